"""One limit for all waits of one transfer, on a monotonic clock."""

from __future__ import annotations

import time
from datetime import timedelta


class Deadline:
    """``limit_s`` seconds from now.

    Attributes:
        limit_s: Seconds allowed altogether.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._until = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._until - time.monotonic())

    @property
    def passed(self) -> bool:
        return self.left_s == 0

    def as_timeout(self) -> timedelta:
        """What is left, for torch, in the whole milliseconds that it counts in: rounded up, so that the deadline has passed then.

        Never zero, which torch takes for no limit at all.
        """
        return timedelta(milliseconds=int(self.left_s * 1000) + 1)
