"""The coordinator as a Ray actor, and how it is started and found. A thin shell: no decision is made here.

It is detached and named, and Ray restarts it; one that finds a journal under its name is a successor and settles first what its
predecessor left (see `ray_weightsync.fleet.recovery`). It ends for good when its session is closed, or by itself when its owner is gone.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from ray_weightsync.config import Native
from ray_weightsync.engines.ref import EngineRef
from ray_weightsync.engines.resolve import Engine, resolve, resolve_all
from ray_weightsync.errors import AttachError, ConfigError, SessionConflict, WeightSyncError
from ray_weightsync.fleet.choosing import SenderFacts
from ray_weightsync.fleet.chronicle import Chronicle
from ray_weightsync.fleet.claims import Claims, Holder
from ray_weightsync.fleet.cluster import NAMESPACE, Process, until_gone
from ray_weightsync.fleet.coordinator import Coordinator
from ray_weightsync.fleet.journal import Origin, RayJournal, Record
from ray_weightsync.fleet.keyring import Keys
from ray_weightsync.fleet.relay import NativeMembers
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.rounds import PlanUnknown
from ray_weightsync.fleet.stores import RayStores
from ray_weightsync.fleet.topology import Group
from ray_weightsync.fleet.values import Opening, Sealed, Settings, Ticket, Way
from ray_weightsync.protocol.channel import Channel
from ray_weightsync.protocol.threads import in_daemon_thread
from ray_weightsync.report import FleetStatus, SyncReport

if TYPE_CHECKING:
    from ray_weightsync.protocol.messages import Payload

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class _CoordinatorActor:
    """All of `Coordinator`, plus what needs Ray: resolving engines. Async: a waiting round blocks nobody's `status`."""

    def __init__(self, name: str, settings: Settings, origin: Origin) -> None:
        self._name = name
        self._settings = settings
        self._journal = RayJournal(name)
        left = self._journal.read()
        mine = left if left is not None and left.origin.session_id == origin.session_id else None
        self._coordinator = self._of(settings, origin, mine)
        self._keyring = self._coordinator.chronicle.keyring
        loop = asyncio.get_running_loop()
        self._first = loop.create_task(self._end_namesake(left if mine is None else None))
        self._life = loop.create_task(self._live(origin))

    def _of(self, settings: Settings, origin: Origin, predecessor: Record | None) -> Coordinator:
        me = Process.this()
        stores = RayStores(self._name, settings.host, coordinator=me, owner=origin.owner, connect_s=settings.timeouts.connect_s)
        claims = Claims(Holder(session=self._name, coordinator=me, owner=origin.owner))
        return Coordinator(
            self._name, settings, stores, claims, Chronicle(self._journal, origin), predecessor=predecessor, reach=self._reach
        )

    async def _live(self, origin: Origin) -> None:
        """Settle what was left, then watch the owner; leave for good when it is gone."""
        try:
            await self._ready()
            self._coordinator.health.start()
        except Exception:  # whoever asks for anything is told
            logger.exception("session %s: what the coordinator before left could not be settled", self._name)
        await until_gone(origin.owner)
        await self._coordinator.leave()
        await in_daemon_thread(lambda: ray.kill(ray.get_runtime_context().current_actor, no_restart=True))

    async def _end_namesake(self, left: Record | None) -> None:
        """End an earlier session of this name, whose coordinator and owner were both lost. Its engines may still be paused."""
        if left is not None:
            await self._of(left.settings, left.origin, left).leave()

    async def _ready(self) -> Coordinator:
        """The coordinator, once it has settled what a predecessor left."""
        await asyncio.shield(self._first)
        await self._coordinator.recovered()
        return self._coordinator

    async def attach(self, refs: Sequence[EngineRef], take_over: bool, keys: Keys) -> FleetStatus:
        coordinator, timeouts = await self._ready(), self._settings.timeouts
        if status := coordinator.attached():  # asked again by a session whose first call met a restart
            return status
        replicas = await self._reached(refs, keys, timeouts.attach_s)
        return await coordinator.adopt(replicas, hand_over=self._ask_to_hand_over if take_over else None)

    async def _reached(self, refs: Sequence[EngineRef], keys: Keys, limit_s: float) -> list[Replica]:
        self._keyring.add(keys)
        given = await self._keyring.fitted(refs, limit_s=limit_s)
        engines = await resolve_all(given, limit_s=limit_s, warn_every_s=self._settings.timeouts.warn_every_s)
        return [Replica(engine) for engine in engines]

    async def _reach(self, engine: EngineRef, *, limit_s: float, first: Callable[[Channel], Awaitable[None]] | None = None) -> Engine:
        (given,) = await self._keyring.fitted([engine], limit_s=limit_s)
        return await resolve(given, limit_s=limit_s, first=first)

    async def add(self, refs: Sequence[EngineRef], keys: Keys, limit_s: float) -> tuple[str, ...]:
        coordinator = await self._ready()
        return await coordinator.membership.add(await self._reached(refs, keys, limit_s))

    async def replace(self, replica_id: str, ref: EngineRef, keys: Keys, limit_s: float) -> str:
        coordinator = await self._ready()
        (replica,) = await self._reached([ref], keys, limit_s)
        return await coordinator.membership.replace(replica_id, replica)

    async def remove(self, replica_id: str, drain_s: float | None) -> None:
        await (await self._ready()).membership.remove(replica_id, drain_s=drain_s)

    async def heal(self, round_id: str, replica_ids: Sequence[str]) -> SyncReport:
        return await (await self._ready()).repair.heal(*replica_ids, round_id=round_id)

    async def sleep(self, level: int) -> None:
        await (await self._ready()).sleep_mode.sleep(level)

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        await (await self._ready()).sleep_mode.wake_up(tags)

    async def hand_over(self, identities: Sequence[str], to: str, limit_s: float) -> None:
        await (await self._ready()).hand_over(identities, to=to, limit_s=limit_s)

    async def _ask_to_hand_over(self, session: str, identities: tuple[str, ...], limit_s: float) -> None:
        try:
            other: Any = await in_daemon_thread(lambda: find_coordinator(session))
            self._coordinator.waits_for_turn(limit_s := max(limit_s, await asyncio.wait_for(other.longest_turn_s.remote(), limit_s)))
            await asyncio.wait_for(other.hand_over.remote(identities, self._name, limit_s), limit_s + self._settings.timeouts.status_s)
        except TimeoutError as error:
            raise SessionConflict(
                f"Nothing was changed: the coordinator of session {session!r}, which has these engines, does not answer.",
                phase="attach",
                elapsed_s=limit_s,
                limit_s=limit_s,
                hint=f"end that session (ray.kill its coordinator, the actor {_actor_name(session)!r} in namespace {NAMESPACE!r})",
            ) from error
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, WeightSyncError) else error) from None
        except (AttachError, RayActorError):
            return  # it has ended meanwhile; whether it still holds anything is looked at next

    async def choose_transport(self, sender: SenderFacts) -> Way:
        return (await self._ready()).choose_transport(sender)

    async def open_snapshot(self, opening: Opening) -> Ticket | None:
        """None asks for the plan itself."""
        if isinstance(opening.offer, Native):
            # Its payloads may hold what is torch's, which is imported now, and not while engines are paused and the first one is unpickled.
            await in_daemon_thread(partial(import_module, "torch"))
        try:
            return await (await self._ready()).rounds.open(opening)
        except PlanUnknown:
            return None

    async def seal(self, snapshot_id: str, sealed: Sealed, keep_turn: bool) -> None:
        await (await self._ready()).rounds.seal(snapshot_id, sealed, keep_turn=keep_turn)

    async def live_members(self, snapshot_id: str) -> Group | NativeMembers | None:
        return await (await self._ready()).rounds.live.members(snapshot_id)

    async def live_ended(self, snapshot_id: str) -> str | None:
        return await (await self._ready()).rounds.live.ended(snapshot_id)

    async def native_call(self, snapshot_id: str, verb: str, payload: Payload | None) -> None:
        await (await self._ready()).rounds.live.call(snapshot_id, verb, payload)

    async def abandon(self, snapshot_id: str, why: str) -> None:
        await (await self._ready()).rounds.give_up(snapshot_id, why)

    async def commit(self, snapshot_id: str, sealed: Sealed | None, holds_turn: bool) -> SyncReport:
        return await (await self._ready()).rounds.commit(snapshot_id, sealed=sealed, holds_turn=holds_turn)

    async def refuse(self, report: SyncReport, complaints: dict[str, str]) -> SyncReport:
        return await (await self._ready()).refuse(report, complaints)

    async def status(self) -> FleetStatus:
        return self._coordinator.status()

    async def watch(self, sequence: int, limit_s: float) -> FleetStatus:
        return await self._coordinator.watch(sequence, limit_s=limit_s)

    async def longest_turn_s(self) -> float:
        return self._coordinator.longest_turn_s

    async def settings(self) -> Settings:
        return self._settings

    async def close(self) -> None:
        await (await self._ready()).close()

    async def settled(self, round_id: str) -> SyncReport:
        return await (await self._ready()).settled(round_id)


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


def start_coordinator(name: str, settings: Settings, origin: Origin | None = None) -> ActorHandle[Any]:
    """Start the coordinator of a session, whose owner is this process unless ``origin`` says another.

    Raises:
        SessionConflict: if a session of that name is running.
    """
    # Watchers wait in a slot each; status and rounds must not queue behind them.
    actor: Any = ray.remote(_CoordinatorActor)
    try:
        handle: ActorHandle[Any] = actor.options(
            name=_actor_name(name),
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=100_000,
        ).remote(name, settings, origin or Origin(session_id=secrets.token_hex(8), owner=Process.this()))
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


def revive(name: str) -> ActorHandle[Any]:
    """The coordinator of the session ``name``: the one that runs, or, if it is dead for good, a successor made from its journal.

    Any process may ask. The successor settles what the dead one left, whoever of the session is still there. An engine with a literal
    api_key stays fenced if the process that gave the key is gone.

    Raises:
        AttachError: if there is neither a coordinator nor a journal: the session was closed.
    """
    try:
        return find_coordinator(name)
    except AttachError:
        left = RayJournal(name).read()
        if left is None:
            raise
    try:
        return start_coordinator(name, left.settings, left.origin)
    except SessionConflict:  # another process was faster
        return find_coordinator(name)


def _actor_name(name: str) -> str:
    return f"coordinator:{name}"
