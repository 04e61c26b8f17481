"""Small engines in actors. Standard library and Ray only: what they prove is that an engine's process needs no package of ours."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import ray


@ray.remote(num_cpus=0)
class Gate:
    """Opened by a test; engines wait at it. Counts who arrived, so that a test can wait for that."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._arrived = asyncio.Condition()
        self._num = 0

    async def wait(self) -> None:
        async with self._arrived:
            self._num += 1
            self._arrived.notify_all()
        await self._open.wait()

    async def arrived(self, num: int = 1) -> None:
        async with self._arrived:
            await self._arrived.wait_for(lambda: self._num >= num)

    async def open(self) -> None:
        self._open.set()


class EngineDeadError(Exception):
    """Has the name that vLLM gives to the death of an engine core."""

    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue.")


class PickyError(Exception):
    """Cannot be rebuilt from its pickle, like many exceptions with an ``__init__`` of their own."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


class Script:
    """What an engine does at each verb: nothing, or what the test said."""

    def __init__(self, script: dict[str, Any] | None = None) -> None:
        self.script = script or {}
        self.order: list[str] = []
        self.payloads: list[Any] = []
        self.version = "default"
        self.paused = False

    def act(self, verb: str) -> Any:
        """Record ``verb``, then raise, die or hand back a gate to wait at."""
        self.order.append(verb)
        what = self.script.get(verb)
        if what == "die":
            os._exit(1)
        if what == "raise":
            raise ValueError(f"no luck in {verb}")
        if what == "picky":
            raise PickyError("this", "that")
        if what == "core dead":
            raise EngineDeadError
        return what if isinstance(what, ray.actor.ActorHandle) else None


class AsyncEngine(Script):
    """As much of vLLM's ``AsyncLLM`` as the control plane sees."""

    def __init__(self, script: dict[str, Any] | None = None, *, handler: bool = True) -> None:
        super().__init__(script)
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size_across_dp=4, data_parallel_index=0))
        self.output_handler = asyncio.get_running_loop().create_task(asyncio.Event().wait()) if handler else None

    async def _at(self, verb: str) -> None:
        gate = self.act(verb)
        if gate is not None:
            await gate.wait.remote()

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self._at("init")
        self.payloads.append(request.init_info)

    async def start_weight_update(self) -> None:
        await self._at("start")

    async def update_weights(self, request: Any) -> None:
        await self._at("update")
        self.payloads.append(request.update_info)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        await self._at("finish" if weight_version is None else f"finish {weight_version}")

    async def update_weight_version(self, new_version: str) -> None:
        await self._at("version")
        self.version = new_version

    async def get_weight_version(self) -> str:
        return self.version

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        await self._at(f"pause {mode} {clear_cache}")
        self.paused = True

    async def resume_generation(self) -> None:
        await self._at("resume")
        self.paused = False

    async def is_paused(self) -> bool:
        return self.paused

    async def shutdown_weight_transfer_engine(self) -> None:
        await self._at("shutdown")

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return reset_running_requests

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[Any]:
        assert timeout is None
        return [[method, list(args), kwargs or {}]]

    @property
    def explodes(self) -> None:
        raise RuntimeError("a property was read")


class SyncEngine(Script):
    """As much of vLLM's ``LLM``."""

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.act("init")
        self.payloads.append(request.init_info)

    def start_weight_update(self) -> None:
        self.act("start")

    def update_weights(self, request: Any) -> None:
        self.act("update")
        self.payloads.append(request.update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.act("finish")


@ray.remote(num_cpus=0)
class EngineActor(AsyncEngine):
    """An actor that is an engine, as vLLM's examples have it."""

    async def record(self) -> dict[str, Any]:
        return {"order": self.order, "payloads": self.payloads, "version": self.version, "paused": self.paused}

    async def change(self, script: dict[str, Any]) -> None:
        self.script = script

    async def pid(self) -> int:
        return os.getpid()


@ray.remote(num_cpus=0)
class OldEngineActor(Script):
    """An actor around a vLLM 0.26: no versions, no shutdown, and finish takes nothing."""

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.act("init")

    async def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        self.act("start")

    async def update_weights(self, request: Any) -> None:
        self.act("update")

    async def finish_weight_update(self) -> None:
        self.act("finish")

    async def record(self) -> list[str]:
        return self.order


@ray.remote(num_cpus=0)
class NoFinishActor:
    """Lacks one verb of four."""

    async def init_weight_transfer_engine(self, request: Any) -> None: ...

    async def start_weight_update(self) -> None: ...

    async def update_weights(self, request: Any) -> None: ...


@ray.remote(num_cpus=0, max_concurrency=2)
class HoldingActor:
    """Somebody's actor with an engine in an attribute and none of the protocol's methods."""

    def __init__(self, script: dict[str, Any] | None = None, *, attr: str = "llm", handler: bool = True) -> None:
        setattr(self, attr, AsyncEngine(script, handler=handler))

    async def generate(self, gate: Any) -> str:
        await gate.wait.remote()
        return "tokens"

    async def ready(self) -> None: ...


@ray.remote(num_cpus=0)
class SyncHoldingActor:
    """Somebody's synchronous actor around an ``LLM``; ``generate`` writes into the engine's order."""

    def __init__(self, script: dict[str, Any] | None = None) -> None:
        self.llm = SyncEngine(script)

    def generate(self) -> str:
        self.llm.order.append("generate")
        return "tokens"

    def order(self) -> list[str]:
        return self.llm.order


@ray.remote(num_cpus=0)
class MismatchedActor:
    """An asynchronous actor around a synchronous ``LLM``."""

    def __init__(self) -> None:
        self.llm = SyncEngine()

    async def ready(self) -> None: ...


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class RetryingActor(AsyncEngine):
    """Ray would repeat every call that the death of this actor cut short."""

    def __init__(self, counter: Any) -> None:
        super().__init__()
        self.counter = counter

    @ray.method(max_task_retries=-1, retry_exceptions=True)
    async def start_weight_update(self) -> None:
        await self.counter.add.remote("start")
        raise ValueError("not again")

    async def update_weights(self, request: Any) -> None:
        await self.counter.add.remote("update")
        os._exit(1)


@ray.remote(num_cpus=0)
class Counter:
    """Remembers what others did before they died."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def add(self, what: str) -> None:
        self.seen.append(what)

    def all(self) -> list[str]:
        return self.seen
