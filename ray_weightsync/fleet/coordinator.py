"""The coordinator: the one place that drives the fleet's handshake. It reads from `open_snapshot` down to `_commit`.

It runs on one event loop (an async Ray actor, see `ray_weightsync.fleet.actor`; plain asyncio in unit tests). Rounds take turns;
`status` and `watch` only read what is known here, so they answer at once, during a round too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any

from ray_weightsync.config import TOMBSTONE_PREFIX, version_label
from ray_weightsync.errors import AttachError, ConfigError, RoundAborted, WeightSyncError
from ray_weightsync.fleet.bring import Bring
from ray_weightsync.fleet.members import members_of, unproved
from ray_weightsync.fleet.preflight import look
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.reporting import report_of
from ray_weightsync.fleet.roster import Roster
from ray_weightsync.fleet.round import Aborted, RoundSpec
from ray_weightsync.fleet.snapshots import Stores
from ray_weightsync.fleet.staging import Snapshot, Staging
from ray_weightsync.fleet.states import ReplicaEvent, ReplicaState
from ray_weightsync.fleet.steps import StepFailed, Timeline
from ray_weightsync.fleet.turns import Busy, Turn
from ray_weightsync.fleet.values import Sealed, Settings, Ticket
from ray_weightsync.fleet.verdicts import aborted, verdict
from ray_weightsync.protocol.channel import FINISH, PAUSE, SET_VERSION
from ray_weightsync.report import FleetStatus, SyncReport
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
        self._abandoned: deque[str] = deque(maxlen=100)

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
        channel = replica.engine.channel
        try:
            # Half-updated weights may be in there: marked and paused before the flush makes them look whole.
            if channel.supports(SET_VERSION):
                await asyncio.wait_for(channel.call(SET_VERSION, f"{TOMBSTONE_PREFIX}flushed"), self._timeouts.commit_s)
            if channel.supports(PAUSE):
                await asyncio.wait_for(channel.call(PAUSE, mode="keep", clear_cache=False), self._timeouts.pause_s)
            await asyncio.wait_for(channel.call(FINISH), self._timeouts.finish_s)
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

    async def open_snapshot(
        self, snapshot_id: str, version: int | str, *, plan_digest: str, plan: dict[str, Any] | None, node_id: str, busy: Busy
    ) -> Ticket:
        """Begin a round: check the version, allot memory, start the preflight beside the sender's packing.

        The turn is the caller's until `seal`, `commit` or `abandon`, or until the sender's deadline has passed. The snapshot's id is
        the caller's choice (32 hex digits), so that it can be abandoned before this returns.

        Raises:
            PlanUnknown: ``plan`` is needed.
            ConfigError: if the version was committed before and is not the present one.
            RoundAborted: if another round does not end, or no memory is left.
        """
        label = version_label(version)
        known = self._plan(plan_digest, plan)
        limit_s = self._timeouts.staging_s(known.num_bytes)
        await self._turn.take(snapshot_id, busy=busy, limit_s=limit_s + self._timeouts.round_s(known.num_bytes))
        opened_at = time.monotonic()
        try:
            if snapshot_id in self._abandoned:
                raise RoundAborted(
                    f"Nothing changed: {self._roster.serves()}. The sender gave up while it waited for its turn.", phase="open"
                )
            if self._roster.was_committed_before(label):
                raise ConfigError(f"version {label!r} was committed before; versions are unique (now: {self._roster.label!r})")
            self._roster.round_id = snapshot_id
            self._roster.changed("stage")
            snapshot = await self._staging.open(snapshot_id, version, label, known, node_id, opened_at, self._roster.serves())
        except BaseException:
            self._end_turn(snapshot_id)
            raise
        if unproved(self._roster, snapshot):
            snapshot.preflight = self._spawn(self._members(snapshot))
        self._spawn(self._give_up_after(snapshot, limit_s))
        progress_bytes = self._settings.transport.bucket_bytes
        return Ticket(snapshot=snapshot_id, address=snapshot.address, progress_bytes=progress_bytes)

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
                await snapshot.judged()
            except BaseException as error:
                await self._staging.give_up(snapshot, str(error))
                raise
        finally:
            if not keep_turn:
                self._end_turn(snapshot_id)

    async def abandon(self, snapshot_id: str, why: str) -> None:
        """The sender gives the snapshot up; nothing is committed. Idempotent."""
        snapshot = self._staging.get(snapshot_id)
        if snapshot is None:
            self._abandoned.append(snapshot_id)  # it may be waiting for its turn
            return
        await self._staging.give_up(snapshot, why)
        if not snapshot.committing:
            self._end_turn(snapshot_id)

    async def _give_up_after(self, snapshot: Snapshot, limit_s: float) -> None:
        """A sender that died or hangs must keep neither the turn nor the slot."""
        done, _ = await asyncio.wait({snapshot.sealed}, timeout=limit_s)
        if not done:
            logger.error("the sender did not seal version %s within %.0f s; its snapshot is given up", snapshot.label, limit_s)
            await self.abandon(snapshot.id, f"the sender did not seal within {limit_s:.1f} s")

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
            if self._roster.was_committed_before(snapshot.label):
                raise ConfigError(f"version {snapshot.label!r} was committed meanwhile; versions are unique (now: {self._roster.label!r})")
            await snapshot.judged()
            # Looked at directly before the pause: who is paused, and who is there at all, may have changed since the packing began.
            return await self._commit(snapshot, await self._members(snapshot))
        finally:
            await self._staging.free(snapshot)
            self._end_turn(snapshot_id)

    async def _commit(self, snapshot: Snapshot, members: list[Replica]) -> SyncReport:
        repeat = await self._is_repeat(snapshot)
        if repeat:
            members = [replica for replica in members if not (replica.serving and replica.attested and replica.version == snapshot.label)]
        spec = self._spec(snapshot)
        bring = Bring(spec, members, snapshot.expected, on_phase=self._roster.changed, timeline=snapshot.timeline)
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
            if not repeat and any(replica.version == snapshot.label and replica.attested for replica in members):
                await self._advance(snapshot)
        report = report_of(snapshot, self._roster, self._settings, replicas, notes=self._staging.notes(), repeated=repeat and not members)
        others = [replica.id for replica in self._roster.replicas.values() if replica.serving and replica.version == snapshot.label]
        if (error := verdict(report, self._settings.on_failure, self._roster.log_hints(), serving=others)) is not None:
            raise error
        return report

    async def _advance(self, snapshot: Snapshot) -> None:
        self._roster.commit(snapshot.label)
        try:
            await self._staging.keep(snapshot)
        except Exception:  # the engines hold the version whatever becomes of the store; the report says what it costs
            logger.exception("the store could not keep version %s", snapshot.label)
            snapshot.notes.append("the snapshot store did not keep this version; nothing can be repaired from it")

    async def _is_repeat(self, snapshot: Snapshot) -> bool:
        """Whether this version is the committed one. With the same bytes that is a repeat, with others a mistake."""
        committed = self._staging.committed
        if committed is None or snapshot.label != self._roster.label:
            return False
        try:
            mine = (await snapshot.seal_of()).digest
        except StepFailed as failed:
            raise RoundAborted(
                f"Nothing changed: {self._roster.serves()}. The sender gave up.",
                phase="stage",
                engine_message=str(failed),
                hint="call again",
            ) from failed
        theirs = committed.written().digest
        if mine != theirs:
            raise RoundAborted(
                f"Nothing changed: {self._roster.serves()}. The same version was committed with other bytes.",
                phase="commit",
                hint=f"choose a new version; {snapshot.label!r} stands for weights {theirs}, not {mine}",
            )
        return True

    async def _members(self, snapshot: Snapshot) -> list[Replica]:
        return await members_of(snapshot, self._roster, self._staging, self._timeouts)

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

    # --- ends ---------------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Free what is shared. Engines are left as they are: whole ones serve, fenced ones stay fenced.

        A round in progress is waited for, one that is only being staged is given up, and what is owed to engines is undone first.
        """
        staging = self._staging.get(self._turn.holder or "")
        if staging is not None and not staging.committing:
            await self.abandon(staging.id, "the session was closed")
        try:
            await self._turn.take(
                "close", busy="wait", limit_s=self._timeouts.round_s(max((p.num_bytes for p in self._plans.values()), default=0))
            )
            owed = [call for replica in self._roster.replicas.values() for call in replica.unanswered]
            if owed:
                await asyncio.wait(owed, timeout=self._timeouts.resume_s)
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
