"""The two places a fault can be armed in, as seen from the process that arms it: the coordinator, and an engine's workers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import os
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from ray_weightsync.engines.facts import EngineFacts
from ray_weightsync.engines.ref import EngineRef, kind_of
from ray_weightsync.errors import ConfigError, WeightSyncError
from ray_weightsync.protocol.channel import COLLECTIVE_RPC
from ray_weightsync.protocol.ray_channel import ActorChannel
from ray_weightsync.protocol.reading import died, words
from ray_weightsync.testing import in_coordinator, in_engine
from ray_weightsync.testing.spec import FaultSpec

T = TypeVar("T")

SLICE_S = 0.05
"""How long one question waits where it is asked; others wait behind it."""


class ProcessGone(WeightSyncError):
    """The process that a fault was armed in is gone, and the fault with it."""


class Side(Protocol):
    """Where faults are armed."""

    def arm(self, fault_id: str, spec: FaultSpec) -> None: ...

    def reached(self, fault_id: str, wait_s: float) -> tuple[int, bool]:
        """How often the fault struck, and whether its place was reached."""
        ...

    def release(self, fault_id: str) -> None: ...

    def disarm(self) -> None:
        """Take out everything that was armed here. A process that is gone has nothing armed."""
        ...


class CoordinatorSide:
    """Faults at the channels of the coordinator's replicas.

    Args:
        coordinator: Gives the coordinator's present handle.
        limit_s: Seconds that it may take to answer.
    """

    def __init__(self, coordinator: Callable[[], Any], *, limit_s: float) -> None:
        self._coordinator = coordinator
        self._limit_s = limit_s
        self._ids: list[str] = []

    def engine_of(self, replica: str) -> tuple[EngineRef, EngineFacts]:
        found: tuple[EngineRef, EngineFacts] = self._ask(in_coordinator.engine_of, replica)
        return found

    def arm(self, fault_id: str, spec: FaultSpec) -> None:
        self._ids.append(fault_id)
        self._ask(in_coordinator.arm, fault_id, spec)

    def reached(self, fault_id: str, wait_s: float) -> tuple[int, bool]:
        found: tuple[int, bool] = self._ask(in_coordinator.struck, fault_id, wait_s)
        return found

    def release(self, fault_id: str) -> None:
        self._ask(in_coordinator.release, fault_id)

    def disarm(self) -> None:
        ids, self._ids = self._ids, []
        if not ids:
            return
        with contextlib.suppress(ProcessGone):
            self._ask(in_coordinator.disarm, ids)

    def _ask(self, function: Callable[..., Any], *args: Any) -> Any:
        # By reference, beside the coordinator's own calls: its methods are the product's, and have no place for faults.
        call: Any = self._coordinator().__ray_call__
        try:
            return ray.get(call.options(max_task_retries=0).remote(function, *args), timeout=self._limit_s)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, LookupError):
                raise ProcessGone("The coordinator was restarted, and its faults are gone.", hint="arm them again") from error
            if isinstance(cause, WeightSyncError):
                raise cause from None
            raise
        except RayActorError as error:
            raise ProcessGone("The coordinator is gone, and its faults with it.", engine_message=words(error)) from error
        except GetTimeoutError as error:
            raise WeightSyncError(
                "The coordinator did not answer the fault kit.",
                phase=function.__name__,
                limit_s=self._limit_s,
                elapsed_s=self._limit_s,
                hint="its process may be stopped or overloaded; Faults(limit_s=...) gives it more time",
            ) from error


class EngineSide:
    """Faults inside the workers of one engine.

    Args:
        ref: How the engine is reached.
        facts: What the coordinator last learned of it.
        label: The replica's id.
        limit_s: Seconds that one question may take.

    Raises:
        ConfigError: if its workers cannot be reached; it says what to pass where the engine is started.
    """

    def __init__(self, ref: EngineRef, facts: EngineFacts, *, label: str, limit_s: float) -> None:
        if facts.kind not in ("torch", "async", "sync"):
            raise ConfigError(f"{label}: faults with rank= need an engine in a Ray actor, not one behind {kind_of(ref.target)!r}")
        self._label = label
        self._limit_s = limit_s
        self._is_torch = facts.kind == "torch"
        self._ranks = sorted(worker.rank for worker in facts.workers)
        handle = ref.target if kind_of(ref.target) == "handle" else ray.get_actor(str(ref.target), namespace=ref.namespace)
        self._calls = ActorChannel(handle, label=label, attr=ref.attr)
        # Never probed, so that it never waits for the actor's turn: it has to get through while a worker hangs.
        self._beside = ActorChannel(handle, label=label, attr=ref.attr)
        if not self._is_torch:
            self._require_extension()
        self._directory: str = self._run(self._beside.run(in_engine.make_directory), "make_directory")
        self._ids: list[str] = []

    def arm(self, fault_id: str, spec: FaultSpec) -> None:
        if spec.rank not in self._ranks:
            raise ConfigError(f"{self._label} has no worker of rank {spec.rank}; it has {', '.join(map(str, self._ranks))}")
        self._ids.append(fault_id)
        self._order({"op": "arm", "id": fault_id, "directory": self._directory, "spec": dataclasses.asdict(spec)})

    def reached(self, fault_id: str, wait_s: float) -> tuple[int, bool]:
        count: int = self._run(self._beside.run(in_engine.struck, self._directory, fault_id, wait_s), "struck")
        return count, count > 0

    def release(self, fault_id: str) -> None:
        self._run(self._beside.run(in_engine.release, self._directory, fault_id), "release")

    def disarm(self) -> None:
        ids, self._ids = self._ids, []
        try:
            # The workers may be gone and the actor not: each step is tried.
            with contextlib.suppress(ProcessGone):
                for fault_id in ids:
                    self.release(fault_id)  # first of all: a worker that hangs does not hear the order
            with contextlib.suppress(ProcessGone):
                if ids:
                    self._order({"op": "heal"})
        finally:
            self._remove_directory()

    def _remove_directory(self) -> None:
        try:
            self._run(self._beside.run(in_engine.remove_directory, self._directory), "remove_directory")
        except ProcessGone:
            # Its name is unique: if there is such a directory here, it is the one that the actor made on this node.
            if os.path.isdir(self._directory):
                in_engine.remove_directory(None, self._directory)

    def _order(self, order: dict[str, Any]) -> None:
        if self._is_torch:
            answers = [{"error": None, **self._run(self._beside.run(in_engine.order_torch_engine, order), order["op"])}]
        else:
            answers = self._run(self._collective(order), order["op"])
        problems = [str(answer["error"]) for answer in answers if not isinstance(answer, dict) or answer.get("error")]
        wanted = [rank == order["spec"]["rank"] for rank in self._ranks] if order["op"] == "arm" else [False] * len(self._ranks)
        if not problems and [bool(answer["armed"]) for answer in sorted(answers, key=lambda each: each["rank"])] != wanted:
            problems = [f"its workers answered {answers}"]
        if problems:
            raise WeightSyncError(
                f"{self._label}: the order {order['op']!r} of the fault kit was not carried out.",
                replicas=(self._label,),
                engine_message="; ".join(problems),
            )

    async def _collective(self, order: dict[str, Any]) -> list[Any]:
        if not self._calls.is_direct and self._calls.shape is None:
            await self._calls.probe()
        return list(await self._calls.call(COLLECTIVE_RPC, in_engine.METHOD, args=(order,)))

    def _require_extension(self) -> None:
        name, fits = self._run(self._beside.run(in_engine.extension_of, self._beside.attr or ""), "extension_of")
        if not fits:
            raise ConfigError(
                f"{self._label}: faults with rank= are armed through the worker extension, and this engine's is {name}",
                hint="start it with **ray_weightsync.testing.vllm_engine_args() instead of **ray_weightsync.vllm_engine_args(); "
                "an extension of your own must derive from ray_weightsync.testing.extension.FaultyExtension",
            )

    def _run(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """Await ``work`` on a thread of its own: whoever injects faults may have an event loop running."""

        async def bounded() -> T:
            async with asyncio.timeout(self._limit_s):
                return await work

        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            try:
                return thread.submit(asyncio.run, bounded()).result()
            except TimeoutError as error:
                raise WeightSyncError(
                    f"{self._label} did not answer the fault kit.",
                    phase=what,
                    replicas=(self._label,),
                    elapsed_s=self._limit_s,
                    limit_s=self._limit_s,
                    hint="a worker may hang; Faults(limit_s=...) gives it more time",
                ) from error
            except WeightSyncError:
                raise
            except Exception as error:
                if died(error):
                    raise ProcessGone(
                        f"{self._label} is gone, and its faults with it.", replicas=(self._label,), engine_message=words(error)
                    ) from error
                raise
