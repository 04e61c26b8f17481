"""One call to many engines: every answer is waited for, up to one deadline, and every outcome keeps its engine's name.

Nothing here raises because an engine failed; the caller decides what a failure means. Calls that missed the deadline are
not cancelled (an engine cannot be told to forget a call): they are handed back, so that their owner can wait for the late answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ray_weightsync.errors import CallFailure

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Outcomes(Generic[T]):
    """What came of a fan-out.

    Attributes:
        answers: Results, by name.
        failures: What went wrong, by name. Every name called is in exactly one of the two.
        errors: The exception behind each failure that was raised.
        late: The calls still unanswered, by name; also in ``failures``.
        elapsed_s: Seconds each call took, by name.
    """

    answers: dict[str, T] = field(default_factory=dict)
    failures: dict[str, CallFailure] = field(default_factory=dict)
    errors: dict[str, BaseException] = field(default_factory=dict)
    late: dict[str, asyncio.Future[T]] = field(default_factory=dict)
    elapsed_s: dict[str, float] = field(default_factory=dict)


async def fan_out(
    calls: Mapping[str, Callable[[], Awaitable[T]]],
    *,
    what: str,
    limit_s: float,
    warn_every_s: float = 10,
    died: Callable[[BaseException], bool] = lambda error: False,
    words: Callable[[BaseException], str] = str,
) -> Outcomes[T]:
    """Start every call at once and wait for all of them, at most ``limit_s`` seconds.

    Args:
        calls: By engine name, a function that starts the call.
        what: The phase, for the log line that names who is still missing.
        limit_s: Seconds until the rest count as unanswered.
        warn_every_s: Seconds between those log lines.
        died: Tells whether an exception means that the engine's process is gone.
        words: The engine's own words in an exception.
    """
    began = time.monotonic()
    outcomes: Outcomes[T] = Outcomes()
    took_s: dict[str, float] = {}  # of its own: a late call still writes into it when the outcomes are somebody else's

    async def run(name: str, call: Callable[[], Awaitable[T]]) -> T:
        try:
            return await call()
        finally:
            took_s[name] = time.monotonic() - began

    names: dict[asyncio.Task[T], str] = {asyncio.create_task(run(name, call)): name for name, call in calls.items()}
    waiting: set[asyncio.Task[T]] = set(names)
    try:
        while waiting and (left := began + limit_s - time.monotonic()) > 0:
            _, waiting = await asyncio.wait(waiting, timeout=min(left, warn_every_s))
            if waiting and time.monotonic() - began < limit_s:
                missing = sorted(names[task] for task in waiting)
                logger.warning("%s: waiting for %s, %.0f s of %.0f s", what, ", ".join(missing), time.monotonic() - began, limit_s)
    except BaseException:
        for task in waiting:
            task.cancel()
        raise
    for task, name in names.items():
        elapsed_s = took_s.get(name, time.monotonic() - began)
        outcomes.elapsed_s[name] = elapsed_s
        if task in waiting:
            outcomes.late[name] = task
            outcomes.failures[name] = CallFailure(message=f"no answer within {limit_s:.1f} s", kind="unanswered", elapsed_s=elapsed_s)
        elif (error := _error_of(task)) is not None:
            outcomes.errors[name] = error
            outcomes.failures[name] = CallFailure(message=words(error), kind="died" if died(error) else "raised", elapsed_s=elapsed_s)
        else:
            outcomes.answers[name] = task.result()
    return outcomes


def _error_of(task: asyncio.Task[Any]) -> BaseException | None:
    return asyncio.CancelledError("the call was cancelled") if task.cancelled() else task.exception()
