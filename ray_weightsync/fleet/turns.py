"""Single flight: one round at a time, first come first served, and nobody keeps the turn for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal

from ray_weightsync.errors import WeightSyncError

Busy = Literal["wait", "raise"]

Unchanged = Callable[..., WeightSyncError]
"""Makes the error for a call that changed nothing; see `ray_weightsync.fleet.roster.Roster.unchanged`."""


class Turn:
    """The right to run a round. Held under a name (the snapshot's id), so that a late release cannot free somebody else's turn.

    Args:
        unchanged: Says to whom does not get it what holds.
    """

    def __init__(self, unchanged: Unchanged) -> None:
        self._unchanged = unchanged
        self._lock = asyncio.Lock()
        self._holder: str | None = None
        self._since = 0.0
        self._waiting: list[str] = []
        self.taken = 0
        """How often it was taken so far: tells whether somebody had it meanwhile."""

    @property
    def holder(self) -> str | None:
        return self._holder

    def concerns(self, holder: str) -> bool:
        """Whether ``holder`` has the turn, or waits for it."""
        return holder == self._holder or holder in self._waiting

    async def take(self, holder: str, *, busy: Busy, limit_s: float) -> None:
        """Wait for the turn.

        Raises:
            RoundAborted, FleetTorn: if another round holds it and ``busy="raise"``, or if it is not free within ``limit_s`` seconds.
        """
        if busy == "raise" and (self._lock.locked() or self._waiting):
            since = f"has been in progress for {time.monotonic() - self._since:.1f} s" if self._holder is not None else "is about to begin"
            raise self._unchanged(
                f"Round {self._holder or self._waiting[0]} {since}.",
                phase="open",
                hint="call again when it has ended, or pass busy='wait'",
            )
        try:
            if self._lock.locked() or self._waiting:
                await self._wait(holder, limit_s)
            else:
                await self._lock.acquire()  # at once: nobody has it, and nobody is about to get it
        except TimeoutError:
            raise self._unchanged(
                f"Round {self._holder} is still in progress.",
                phase="open",
                elapsed_s=limit_s,
                limit_s=limit_s,
                hint="see status()",
            ) from None
        self._holder, self._since = holder, time.monotonic()
        self.taken += 1

    async def _wait(self, holder: str, limit_s: float) -> None:
        self._waiting.append(holder)
        try:
            await asyncio.wait_for(self._lock.acquire(), limit_s)
        finally:
            self._waiting.remove(holder)

    def release(self, holder: str) -> None:
        """Give the turn back if ``holder`` has it."""
        if self._holder == holder:
            self._holder = None
            self._lock.release()
