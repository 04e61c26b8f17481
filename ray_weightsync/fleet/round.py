"""The values of one round: what it is about, how each member was found and how it fares, and how a round ends early."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ray_weightsync.config import CachePolicy, FailurePolicy, PauseMode, Timeouts, is_tombstone, tombstone
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.steps import StepFailed, Timeline
from ray_weightsync.protocol.channel import GET_VERSION, IS_PAUSED
from ray_weightsync.report import ReplicaReport


@dataclass
class RoundLog:
    """What a round leaves behind for its report: where the seconds went, how the bytes went, and remarks.

    Attributes:
        transport: In the words of `config.as_transport`.
        attested: The workers attest the bytes.
        grouped: A member that is lost while bytes move takes the others with it.
    """

    round_id: str
    began: float = field(default_factory=time.monotonic)
    timeline: Timeline = field(default_factory=Timeline)
    transport: str = "host"
    transport_reason: str = "what is kept is in host memory"
    attested: bool = True
    grouped: bool = False
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class RoundSpec:
    """What a round is about.

    Attributes:
        round_id: Part of the tombstone and of every payload.
        epoch: Receivers refuse an older one.
        label: The version's label.
        num_bytes: Bytes moved to each replica; deadlines grow with them.
        all_or_none: Nobody is committed unless all are attested.
        overlap: The engines load while the snapshot is still being written, or sent.
        attested: The workers can attest the bytes, and not only that the update was complete.
    """

    round_id: str
    epoch: int
    label: str
    num_bytes: int
    all_or_none: bool
    overlap: bool
    attested: bool
    pause: PauseMode
    cache: CachePolicy
    timeouts: Timeouts
    policy: FailurePolicy

    @property
    def tombstone(self) -> str:
        return tombstone(self.round_id)

    @property
    def apply_limit_s(self) -> float:
        """Seconds from start to outcome when every call uses up its deadline."""
        return self.timeouts.apply_s(self.num_bytes)


class NotAll(Exception):
    """Some failed after *start* of a round that is for all or none: nobody was committed. ``failures`` names the culprits."""

    def __init__(self, failures: dict[str, StepFailed]) -> None:
        super().__init__("; ".join(f"{name}: {failure}" for name, failure in failures.items()))
        self.failures = failures


class Aborted(Exception):
    """The round ended before *start* and was put back. ``failures`` names the culprits, ``stuck`` those that could not be put back."""

    def __init__(self, failures: dict[str, StepFailed], stuck: dict[str, StepFailed]) -> None:
        super().__init__("; ".join(f"{name}: {failure}" for name, failure in failures.items()))
        self.failures = failures
        self.stuck = stuck


@dataclass
class Member:
    """One replica's course through the round."""

    replica: Replica
    incarnation: str | None
    paused_as_found: bool
    label_as_found: str | None
    torn_as_found: bool
    pause_asked_at: float | None = None
    resumed_at: float | None = None
    marked: bool = False
    published: bool = False
    resumed: bool = False
    recomputed: int | None = 0
    failed: StepFailed | None = None

    @classmethod
    def found(cls, replica: Replica) -> Member:
        """A member as the look directly before the round found it."""
        facts = replica.engine.facts
        return cls(
            replica=replica,
            incarnation=facts.incarnation,
            paused_as_found=bool(facts.paused),
            label_as_found=facts.version,
            torn_as_found=is_tombstone(facts.version) or replica.fenced_by_us,
        )

    def found_again(self, answers: dict[str, Any]) -> None:
        """What it answered directly before the pause, which counts for more than the look."""
        if isinstance(paused := answers.get(IS_PAUSED), bool):
            self.paused_as_found = paused
        if not self.replica.fenced_by_us:
            self.replica.owner_paused = self.paused_as_found and not self.replica.asleep  # a sleeping engine says that it is paused
        if isinstance(label := answers.get(GET_VERSION), str) and label:
            self.label_as_found, self.torn_as_found = label, is_tombstone(label) or self.replica.fenced_by_us

    @property
    def resume_is_ours(self) -> bool:
        """Whether this session must end the pause: it began it, or a tombstone says that whoever began it never ended it.

        One that sleeps runs again when it is woken up; before that it must not.
        """
        ours = not self.paused_as_found or (self.replica.fenced_by_us and not self.replica.owner_paused)
        return self.pause_asked_at is not None and ours and not self.replica.asleep

    def report(self, phases_s: dict[str, float]) -> ReplicaReport:
        """Its part of the round's report."""
        paused_s = 0.0
        if self.pause_asked_at is not None and not self.paused_as_found:
            paused_s = (self.resumed_at or time.monotonic()) - self.pause_asked_at
        return ReplicaReport(
            id=self.replica.id,
            state=self.replica.state.value,
            version=self.replica.version,
            phases_s=phases_s,
            pause_s=paused_s,
            requests_recomputed=self.recomputed,
            failed_phase=self.failed.phase if self.failed else None,
            error=self.failed.failure.message if self.failed else None,
        )
