"""A replica's faults at its channel, in the coordinator's process.

The channel's own instance gets other methods; its class, its state and whoever holds it stay the same, so that nothing in the
product has to know, and nothing is left when they are taken off again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ray.exceptions import ActorUnavailableError

from ray_weightsync.engines import told
from ray_weightsync.protocol.chain import ChainOutcome, Place, Step, StepByStep
from ray_weightsync.protocol.channel import Channel
from ray_weightsync.protocol.ray_channel import ActorChannel
from ray_weightsync.testing.phases import phase_of, phases_of
from ray_weightsync.testing.spec import FaultSpec, InjectedFault

SEAMS = ("call", "call_chain", "halt_chain", "run_long")
"""What the product calls of a channel. Not every channel has all of them."""

_inside: ContextVar[bool] = ContextVar("ray_weightsync_testing_inside", default=False)
"""Set while the channel itself works: what it calls of its own methods then is no call of the round."""


@dataclass(eq=False)
class Armed:
    """A fault that waits for its phase. It strikes on the coordinator's loop; it is released, and asked about, from other threads."""

    id: str
    spec: FaultSpec
    struck: int = 0
    reached: threading.Event = field(default_factory=threading.Event)
    released: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future)

    def release(self) -> None:
        if not self.released.done():
            self.released.set_result(None)

    async def wait_released(self) -> None:
        # Shielded: a caller that gives up must not take the gate away from the others.
        await asyncio.shield(asyncio.wrap_future(self.released))


class Interceptor(StepByStep):
    """Stands before one replica's channel.

    Args:
        channel: The channel.
        kill: Ends what a fault of the kind ``"kill"`` names.
        started: Whether an update is under way on the replica.
    """

    def __init__(self, channel: Channel, kill: Callable[[FaultSpec], Awaitable[None]], *, started: bool = False) -> None:
        self.channel = channel
        self.armed: list[Armed] = []
        self._kill = kill
        self._started = started
        self._theirs: dict[str, Callable[..., Any]] = {name: getattr(channel, name) for name in SEAMS if hasattr(channel, name)}
        for name in self._theirs:
            setattr(channel, name, getattr(self, name))

    def remove(self) -> None:
        """Give the channel its own methods back. Calls that are held here go on when their faults are released."""
        for name in self._theirs:
            delattr(self.channel, name)

    async def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """`Channel.call`, with what is armed for its phase."""
        theirs = partial(self._theirs["call"], verb, *args, **kwargs)
        if _inside.get():
            return await theirs()
        phase, self._started = phase_of(verb, args, self._started)
        return await self._meet(phase, theirs)

    async def call_chain(self, token: str, steps: Sequence[Step], *, incarnation: str | None = None) -> ChainOutcome:
        """`Channel.call_chain`; step by step, each a call of its own, if something is armed for one of them."""
        if not _inside.get():
            phases, started = phases_of(steps, self._started)
            if any(self._next(phase) for phase in phases):
                return await super().call_chain(token, steps, incarnation=incarnation)
            self._started = started
        outcome: ChainOutcome = await self._pass(partial(self._theirs["call_chain"], token, steps, incarnation=incarnation))
        return outcome

    async def halt_chain(self, *args: Any, **options: Any) -> Place | None:
        """`Channel.halt_chain`."""
        place = await super().halt_chain(*args, **options)
        if place is None:
            place = await self._pass(partial(self._theirs["halt_chain"], *args, **options))
        return place

    async def require_incarnation(self, incarnation: str) -> None:
        """As the channel does it."""
        require = getattr(self.channel, "require_incarnation", None)
        if require is not None:
            await self._pass(partial(require, incarnation))

    async def run_long(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """`ActorChannel.run_long`: the way in which an actor that holds its engine is asked what it is."""
        theirs = partial(self._theirs["run_long"], function, *args, **options)
        return await (self._pass(theirs) if _inside.get() or function is not told.tell else self._meet("preflight", theirs))

    def _next(self, phase: str | None) -> Armed | None:
        return next((each for each in tuple(self.armed) if each.spec.phase == phase and each.struck < each.spec.times), None)

    async def _pass(self, theirs: Callable[[], Awaitable[Any]]) -> Any:
        outer = _inside.set(True)
        try:
            return await theirs()
        finally:
            _inside.reset(outer)

    async def _meet(self, phase: str | None, theirs: Callable[[], Awaitable[Any]]) -> Any:
        fault = self._next(phase)
        if fault is None:
            return await self._pass(theirs)
        fault.struck += 1
        spec = fault.spec
        if spec.kind != "late":
            fault.reached.set()
        if spec.kind == "raise":
            raise InjectedFault(spec.words)
        if spec.kind == "kill":
            await self._kill(spec)
        elif spec.kind == "slow":
            await asyncio.sleep(spec.seconds or 0)
        elif spec.kind == "hang":
            await fault.wait_released()
            if not spec.carried_out:
                raise InjectedFault(f"{spec.words}: it came back at last, and failed")
        answer = await self._pass(theirs)
        if spec.kind == "late":
            fault.reached.set()
            await fault.wait_released()
        elif spec.kind == "lost":
            raise self._lost(spec)
        return answer

    def _lost(self, spec: FaultSpec) -> Exception:
        """What is raised where a connection breaks before the answer came."""
        words = f"made to lose the answer of {spec.phase}"
        if isinstance(self.channel, ActorChannel):
            return ActorUnavailableError(words, None)
        return ConnectionError(words)
