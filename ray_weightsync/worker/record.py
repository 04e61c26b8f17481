"""What one session (start, update, finish) left on record, and what of it counts as the complete round that was asked for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray_weightsync.worker import payload
from ray_weightsync.worker.receiver import Received


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The round that an outcome call asks for.

    Attributes:
        round: Its id.
        epoch: Its epoch.
        plan: Digest of its plan.
        received: What every worker has to have received; None if its way does not let workers attest bytes.
    """

    round: str
    epoch: int
    plan: str
    received: Received | None

    @classmethod
    def from_payload(cls, info: Mapping[str, Any]) -> Asked:
        """Read an ``"outcome"`` op.

        Raises:
            Malformed: if a field is missing or of the wrong type.
        """
        asked, epoch, expected = payload.text(info, "round"), payload.count(info, "epoch"), payload.mapping(info, "expected")
        received = None
        if payload.flag(expected, "attested", default=True):
            received = Received(
                snapshot=payload.text(expected, "snapshot"),
                digest=payload.text(expected, "digest"),
                num_bytes=payload.count(expected, "num_bytes"),
                num_tensors=payload.count(expected, "num_tensors"),
            )
        return cls(round=asked, epoch=epoch, plan=payload.text(expected, "plan"), received=received)


@dataclass
class Session:
    """What happened since the latest `start`; kept after `finish`, until the next one."""

    round: str | None = None
    epoch: int | None = None
    plan: str | None = None
    received: Received | None = None
    updates: int = 0
    finished: bool = False
    failures: list[str] = field(default_factory=list)

    def verdict(self, asked: Asked) -> str | None:
        """What stands between this session and the round asked for; None if it is that round, complete."""
        complaints = list(self.failures)
        if not self.finished:
            complaints.append("finish_weight_update has not been called")
        if self.updates == 0 and not self.failures:
            complaints.append("nothing was transferred: start and finish came without update_weights")
        if self.round is not None and (self.round, self.epoch) != (asked.round, asked.epoch):
            complaints.append(
                f"round {asked.round} of epoch {asked.epoch} was asked for, the latest update is round {self.round} of epoch {self.epoch}"
            )
        wanted: dict[str, Any] = {"plan": asked.plan}
        found: dict[str, Any] = {"plan": self.plan}
        if asked.received is not None and self.received is not None:
            wanted |= vars(asked.received)
            found |= vars(self.received)
            if self.received.snapshot is None:
                del wanted["snapshot"]
        elif asked.received is not None:
            complaints = complaints or ["nothing was received that could be attested"]
            wanted = {}
        complaints += [f"{key}: expected {wanted[key]}, received {found[key]}" for key in wanted if wanted[key] != found[key]]
        return "; ".join(complaints) or None
