"""The channel of an engine that could not be reached again: each call tries anew, so that one that comes back is found."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ray_weightsync.protocol.chain import ChainOutcome, Place, Step
from ray_weightsync.protocol.channel import Channel


class Unreached:
    """Stands for the channel that ``reach`` returns, once it does.

    Args:
        label: The engine's name in errors and logs.
        reach: Reaches the engine; raises, with the reason, as long as it cannot be.
    """

    def __init__(self, label: str, reach: Callable[[], Awaitable[Channel]]) -> None:
        self.label = label
        self._reach = reach
        self._reached: Channel | None = None

    async def reached(self) -> Channel:
        """The engine's own channel.

        Raises:
            Exception: what keeps it from being reached.
        """
        if self._reached is None:
            self._reached = await self._reach()
        return self._reached

    def supports(self, verb: str) -> bool:
        """Whether the engine has ``verb``; as long as it was not reached, nothing is known against it."""
        return self._reached is None or self._reached.supports(verb)

    async def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """See `Channel`; so for all that follow."""
        return await (await self.reached()).call(verb, *args, **kwargs)

    async def call_chain(self, token: str, steps: Sequence[Step], *, incarnation: str | None = None) -> ChainOutcome:
        return await (await self.reached()).call_chain(token, steps, incarnation=incarnation)

    async def halt_chain(self, token: str, limits_s: Sequence[float]) -> Place | None:
        return None if self._reached is None else await self._reached.halt_chain(token, limits_s)

    async def halt_chains(self) -> int:
        return await (await self.reached()).halt_chains()
