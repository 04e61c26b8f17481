"""What travels between session, senders and coordinator. Frozen and picklable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray_weightsync.config import AdoptPolicy, Auto, CachePolicy, Collective, FailurePolicy, Host, Native, PauseMode, Timeouts, Transport
from ray_weightsync.fleet.cluster import Process
from ray_weightsync.fleet.turns import Busy
from ray_weightsync.transports.native.backends import traits

if TYPE_CHECKING:
    from ray_weightsync.transports.collective.rendezvous import Meeting


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the bytes of one round travel, and why so.

    Attributes:
        stock: The backend of vLLM's own that the engines were started on; None if they have our worker side, or were not asked about.
    """

    transport: Transport
    reason: str
    stock: str | None = None

    @property
    def patches(self) -> bool:
        """Whether it takes patches of some tensors alone."""
        return isinstance(self.transport, Native) and not traits(self.transport.backend).needs_source

    @property
    def keeps_broadcast(self) -> bool:
        """Whether what is broadcast is kept in host memory as well."""
        return isinstance(self.transport, Host) or (isinstance(self.transport, Collective) and self.transport.keep_snapshot)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a session was attached with."""

    transport: Transport | Auto
    transport_reason: str
    pause: PauseMode
    cache: CachePolicy
    adopt: AdoptPolicy
    on_failure: FailurePolicy
    timeouts: Timeouts

    @property
    def host(self) -> Host:
        """How snapshots are kept in host memory, whatever brings the bytes to the engines."""
        if isinstance(self.transport, Host):
            return self.transport
        return Host() if isinstance(self.transport, Native) else self.transport.host

    @property
    def directory_option(self) -> str:
        """How a user of this transport names another shared-memory directory; empty where there is no way to."""
        return {
            Host: "Host(directory=...)",
            Auto: "Auto(host=Host(directory=...))",
            Collective: "Collective(host=Host(directory=...), ...)",
            Native: "",
        }[type(self.transport)]

    @property
    def way(self) -> Way | None:
        """How every round goes; None if each one chooses."""
        return None if isinstance(self.transport, Auto) else Way(transport=self.transport, reason=self.transport_reason)


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What a sender says when it asks for the right to send one version's weights.

    Attributes:
        snapshot: The snapshot's id, of its own choice (32 hex digits), so that it can be given up before it is answered.
        version: As the caller gave it.
        plan_digest: Which plan.
        plan: The plan in its form for the wire. None: the coordinator is believed to know it.
        node_id: Where it writes.
        busy: Whether it waits for a round in progress.
        sender: The process, whose death ends the round before it is sealed.
        offer: With one the bytes go straight from the sender to the engines: it is met at a `Meeting`, or has a trainer engine of vLLM's.
        way: How the bytes are to go, where each round of the session chooses.
    """

    snapshot: str
    version: int | str
    plan_digest: str
    plan: dict[str, Any] | None
    node_id: str
    busy: Busy
    sender: Process
    offer: Meeting | Native | None = None
    way: Way | None = None


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """The right to send one version's weights.

    Attributes:
        snapshot: The snapshot's id.
        address: Where to write it (see `ray_weightsync.transports.host.layout`); None if nothing is kept.
        progress_bytes: How often progress is to be made visible.
    """

    snapshot: str
    address: dict[str, Any] | None
    progress_bytes: int


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """What a sender has written: the digest of the weights, their bytes and number, and the seconds it took."""

    digest: str
    num_bytes: int
    num_tensors: int
    stage_s: float
