"""Taking a version back from replicas whose outputs the user's own probe refused: out of the serving set, tombstone, paused."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import uuid
from collections.abc import Mapping

from ray_weightsync.config import tombstone
from ray_weightsync.errors import FleetTorn, RoundAborted, WeightSyncError
from ray_weightsync.fleet.fence import fence_engine
from ray_weightsync.fleet.parts import Parts
from ray_weightsync.fleet.preflight import look
from ray_weightsync.fleet.replica import Doubt, Replica
from ray_weightsync.fleet.steps import StepFailed, Timeline
from ray_weightsync.fleet.verdicts import verdict
from ray_weightsync.report import ReplicaReport, SyncReport

logger = logging.getLogger(__name__)

PHASE = "probe"


async def refuse(parts: Parts, report: SyncReport, complaints: Mapping[str, str]) -> SyncReport:
    """Fence the replicas that the probe complained of, by id, and say what holds now.

    They are out of the serving set at once, and fenced when the round in progress has ended, however long the caller waits for that. A
    replica that holds another version by then is left alone: what was probed is not served any more. Asked again, by a caller who lost
    the answer, it answers the same.

    Returns:
        The report, amended; only if nobody had to be fenced, or ``min_serving`` replicas still serve the version.

    Raises:
        ReplicasLost, FleetTorn: as a round would; also if the round in progress does not end.
    """
    for replica in _holding(parts, report, complaints):
        replica.doubted = Doubt(str(report.version), report.round_id, complaints[replica.id])
    parts.roster.changed()
    try:
        await _fence_in_turn(parts)
    except (RoundAborted, FleetTorn) as late:
        parts.spawn(fence_doubted(parts))
        return _not_fenced(parts, report, complaints, late)
    served = parts.roster.label == str(report.version)  # else what a replica is out for now is not this complaint
    refused = [replica for replica in _named(parts, complaints) if served and _is_refused(replica, report.round_id)]
    amended, error = _told(parts, report, refused, complaints)
    if error is not None:
        raise error
    return amended


def _named(parts: Parts, complaints: Mapping[str, str]) -> list[Replica]:
    return [parts.roster.replicas[name] for name in complaints if name in parts.roster.replicas]


def _holding(parts: Parts, report: SyncReport, complaints: Mapping[str, str]) -> list[Replica]:
    """Those complained of that still hold what was probed."""
    return [each for each in _named(parts, complaints) if each.whole and each.version == str(report.version)]


def _is_refused(replica: Replica, round_id: str) -> bool:
    """Whether a replica is fenced since the probe refused it after this round; a coordinator that died may have left only the mark."""
    return not replica.whole and (replica.refused_in == round_id or replica.engine.facts.version == tombstone(round_id))


async def fence_doubted(parts: Parts) -> None:
    """Fence whom a probe has refused, when the turn is free at last; who asked for it does not wait any more."""
    while any(replica.doubted for replica in parts.roster.members):
        try:
            await _fence_in_turn(parts)
        except (RoundAborted, FleetTorn) as late:
            logger.warning("what a probe refused is not fenced yet: %s", late)


async def _fence_in_turn(parts: Parts) -> None:
    """Fence everybody whom a probe has refused when the turn is free.

    Raises:
        RoundAborted, FleetTorn: if the round in progress does not end.
    """
    holder = f"probe-{uuid.uuid4().hex}"
    await parts.turn.take(holder, busy="wait", limit_s=parts.longest_turn_s)
    try:
        await asyncio.gather(*(_looked_at(parts, replica) for replica in parts.roster.members if replica.doubted is not None))
        doubts = [(replica, replica.doubted) for replica in parts.roster.members if replica.doubted is not None]
        whole = [(replica, doubt) for replica, doubt in doubts if _given_up(parts, replica, doubt)]
        if whole:
            await _written(parts)
        await asyncio.gather(*(_fence(parts, replica, doubt) for replica, doubt in whole))
    finally:
        parts.end_turn(holder)


async def _looked_at(parts: Parts, replica: Replica) -> None:
    """Learn whether its owner has resumed it: the pause that follows would be taken for theirs."""
    try:
        await look(replica, timeouts=parts.timeouts, timeline=Timeline())
    except StepFailed as failed:
        logger.info("%s is fenced without a look: %s", replica.id, failed)


def _given_up(parts: Parts, replica: Replica, doubt: Doubt) -> bool:
    """Take a replica out of the fleet's serving set; whether it was whole, so that its engine is to be fenced."""
    is_whole = replica.whole
    replica.doubted = None
    if is_whole:
        replica.lose_weights(str(StepFailed.refused(PHASE, doubt.complaint, parts.timeouts.attest_s)))
    if is_whole or parts.roster.label == doubt.label:  # one that is fenced already is not to be healed to what was refused
        replica.refused_in = doubt.round_id
    parts.roster.changed()
    return is_whole


async def _written(parts: Parts) -> None:
    """Before an engine is paused for it: a successor could not tell that pause from its owner's."""
    try:
        await parts.chronicle.write()
    except Exception:  # nobody is sent to them all the same, and their mark tells a successor
        logger.exception("what a probe refused is not in the journal")


async def _fence(parts: Parts, replica: Replica, doubt: Doubt) -> None:
    await fence_engine(
        replica,
        tombstone(doubt.round_id),
        limit_s=parts.timeouts.resume_s,
        release=parts.settings.on_failure.release_requests,
        timeline=Timeline(),
        incarnation=replica.engine.facts.incarnation,
    )


def _not_fenced(parts: Parts, report: SyncReport, complaints: Mapping[str, str], late: WeightSyncError) -> SyncReport:
    """What holds if the turn was not to be had yet: nobody is sent to whom the probe refused, and none of them was touched."""
    doubted = [replica for replica in _holding(parts, report, complaints) if replica.doubted]
    amended, error = _told(parts, report, doubted, complaints)
    names = ", ".join(replica.id for replica in doubted)
    what = f"{names}: out of the serving set, but neither paused nor marked, since a round is still in progress"
    what += "; fenced as soon as it ends, unless it brings another version"
    if error is None:
        return dataclasses.replace(amended, notes=(*amended.notes, what)) if doubted else amended
    serving = ", ".join(_serving(parts, report))
    raise type(error)(
        f"{f'Version {report.version} serves on {serving}' if serving else 'No replica serves'}. Refused by the probe: {what}.",
        phase=PHASE,
        replicas=tuple(replica.id for replica in doubted),
        elapsed_s=late.elapsed_s,
        limit_s=late.limit_s,
        engine_message=error.engine_message,
        hint=f"see status() for the round; the next version brings back what is out: {names}",
        report=amended,
    ) from late


def _serving(parts: Parts, report: SyncReport) -> list[str]:
    return [each.id for each in parts.roster.members if each.whole and not each.doubted and each.version == str(report.version)]


def _told(
    parts: Parts, report: SyncReport, refused: list[Replica], complaints: Mapping[str, str]
) -> tuple[SyncReport, WeightSyncError | None]:
    amended = _amended(report, {replica.id: replica for replica in refused}, complaints)
    hints = parts.roster.log_hints()
    return amended, verdict(amended, parts.settings.on_failure, hints, serving=_serving(parts, report)) if refused else None


def _amended(report: SyncReport, refused: Mapping[str, Replica], complaints: Mapping[str, str]) -> SyncReport:
    def told(each: ReplicaReport) -> ReplicaReport:
        if each.id not in refused:
            return each
        return dataclasses.replace(each, state=refused[each.id].state.value, version=None, failed_phase=PHASE, error=complaints[each.id])

    late = [name for name in complaints if name not in refused]
    notes = (f"the probe refused {', '.join(late)}, of a version that is not served there any more",) if late else ()
    return dataclasses.replace(report, replicas=tuple(map(told, report.replicas)), notes=(*report.notes, *notes))
