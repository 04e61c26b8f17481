"""A successor's first work: find out what the coordinator before it left in the engines, and settle it. Nothing else runs meanwhile.

What is done with each replica is decided in `ray_weightsync.fleet.settlement`; this asks the engines and carries it out.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Any

from ray_weightsync.errors import CallFailure
from ray_weightsync.fleet.bring import Bring
from ray_weightsync.fleet.fence import fence, fence_engine
from ray_weightsync.fleet.journal import Record, RoundRecord, SnapshotRecord
from ray_weightsync.fleet.membership import retire
from ray_weightsync.fleet.outcomes import outcomes_of
from ray_weightsync.fleet.putback import put_back
from ray_weightsync.fleet.reaching import Reach, Reaching
from ray_weightsync.fleet.replica import Left, Replica
from ray_weightsync.fleet.round import Member, RoundLog, RoundSpec
from ray_weightsync.fleet.settlement import Ending, Standing, Trace, endings, standing, trace, why
from ray_weightsync.fleet.snapshot import Copy, Snapshot
from ray_weightsync.fleet.states import ReplicaEvent, ReplicaState
from ray_weightsync.fleet.steps import Call, StepFailed, Timeline, chain
from ray_weightsync.fleet.values import Sealed
from ray_weightsync.protocol.channel import FINISH, INIT, PAUSE
from ray_weightsync.protocol.threads import in_daemon_thread
from ray_weightsync.report import ReplicaReport
from ray_weightsync.weights.plan import Plan

if TYPE_CHECKING:
    from ray_weightsync.engines.facts import EngineFacts
    from ray_weightsync.fleet.parts import Parts

logger = logging.getLogger(__name__)

PHASE = "recovery"


class Recovery:
    """Of one session's coordinator.

    Args:
        parts: The session's; filled with what the coordinator before knew.
        record: What it left, if there was one.
        reach: How engines are reached again.
    """

    def __init__(self, parts: Parts, record: Record | None, reach: Reach) -> None:
        self._parts = parts
        self._roster = parts.roster
        self._timeouts = parts.timeouts
        self._reaching = Reaching(reach, parts.timeouts)
        self._problems = self._reaching.problems
        self._num_bytes = 0
        self._settled: set[str] = set()
        self._committed: set[str] = set()
        self._record = record
        if record is not None:
            self._succeed(record)

    @property
    def limit_s(self) -> float:
        """The longest that it may take, in seconds."""
        return self._reaching.limit_s(self._num_bytes) + self._timeouts.connect_s + self._timeouts.round_s(self._num_bytes)

    async def run(self) -> None:
        """Settle what the coordinator before left; nothing if there was none.

        Raises:
            Exception: if the journal cannot be written.
        """
        if (record := self._record) is None:
            return
        # Nobody can have it yet; as long as it is held, the journal stays as it is.
        await self._parts.turn.take(PHASE, busy="raise", limit_s=self._timeouts.status_s)
        await self._run(record)
        self._parts.end_turn(PHASE)
        await self._parts.chronicle.write()

    async def _run(self, record: Record) -> None:
        began = time.monotonic()
        logger.warning("a coordinator of session %s died; its successor settles what it left", self._roster.name)
        await self._parts.claims.follow(self._roster.replicas.values())  # what another session has by now is not to be touched
        at_work = [each for each in (record.committed, record.round and record.round.snapshot) if each]
        kept, plans = await asyncio.gather(self._stores_kept(at_work), self._plans(at_work))
        self._num_bytes = max((plan.num_bytes for plan in plans.values()), default=0)
        found = await self._reaching.found(self._roster.replicas.values(), num_bytes=self._num_bytes)
        await self._parts.claims.follow([self._roster.replicas[name] for name in found])
        snapshots = {each.id: self._snapshot(each, plans[each.plan], kept) for each in at_work if each.plan in plans}
        committed = snapshots.get(record.committed.id) if record.committed else None
        reports: list[ReplicaReport] = []
        if record.round is not None:
            of_round = snapshots.get(record.round.snapshot.id)
            reports = await self._settle(record.round, found, of_round)
            committed = of_round if self._serving(reports) else committed
        await self._stand(record, found)
        for replica in [each for each in self._roster.replicas.values() if each.leaving]:  # whoever asked for it may have been answered
            await retire(self._parts, replica, "removed")
        if record.round is not None:  # only now is it known who serves
            for round_id, outcome in outcomes_of(self._parts, record.round, of_round, reports, self._serving(reports)).items():
                self._parts.chronicle.ended(round_id, outcome)
        if committed is not None:
            self._parts.staging.keep(committed)
            await self._parts.staging.settled()
        for snapshot in snapshots.values():
            if committed is None or snapshot.slot != committed.slot:
                await self._parts.staging.discard(snapshot)
        logger.warning("session %s goes on after %.1f s: %s", self._roster.name, time.monotonic() - began, self._roster.status())

    # --- what there is ------------------------------------------------------------------------------------------------------

    def _succeed(self, record: Record) -> None:
        replicas = [self._reaching.replica(each) for each in record.replicas]
        self._roster.succeed(replicas, label=record.label, ordinal=record.ordinal, epoch=record.epoch, ordinals=record.ordinals)
        self._parts.chronicle.succeed(record)
        self._roster.changed("recovering")

    async def _stores_kept(self, at_work: list[SnapshotRecord]) -> dict[str, tuple[str, dict[str, Copy]]]:
        """Digests and copies of the sealed snapshots that are still there, by slot. Whatever else lies in the stores is given up."""
        try:
            return await self._parts.staging.recover({each.slot for each in at_work}, limit_s=self._timeouts.connect_s)
        except Exception:  # the engines are settled all the same; without a snapshot nothing can be proved or healed from
            logger.exception("the snapshot stores could not be found again")
            return {}

    async def _plans(self, at_work: list[SnapshotRecord]) -> dict[str, Plan]:
        journal = self._parts.chronicle.journal
        digests = {each.plan for each in at_work}
        wires = await asyncio.wait_for(
            in_daemon_thread(lambda: {digest: journal.read_plan(digest) for digest in digests}), self._timeouts.connect_s
        )
        return {digest: Plan.from_wire(wire) for digest, wire in wires.items() if wire is not None}

    def _snapshot(self, record: SnapshotRecord, plan: Plan, kept: dict[str, tuple[str, dict[str, Copy]]]) -> Snapshot:
        sealed: asyncio.Future[Sealed] = asyncio.get_running_loop().create_future()
        digest, copies = kept.get(record.slot, (record.sealed.digest if record.sealed else "", {}))
        sealed.set_result(record.sealed or Sealed(digest=digest, num_bytes=plan.weight_bytes, num_tensors=len(plan.tensors), stage_s=0.0))
        return Snapshot(
            id=record.id,
            slot=record.slot,
            version=record.version,
            label=record.label,
            plan=plan,
            node_id=record.node_id,
            log=RoundLog(
                record.id,
                transport=record.transport,
                transport_reason=record.transport_reason,
                attested=record.attested,
                grouped=record.grouped,
            ),
            sealed=sealed,
            group=record.group,
            kept=record.kept,
            attested=record.attested,
            copies=copies,
        )

    # --- the round that was in progress -------------------------------------------------------------------------------------

    async def _settle(self, round_: RoundRecord, found: dict[str, EngineFacts], snapshot: Snapshot | None) -> list[ReplicaReport]:
        """Carry the round to an end on each of its members."""
        members = {name: each for name, each in round_.members.items() if self._is_member(name)}
        label, busy = round_.snapshot.label, self._reaching.busy
        traces = {name: Trace.BUSY if name in busy else trace(found.get(name), each, round_.id, label) for name, each in members.items()}
        spec = self._spec(round_, snapshot)
        asking = [name for name, each in traces.items() if each in (Trace.OPEN, Trace.CLOSED)]
        answers = await asyncio.gather(*(self._asked(self._roster.replicas[name], traces[name], spec, snapshot) for name in asking))
        traces.update(zip(asking, answers, strict=True))
        ends = endings(traces, members, all_or_none=round_.all_or_none)
        logger.warning("round %s, version %s: %s", round_.id, label, ", ".join(f"{name}: {end.value}" for name, end in ends.items()))
        brings = {name: Bring(spec, [], _no_payloads, _nothing, RoundLog(spec.round_id)) for name in ends}
        runs = [self._end(brings[name], name, ends[name], traces[name], round_) for name in ends]
        reports = list(await asyncio.gather(*runs))
        self._committed = {name for name, end in ends.items() if end is Ending.COMMIT}
        if self._serving(reports) and not self._roster.ordinals.get(spec.label):
            self._roster.commit(spec.label)
        self._settled = {name for name, end in ends.items() if end is not Ending.PUT_BACK}
        return reports

    def _serving(self, reports: list[ReplicaReport]) -> list[str]:
        """Which members serve the round's version."""
        return [each.id for each in reports if each.id in self._committed and self._roster.replicas[each.id].whole]

    def _is_member(self, name: str) -> bool:
        replica = self._roster.replicas.get(name)
        return replica is not None and replica.state is not ReplicaState.RETIRED

    def _spec(self, round_: RoundRecord, snapshot: Snapshot | None) -> RoundSpec:
        settings = self._parts.settings
        return RoundSpec(
            round_id=round_.id,
            epoch=self._roster.epoch,
            label=round_.snapshot.label,
            num_bytes=snapshot.plan.num_bytes if snapshot is not None else 0,
            all_or_none=False,
            overlap=False,
            attested=snapshot is None or snapshot.attested,
            pause=settings.pause,
            cache=settings.cache,
            timeouts=self._timeouts,
            policy=settings.on_failure,
        )

    async def _asked(self, replica: Replica, left: Trace, spec: RoundSpec, snapshot: Snapshot | None) -> Trace:
        """Close an open update, and ask whether it was the round's, complete."""
        facts = replica.engine.facts
        calls = [Call("finish", self._timeouts.for_bytes("finish", spec.num_bytes), FINISH)] if left is Trace.OPEN else []
        expected = await snapshot.expected() if snapshot is not None else {"digest": ""}
        if expected["digest"]:
            info = {
                "op": "outcome",
                "round": spec.round_id,
                "epoch": max(worker.epoch for worker in facts.workers),
                "expected": expected,
                "limit_s": self._timeouts.attest_s * 0.8,
            }
            calls.append(Call("outcome", self._timeouts.attest_s, INIT, (info,)))
        try:
            if calls:
                await chain(replica, PHASE, calls, incarnation=facts.incarnation, timeline=Timeline())
        except StepFailed as failed:
            self._problems[replica.id] = str(failed)
            return Trace.TORN
        return Trace.ATTESTED if expected["digest"] else Trace.TORN

    async def _end(self, bring: Bring, name: str, end: Ending, left: Trace, round_: RoundRecord) -> ReplicaReport:
        replica, record = self._roster.replicas[name], round_.members[name]
        member = Member(
            replica=replica,
            incarnation=record.incarnation,
            paused_as_found=record.paused,
            label_as_found=record.label,
            torn_as_found=record.torn,
            pause_asked_at=time.monotonic() if replica.engine.channel.supports(PAUSE) else None,
            marked=left is Trace.MARKED,
        )
        timeline = bring.log.timeline
        try:
            if end is Ending.COMMIT:
                if replica.state is ReplicaState.JOINING:
                    replica.happen(ReplicaEvent.INSPECT)
                replica.happen(ReplicaEvent.START)
                await bring.commit(member)
            elif end is Ending.PUT_BACK:
                await put_back(member, spec=bring.spec, timeline=timeline)
                as_found = dataclasses.replace(replica.engine.facts, version=record.label, paused=record.paused)
                replica.engine = replica.engine.with_facts(as_found)
            else:
                kind = "died" if end is Ending.LOSE else "raised"
                said = f" ({self._problems[name]})" if name in self._problems else ""
                member.failed = StepFailed(PHASE, CallFailure(message=f"{why(left, round_)}{said}", kind=kind, elapsed_s=0.0), 0.0)
                await fence(replica, member.failed, spec=bring.spec, timeline=timeline)
                replica.left = Left.UNKNOWN if left in (Trace.TORN, Trace.BUSY, Trace.FOREIGN) else replica.left
                if left is Trace.RESTARTED:
                    replica.forget_incarnation()
        except StepFailed as failed:
            member.failed = failed
            if end is Ending.COMMIT:
                await fence(replica, failed, spec=bring.spec, timeline=timeline)
        return member.report(dict(timeline.seconds[name]))

    # --- everybody else -----------------------------------------------------------------------------------------------------

    async def _stand(self, record: Record, found: dict[str, EngineFacts]) -> None:
        """Keep, lose or fence again each replica that the round left as it was."""
        fences = []
        for each in record.replicas:
            replica = self._roster.replicas[str(each.ref.id)]
            if replica.id in self._settled:
                continue
            facts = replica.engine.facts if replica.id in found else None
            stands, said = standing(replica.state, replica.version, each.facts.incarnation, facts)
            if stands is Standing.AS_BEFORE:
                continue
            if replica.id in self._reaching.busy:
                replica.fenced_by_us = True  # what is under way in it may be a pause of ours
            if replica.state is not ReplicaState.QUARANTINED:
                replica.happen(ReplicaEvent.FAIL, error=f"{said} ({self._problems[replica.id]})" if replica.id in self._problems else said)
            if facts is not None and facts.incarnation != each.facts.incarnation:
                replica.forget_incarnation()
            if stands is Standing.FENCED and facts is not None:
                replica.version = None
                replica.found_torn()
                fences.append(
                    fence_engine(
                        replica,
                        str(facts.version),
                        limit_s=self._timeouts.resume_s,
                        release=self._parts.settings.on_failure.release_requests,
                        timeline=Timeline(),
                        incarnation=facts.incarnation,
                    )
                )
        await asyncio.gather(*fences)


def _no_payloads(replicas: object) -> dict[str, Any]:
    return {}


async def _nothing() -> dict[str, Any]:
    return {}
