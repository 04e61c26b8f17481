"""What a coordinator leaves for its successor: what the engines' labels cannot say. One small record per session, in Ray's control plane.

The labels stay the truth about what is torn and what is committed. The record adds who the engines are, who was paused by a round and how
it was found, and where the snapshots lie. Plans are large and never change, so each is written once, apart.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ray_weightsync.engines.facts import EngineFacts
from ray_weightsync.engines.ref import EngineRef
from ray_weightsync.errors import WeightSyncError
from ray_weightsync.fleet import cluster
from ray_weightsync.fleet.cluster import Process
from ray_weightsync.fleet.keyring import Keys
from ray_weightsync.fleet.steps import StepFailed
from ray_weightsync.fleet.values import Sealed, Settings
from ray_weightsync.report import SyncReport

Outcome = SyncReport | WeightSyncError
"""How a round ended: what its caller was told, or would have been."""

MAX_OUTCOMES = 3


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Which session a coordinator is of; the same for all its coordinators.

    Attributes:
        session_id: Tells it from an earlier session of the same name.
        owner: The process whose end ends it.
    """

    session_id: str
    owner: Process


@dataclass(frozen=True, kw_only=True)
class SnapshotRecord:
    """A snapshot; see `ray_weightsync.fleet.snapshot.Snapshot`. ``sealed`` is None where that was not known yet. How its bytes went is as
    in `ray_weightsync.fleet.round.RoundLog`.

    Where it lies is for the stores to tell.
    """

    id: str
    slot: str
    version: int | str
    label: str
    plan: str
    node_id: str
    sealed: Sealed | None
    group: str | None = None
    kept: bool = True
    attested: bool = True
    transport: str = "host"
    transport_reason: str = ""
    grouped: bool = False


@dataclass(frozen=True, kw_only=True)
class MemberRecord:
    """How a round found one of its members."""

    incarnation: str | None
    paused: bool
    label: str | None
    torn: bool


@dataclass(frozen=True, kw_only=True)
class Undone:
    """A round that was for all or none and is taken back: its caller waits for the end of the one that brings everybody back.

    Attributes:
        id: The round.
        label: Its version's.
        failures: Why it is taken back, by replica.
    """

    id: str
    label: str
    failures: dict[str, StepFailed]


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """A round that may have begun to touch engines.

    Attributes:
        all_or_none: Nobody is committed unless all are attested.
        undone: The round that this one takes back, if it does.
    """

    id: str
    snapshot: SnapshotRecord
    members: dict[str, MemberRecord]
    all_or_none: bool = False
    undone: Undone | None = None


@dataclass(frozen=True, kw_only=True)
class ReplicaRecord:
    """One replica as it stood; see `ray_weightsync.fleet.replica.Replica`. The reference carries no secret."""

    ref: EngineRef
    facts: EngineFacts
    state: str
    values: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Record:
    """All of it.

    Attributes:
        ordinals: The versions of the session and their place in the order of commits, oldest first.
        committed: The snapshot that replicas are repaired from.
        round: The round in progress.
        outcomes: The rounds that ended last, by id.
        keys: References to the literal api_keys of its engines.
    """

    origin: Origin
    settings: Settings
    replicas: tuple[ReplicaRecord, ...]
    label: str | None = None
    ordinal: int = 0
    epoch: int = 0
    ordinals: dict[str, int] = field(default_factory=dict)
    committed: SnapshotRecord | None = None
    round: RoundRecord | None = None
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    keys: Keys = ()


class Journal(Protocol):
    """Where the record is kept. `RayJournal` is the real one; unit tests keep it in memory. Every call may block."""

    def read(self) -> Record | None: ...
    def write(self, record: Record) -> None: ...
    def read_plan(self, digest: str) -> dict[str, Any] | None: ...
    def write_plan(self, digest: str, plan: dict[str, Any]) -> None: ...
    def forget_plan(self, digest: str) -> None: ...
    def erase(self) -> None: ...


class RayJournal:
    """The journal of the session ``name`` in Ray's control plane, which outlives every process of ours."""

    def __init__(self, name: str) -> None:
        self._key = f"session:{name}"
        self._plans = f"plan:{name}:"

    def read(self) -> Record | None:
        """The record, or None if no session of that name left one."""
        value = cluster.get(self._key)
        record: Record | None = None if value is None else pickle.loads(value)
        return record

    def write(self, record: Record) -> None:
        import ray.cloudpickle

        # A user's own client may be of a class that only cloudpickle can carry; handles are pickled as Ray's own.
        dumps: Callable[[Any], bytes] = ray.cloudpickle.dumps
        cluster.put(self._key, dumps(record))

    def read_plan(self, digest: str) -> dict[str, Any] | None:
        """The plan in its form for the wire."""
        value = cluster.get(self._plans + digest)
        plan: dict[str, Any] | None = None if value is None else pickle.loads(value)
        return plan

    def write_plan(self, digest: str, plan: dict[str, Any]) -> None:
        cluster.put(self._plans + digest, pickle.dumps(plan))

    def forget_plan(self, digest: str) -> None:
        cluster.delete(self._plans + digest)

    def erase(self) -> None:
        """Leave nothing. Idempotent."""
        for key in (self._key, *cluster.keys(self._plans)):
            cluster.delete(key)
