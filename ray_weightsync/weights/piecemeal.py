"""Long work in short pieces: it goes on only while somebody lends it time, and stands still in between.

What has to be asked of a worker between two steps of its engine - is this plan of 37,000 tensors yours? - may take seconds, and a request
is not to wait for them. The work cannot be cut by hand where it calls a model's own loaders, so it gets a thread of its own; but that
thread never runs beside its owner, it takes turns with it. So nothing it does needs a lock, and it never competes for the interpreter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")

HANDED_BACK_S = 600.0
"""The longest that a piece may take to come to its next `yield_point`, in seconds: then it hangs."""


class Cancelled(BaseException):
    """Raised at the `yield_point` of work that nobody wants any more. No `Exception`: whoever judges errors is not to judge this one."""


class Piecemeal(Generic[T]):
    """``work``, to be carried out piece by piece. One owner, one thread at a time; not thread-safe.

    Args:
        work: Calls `yield_point` wherever it may stand still, every millisecond or so.
        name: Of its thread.
    """

    def __init__(self, work: Callable[[], T], *, name: str) -> None:
        self._work = work
        self._go_on = threading.Semaphore(0)
        self._handed_back = threading.Semaphore(0)
        self._until = 0.0
        self._cancelled = False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.done = False

    def advance(self, for_s: float) -> bool:
        """Let it work for ``for_s`` seconds, and to its next `yield_point` after them. Returns whether it is done.

        Raises:
            TimeoutError: if it does not come to a `yield_point` for `HANDED_BACK_S` seconds.
        """
        if not self.done:
            self._until = time.monotonic() + for_s
            self._go_on.release()
            if not self._thread.is_alive() and not self.done:
                self._thread.start()
            if not self._handed_back.acquire(timeout=for_s + HANDED_BACK_S):
                raise TimeoutError(f"{self._thread.name} did not pause for {HANDED_BACK_S:.0f} s")
        return self.done

    def result(self) -> T:
        """What came of it, working to the end first.

        Raises:
            BaseException: what ``work`` raised; `Cancelled` if it was cancelled.
        """
        while not self.advance(HANDED_BACK_S):
            pass
        if self._error is not None:
            raise self._error
        if self._cancelled:
            raise Cancelled
        return cast("T", self._result)

    def cancel(self) -> None:
        """End it where it stands. Its thread is gone afterwards. Idempotent."""
        self._cancelled = True
        if self._thread.ident is None:
            self.done = True  # it never began
        self.advance(0.0)

    def _run(self) -> None:
        _current.piecemeal = self
        self._go_on.acquire()
        try:
            self._result = None if self._cancelled else self._work()
        except BaseException as error:  # told by `result`, in the thread that asks
            self._error = error
        finally:
            self.done = True
            self._handed_back.release()

    def _yield(self) -> None:
        if not self._cancelled and time.monotonic() >= self._until:
            self._handed_back.release()
            self._go_on.acquire()
        if self._cancelled:
            raise Cancelled


class _Current(threading.local):
    piecemeal: Piecemeal[Any] | None = None


_current = _Current()


def yield_point() -> None:
    """A place where work may stand still. Costs a fraction of a microsecond, and means nothing outside of a `Piecemeal`."""
    if (piecemeal := _current.piecemeal) is not None:
        piecemeal._yield()
