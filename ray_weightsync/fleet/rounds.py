"""A sender's round, from the slot allotted to the report. It reads from `open` down to `bring`.

Rounds take turns. While a sender packs, the fleet is looked at and, when somebody does not know it, has the plan judged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from ray_weightsync.config import version_label
from ray_weightsync.errors import ConfigError, WeightSyncError
from ray_weightsync.fleet.bring import Bring
from ray_weightsync.fleet.broadcast import Broadcast
from ray_weightsync.fleet.cluster import Process, until_gone
from ray_weightsync.fleet.journal import Undone
from ray_weightsync.fleet.live_rounds import LiveRounds
from ray_weightsync.fleet.members import members_of
from ray_weightsync.fleet.parts import Parts
from ray_weightsync.fleet.relay import Relay
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.reporting import report_of
from ray_weightsync.fleet.restoring import payloads_of, roll_back, spec_of
from ray_weightsync.fleet.round import Aborted, NotAll, RoundLog
from ray_weightsync.fleet.snapshot import Snapshot
from ray_weightsync.fleet.staging import AFTER_REPLY_S
from ray_weightsync.fleet.states import ReplicaEvent, ReplicaState
from ray_weightsync.fleet.values import Opening, Sealed, Ticket, Way
from ray_weightsync.fleet.verdicts import not_committed, verdict
from ray_weightsync.fleet.within_reach import within_reach
from ray_weightsync.report import ReplicaReport, SyncReport
from ray_weightsync.weights.plan import Plan

logger = logging.getLogger(__name__)

LOOK_IS_FRESH_S = 0.25
"""For how long a round relies on a look at the fleet, in seconds."""


BY_HOST = "auto: it is staged, and what is staged waits in host memory"


class PlanUnknown(Exception):
    """The coordinator does not know this plan (any more); send the plan itself."""


class Rounds:
    """The rounds of one session.

    Attributes:
        live: For senders whose bytes go straight to the engines.
    """

    def __init__(self, parts: Parts) -> None:
        self.live = LiveRounds(parts)
        self._parts = parts
        self._settings = parts.settings
        self._timeouts = parts.timeouts
        self._roster = parts.roster
        self._staging = parts.staging
        self._plans: dict[str, Plan] = {}
        self._abandoned: dict[str, str] = {}

    # --- staging ------------------------------------------------------------------------------------------------------------

    async def open(self, opening: Opening) -> Ticket:
        """Begin a round: check the version, allot memory, start the preflight beside the sender's packing.

        The turn is the caller's until `seal`, `commit` or `abandon`, until the sender died, or until the sender's deadline has passed. One
        that made an offer learns from `live` whom to expect.

        Raises:
            PlanUnknown: ``plan`` is needed.
            ConfigError: if the version was committed before and is not the present one.
            RoundAborted, FleetTorn: if another round does not end, or no memory is left.
            SessionConflict: if other sessions have taken every engine of this one.
        """
        label = version_label(opening.version)
        known = self._plan(opening.plan_digest, opening.plan)
        limit_s = self._timeouts.staging_s(known.num_bytes)
        turn_s = max(limit_s + self._timeouts.round_s(known.num_bytes), self._parts.longest_turn_s)
        await self._parts.turn.take(opening.snapshot, busy=opening.busy, limit_s=turn_s)
        self._parts.turn_bytes = known.num_bytes
        try:
            snapshot = await self._begun(opening, label, known)
            snapshot.turn = self._parts.turn.taken
        except BaseException:
            self._parts.end_turn(opening.snapshot)
            raise
        snapshot.preflight = self._parts.spawn(self._look(snapshot))
        if snapshot.live is not None:  # it is sealed when all have received
            limit_s += self._timeouts.round_s(known.num_bytes)
        self._parts.spawn(self._give_up_after(snapshot, limit_s, opening.sender))
        address = snapshot.copies[opening.node_id].address if snapshot.kept else None
        return Ticket(snapshot=snapshot.id, address=address, progress_bytes=self._settings.host.bucket_bytes)

    async def _begun(self, opening: Opening, label: str, plan: Plan) -> Snapshot:
        """The snapshot, with its slot on the sender's node if it is kept."""
        self._parts.claims.require_any(self._roster.replicas.values())
        self._require_not_abandoned(opening.snapshot)
        if self._roster.was_committed_before(label):
            raise ConfigError(f"version {label!r} was committed before; versions are unique (now: {self._roster.label!r})")
        self._roster.round_id = opening.snapshot
        self._roster.changed("stage")
        way = opening.way or self._settings.way or Way(transport=self._settings.host, reason=BY_HOST)
        log = RoundLog(opening.snapshot, transport_reason=way.reason)
        live = None if opening.offer is None else self.live.begin(opening.offer, plan, way)
        if live is not None:
            log.transport, log.attested, log.grouped = live.name, live.attested, live.grouped
        kept = live is None or (isinstance(live, Broadcast) and way.keeps_broadcast)
        snapshot = await self._staging.open(log, opening.version, label, plan, opening.node_id, kept=kept, live=live)
        try:
            self._require_not_abandoned(snapshot.id)
        except WeightSyncError:
            await self._staging.free(snapshot)
            raise
        return snapshot

    def _require_not_abandoned(self, snapshot_id: str) -> None:
        """Its sender may have gone away while it waited for its turn, or for its slot."""
        if (why := self._abandoned.get(snapshot_id)) is not None:
            raise self._roster.unchanged("The round was given up before it had begun.", phase="open", engine_message=why, hint="call again")

    async def _look(self, snapshot: Snapshot) -> list[Replica]:
        await asyncio.sleep(AFTER_REPLY_S)
        return await self._members(snapshot)

    async def _members(self, snapshot: Snapshot) -> list[Replica]:
        members = await members_of(snapshot, snapshot.log, self._parts)
        await self._parts.chronicle.before(snapshot, members, snapshot.log.round_id)
        return members

    def _plan(self, digest: str, wire: dict[str, Any] | None) -> Plan:
        if digest not in self._plans:
            if wire is None:
                raise PlanUnknown(digest)
            plan = Plan.from_wire(wire)
            self._plans = dict([*self._plans.items(), (plan.digest, plan)][-4:])
        return self._plans[digest]

    async def seal(self, snapshot_id: str, sealed: Sealed, *, keep_turn: bool = False) -> None:
        """The sender has written everything: seal the snapshot on every node, and wait for the preflight's verdict.

        Raises:
            RoundAborted, FleetTorn: if the snapshot was given up meanwhile, a store refuses it, or a replica refused the plan.
        """
        try:
            snapshot = self._staging.require(snapshot_id)
            try:
                await self._staging.seal(snapshot, sealed)
                if snapshot.live is not None:
                    self._parts.spawn(self._parts.chronicle.sealed(snapshot))
                await self._staging.sealed(snapshot)
                members = await snapshot.judged()
                if not snapshot.committing:  # else (overlap) a round is at it already, and its end says what became of each replica
                    await within_reach(self._parts, snapshot, members)
            except BaseException as error:
                await self._staging.give_up(snapshot, str(error))
                raise
        finally:
            if not keep_turn:
                self._parts.end_turn(snapshot_id)

    async def give_up(self, snapshot_id: str, why: str) -> None:
        """`abandon` for a sender, who is not to wait for engines that hang: when they have answered, turn and slot are free."""
        await asyncio.wait({self._parts.spawn(self.abandon(snapshot_id, why))}, timeout=self._timeouts.status_s)

    async def abandon(self, snapshot_id: str, why: str) -> None:
        """The sender gives the snapshot up; nothing is committed. Idempotent."""
        snapshot = self._staging.get(snapshot_id)
        if snapshot is None:
            self._abandoned = dict([*self._abandoned.items(), (snapshot_id, why)][-100:])  # it may be about to begin
            return
        await self._staging.give_up(snapshot, why)
        if not snapshot.committing:
            self._parts.end_turn(snapshot_id)

    async def _give_up_after(self, snapshot: Snapshot, limit_s: float, sender: Process) -> None:
        """A sender that died or hangs must keep neither the turn nor the slot."""
        death = self._parts.spawn(until_gone(sender))
        either: set[asyncio.Future[Any]] = {snapshot.sealed, death}
        try:
            await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            death.cancel()
        if snapshot.sealed.done():
            return
        why = f"the sender did not seal within {limit_s:.1f} s"
        if death.done():
            if snapshot.sealing is not None:
                return  # it had said what it wrote; the rest goes on without it
            why = "the sender died before it had sealed"
        logger.error("%s; version %s is given up", why, snapshot.label)
        await self.abandon(snapshot.id, why)

    # --- commit -------------------------------------------------------------------------------------------------------------

    async def commit(self, snapshot_id: str, *, sealed: Sealed | None = None, holds_turn: bool = False) -> SyncReport:
        """Bring the fleet to a staged snapshot: pause .. resume.

        Args:
            snapshot_id: From the `Ticket`.
            sealed: What the sender has written, if `seal` has not been called and will not be.
            holds_turn: The turn taken by `open` is still the caller's.

        Raises:
            RoundAborted, ReplicasLost, FleetTorn: see `ray_weightsync.errors`.
        """
        snapshot = self._staging.require(snapshot_id)
        if not holds_turn:
            await self._parts.turn.take(snapshot_id, busy="wait", limit_s=self._parts.longest_turn_s)
            self._roster.round_id = snapshot_id
            self._parts.turn_bytes = snapshot.plan.num_bytes
        try:
            # Asked again: it may have given way to another one while this call waited for its turn.
            self._staging.require(snapshot_id).committing = True
            if sealed is not None:
                snapshot.sealing = self._parts.spawn(self._seal_beside(snapshot, sealed))
            if self._roster.was_committed_before(snapshot.label):
                raise ConfigError(f"version {snapshot.label!r} was committed meanwhile; versions are unique (now: {self._roster.label!r})")
            members = await snapshot.judged()
            await self._require_wanted(snapshot)
            members = await within_reach(self._parts, snapshot, members)
            gone = any(replica.state is ReplicaState.RETIRED for replica in members)
            others = self._parts.turn.taken - snapshot.turn > (0 if holds_turn else 1)  # what they changed, the look does not know
            if gone or others or time.monotonic() - snapshot.log.began > LOOK_IS_FRESH_S:
                # Who is awake, and who is there at all, may have changed meanwhile.
                members = await within_reach(self._parts, snapshot, await self._members(snapshot))
                await self._require_wanted(snapshot)
            report = await self._commit(snapshot, members)
            self._parts.chronicle.ended(snapshot_id, report)
            return report
        except WeightSyncError as error:
            self._parts.chronicle.ended(snapshot_id, error)
            raise
        finally:
            await self._staging.free(snapshot)
            self._parts.end_turn(snapshot_id)

    async def _require_wanted(self, snapshot: Snapshot) -> None:
        """Its sender may have given it up while the fleet was looked at."""
        if snapshot.over and snapshot.given_up is not None:
            await self._staging.sealed(snapshot)  # raises, and says why
        self._staging.require(snapshot.id)

    async def _seal_beside(self, snapshot: Snapshot, sealed: Sealed) -> None:
        await asyncio.sleep(0.0)  # the engines are asked to pause first: that takes longer
        await self._staging.seal(snapshot, sealed)

    async def _commit(self, snapshot: Snapshot, members: list[Replica]) -> SyncReport:
        repeat = await self._is_repeat(snapshot)
        left: list[Replica] = []
        if repeat:
            members = [replica for replica in members if not _holds(replica, snapshot)]
            if snapshot.live is not None:
                left, members = members, []
        try:
            replicas = await self.bring(snapshot, snapshot.log, members)
        finally:
            if not repeat and any(_holds(replica, snapshot) for replica in members):
                self._roster.commit(snapshot.label)
                self._staging.keep(snapshot)
        reports = [*replicas, *map(_left, left)]
        return self._told(snapshot, snapshot.log, reports, repeated=repeat and not reports)

    async def _is_repeat(self, snapshot: Snapshot) -> bool:
        """Whether this version is the committed one. With the same bytes that is a repeat, with others a mistake."""
        committed = self._staging.committed
        if committed is None or snapshot.label != self._roster.label:
            return False
        if snapshot.live is not None:
            snapshot.live.invite_nobody()
        mine = (await self._staging.sealed(snapshot)).digest
        theirs = committed.written().digest
        if mine != theirs:
            raise self._roster.unchanged(
                "The same version was committed with other bytes.",
                phase="commit",
                hint=f"choose a new version; {snapshot.label!r} stands for weights {theirs}, not {mine}",
            )
        return True

    # --- the engines' part --------------------------------------------------------------------------------------------------

    async def bring(self, snapshot: Snapshot, log: RoundLog, members: list[Replica]) -> list[ReplicaReport]:
        """Bring ``members`` to ``snapshot``, all paused before the first one starts.

        Raises:
            RoundAborted, FleetTorn: if the round ended before *start*, or was rolled back.
        """
        await self._parts.chronicle.before(snapshot, members, log.round_id)
        before = self._staging.committed
        live = snapshot.live
        spec = spec_of(self._parts, snapshot, log, overlap=self._settings.host.overlap or live is not None)
        bring = Bring(spec, members, payloads_of(snapshot, spec), snapshot.expected, log=log, on_phase=self._roster.changed)
        if live is not None:
            bring.on_lost = live.lose
        if isinstance(live, Relay):
            bring.relay = live
        try:
            return await bring.run()
        except Aborted as end:
            raise not_committed(self._roster, snapshot.label, end) from end
        except NotAll as end:
            assert before is not None
            undone = Undone(id=log.round_id, label=snapshot.label, failures=end.failures)
            raise await roll_back(self._parts, before, undone, members) from end
        finally:
            for replica in members:
                if replica.state is ReplicaState.UPDATING:
                    replica.happen(ReplicaEvent.FAIL, error="the round ended unexpectedly; its weights may be torn")

    def _told(self, snapshot: Snapshot, log: RoundLog, replicas: list[ReplicaReport], *, repeated: bool) -> SyncReport:
        """The report, or the error that says what holds now."""
        report = report_of(snapshot, log, self._roster, self._settings, replicas, notes=self._staging.notes(), repeated=repeated)
        others = [replica.id for replica in self._roster.replicas.values() if replica.whole and replica.version == snapshot.label]
        if (error := verdict(report, self._settings.on_failure, self._roster.log_hints(), serving=others)) is not None:
            raise error
        return report


def _holds(replica: Replica, snapshot: Snapshot) -> bool:
    """Whether it serves this version, from a round of this session."""
    return replica.whole and replica.version == snapshot.label and replica.brought


def _left(replica: Replica) -> ReplicaReport:
    """What is said of a replica that a repeat does not help, because it is not sent to the engines a second time."""
    error = "it does not hold this version, and a version that was committed is not sent a second time: send another one"
    return ReplicaReport(id=replica.id, state=replica.state.value, version=replica.version, failed_phase="update", error=error)
