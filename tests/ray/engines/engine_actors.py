"""Small engines in actors, with as much of vLLM as attaching sees. They travel by value: an engine's process needs none of our tests."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import ray

from ray_weightsync.engines.mixin import EngineMixin


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


def configuration(*, ranks: int = 1, backend: str | None = "rws", extension: str = "ray_weightsync.engines.plugin.WorkerExtension") -> Any:
    sizes = {
        "tensor_parallel_size": ranks,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "data_parallel_index": 0,
        "world_size": ranks,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes, worker_extension_cls=extension),
        weight_transfer_config=SimpleNamespace(backend=backend) if backend else None,
        instance_id=os.urandom(4).hex(),
    )


class Core:
    """State and answers that the asynchronous and the synchronous fake share."""

    def __init__(self, *, ranks: int = 1, backend: str | None = "rws", package_version: str = "unset", **config: Any) -> None:
        self.vllm_config: Any = configuration(ranks=ranks, backend=backend, **config)
        self.order: list[str] = []
        self.threads: list[str] = []
        self.paused = False
        self.version = "default"
        self.dead = False
        self.stale: str | None = None
        self.gate: Any = None
        self._ranks = ranks
        self._package_version = package_version
        self._incarnation = os.urandom(8).hex()

    def act(self, verb: str) -> None:
        self.order.append(verb)
        self.threads.append(threading.current_thread().name)
        if self.dead:
            raise EngineDeadError("EngineCore encountered an issue.")

    def described(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        assert method == "rws_describe"
        (nonce,) = args
        told = {"world_size": self._ranks, "package_version": self._package_version, "incarnation": self._incarnation}
        answers = [{"nonce": nonce, "rank": rank, **told} for rank in range(self._ranks)]
        if self.stale is not None:
            answers[-1]["nonce"], self.stale = self.stale, nonce
        return answers


class AsyncEngine(Core):
    """As much of ``AsyncLLM`` as the control plane sees; made on a running loop it belongs to that one."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.output_handler: Any = asyncio.get_running_loop().create_task(asyncio.Event().wait())

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.act("init")

    async def start_weight_update(self) -> None:
        self.act("start")

    async def update_weights(self, request: Any) -> None:
        self.act("update")

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.act("finish")

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        self.act("pause")
        self.paused = True

    async def resume_generation(self) -> None:
        self.act("resume")
        self.paused = False

    async def is_paused(self) -> bool:
        self.act("is_paused")
        return self.paused

    async def get_weight_version(self) -> str:
        self.act("get_version")
        return self.version

    async def update_weight_version(self, new_version: str) -> None:
        self.act("set_version")
        self.version = new_version

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[Any]:
        assert timeout is None
        self.act("collective_rpc")
        if self.gate is not None:
            await self.gate.wait.remote()
        return self.described(method, args)


class SyncEngine(Core):
    """As much of ``LLM``: no pause, no resume, nothing asynchronous."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.llm_engine = SimpleNamespace(vllm_config=self.__dict__.pop("vllm_config"))

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.act("init")

    def start_weight_update(self) -> None:
        self.act("start")

    def update_weights(self, request: Any) -> None:
        self.act("update")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.act("finish")

    def get_weight_version(self) -> str:
        self.act("get_version")
        return self.version

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[Any]:
        self.act("collective_rpc")
        return self.described(method, args)


class Holder:
    """Somebody's own actor: the engine in ``self.llm``, none of the protocol's methods."""

    def __init__(self, **fields: Any) -> None:
        self.llm = AsyncEngine(**fields)

    async def set(self, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(self.llm, name, value)

    async def order(self) -> list[str]:
        return self.llm.order

    async def wait_at(self, gate: Any) -> None:
        await gate.wait.remote()

    async def pid(self) -> int:
        return os.getpid()


class Foreign(Holder):
    """In a process that does not have this package at all."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        for name in [each for each in sys.modules if each.partition(".")[0] == "ray_weightsync"]:
            del sys.modules[name]
        sys.modules["ray_weightsync"] = None  # type: ignore[assignment]  # what Python takes for "cannot be imported"

    async def importable(self) -> bool:
        try:
            import ray_weightsync  # noqa: F401
        except ImportError:
            return False
        return True


class SyncHolder:
    """A synchronous engine in a synchronous actor."""

    def __init__(self, **fields: Any) -> None:
        self.llm = SyncEngine(**fields)

    def generate(self, seconds: float) -> str:
        self.llm.order.append("generate")
        time.sleep(seconds)
        self.llm.order.append("generated")
        return "text"

    def order(self) -> list[str]:
        return self.llm.order


class Mixed(EngineMixin, Holder):
    """The same with `EngineMixin`."""

    async def threads(self) -> list[str]:
        return sorted(set(self.llm.threads))

    async def mine(self) -> str:
        return threading.current_thread().name


class MixedLate(Mixed):
    """Its engine was made away from any loop, so it has no output handler yet."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.llm.output_handler.cancel()
        self.llm.output_handler = None


class MixedSync(EngineMixin):
    def __init__(self, **fields: Any) -> None:
        self.llm = SyncEngine(**fields)


class MixedEmpty(EngineMixin):
    engine_attr = "engine"

    async def nothing(self) -> None: ...


class Own(AsyncEngine):
    """An actor that is an engine: it has the protocol's methods itself, and nothing of ours."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.output_handler.cancel()
        del self.output_handler


class Lacking:
    """Has most of the protocol."""

    def init_weight_transfer_engine(self, request: Any) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, request: Any) -> None: ...


class Counter:
    """No engine at all."""

    def __init__(self) -> None:
        self.num = 0

    def add(self) -> None:
        self.num += 1


def make(
    cls: type,
    *args: Any,
    name: str | None = None,
    namespace: str | None = None,
    max_restarts: int = 0,
    slots: int | None = None,
    **fields: Any,
) -> Any:
    """Start an actor of ``cls`` that reserves no CPU."""
    groups = {"concurrency_groups": EngineMixin.concurrency_groups} if issubclass(cls, EngineMixin) else {}
    options = {"name": name, "namespace": namespace, "max_restarts": max_restarts, "max_concurrency": slots}
    start: Any = ray.remote(num_cpus=0, **groups)(cls)
    return start.options(**{key: value for key, value in options.items() if value is not None}).remote(*args, **fields)
