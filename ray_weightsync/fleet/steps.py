"""One protocol call of a round: bounded, timed, and attributed when it fails."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
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
        first, last = self.spans.get(phase, (0.0, 0.0))
        return last - first


async def step(replica: Replica, phase: str, verb: str, *args: Any, limit_s: float, timeline: Timeline, **kwargs: Any) -> Any:
    """Call ``verb`` on the replica's engine and return its answer.

    Raises:
        StepFailed: if the engine raised, died, or did not answer within ``limit_s`` seconds. An unanswered call is
            left with the replica, which is not used again before it came back.
    """
    began = time.monotonic()
    call = asyncio.ensure_future(replica.engine.channel.call(verb, *args, **kwargs))
    try:
        done, _ = await asyncio.wait({call}, timeout=limit_s)
    finally:
        ended = time.monotonic()
        timeline.add(replica.id, phase, began, ended)
    if not done:
        replica.left_unanswered(call)
        raise StepFailed(phase, CallFailure(message=f"{verb} was not answered", kind="unanswered", elapsed_s=ended - began), limit_s)
    error = call.exception()
    if error is not None:
        failure = CallFailure(message=words(error), kind="died" if died(error) else "raised", elapsed_s=ended - began)
        raise StepFailed(phase, failure, limit_s) from error
    return call.result()
