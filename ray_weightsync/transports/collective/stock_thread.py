"""A thread that owns something which only one thread may use, and which may never come back from a call."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_Job = tuple[Callable[[], Any], "Future[Any]"]


class OwnerThread:
    """Runs what it is given, one after the other, on one daemon thread: a call that is stuck does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run ``work`` after what was submitted before it."""
        future: Future[T] = Future()
        self._jobs.put((work, future))
        return future

    def stop(self, limit_s: float) -> None:
        """End the thread after what was submitted, and wait for that at most ``limit_s`` seconds. Idempotent."""
        self._jobs.put(None)
        self._thread.join(limit_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, future = job
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
