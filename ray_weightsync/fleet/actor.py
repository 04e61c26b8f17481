"""The coordinator as a Ray actor, and how the other processes find it and ask it. A thin shell: no decision is made here."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from ray_weightsync.engines.ref import EngineRef
from ray_weightsync.engines.resolve import resolve_all
from ray_weightsync.errors import AttachError, ConfigError, SessionConflict, WeightSyncError
from ray_weightsync.fleet.coordinator import Coordinator
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.rounds import PlanUnknown
from ray_weightsync.fleet.snapshots import RayStores
from ray_weightsync.fleet.turns import Busy
from ray_weightsync.fleet.values import Sealed, Settings, Ticket
from ray_weightsync.report import FleetStatus, SyncReport

NAMESPACE = "ray_weightsync"
"""Ray namespace of all coordinators; always passed explicitly, since an engine's own executor may connect to Ray elsewhere."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class _CoordinatorActor:
    """All of `Coordinator`, plus what needs Ray: resolving engines. Async: a waiting round blocks nobody's `status`."""

    def __init__(self, name: str, settings: Settings) -> None:
        self._settings = settings
        stores = RayStores(secrets.token_hex(6), settings.transport, connect_s=settings.timeouts.connect_s)
        self._coordinator = Coordinator(name, settings, stores)

    async def attach(self, refs: Sequence[EngineRef], take_over: bool) -> FleetStatus:
        timeouts = self._settings.timeouts
        engines = await resolve_all(refs, limit_s=timeouts.attach_s, warn_every_s=timeouts.warn_every_s)
        return await self._coordinator.adopt([Replica(engine) for engine in engines], take_over=take_over)

    async def open_snapshot(
        self, snapshot_id: str, version: int | str, plan_digest: str, plan: dict[str, Any] | None, node_id: str, busy: Busy
    ) -> Ticket | None:
        """None asks for the plan itself."""
        try:
            return await self._coordinator.rounds.open(snapshot_id, version, plan_digest=plan_digest, plan=plan, node_id=node_id, busy=busy)
        except PlanUnknown:
            return None

    async def seal(self, snapshot_id: str, sealed: Sealed, keep_turn: bool) -> None:
        await self._coordinator.rounds.seal(snapshot_id, sealed, keep_turn=keep_turn)

    async def abandon(self, snapshot_id: str, why: str) -> None:
        await self._coordinator.rounds.abandon(snapshot_id, why)

    async def commit(self, snapshot_id: str, sealed: Sealed | None, holds_turn: bool) -> SyncReport:
        return await self._coordinator.rounds.commit(snapshot_id, sealed=sealed, holds_turn=holds_turn)

    async def status(self) -> FleetStatus:
        return self._coordinator.status()

    async def watch(self, sequence: int, limit_s: float) -> FleetStatus:
        return await self._coordinator.watch(sequence, limit_s=limit_s)

    async def settings(self) -> Settings:
        return self._settings

    async def close(self) -> None:
        await self._coordinator.close()


def session_name(name: str | None) -> str:
    """``name``, validated, or a fresh one.

    Raises:
        ConfigError: if it is not 1 to 64 letters, digits, ``.``, ``_`` or ``-``, starting with a letter or digit.
    """
    if name is None:
        return f"ws-{secrets.token_hex(4)}"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"name must be 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit, not {name!r}")
    return name


def start_coordinator(name: str, settings: Settings) -> ActorHandle[Any]:
    """Start the coordinator of a session.

    Raises:
        SessionConflict: if a session of that name is running.
    """
    # Watchers wait in a slot each; status and rounds must not queue behind them.
    actor: Any = ray.remote(_CoordinatorActor)
    try:
        handle: ActorHandle[Any] = actor.options(
            name=_actor_name(name), namespace=NAMESPACE, num_cpus=0, max_restarts=0, max_task_retries=0, max_concurrency=100_000
        ).remote(name, settings)
    except ValueError as error:
        raise SessionConflict(
            f"A session named {name!r} is running; its engines were not touched.", hint="choose another name, or close() that session"
        ) from error
    return handle


def find_coordinator(name: str) -> ActorHandle[Any]:
    """The running coordinator of the session ``name``.

    Raises:
        AttachError: if there is none.
    """
    try:
        handle: ActorHandle[Any] = ray.get_actor(_actor_name(name), namespace=NAMESPACE)
    except ValueError as error:
        raise AttachError(f"No session named {name!r} is running.", hint="WeightSync.attach(..., name=...) starts one") from error
    return handle


def ask(coordinator: ActorHandle[Any], method: str, *args: Any, limit_s: float) -> Any:
    """Call the coordinator and return its answer, raising its own errors as they are.

    Raises:
        WeightSyncError: what the coordinator raised; or that it is gone, or did not answer in time.
    """
    return answer(getattr(coordinator, method).remote(*args), method, limit_s=limit_s)


def answer(ref: Any, method: str, *, limit_s: float) -> Any:
    """Wait for a call to the coordinator that `ask` would have made."""
    try:
        return ray.get(ref, timeout=limit_s)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, WeightSyncError):
            raise cause from None
        raise
    except GetTimeoutError as error:
        raise WeightSyncError(
            "The coordinator did not answer; what holds now is not known here.",
            phase=method,
            elapsed_s=limit_s,
            limit_s=limit_s,
            hint="ask status()",
        ) from error
    except RayActorError as error:
        raise WeightSyncError(
            "The coordinator is gone; what holds now stands in the engines' own version labels ('!rws:' means torn or not committed).",
            phase=method,
            engine_message=str(error),
            hint="WeightSync.attach the engines again: it reads the labels",
        ) from error


def _actor_name(name: str) -> str:
    return f"coordinator:{name}"
