"""What travels between session, senders and coordinator. Frozen and picklable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray_weightsync.config import AdoptPolicy, CachePolicy, FailurePolicy, Host, PauseMode, Timeouts


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a session was attached with."""

    transport: Host
    transport_reason: str
    pause: PauseMode
    cache: CachePolicy
    adopt: AdoptPolicy
    on_failure: FailurePolicy
    timeouts: Timeouts


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """The right to write one snapshot.

    Attributes:
        snapshot: The snapshot's id.
        address: Where to write it (see `ray_weightsync.transports.host.layout`).
        progress_bytes: How often progress is to be made visible.
    """

    snapshot: str
    address: dict[str, Any]
    progress_bytes: int


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """What a sender has written: the digest of the weights, their bytes and number, and the seconds it took."""

    digest: str
    num_bytes: int
    num_tensors: int
    stage_s: float
