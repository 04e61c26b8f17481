"""One protocol call of a round, or several in one turn of an actor: bounded, timed, and attributed when it fails."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from ray_weightsync.errors import CallFailure
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.protocol.chain import Place
from ray_weightsync.protocol.reading import EngineRestarted, died, words

logger = logging.getLogger(__name__)

HALT_S = 5.0
"""The longest that an engine which is late already is asked where it is, in seconds."""


class StepFailed(Exception):
    """A replica failed a call of a round. Carries the phase, how it failed and the deadline that applied.

    Attributes:
        goes_on: The rest of its chain may have been carried out, or may be yet: the engine could not be told to halt it, or its answer
            was lost.
    """

    def __init__(self, phase: str, failure: CallFailure, limit_s: float, goes_on: bool = False) -> None:
        super().__init__(f"{phase}: {failure.message}")
        self.phase = phase
        self.failure = failure
        self.limit_s = limit_s
        self.goes_on = goes_on

    @classmethod
    def refused(cls, phase: str, why: str, limit_s: float = 0.0) -> Self:
        """What speaks against going on, found without a call."""
        return cls(phase, CallFailure(message=why, kind="raised", elapsed_s=0.0), limit_s)

    def __reduce__(self) -> tuple[Any, ...]:
        return (StepFailed, (self.phase, self.failure, self.limit_s, self.goes_on))


@dataclass
class Timeline:
    """Seconds per replica and phase, and the wall span of each phase over all replicas."""

    seconds: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, replica_id: str, phase: str, began: float, ended: float) -> None:
        mine = self.seconds[replica_id]
        mine[phase] = mine.get(phase, 0.0) + ended - began
        first, last = self.spans.get(phase, (began, ended))
        self.spans[phase] = (min(first, began), max(last, ended))

    def span_s(self, *phases: str) -> float:
        """Seconds from the first beginning to the last end of ``phases``."""
        spans = [self.spans[phase] for phase in phases if phase in self.spans]
        return max(last for _, last in spans) - min(first for first, _ in spans) if spans else 0.0


async def step(replica: Replica, phase: str, verb: str, *args: Any, limit_s: float, timeline: Timeline, **kwargs: Any) -> Any:
    """Call ``verb`` on the replica's engine and return its answer.

    Raises:
        StepFailed: if the engine raised, died, or did not answer within ``limit_s`` seconds. An unanswered call is
            left with the replica, which is not used again before it came back.
    """
    began = time.monotonic()
    call = asyncio.ensure_future(replica.engine.channel.call(verb, *args, **kwargs))
    try:
        await asyncio.wait({call}, timeout=limit_s)
    finally:
        ended = time.monotonic()
        timeline.add(replica.id, phase, began, ended)
    if not call.done():
        raise _unanswered(replica, phase, verb, call, ended - began, limit_s)
    if (error := call.exception()) is not None:
        raise _raised(phase, error, ended - began, limit_s) from error
    return call.result()


@dataclass(frozen=True)
class Call:
    """One call of a chain: the phase that its seconds are booked under, the seconds it may take, and the call itself."""

    phase: str
    limit_s: float
    verb: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


async def chain(replica: Replica, phase: str, calls: Sequence[Call], *, incarnation: str | None, timeline: Timeline) -> dict[str, Any]:
    """Make several calls, one after the other, until one raises; one trip where the engine's actor can do that (see `Channel.call_chain`).

    Each call has its own deadline. Where one passes, the engine is asked which call it is at, and told to begin no other.

    Args:
        replica: The replica.
        phase: The phase that a failure of all of it belongs to: of an engine that died nobody can say which call it was at.
        calls: The calls.
        incarnation: The engine that they are meant for; another one behind the same handle is told nothing.
        timeline: Where the seconds are written.

    Returns:
        The answers, by verb.

    Raises:
        StepFailed: as of `step`, with the phase of the call that failed.
    """
    token = uuid.uuid4().hex
    channel = replica.engine.channel
    began = time.monotonic()
    running = asyncio.ensure_future(
        channel.call_chain(token, [(each.verb, each.args, each.kwargs) for each in calls], incarnation=incarnation)
    )
    limits_s = [call.limit_s for call in calls]
    at, since = 0, began
    while True:
        # The first deadline that may have passed: its own, or that of a later call if this one took no time.
        deadline = min(since + limits_s[at], *(time.monotonic() + limit_s for limit_s in limits_s[at + 1 :]), math.inf)
        await asyncio.wait({running}, timeout=deadline - time.monotonic())
        if running.done():
            break
        place = await _halted(replica, token, limits_s)
        if place is not None:
            at, since = place.step, time.monotonic() - place.seconds
        else:  # not begun, or its answer is on the way
            await asyncio.wait({running}, timeout=min(limits_s[at], HALT_S) / 5)
        if running.done():
            break
        elapsed_s = time.monotonic() - since if place is None else place.seconds
        if elapsed_s >= limits_s[at]:
            timeline.add(replica.id, calls[at].phase, since, time.monotonic())
            raise _unanswered(replica, calls[at].phase, calls[at].verb, running, elapsed_s, limits_s[at], goes_on=place is None)
    ended = time.monotonic()
    if (error := running.exception()) is not None:
        timeline.add(replica.id, phase, began, ended)
        raise _raised(phase, error, ended - began, sum(limits_s), goes_on=not isinstance(error, EngineRestarted)) from error
    outcome = running.result()
    for call, begins, ends in _spans(calls, outcome.seconds, began, ended):
        timeline.add(replica.id, call.phase, begins, ends)
    if outcome.error is not None and outcome.failed_step is not None:
        failed = calls[outcome.failed_step]
        raise _raised(failed.phase, outcome.error, outcome.seconds[-1], failed.limit_s) from outcome.error
    return dict(zip((call.verb for call in calls), outcome.answers, strict=True))


async def _halted(replica: Replica, token: str, limits_s: list[float]) -> Place | None:
    """Where the chain is, halted there if it is late; None if the engine does not say."""
    try:
        return await asyncio.wait_for(replica.engine.channel.halt_chain(token, limits_s), min(*limits_s, HALT_S))
    except Exception as error:  # told by the call that was not answered
        logger.warning("%s does not say where its calls are: %s", replica.id, words(error) or type(error).__name__)
        return None


def _spans(calls: Sequence[Call], seconds: Sequence[float], began: float, ended: float) -> Iterator[tuple[Call, float, float]]:
    """When each call began and ended, as seen from here; the trip to the engine and back belongs to the first."""
    begins = began
    ends = ended - sum(seconds[1:])
    for index, call in enumerate(calls[: len(seconds)]):
        yield call, begins, ends
        begins, ends = ends, ends + (seconds[index + 1] if index + 1 < len(seconds) else 0.0)


def _unanswered(
    replica: Replica, phase: str, verb: str, call: asyncio.Future[Any], elapsed_s: float, limit_s: float, *, goes_on: bool = False
) -> StepFailed:
    replica.left_unanswered(call)
    failure = CallFailure(message=f"{verb} was not answered", kind="unanswered", elapsed_s=elapsed_s)
    return StepFailed(phase, failure, limit_s, goes_on)


def _raised(phase: str, error: BaseException, elapsed_s: float, limit_s: float, *, goes_on: bool = False) -> StepFailed:
    failure = CallFailure(message=words(error), kind="died" if died(error) else "raised", elapsed_s=elapsed_s)
    return StepFailed(phase, failure, limit_s, goes_on)
