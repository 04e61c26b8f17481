"""Bringing replicas to a sealed snapshot each for itself: a repair, a join, the way back of a round that was for all or none."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from typing import Any

from ray_weightsync.errors import FleetTorn, RoundAborted
from ray_weightsync.fleet.bring import Bring, Payloads
from ray_weightsync.fleet.fence import fence
from ray_weightsync.fleet.journal import Undone
from ray_weightsync.fleet.parts import Parts
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.round import Aborted, Member, RoundLog, RoundSpec
from ray_weightsync.fleet.snapshot import Snapshot
from ray_weightsync.fleet.states import ReplicaState
from ray_weightsync.fleet.steps import StepFailed
from ray_weightsync.fleet.verdicts import taken_back
from ray_weightsync.report import ReplicaReport

logger = logging.getLogger(__name__)


def spec_of(parts: Parts, snapshot: Snapshot, log: RoundLog, *, overlap: bool) -> RoundSpec:
    """What a round that brings ``snapshot`` is about, in a new epoch."""
    settings, timeouts = parts.settings, parts.timeouts
    return RoundSpec(
        round_id=log.round_id,
        epoch=parts.roster.next_epoch(),
        label=snapshot.label,
        num_bytes=snapshot.plan.num_bytes,
        # There is nothing to go back to before the first commit, and a restoration is of each for itself.
        all_or_none=settings.on_failure.after_start == "all_or_none" and parts.staging.committed not in (None, snapshot),
        overlap=overlap,
        attested=snapshot.attested,
        pause=settings.pause,
        cache=settings.cache,
        timeouts=timeouts,
        policy=settings.on_failure,
    )


def payloads_of(snapshot: Snapshot, spec: RoundSpec) -> Payloads:
    """The ``update_weights`` payloads of a round: what each member is to read, or where it is to join."""
    common = {
        "transport": "host" if snapshot.live is None else snapshot.live.receiver,
        "round": spec.round_id,
        "epoch": spec.epoch,
        "plan": snapshot.plan.digest,
        # The workers' own deadline ends before ours: it is they who know how far the bytes had come.
        "limit_s": 0.8 * spec.timeouts.for_bytes("update", spec.num_bytes),
    }
    if (live := snapshot.live) is not None:
        return lambda replicas: live.payloads(replicas, common)

    def on_their_nodes(replicas: Sequence[Replica]) -> dict[str, dict[str, Any]]:
        if snapshot.given_up is not None:  # with overlap, nobody has waited for the seal
            raise snapshot.given_up
        slots = {replica.id: snapshot.copies[replica.home].address for replica in replicas if replica.home in snapshot.copies}
        return {name: common | {"slot": address} for name, address in slots.items()}

    return on_their_nodes


async def restore(
    parts: Parts, snapshot: Snapshot, log: RoundLog, replicas: Sequence[Replica], *, undone: Undone | None = None
) -> list[ReplicaReport]:
    """Bring each of ``replicas`` to a sealed snapshot; back to it, if they were in a round that is ``undone``.

    What keeps one away is in its report; it is fenced, unless it served and was put back.

    Raises:
        RoundAborted, FleetTorn: if the journal cannot be written, and no engine was touched yet.
    """
    try:
        await parts.chronicle.before(snapshot, list(replicas), log.round_id, each_for_itself=True, undone=undone)
    except (RoundAborted, FleetTorn) as error:
        if undone is None:
            raise
        # They are torn as they are. Should this process die too, its successor fences those that carry a mark it does not know.
        logger.error("the way back of version %s is not in the journal: %s", undone.label, error.engine_message)
    out_of_reach = await parts.staging.spread(snapshot, replicas, log.timeline)
    spec = spec_of(parts, snapshot, log, overlap=False)
    payloads = payloads_of(snapshot, spec)

    async def restored(replica: Replica) -> ReplicaReport:
        if replica.id in out_of_reach:
            return await kept_away(replica, out_of_reach[replica.id])
        try:
            (report,) = await Bring(spec, [replica], payloads, snapshot.expected, log=log).run()
        except Aborted as end:
            return await kept_away(replica, next(iter(end.failures.values())))
        return report

    async def kept_away(replica: Replica, why: StepFailed) -> ReplicaReport:
        member = Member.found(replica)
        member.failed = why
        if replica.state is not ReplicaState.SERVING:
            await fence(replica, why, spec=spec, timeline=log.timeline)
        return member.report(dict(log.timeline.seconds[replica.id]))

    try:
        return list(await asyncio.gather(*map(restored, replicas)))
    finally:
        parts.roster.changed()


async def roll_back(parts: Parts, before: Snapshot, undone: Undone, members: Sequence[Replica]) -> RoundAborted | FleetTorn:
    """Bring every replica that the round ``undone`` touched back to the snapshot committed before, and say how that went."""
    parts.roster.changed("roll back")
    for replica in members:
        replica.fenced_by_us = True  # its pause is ours to end, and its tombstone does not mean that somebody else's round left it
    able = [replica for replica in members if not replica.unanswered]
    return taken_back(parts.roster, undone, await restore(parts, before, RoundLog(uuid.uuid4().hex), able, undone=undone))
