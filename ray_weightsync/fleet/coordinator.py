"""The coordinator: the one place that drives the fleet's handshake. It reads from `open_snapshot` down to `_commit`.

It runs on one event loop (an async Ray actor, see `ray_weightsync.fleet.actor`; plain asyncio in unit tests). Rounds take turns;
`status` and `watch` only read what is known here, so they answer at once, during a round too.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any

from ray_weightsync.config import version_label
from ray_weightsync.errors import AttachError, ConfigError, FleetTorn, RoundAborted, WeightSyncError
from ray_weightsync.fleet.bring import Aborted, Bring, RoundSpec
from ray_weightsync.fleet.preflight import check, look
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.roster import Roster
from ray_weightsync.fleet.snapshots import Stores
from ray_weightsync.fleet.staging import Snapshot, Staging
from ray_weightsync.fleet.states import ReplicaEvent, ReplicaState
from ray_weightsync.fleet.steps import StepFailed, Timeline
from ray_weightsync.fleet.turns import Busy, Turn
from ray_weightsync.fleet.values import Sealed, Settings, Ticket
from ray_weightsync.fleet.verdicts import aborted, verdict
from ray_weightsync.protocol.channel import FINISH
from ray_weightsync.protocol.fanout import fan_out
from ray_weightsync.report import FleetStatus, ReplicaReport, SyncReport
from ray_weightsync.weights.plan import Plan

logger = logging.getLogger(__name__)


class PlanUnknown(Exception):
    """The coordinator does not know this plan (any more); send the plan itself."""


class Coordinator:
    """Owns one session: its fleet, its snapshots, its rounds.

    Args:
        name: The session's name.
        settings: What the session was attached with.
        stores: The snapshot stores.
    """

    def __init__(self, name: str, settings: Settings, stores: Stores) -> None:
        self._settings = settings
        self._timeouts = settings.timeouts
        self._roster = Roster(name)
        self._staging = Staging(stores, settings.transport, settings.timeouts)
        self._turn = Turn()
        self._plans: dict[str, Plan] = {}
        self._background: set[asyncio.Task[Any]] = set()

    # --- the fleet ----------------------------------------------------------------------------------------------------------

    async def adopt(self, replicas: list[Replica], *, take_over: bool) -> FleetStatus:
        """Take resolved engines into the fleet.

        Raises:
            AttachError: if an engine has an update open that somebody else started, and ``take_over`` is not set.
        """
        for replica in replicas:
            if any(worker.update_open for worker in replica.engine.facts.workers):
                await self._flush(replica, take_over=take_over)
        self._roster.adopt(replicas, self._settings.adopt)
        return self.status()

    async def _flush(self, replica: Replica, *, take_over: bool) -> None:
        if not take_over:
            raise AttachError(
                f"{replica.id} has a weight update open that another client started; it was left as found.",
                phase="attach",
                replicas=(replica.id,),
                hint="end it there, or attach(..., take_over=True), which flushes it; the engine is then fenced until the next round",
            )
        try:
            await asyncio.wait_for(replica.engine.channel.call(FINISH), self._timeouts.finish_s)
            await look(replica, timeouts=self._timeouts, timeline=Timeline())
        except Exception as error:
            raise AttachError(
                f"{replica.id}: the weight update that another client left open could not be flushed.",
                phase="attach",
                replicas=(replica.id,),
                limit_s=self._timeouts.finish_s,
                engine_message=str(error),
                log_hint=replica.log_hint,
                hint="restart the engine",
            ) from error
        replica.fenced_by_us = True

    def status(self) -> FleetStatus:
        """What is known here; asks no engine."""
        return self._roster.status()

    async def watch(self, sequence: int, *, limit_s: float) -> FleetStatus:
        """The status as soon as it is newer than ``sequence``, or as it is after ``limit_s`` seconds."""
        return await self._roster.watch(sequence, limit_s=limit_s)

    # --- staging ------------------------------------------------------------------------------------------------------------

    async def open_snapshot(self, version: int | str, *, plan_digest: str, plan: dict[str, Any] | None, node_id: str, busy: Busy) -> Ticket:
        """Begin a round: check the version, allot memory, start the preflight beside the sender's packing.

        The turn is the caller's until `seal`, `commit` or `abandon`, or until the sender's deadline has passed.

        Raises:
            PlanUnknown: ``plan`` is needed.
            ConfigError: if the version was committed before and is not the present one.
            RoundAborted: if another round does not end, or no memory is left.
        """
        label = version_label(version)
        known = self._plan(plan_digest, plan)
        limit_s = self._timeouts.staging_s(known.num_bytes)
        snapshot_id = uuid.uuid4().hex
        await self._turn.take(snapshot_id, busy=busy, limit_s=limit_s + self._timeouts.round_s(known.num_bytes))
        opened_at = time.monotonic()
        try:
            if self._roster.was_committed_before(label):
                raise ConfigError(f"version {label!r} was committed before; versions are unique (now: {self._roster.label!r})")
            self._roster.round_id = snapshot_id
            self._roster.changed("stage")
            snapshot = await self._staging.open(snapshot_id, version, label, known, node_id, opened_at, self._roster.serves())
        except BaseException:
            self._end_turn(snapshot_id)
            raise
        snapshot.preflight = self._spawn(self._preflight(snapshot))
        self._spawn(self._give_up_after(snapshot, limit_s))
        progress_bytes = self._settings.transport.bucket_bytes
        return Ticket(snapshot=snapshot_id, address=snapshot.address, progress_bytes=progress_bytes, limit_s=limit_s)

    def _plan(self, digest: str, wire: dict[str, Any] | None) -> Plan:
        if digest not in self._plans:
            if wire is None:
                raise PlanUnknown(digest)
            plan = Plan.from_wire(wire)
            self._plans = dict([*self._plans.items(), (plan.digest, plan)][-4:])
        return self._plans[digest]

    async def seal(self, snapshot_id: str, sealed: Sealed, *, keep_turn: bool = False) -> None:
        """The sender has written everything: seal the snapshot, and wait for the preflight's verdict.

        Raises:
            RoundAborted: if the snapshot was given up meanwhile, the store refuses it, or a replica refused the plan.
        """
        try:
            snapshot = self._staging.require(snapshot_id, self._roster.serves())
            try:
                await self._staging.seal(snapshot, sealed, self._roster.serves())
                await snapshot.members()
            except BaseException as error:
                await self._staging.give_up(snapshot, str(error))
                raise
        finally:
            if not keep_turn:
                self._end_turn(snapshot_id)

    async def abandon(self, snapshot_id: str, why: str) -> None:
        """The sender gives the snapshot up; nothing is committed. Idempotent."""
        snapshot = self._staging.get(snapshot_id)
        if snapshot is not None:
            await self._staging.give_up(snapshot, why)
            if not snapshot.committing:
                self._end_turn(snapshot_id)

    async def _give_up_after(self, snapshot: Snapshot, limit_s: float) -> None:
        """A sender that died or hangs must keep neither the turn nor the slot."""
        done, _ = await asyncio.wait({snapshot.sealed}, timeout=limit_s)
        if not done:
            logger.error("the sender did not seal version %s within %.0f s; its snapshot is given up", snapshot.label, limit_s)
            await self.abandon(snapshot.id, f"the sender did not seal within {limit_s:.1f} s")

    # --- preflight ----------------------------------------------------------------------------------------------------------

    async def _preflight(self, snapshot: Snapshot) -> list[Replica]:
        """The members of the round: everyone who can take part. One that serves and cannot is a reason to abort."""
        store = f"host:{snapshot.node_id}"
        candidates = [replica for replica in self._roster.replicas.values() if replica.state is not ReplicaState.RETIRED]
        for replica in [each for each in candidates if each.unanswered]:
            candidates.remove(replica)
            snapshot.notes.append(f"{replica.id} left out: it has not answered an earlier call yet")
        unproved = any(store not in replica.stores for replica in candidates)
        probe = await self._staging.probe(snapshot.node_id) if unproved else None
        ask = partial(check, plan=snapshot.plan, store=store, probe=probe, timeouts=self._timeouts, timeline=snapshot.timeline)
        outcomes = await fan_out(
            {replica.id: partial(ask, replica) for replica in candidates},
            what="preflight",
            limit_s=5 * self._timeouts.preflight_s,
            warn_every_s=self._timeouts.warn_every_s,
        )
        members, culprits = [], {}
        for replica in candidates:
            error = outcomes.errors.get(replica.id)
            if error is None:
                members.append(replica)
            elif not isinstance(error, StepFailed):
                raise error
            elif replica.state is ReplicaState.QUARANTINED:
                snapshot.notes.append(f"{replica.id} left out: {error}")
            else:
                culprits[replica.id] = error
                if error.failure.kind in ("died", "unanswered"):
                    replica.happen(ReplicaEvent.FAIL, error=str(error))
        self._roster.changed()
        if culprits:
            raise aborted(
                f"Version {snapshot.label} was refused before anything was touched.",
                old=self._roster.label,
                culprits=culprits,
                log_hints=self._roster.log_hints(),
                hint="mend what the engines named; replicas that are gone are left out when the call is repeated",
            )
        if not members:
            raise FleetTorn(
                f"No replica serves: version {snapshot.label} can be brought to none. {'; '.join(snapshot.notes)}",
                phase="preflight",
                replicas=tuple(self._roster.replicas),
                hint="replace the engines and attach again",
            )
        return members

    # --- commit -------------------------------------------------------------------------------------------------------------

    async def commit(self, snapshot_id: str, *, sealed: Sealed | None = None, holds_turn: bool = False) -> SyncReport:
        """Bring the fleet to a staged snapshot: pause .. resume.

        Args:
            snapshot_id: From the `Ticket`.
            sealed: What the sender has written, if `seal` has not been called and will not be.
            holds_turn: The turn taken by `open_snapshot` is still the caller's.

        Raises:
            RoundAborted, ReplicasLost, FleetTorn: see `ray_weightsync.errors`.
        """
        snapshot = self._staging.require(snapshot_id, self._roster.serves())
        if not holds_turn:
            await self._turn.take(snapshot_id, busy="wait", limit_s=self._timeouts.round_s(snapshot.plan.num_bytes))
            self._roster.round_id = snapshot_id
        try:
            # Asked again: it may have given way to another one while this call waited for its turn.
            self._staging.require(snapshot_id, self._roster.serves()).committing = True
            if sealed is not None:
                await self._staging.seal(snapshot, sealed, self._roster.serves())
            members = await snapshot.members()
            if not holds_turn:  # staged some time ago: the fleet may have changed
                snapshot.notes.clear()
                members = await self._preflight(snapshot)
            return await self._commit(snapshot, members)
        finally:
            await self._staging.free(snapshot)
            self._end_turn(snapshot_id)

    async def _commit(self, snapshot: Snapshot, members: list[Replica]) -> SyncReport:
        repeat = await self._is_repeat(snapshot)
        if repeat:
            members = [replica for replica in members if not (replica.serving and replica.attested and replica.version == snapshot.label)]
        spec = self._spec(snapshot)
        bring = Bring(
            spec, members, snapshot.expected, on_phase=self._roster.changed, timeline=snapshot.timeline, background=self._background
        )
        try:
            replicas = await bring.run()
        except Aborted as end:
            raise aborted(
                f"Version {snapshot.label} was not committed.",
                old=self._roster.label,
                culprits=end.failures,
                stuck=end.stuck,
                log_hints=self._roster.log_hints(),
                hint="call again; raise Timeouts.pause_s if the engines are slow to pause",
            ) from end
        finally:
            for replica in members:
                if replica.state is ReplicaState.UPDATING:
                    replica.happen(ReplicaEvent.FAIL, error="the round ended unexpectedly; its weights may be torn")
        if not repeat and any(replica.failed_phase is None for replica in replicas):
            self._roster.commit(snapshot.label)
            await self._staging.keep(snapshot)
        report = self._report(snapshot, spec, replicas, repeated=repeat and not members)
        if (error := verdict(report, self._settings.on_failure, self._roster.log_hints())) is not None:
            raise error
        return report

    async def _is_repeat(self, snapshot: Snapshot) -> bool:
        """Whether this version is the committed one. With the same bytes that is a repeat, with others a mistake."""
        committed = self._staging.committed
        if committed is None or snapshot.label != self._roster.label:
            return False
        mine, theirs = (await snapshot.seal_of()).digest, (await committed.seal_of()).digest
        if mine != theirs:
            raise RoundAborted(
                f"Nothing changed: {self._roster.serves()}. The same version was committed with other bytes.",
                phase="commit",
                hint=f"choose a new version; {snapshot.label!r} stands for weights {theirs}, not {mine}",
            )
        return True

    def _spec(self, snapshot: Snapshot) -> RoundSpec:
        settings, num_bytes = self._settings, snapshot.plan.num_bytes
        epoch = self._roster.next_epoch()
        update = {
            "transport": "host",
            "round": snapshot.id,
            "epoch": epoch,
            "plan": snapshot.plan.digest,
            # The workers' own deadline ends before ours: it is they who know how far the bytes had come.
            "limit_s": 0.8 * self._timeouts.for_bytes("update", num_bytes),
            "slot": snapshot.address,
        }
        return RoundSpec(
            round_id=snapshot.id,
            epoch=epoch,
            label=snapshot.label,
            num_bytes=num_bytes,
            update=update,
            pause=settings.pause,
            cache=settings.cache,
            timeouts=self._timeouts,
            policy=settings.on_failure,
        )

    def _report(self, snapshot: Snapshot, spec: RoundSpec, replicas: list[ReplicaReport], *, repeated: bool) -> SyncReport:
        sealed = snapshot.written()
        recomputed = [replica.requests_recomputed for replica in replicas]
        guarantees, missing = _guarantees(self._roster.replicas.values(), snapshot.plan, self._settings)
        return SyncReport(
            version=snapshot.version,
            ordinal=self._roster.ordinal,
            round_id=snapshot.id,
            epoch=spec.epoch,
            plan_digest=snapshot.plan.digest,
            weights_digest=sealed.digest,
            transport="host",
            transport_reason=self._settings.transport_reason,
            num_bytes=sealed.num_bytes,
            num_tensors=sealed.num_tensors,
            phases_s={phase: snapshot.timeline.wall_s(phase) for phase in snapshot.timeline.spans},
            replicas=tuple(replicas),
            pause_s=max((replica.pause_s for replica in replicas), default=0.0),
            trainer_blocked_s=sealed.stage_s,
            total_s=time.monotonic() - snapshot.opened_at,
            requests_recomputed=None if None in recomputed else sum(count for count in recomputed if count is not None),
            guarantees=guarantees,
            missing=missing,
            notes=(*snapshot.notes, *self._staging.notes()),
            repeated=repeated,
        )

    # --- ends ---------------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Free what is shared. Engines are left as they are: whole ones serve, fenced ones stay fenced."""
        try:
            await self._turn.take("close", busy="wait", limit_s=self._timeouts.heal_s)
        finally:
            for task in list(self._background):
                task.cancel()
            await self._staging.close()

    def _end_turn(self, holder: str) -> None:
        if self._turn.holder == holder:
            self._turn.release(holder)
            self._roster.round_id = None
            self._roster.changed("idle")

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, WeightSyncError):
            logger.error("a task of the coordinator failed", exc_info=error)


def _guarantees(replicas: Iterable[Replica], plan: Plan, settings: Settings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What this fleet and transport hold, and what they cannot. Pure."""
    given = [
        "plan checked on a meta twin before anything changed",
        "bytes attested by every worker",
        "a lost replica does not stop the others",
        "caches of old weights dropped before resume" if settings.cache == "recompute" else f"cache policy {settings.cache!r}",
    ]
    missing: list[str] = []
    for replica in replicas:
        unjudged = {each for worker in replica.engine.facts.workers for each in worker.unjudged.get(plan.digest, ())}
        missing.extend(f"{replica.id}: {each}" for each in sorted(unjudged))
        if replica.engine.facts.kind == "sync":
            missing.append(f"{replica.id}: a synchronous LLM has no pause; it commits in its own turn, before all others have attested")
    return tuple(given), tuple(missing)
