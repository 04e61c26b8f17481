"""Repair: replicas that hold no version, or another one, are brought to the committed snapshot.

Neither the trainer nor the rest of the fleet takes part. Each replica is healed for itself: one that cannot be does not stop the others.
"""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Callable, Iterable

from ray_weightsync.errors import ConfigError, FleetTorn, ReplicasLost, RoundAborted, WeightSyncError
from ray_weightsync.fleet.members import unable
from ray_weightsync.fleet.parts import Parts
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.reporting import report_of
from ray_weightsync.fleet.restoring import restore
from ray_weightsync.fleet.round import RoundLog
from ray_weightsync.fleet.snapshot import Snapshot
from ray_weightsync.fleet.states import ReplicaEvent, ReplicaState
from ray_weightsync.fleet.steps import StepFailed
from ray_weightsync.fleet.stock import ruined
from ray_weightsync.fleet.turns import Busy
from ray_weightsync.fleet.verdicts import verdict
from ray_weightsync.report import ReplicaReport, SyncReport

logger = logging.getLogger(__name__)

AILING = (ReplicaState.QUARANTINED, ReplicaState.STALE, ReplicaState.JOINING)


class Repair:
    """Heals the replicas of one session."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._roster = parts.roster
        self._said = ""

    async def turn(self, what: str) -> str:
        """Wait for the turn, for something that is no round; and say who has it.

        Raises:
            RoundAborted, FleetTorn: if a round does not end.
        """
        holder = f"{what}-{uuid.uuid4().hex}"
        await self._parts.turn.take(holder, busy="wait", limit_s=self._parts.longest_turn_s)
        self._roster.changed(what)
        return holder

    async def heal(self, *replica_ids: str, round_id: str | None = None) -> SyncReport:
        """Bring replicas to the committed snapshot, in a turn of their own; the others are not touched.

        Args:
            replica_ids: Whom; by default all that are QUARANTINED, STALE or JOINING.
            round_id: The caller's choice, so that a successor can be asked what came of it.

        Raises:
            ConfigError: for an id that is unknown or retired.
            RoundAborted: if there is no committed snapshot to heal from, or the turn is not free in time. Nothing changed.
            ReplicasLost: if some could not be healed.
            FleetTorn: if no replica serves, afterwards or as before.
        """
        named = [self._roster.named(replica_id) for replica_id in replica_ids]
        if retired := [replica.id for replica in named if replica.state is ReplicaState.RETIRED]:
            raise ConfigError(f"{', '.join(retired)} is retired for good; add() or replace() brings a new engine in")
        return await self._heal(
            lambda: named or [each for each in self._roster.members if each.state in AILING], busy="wait", round_id=round_id
        )

    async def bring_in(self, replicas: Iterable[Replica]) -> None:
        """Heal whoever has just joined, when the turn is free. Before the first commit, and for stock engines, the next round does it."""
        able = [replica for replica in replicas if not replica.engine.facts.is_stock]
        if self._parts.staging.committed is None or not able:
            return
        try:
            await self._heal(lambda: [each for each in able if each.state in AILING], busy="wait")
        except (RoundAborted, ReplicasLost, FleetTorn) as error:
            logger.error("%s", error)

    async def heal_unasked(self) -> None:
        """What `FailurePolicy.auto_heal` promises: heal who can be healed, if nobody has the turn; retire who was healed often enough."""
        policy = self._parts.settings.on_failure
        if not policy.auto_heal or self._parts.turn.holder is not None:
            return
        for replica in [each for each in self._roster.members if each.state in AILING]:
            if (why := never_again(replica)) is not None:
                await self.lose(replica, why, lives=False)
            elif (why := healed_enough(replica, max_heals=policy.max_heals)) is not None:
                await self.lose(replica, why, lives=True)
        if self._parts.staging.committed is None or not self._can_be_healed():
            return
        counts: dict[str, int] = {}

        def pick() -> list[Replica]:
            chosen = self._can_be_healed()
            counts.update({replica.id: replica.heals for replica in chosen})
            return chosen

        try:
            await self._heal(pick, busy="raise")
        except (RoundAborted, ReplicasLost, FleetTorn) as error:
            if counts or (error.phase == "heal" and str(error) != self._said):  # a lost snapshot stays lost: said once
                self._said = str(error)
                logger.error("%s", error)
        finally:
            # Also one that was healed is counted: only a sender's round that it gets through proves that it is well.
            for name, count in counts.items():
                self._roster.replicas[name].heals = count + 1

    async def lose(self, replica: Replica, why: str, *, lives: bool) -> None:
        """Give up a replica that cannot be healed; a new engine is wanted in its place. Nothing is done while somebody has the turn.

        It is retired, unless its engine lives and it is the last one of the session: a round may yet bring that one back.
        """
        if self._parts.turn.holder is not None or replica not in self._roster.members or (lives and replica.lost):
            return
        replica.lost = True
        if not lives or self._roster.members != [replica]:
            if replica.state is not ReplicaState.QUARANTINED:
                replica.happen(ReplicaEvent.FAIL, error=why)
            replica.happen(ReplicaEvent.RETIRE, error=why)
            await self._parts.claims.release([replica])
        logger.warning("%s is given up: %s", replica.id, why)
        self._roster.changed()

    def _can_be_healed(self) -> list[Replica]:
        return [each for each in self._roster.members if each.state in AILING and may_be_healed_unasked(each)]

    # --- in a turn ----------------------------------------------------------------------------------------------------------

    async def _heal(self, pick: Callable[[], list[Replica]], *, busy: Busy, round_id: str | None = None) -> SyncReport:
        log = RoundLog(round_id or uuid.uuid4().hex)
        await self._parts.turn.take(log.round_id, busy=busy, limit_s=self._parts.longest_turn_s)
        self._roster.round_id = log.round_id
        try:
            await self._parts.staging.settled()
            snapshot = await self._snapshot()
            self._roster.changed("heal")
            replicas = [each for each in pick() if each in self._roster.members]  # some may have left while this waited
            report = self._told(snapshot, log, await self._each(snapshot, log, replicas))
            if round_id is not None:  # of others nobody will ask how they ended, and only the last few ends are kept
                self._parts.chronicle.ended(round_id, report)
            return report
        except WeightSyncError as error:
            if round_id is not None:
                self._parts.chronicle.ended(round_id, error)
            raise
        finally:
            self._parts.end_turn(log.round_id)

    async def _snapshot(self) -> Snapshot:
        staging = self._parts.staging
        committed = staging.committed
        if committed is None and self._roster.ordinal:
            raise self._lost(
                str(self._roster.label), "its plan is not in the journal any more, from which this coordinator had to learn it"
            )
        if committed is None:
            raise self._roster.unchanged(
                "No version was committed in this session, so there is nothing to heal from.",
                phase="heal",
                hint="send_weights: it brings every replica that answers to the new version",
            )
        if (why := await staging.why_unreadable(committed)) is not None:
            raise self._lost(committed.label, why)
        return committed

    def _lost(self, label: str, why: str) -> RoundAborted | FleetTorn:
        return self._roster.unchanged(
            f"The snapshot of version {label} is lost, so nobody can be healed.",
            phase="heal",
            engine_message=why,
            hint="send_weights: the next version makes a new snapshot, and brings every replica that answers to it",
        )

    async def _each(self, snapshot: Snapshot, log: RoundLog, replicas: list[Replica]) -> list[ReplicaReport]:
        failures = await unable(replicas, snapshot, log, self._parts)
        replicas = [replica for replica in replicas if replica.state is not ReplicaState.RETIRED]
        able = [replica for replica in replicas if replica.id not in failures]
        for replica in able:
            if replica.state is ReplicaState.JOINING:
                replica.happen(ReplicaEvent.INSPECT)
        restored = {report.id: report for report in await restore(self._parts, snapshot, log, able)}
        reports = [restored.get(replica.id) or self._refused(replica, failures[replica.id]) for replica in replicas]
        untouched = [report for report in reports if report.failed_phase is not None and self._roster.named(report.id).whole]
        if untouched and len(untouched) == len(reports):
            told = "; ".join(f"{report.id}, {report.failed_phase}: {report.error}" for report in untouched)
            raise self._roster.unchanged(
                "What could not be healed goes on as it was.",
                phase=untouched[0].failed_phase,
                replicas=tuple(report.id for report in untouched),
                engine_message=told,
                hint="call again",
            )
        log.notes.extend(f"{report.id} serves on as it was; {report.failed_phase}: {report.error}" for report in untouched)
        return [report for report in reports if report not in untouched]

    def _refused(self, replica: Replica, failed: StepFailed) -> ReplicaReport:
        if not replica.whole or failed.failure.kind in ("died", "out_of_step"):
            replica.happen(ReplicaEvent.FAIL, error=f"it could not be healed: {failed}")
        return ReplicaReport(
            id=replica.id,
            state=replica.state.value,
            version=replica.version,
            failed_phase=failed.phase,
            error=failed.failure.message,
        )

    def _told(self, snapshot: Snapshot, log: RoundLog, replicas: list[ReplicaReport]) -> SyncReport:
        parts, roster = self._parts, self._roster
        told = report_of(snapshot, log, roster, parts.settings, replicas, notes=parts.staging.notes(), repeated=not replicas)
        report = dataclasses.replace(told, trainer_blocked_s=0.0)
        serving = [replica.id for replica in roster.members if replica.whole and replica.version == snapshot.label]
        if (error := verdict(report, parts.settings.on_failure, roster.log_hints(), serving=serving)) is not None:
            raise error
        return report


def never_again(replica: Replica) -> str | None:
    """Why a replica can never be healed, or None. Pure."""
    if replica.engine.facts.in_step:
        return ruined(replica)
    return f"its workers' replies are out of step ({replica.engine.facts.step_problem}); only a new engine in its place helps"


def healed_enough(replica: Replica, *, max_heals: int) -> str | None:
    """Why a replica is not worth another repair that nobody asked for, or None. Pure."""
    if replica.heals < max_heals or replica.refused_in:
        return None
    return f"healed {replica.heals} times without a round that it got through; last: {replica.error}"


def may_be_healed_unasked(replica: Replica) -> bool:
    """Whether a replica that does not serve can be healed now, and nothing says that this would be in vain. Pure."""
    stock = replica.engine.facts.is_stock  # the next round brings it; until then it costs no heal
    return not (stock or replica.asleep or replica.unanswered or replica.refused_in or replica.lost)
