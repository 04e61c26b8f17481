"""One protocol call of a round, or several in one turn of an actor: bounded, timed, and attributed when it fails."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray_weightsync.errors import CallFailure
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.protocol.reading import died, words


class StepFailed(Exception):
    """A replica failed a call of a round. Carries the phase, how it failed and the deadline that applied."""

    def __init__(self, phase: str, failure: CallFailure, limit_s: float) -> None:
        super().__init__(f"{phase}: {failure.message}")
        self.phase = phase
        self.failure = failure
        self.limit_s = limit_s

    def __reduce__(self) -> tuple[Any, ...]:
        return (StepFailed, (self.phase, self.failure, self.limit_s))


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

    def wall_s(self, phase: str) -> float:
        return self.span_s(phase)

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
    return await _bounded(replica, phase, verb, replica.engine.channel.call(verb, *args, **kwargs), limit_s=limit_s, timeline=timeline)


async def chain(replica: Replica, phase: str, steps: Sequence[tuple[str, Any]], *, limit_s: float, timeline: Timeline) -> dict[str, Any]:
    """Call several verbs in one turn of the engine's actor, until one raises (see `ActorChannel.call_chain`).

    Args:
        replica: The replica, whose engine sits in an actor.
        phase: The phase that all the seconds are booked under, and that a failure of the turn as a whole belongs to.
        steps: Each verb's own phase, and the call.
        limit_s: Seconds for all of them, the wait for the actor's turn included.
        timeline: Where the seconds are written.

    Returns:
        The answers, by phase.

    Raises:
        StepFailed: as of `step`; a verb that raised is named by its own phase.
    """
    began = time.monotonic()
    channel: Any = replica.engine.channel  # more than a `Channel`: only actors have turns
    turn = channel.call_chain([call for _, call in steps])
    outcome = await _bounded(replica, phase, "the update in one call of its actor", turn, limit_s=limit_s, timeline=timeline)
    if outcome.error is not None:
        raise _raised(steps[outcome.failed_step][0], outcome.error, time.monotonic() - began, limit_s) from outcome.error
    return dict(zip((each for each, _ in steps), outcome.answers, strict=True))


async def _bounded(replica: Replica, phase: str, what: str, answer: Awaitable[Any], *, limit_s: float, timeline: Timeline) -> Any:
    began = time.monotonic()
    call = asyncio.ensure_future(answer)
    try:
        done, _ = await asyncio.wait({call}, timeout=limit_s)
    finally:
        ended = time.monotonic()
        timeline.add(replica.id, phase, began, ended)
    if not done:
        replica.left_unanswered(call)
        raise StepFailed(phase, CallFailure(message=f"{what} was not answered", kind="unanswered", elapsed_s=ended - began), limit_s)
    error = call.exception()
    if error is not None:
        raise _raised(phase, error, ended - began, limit_s) from error
    return call.result()


def _raised(phase: str, error: BaseException, elapsed_s: float, limit_s: float) -> StepFailed:
    return StepFailed(phase, CallFailure(message=words(error), kind="died" if died(error) else "raised", elapsed_s=elapsed_s), limit_s)
