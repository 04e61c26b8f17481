"""One engine as a member of the fleet: its state, what it holds, and the calls it has not answered yet."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ray_weightsync.config import is_tombstone
from ray_weightsync.fleet.states import ReplicaEvent, ReplicaState, move
from ray_weightsync.report import ReplicaStatus
from ray_weightsync.worker.identity import RESIDENT

if TYPE_CHECKING:
    from ray_weightsync.engines.headers import Headers
    from ray_weightsync.engines.resolve import Engine

logger = logging.getLogger(__name__)


class Left(StrEnum):
    """What an update that was not committed left in an engine which nobody can ask."""

    NOTHING = "nothing"
    OPEN = "open"
    """It is open, and every call of it that was made was answered well."""
    UNKNOWN = "unknown"
    """A call of it failed, was not answered, or is known of by nobody."""


@dataclass(frozen=True)
class Doubt:
    """The user's own probe refused a replica's outputs.

    Attributes:
        label: The version that it holds.
        round_id: The round that brought it.
        complaint: What the probe said.
    """

    label: str
    round_id: str
    complaint: str


@dataclass(eq=False)
class Replica:
    """A fleet member. Owned by the coordinator, changed on its event loop only.

    Attributes:
        engine: The engine, its channel and the facts last learned of it.
        state: Where it stands; changed by `happen` alone.
        version: The label whose weights it holds, if it is known.
        brought: Whether a round of this session brought those weights, all of them.
        attested: Whether its workers proved them. Those of a stock engine prove nothing.
        left: What the latest update left in a stock engine. Our worker side leaves nothing.
        holds_end: Its workers keep what a trainer engine of vLLM's had set up in them.
        served: It was SERVING when the round in progress passed *start*; a router may go on sending (requests queue).
        leaving: Its removal was asked for: no new requests, no further round.
        doubted: Why it is to be fenced when the round in progress has ended. No new requests until it is brought another version.
        owner_paused: Its owner had paused it before this session first touched it, and finds it so afterwards.
        fenced_by_us: Its pause is this session's (or a dead session's, by its tombstone) and ends with its next commit.
        plans: Digests of the plans that its preflight accepted, for its present incarnation.
        home: The node whose snapshot store it reads from, as last looked at.
        stores: Snapshot stores whose memory it proved to see, for its present incarnation.
        headers: The tensors of a stock engine's checkpoint, once it was asked for them.
        error: Why it is quarantined or lost.
        heals: How often it was healed without being asked since it last took part in a sender's round.
        refused_in: The round after which the user's own probe refused its outputs; it is not healed without being asked.
        asleep_tags: What this session put to sleep and nobody has woken up since: of ``"weights"`` and ``"kv_cache"``.
        lost: It was given up because it cannot be healed, not because its user let it go.
        replaced_by: Id of the replica that took its place.
        taken_by: Name of the session that has its engine now.
        unanswered: Calls that missed their deadline and may still come back.
    """

    engine: Engine
    state: ReplicaState = ReplicaState.JOINING
    version: str | None = None
    brought: bool = False
    attested: bool = False
    left: Left = Left.NOTHING
    holds_end: bool = False
    served: bool = False
    leaving: bool = False
    doubted: Doubt | None = None
    owner_paused: bool = False
    fenced_by_us: bool = False
    plans: set[str] = field(default_factory=set)
    home: str | None = None
    stores: set[str] = field(default_factory=set)
    headers: Headers | None = None
    error: str | None = None
    heals: int = 0
    refused_in: str | None = None
    asleep_tags: set[str] = field(default_factory=set)
    lost: bool = False
    replaced_by: str | None = None
    taken_by: str | None = None
    unanswered: set[asyncio.Future[Any]] = field(default_factory=set)

    @property
    def id(self) -> str:
        return self.engine.id

    @property
    def log_hint(self) -> str | None:
        """Where its log is to be found."""
        actor_id = self.engine.facts.actor_id
        return f"ray logs actor --id {actor_id}" if actor_id is not None else None

    @property
    def whole(self) -> bool:
        """Whether it holds a committed version, or did when the round in progress passed *start*."""
        return self.state is ReplicaState.SERVING or (self.state is ReplicaState.UPDATING and self.served)

    @property
    def asleep(self) -> bool:
        """Whether a part of it sleeps, as last seen. An engine whose workers cannot sleep only pauses, and does not tell."""
        return bool(self.asleep_tags) or any(not set(RESIDENT) <= set(worker.resident) for worker in self.engine.facts.workers)

    @property
    def holds_weights(self) -> bool:
        """Whether its weights are in memory, as last seen."""
        return all("weights" in worker.resident for worker in self.engine.facts.workers)

    @property
    def serving(self) -> bool:
        """Whether a router may send requests to it."""
        return self.whole and not (self.leaving or self.doubted or self.asleep)

    def happen(self, event: ReplicaEvent, *, error: str | None = None) -> None:
        """Move to the state that ``event`` leads to."""
        before, self.state = self.state, move(self.state, event)
        if event is ReplicaEvent.START:
            self.served = before is ReplicaState.SERVING or (before is ReplicaState.UPDATING and self.served)
        if event in (ReplicaEvent.START, ReplicaEvent.FAIL):
            self.brought = self.attested = False
        if event is ReplicaEvent.COMMIT:
            self.left = Left.NOTHING
            self.heals, self.refused_in, self.lost = 0, None, False
        self.error = error if event in (ReplicaEvent.FAIL, ReplicaEvent.RETIRE) else None
        if before is not self.state:
            logger.info("%s: %s -> %s%s", self.id, before.value, self.state.value, f" ({error})" if error else "")

    def hold(self, label: str, *, attested: bool) -> None:
        """A round of this session brought it this version, all of it."""
        self.happen(ReplicaEvent.COMMIT)
        self.version, self.brought, self.attested, self.fenced_by_us = label, True, attested, False
        if self.doubted is not None and self.doubted.label != label:  # a roll-back brings again what the probe has refused
            self.doubted = None

    def lose_weights(self, why: str) -> None:
        """It holds no version that may be served, and is kept from serving until this session has brought it one."""
        self.happen(ReplicaEvent.FAIL, error=why)
        self.version, self.fenced_by_us = None, True

    def found_torn(self) -> None:
        """It was found under a tombstone. If that is not ours, some round has begun to change it, and did not come to an end."""
        if not self.fenced_by_us:
            self.fenced_by_us, self.left = True, Left.UNKNOWN

    def forget_incarnation(self) -> None:
        """The engine restarted: whatever its earlier process knew or proved is gone."""
        self.plans.clear()
        self.stores.clear()
        self.unanswered.clear()
        self.version = self.headers = None
        self.brought = self.attested = False
        self.left, self.holds_end = Left.NOTHING, False
        self.fenced_by_us = False
        self.doubted = self.refused_in = None
        self.asleep_tags = set()

    def left_unanswered(self, call: asyncio.Future[Any]) -> None:
        """Keep a call that missed its deadline: until it comes back the engine may still act on it."""
        self.unanswered.add(call)
        call.add_done_callback(self._came_back)

    def _came_back(self, call: asyncio.Future[Any]) -> None:
        self.unanswered.discard(call)
        error = None if call.cancelled() else call.exception()
        logger.info("%s: a call that had missed its deadline came back%s", self.id, f" with {error}" if error else "")

    def status(self) -> ReplicaStatus:
        facts = self.engine.facts
        return ReplicaStatus(
            id=self.id,
            state=self.state.value,
            serving=self.serving,
            version=None if is_tombstone(self.version) else self.version,
            attested=self.attested,
            incarnation=facts.incarnation,
            node_id=facts.node_id,
            world_size=self.engine.world_size,
            error=self.error,
            asleep=self.asleep,
            lost=self.lost,
            replaced_by=self.replaced_by,
            taken_by=self.taken_by,
        )
