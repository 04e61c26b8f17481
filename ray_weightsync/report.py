"""What users print, log and plot: the report of a round and the status of a fleet. Plain frozen values, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PHASES = ("preflight", "stage", "relay", "pause", "mark", "start", "update", "finish", "outcome", "commit", "cache", "resume")
"""The phases of a round, in order; the keys of ``phases_s``."""


@dataclass(frozen=True, kw_only=True)
class ReplicaReport:
    """One replica's part in a round.

    Attributes:
        id: The replica's id.
        state: Its state after the round, such as ``"SERVING"``.
        version: The label it holds after the round; None if unknown.
        phases_s: Seconds per phase, as far as it got.
        pause_s: Seconds from asking it to pause to its resume; 0 if this round did not pause it.
        requests_recomputed: Requests in flight whose KV was dropped, to be prefilled again; None if unknown.
        failed_phase: The phase it failed in, or None.
        error: What went wrong, or None.
    """

    id: str
    state: str
    version: str | None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    pause_s: float = 0.0
    requests_recomputed: int | None = 0
    failed_phase: str | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What one round did.

    Attributes:
        version: The version as the caller gave it; on the engines it stands as text.
        ordinal: Place of this version in the order of commits, from 1.
        round_id: The round's id, also part of its tombstone.
        epoch: Number of the membership the round used.
        plan_digest: Digest of names, dtypes, shapes and order.
        weights_digest: Digest of the bytes; equals ``weights_digest(source)``. Empty if the sender gave up while engines read on.
        transport: The transport used, and in ``transport_reason`` why it was picked.
        num_bytes: Bytes of weights, without padding.
        num_tensors: Number of tensors.
        phases_s: Wall seconds per phase over all replicas (phases of different replicas may overlap); "stage" is the sender's, "relay" the
            bytes' way to other nodes, also in ``phases_s`` of each replica there.
        apply_s: Wall seconds from the first ``start_weight_update`` to the last attested replica.
        replicas: One `ReplicaReport` for each member of the round.
        pause_s: Longest time one replica was paused, in seconds.
        trainer_blocked_s: Seconds until the trainer might change its weights again.
        total_s: Seconds from opening the round to its last resume.
        requests_recomputed: Sum over replicas; None if one does not tell.
        guarantees: What was held, one short sentence each.
        missing: What could not be held for this fleet, and why.
        notes: Remarks, such as a retired slot.
        repeated: The same version with the same bytes had been committed already; nothing was sent.
    """

    version: int | str
    ordinal: int
    round_id: str
    epoch: int
    plan_digest: str
    weights_digest: str
    transport: str
    transport_reason: str
    num_bytes: int
    num_tensors: int
    phases_s: Mapping[str, float]
    apply_s: float
    replicas: tuple[ReplicaReport, ...]
    pause_s: float
    trainer_blocked_s: float
    total_s: float
    requests_recomputed: int | None = 0
    guarantees: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    repeated: bool = False

    @property
    def committed(self) -> tuple[str, ...]:
        """Ids of the replicas that hold this version."""
        return tuple(replica.id for replica in self.replicas if replica.failed_phase is None)

    @property
    def lost(self) -> tuple[str, ...]:
        """Ids of the replicas that failed after *start* and are fenced."""
        return tuple(replica.id for replica in self.replicas if replica.failed_phase is not None)

    @property
    def gigabytes_per_s(self) -> float:
        """Bytes of weights over staging plus apply, in 1e9 bytes a second; 0 if nothing was sent."""
        seconds = self.phases_s.get("stage", 0.0) + self.apply_s
        return self.num_bytes / seconds / 1e9 if seconds > 0 else 0.0

    def line(self) -> str:
        """One line for a log."""
        lost = f", lost {', '.join(self.lost)}" if self.lost else ""
        seconds = f"{self.total_s:.3f} s (stage {self.phases_s.get('stage', 0.0):.3f}, pause {self.pause_s:.3f}, apply {self.apply_s:.3f})"
        sent = f"{self.num_bytes / 1e6:.1f} MB in {self.num_tensors} tensors by {self.transport}"
        return f"version {self.version} on {len(self.committed)} of {len(self.replicas)} replicas{lost}: {sent}, {seconds}"

    def __str__(self) -> str:
        rows = [self.line() + (" - a repeat, nothing was sent" if self.repeated else "")]
        if self.replicas:
            width = max(len(replica.id) for replica in self.replicas)
            rows.append(f"  {'replica':<{max(width, 7)}}  {'state':<11}  {'pause s':>8}  {'update s':>8}  {'finish s':>8}  version")
            for replica in self.replicas:
                seconds = (replica.pause_s, replica.phases_s.get("update", 0.0), replica.phases_s.get("finish", 0.0))
                columns = "  ".join(f"{each:8.3f}" for each in seconds)
                error = f"  {replica.failed_phase}: {replica.error}" if replica.error else ""
                rows.append(f"  {replica.id:<{max(width, 7)}}  {replica.state:<11}  {columns}  {replica.version}{error}")
        rows.append(f"  transport: {self.transport} ({self.transport_reason}); weights digest {self.weights_digest}")
        rows.extend(f"  missing: {each}" for each in self.missing)
        rows.extend(f"  note: {each}" for each in self.notes)
        return "\n".join(rows)


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """What the coordinator knows of one replica.

    Attributes:
        id: The replica's id.
        state: ``JOINING``, ``STALE``, ``UPDATING``, ``SERVING``, ``QUARANTINED`` or ``RETIRED``.
        serving: Whether a router may send requests to it. Stays true while a round pauses a replica that served before.
        version: The version whose weights it holds; None if it holds none that is known.
        attested: Whether those weights were proved by a round of this session.
        incarnation: Changes when the engine restarts.
        node_id: Ray's id of its node; None for an engine behind a URL.
        world_size: Workers in the engine.
        error: Why it is quarantined or lost, or None.
        asleep: Whether a part of it (weights or KV cache) is not in memory, as last seen; requests would wait.
        lost: It was given up because its process is gone or it could not be healed, not because it was removed. It is RETIRED, unless it
            is the last one: a round may yet bring that one back.
        replaced_by: Id of the replica that took its place.
        taken_by: Name of the session that took its engine over.
    """

    id: str
    state: str
    serving: bool
    version: str | None
    attested: bool
    incarnation: str | None
    node_id: str | None
    world_size: int | None
    error: str | None = None
    asleep: bool = False
    lost: bool = False
    replaced_by: str | None = None
    taken_by: str | None = None


@dataclass(frozen=True, kw_only=True)
class FleetStatus:
    """What the coordinator knows, without asking an engine.

    Attributes:
        name: The session's name.
        version: The version last committed, or adopted at attach, as its label; None if there is neither.
        ordinal: Place of that version in the order of commits; 0 before the first commit.
        epoch: Number of the present membership.
        phase: The phase of the round in progress, or ``"idle"``.
        round_id: The round in progress, or None.
        replicas: One `ReplicaStatus` per replica.
        sequence: Grows by one with every change; for watchers.
        ordinals: Place in the order of commits of each of the last 100 versions, oldest first; a version adopted at attach has 0.
        ranks: Who had which ranks in the group of the last broadcast, in one line; None if there was none.
    """

    name: str
    version: str | None
    ordinal: int
    epoch: int
    phase: str
    round_id: str | None
    replicas: tuple[ReplicaStatus, ...]
    sequence: int
    ordinals: Mapping[str, int] = field(default_factory=dict)
    ranks: str | None = None

    @property
    def committed(self) -> tuple[str, ...]:
        """The labels last committed, newest last."""
        return tuple(label for label, ordinal in self.ordinals.items() if ordinal > 0)

    @property
    def serving(self) -> tuple[str, ...]:
        """Ids of the replicas that a router may send requests to."""
        return tuple(replica.id for replica in self.replicas if replica.serving)

    def __str__(self) -> str:
        members = [replica for replica in self.replicas if replica.state != "RETIRED"]
        rows = [f"{self.name}: version {self.version}, {len(self.serving)} of {len(members)} serving, {self.phase}"]
        for each in self.replicas:
            asleep, error = ", asleep" if each.asleep else "", f", {each.error}" if each.error else ""
            rows.append(f"  {each.id}: {each.state}{asleep}, version {each.version}{error}")
        if self.ranks is not None:
            rows.append(f"  {self.ranks}")
        return "\n".join(rows)
