"""`EngineMixin`: gives an actor class that holds an `AsyncLLM` the protocol's methods, in a concurrency group of their own.

An attached actor need not have it. What it adds: nothing undocumented of Ray or vLLM is needed to reach the engine, and vLLM's own trainer
engines can call the actor.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import ray

from ray_weightsync.engines.facts import CONTROL_GROUP
from ray_weightsync.engines.told import look, read
from ray_weightsync.protocol.channel import unsupported
from ray_weightsync.protocol.remote import halt, loop_of, resolve, run_on_loop, successor_of


class EngineMixin:
    """The protocol for an actor class that holds its engine in an attribute::

        @ray.remote(concurrency_groups=EngineMixin.concurrency_groups)
        class Generator(EngineMixin):
            engine_attr = "llm"

            def __init__(self, path):
                self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=path, **vllm_engine_args()))

    The methods run in the group ``"rws_control"``: they are answered while requests hold every one of the actor's slots
    (``max_concurrency``). Ray takes ``concurrency_groups`` in the decorator only. Without it ``Generator.remote()`` raises an
    ``AssertionError`` without a text (``assert cg_name in concurrency_groups_dict``), and ``.options(concurrency_groups=...)`` a
    ``ValueError``.

    The group has an event loop of its own; calls are handed to the loop that the engine lives on.

    The mixin makes the actor asynchronous. A synchronous ``LLM`` in it answers these calls between its requests, which is too weak
    for an update while requests come in, so it is refused when it is attached; such an engine belongs into a plain synchronous actor.
    """

    engine_attr: ClassVar[str] = "llm"
    """Where the actor holds its engine; dots lead further down."""

    concurrency_groups: ClassVar[dict[str, int]] = {CONTROL_GROUP: 4}
    """What ``@ray.remote(concurrency_groups=...)`` needs."""

    _rws_actor_loop: asyncio.AbstractEventLoop | None = None

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def init_weight_transfer_engine(self, request: Any) -> None:
        """See vLLM's method of this name; so for all that follow."""
        await self._rws_call("init_weight_transfer_engine", request)

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def shutdown_weight_transfer_engine(self) -> None:
        await self._rws_call("shutdown_weight_transfer_engine")

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def start_weight_update(self) -> None:
        await self._rws_call("start_weight_update")

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def start_draft_weight_update(self) -> None:
        await self._rws_call("start_draft_weight_update")

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def update_weights(self, request: Any) -> None:
        await self._rws_call("update_weights", request)

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        # Before 0.28 the method has no such argument.
        await self._rws_call("finish_weight_update", *(() if weight_version is None else (weight_version,)))

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        await self._rws_call("pause_generation", mode=mode, clear_cache=clear_cache)

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def resume_generation(self) -> None:
        await self._rws_call("resume_generation")

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def is_paused(self) -> bool:
        return bool(await self._rws_call("is_paused"))

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def get_weight_version(self) -> str:
        return str(await self._rws_call("get_weight_version"))

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def update_weight_version(self, new_version: str) -> None:
        await self._rws_call("update_weight_version", new_version)

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return await self._rws_call("reset_prefix_cache", reset_running_requests, reset_connector)  # type: ignore[no-any-return]  # as it answered

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def reset_mm_cache(self) -> None:
        await self._rws_call("reset_mm_cache")

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def reset_encoder_cache(self) -> None:
        await self._rws_call("reset_encoder_cache")

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        return list(await self._rws_call("collective_rpc", method, timeout, args, kwargs))

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        await self._rws_call("sleep", level=level, mode=mode)

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def wake_up(self, tags: list[str] | None = None) -> Any:
        return await self._rws_call("wake_up", tags)

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def is_sleeping(self) -> bool:
        return bool(await self._rws_call("is_sleeping"))

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def rws_inspect(self, nonce: str) -> dict[str, Any]:
        """What the engine is and holds, for `ray_weightsync.engines.inspect`. Calls nothing that could raise on one worker alone."""
        told = look(self, self.engine_attr)
        engine = self._rws_engine()
        return dict(await self._rws_where_it_lives(engine, lambda: read(engine, told, nonce)))

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def get_num_unfinished_requests(self) -> int:
        return int(await self._rws_call("get_num_unfinished_requests"))

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def rws_chain(self, token: str, steps: Any, incarnation: str | None) -> dict[str, Any]:
        """Carry out several of the protocol's calls; see `ray_weightsync.protocol.channel.Channel.call_chain`."""
        if (other := successor_of(self, self.engine_attr, incarnation)) is not None:
            return {"restarted": other}
        engine = self._rws_engine()
        return dict(await self._rws_where_it_lives(engine, lambda: run_on_loop(engine, token, steps)))

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def rws_halt_chain(self, token: str, limits_s: list[float]) -> tuple[int, float] | None:
        """Let a chain that is late begin no further step; see `ray_weightsync.protocol.channel.Channel.halt_chain`."""
        return halt(self, token, limits_s)

    async def rws_actor_loop(self) -> None:
        """Note the loop that the actor's own methods run on. Not in the control group: that is the point."""
        self._rws_actor_loop = asyncio.get_running_loop()

    def _rws_engine(self) -> Any:
        try:
            engine = resolve(self, self.engine_attr)
        except AttributeError as error:
            raise AttributeError(f"{type(self).__name__} holds no engine in {self.engine_attr!r} (set engine_attr): {error}") from error
        if engine is None:
            raise AttributeError(f"{type(self).__name__} holds None in {self.engine_attr!r}: attach it when its engine was made")
        return engine

    async def _rws_call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        engine = self._rws_engine()
        method = getattr(engine, verb, None)
        if not callable(method):
            raise unsupported(verb, (f"{type(engine).__name__} in {type(self).__name__}.{self.engine_attr}",))
        return await self._rws_where_it_lives(engine, lambda: method(*args, **kwargs))

    async def _rws_where_it_lives(self, engine: Any, call: Callable[[], Any]) -> Any:
        """Run ``call`` on the engine's event loop and wait for it here. An AsyncLLM called on another loop mixes up its own queues."""

        async def run() -> Any:
            answer = call()
            return await answer if inspect.isawaitable(answer) else answer

        loop = loop_of(engine)
        if loop is None:
            # An AsyncLLM without a loop takes the first it is called on for its own; that has to be the one its requests will come on.
            if self._rws_actor_loop is None:
                await ray.get_runtime_context().current_actor.rws_actor_loop.remote()
            loop = self._rws_actor_loop
            assert loop is not None
        if loop is asyncio.get_running_loop():
            return await run()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), loop))
