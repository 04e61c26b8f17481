"""Time that passes only while everybody waits: a deadline of a minute costs nothing, and no slow machine makes an answer late."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ray_weightsync.protocol import threads

LIMIT_S = 600.0
"""The longest that a story may last, in its own seconds."""

TURN_S = 1e-6
"""What a turn of the loop takes, in seconds: a deadline is passed at last, however it is rounded."""


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while there is anything to do, and then jumps to the next deadline."""

    def __init__(self) -> None:
        self._now = time.monotonic()
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        """Let so many seconds pass."""
        self._now += seconds


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTime) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits, and nothing will ever happen"
        self._loop.jump(timeout + TURN_S)
        return super().select(0)


class _AtOnce:
    """A thread whose work is done where it is started."""

    def __init__(self, target: Callable[[], None], **options: Any) -> None:
        self.start = target


def run(story: Coroutine[Any, Any, None]) -> None:
    """Run a story in virtual time, blocking calls in line.

    Raises:
        BaseException: what the story raised; TimeoutError if it does not come to its end.
    """
    loop = VirtualTime()
    in_line = mock.patch.object(threads, "threading", SimpleNamespace(Thread=_AtOnce))
    with mock.patch.object(time, "monotonic", loop.time), in_line, asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(asyncio.wait_for(story, LIMIT_S))
