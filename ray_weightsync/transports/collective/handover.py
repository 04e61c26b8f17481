"""Buckets on their way from one thread to the other, a few at a time; each side may end it, and the other one learns why."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")

ABANDONED = -1
"""In place of a slot: nobody takes items any more."""


class Handover(Generic[Item]):
    """A queue of at most ``num_slots`` items, counted from before an item is made until after it is used.

    Every wait takes a limit in seconds. `fail` and `abandon` wake whoever waits; the first failure stays.
    """

    def __init__(self, num_slots: int) -> None:
        self._changed = threading.Condition()
        self._num_slots = num_slots
        self._free = list(range(num_slots))
        self._items: deque[tuple[int, Item]] = deque()
        self._failure: BaseException | None = None
        self._finished = False
        self._abandoned = False

    # -- the side that makes items -------------------------------------------------------------------------------------------

    def reserve(self, limit_s: float) -> int | None:
        """A slot for one item; `ABANDONED` if nobody takes items any more; None if no slot became free in time.

        Raises:
            BaseException: what `fail` was given.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._abandoned or self._free, limit_s)
            self._check()
            if self._abandoned:
                return ABANDONED
            return self._free.pop() if self._free else None

    def put(self, slot: int, item: Item) -> None:
        """Hand ``item`` over in a reserved slot.

        Raises:
            BaseException: what `fail` was given.
        """
        with self._changed:
            self._check()
            if not self._abandoned:
                self._items.append((slot, item))
            self._changed.notify_all()

    def finish(self) -> None:
        """Nothing more will come."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def wait_used(self, limit_s: float) -> bool | None:
        """True once everything that came before `finish` is used, whatever fails afterwards; None if it is not in time.

        Raises:
            BaseException: what `fail` was given.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._used_up or self._failure, limit_s)
            if self._used_up:
                return True
            self._check()
            return None

    # -- the side that uses them ---------------------------------------------------------------------------------------------

    def take(self, limit_s: float) -> tuple[int, Item] | None:
        """The next item and its slot; None if nothing came in time. Items that were put before a failure come first.

        Raises:
            EOFError: if nothing more will come.
            BaseException: what `fail` was given.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._failure or self._finished, limit_s)
            if self._items:
                return self._items.popleft()
            self._check()
            if self._finished:
                raise EOFError
            return None

    def release(self, slot: int) -> None:
        """The item that came in ``slot`` is used: another one may be made."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()

    def abandon(self) -> None:
        """Nobody takes items any more."""
        with self._changed:
            self._abandoned = True
            self._items.clear()
            self._changed.notify_all()

    # -- either side ---------------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """End it for both sides. Only the first failure counts."""
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    @property
    def _used_up(self) -> bool:
        return self._finished and not self._items and len(self._free) == self._num_slots

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
