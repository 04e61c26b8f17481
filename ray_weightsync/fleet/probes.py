"""Taking a version back from replicas whose outputs the user's own probe refused: out of the serving set, tombstone, paused."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping

from ray_weightsync.config import tombstone
from ray_weightsync.fleet.fence import fence_engine
from ray_weightsync.fleet.parts import Parts
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.steps import StepFailed, Timeline
from ray_weightsync.fleet.verdicts import verdict
from ray_weightsync.report import ReplicaReport, SyncReport

PHASE = "probe"


async def refuse(parts: Parts, report: SyncReport, complaints: Mapping[str, str]) -> SyncReport:
    """Fence the replicas that the probe complained of, by id, and say what holds now.

    A replica that holds another version by now is left alone: what was probed is not served any more.

    Returns:
        The report, amended; only if nobody had to be fenced, or ``min_serving`` replicas still serve the version.

    Raises:
        ReplicasLost, FleetTorn: as a round would.
    """
    label, holder = str(report.version), f"probe of {report.round_id}"
    await parts.turn.take(holder, busy="wait", limit_s=parts.timeouts.round_s(report.num_bytes))
    try:
        replicas = parts.roster.replicas
        refused = [replicas[name] for name in complaints if name in replicas and replicas[name].whole and replicas[name].version == label]
        await asyncio.gather(*(_fence(parts, replica, complaints[replica.id], report.round_id) for replica in refused))
    finally:
        parts.end_turn(holder)
    amended = _amended(report, {replica.id: replica for replica in refused}, complaints)
    serving = [replica.id for replica in parts.roster.members if replica.whole and replica.version == label]
    if refused and (error := verdict(amended, parts.settings.on_failure, parts.roster.log_hints(), serving=serving)) is not None:
        raise error
    return amended


async def _fence(parts: Parts, replica: Replica, complaint: str, round_id: str) -> None:
    timeouts = parts.timeouts
    failed = StepFailed.refused(PHASE, complaint, timeouts.attest_s)
    replica.lose_weights(str(failed))
    replica.probe_failed = True
    parts.roster.changed()
    release = parts.settings.on_failure.release_requests
    await fence_engine(replica, tombstone(round_id), limit_s=timeouts.resume_s, release=release, timeline=Timeline())


def _amended(report: SyncReport, refused: Mapping[str, Replica], complaints: Mapping[str, str]) -> SyncReport:
    def told(each: ReplicaReport) -> ReplicaReport:
        if each.id not in refused:
            return each
        return dataclasses.replace(each, state=refused[each.id].state.value, version=None, failed_phase=PHASE, error=complaints[each.id])

    late = [name for name in complaints if name not in refused]
    notes = (f"the probe refused {', '.join(late)}, which held another version by then",) if late else ()
    return dataclasses.replace(report, replicas=tuple(map(told, report.replicas)), notes=(*report.notes, *notes))
