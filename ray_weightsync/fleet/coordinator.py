"""The coordinator: the one place that drives the fleet's handshake. Its parts do the work; this is who is asked.

It runs on one event loop (an async Ray actor, see `ray_weightsync.fleet.actor`; plain asyncio in unit tests). `status` and `watch` only
read what is known here, so they answer at once, during a round too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence

from ray_weightsync.engines.resolve import resolve
from ray_weightsync.errors import AttachError, WeightSyncError
from ray_weightsync.fleet import takeover
from ray_weightsync.fleet.choosing import SenderFacts
from ray_weightsync.fleet.chronicle import Chronicle
from ray_weightsync.fleet.claims import Claims, HandOver
from ray_weightsync.fleet.health import Health, IsGone, actor_is_gone
from ray_weightsync.fleet.journal import Record
from ray_weightsync.fleet.membership import Membership
from ray_weightsync.fleet.parts import Parts
from ray_weightsync.fleet.probes import fence_doubted, refuse
from ray_weightsync.fleet.reaching import Reach
from ray_weightsync.fleet.recovery import Recovery
from ray_weightsync.fleet.repair import Repair
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.rounds import Rounds
from ray_weightsync.fleet.sleep_mode import SleepMode
from ray_weightsync.fleet.steps import StepFailed, Timeline, step
from ray_weightsync.fleet.stock import require_servable
from ray_weightsync.fleet.stores import Stores
from ray_weightsync.fleet.values import Settings, Way
from ray_weightsync.fleet.way import way_of
from ray_weightsync.protocol.channel import SHUTDOWN
from ray_weightsync.report import FleetStatus, SyncReport

logger = logging.getLogger(__name__)


class Coordinator:
    """Owns one session: its fleet, its snapshots, its rounds.

    Attributes:
        chronicle: What it leaves for a successor.
        rounds: What senders ask for.
        repair: Heals.
        membership: Joins and leaves.
        sleep_mode: Puts engines to sleep and wakes them up.
        health: Looks at the fleet between rounds.

    Args:
        name: The session's name.
        settings: What the session was attached with.
        stores: The snapshot stores.
        claims: On its engines.
        chronicle: What it leaves for a successor.
        predecessor: What the coordinator before this one left, if there was one.
        reach: How engines are reached again by a successor.
        is_gone: Whether an engine's process will never answer again.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        stores: Stores,
        claims: Claims,
        chronicle: Chronicle,
        *,
        predecessor: Record | None = None,
        reach: Reach = resolve,
        is_gone: IsGone = actor_is_gone,
    ) -> None:
        self.chronicle = chronicle
        self._parts = Parts(name, settings, stores, claims, chronicle)
        self._timeouts = settings.timeouts
        self._roster = self._parts.roster
        self.rounds = Rounds(self._parts)
        self.repair = Repair(self._parts)
        self.membership = Membership(self._parts, self.repair)
        self.sleep_mode = SleepMode(self._parts, self.repair)
        self.health = Health(self._parts, self.repair, is_gone=is_gone)
        self._recovery = Recovery(self._parts, predecessor, reach)
        self._recovering: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._others_turn_s = 0.0

    # --- a life after another -----------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Settle what a coordinator before this one left, if there was one. Nothing else is done for anybody before that.

        Raises:
            Exception: if it could not be done; everybody who asks is told.
        """
        if self._recovering is None:
            self._recovering = asyncio.get_running_loop().create_task(self._recover())
        await asyncio.shield(self._recovering)

    async def _recover(self) -> None:
        await self._recovery.run()
        self._parts.spawn(fence_doubted(self._parts))  # which the coordinator before had promised

    async def recovered(self) -> None:
        """Wait until `recover` is done.

        Raises:
            WeightSyncError: if it failed, or is not done in time.
        """
        limit_s = self._recovery.limit_s
        try:
            await asyncio.wait_for(self.recover(), limit_s)
        except TimeoutError as error:
            raise WeightSyncError(
                "The coordinator still settles what the one before it left; what holds is in status().",
                phase="recovery",
                elapsed_s=limit_s,
                limit_s=limit_s,
                hint="call again; a replica that does not answer costs one deadline",
            ) from error
        except WeightSyncError:
            raise
        except Exception as error:
            raise WeightSyncError(
                "The coordinator could not settle what the one before it left. Engines whose label starts with '!rws:' are torn or not "
                "committed.",
                phase="recovery",
                engine_message=f"{type(error).__name__}: {error}",
                hint="close() this session and attach again: it reads the labels",
            ) from error

    def attached(self) -> FleetStatus | None:
        """The status, if the engines of this session were taken in already."""
        return self.status() if self._roster.replicas else None

    async def settled(self, round_id: str) -> SyncReport:
        """How a round ended whose caller lost the answer with its coordinator.

        Raises:
            RoundAborted, FleetTorn: if no coordinator had begun to touch an engine for it.
            WeightSyncError: what its caller would have been told; or that it has not ended in the time that a round may take.
        """
        began, limit_s = time.monotonic(), self._parts.longest_turn_s
        while self._parts.turn.concerns(round_id):  # the answer was lost, not the coordinator
            if (elapsed_s := time.monotonic() - began) > limit_s:
                raise WeightSyncError(
                    "The round is still in progress; what holds when it ends is not known yet.",
                    phase=self._roster.phase,
                    elapsed_s=elapsed_s,
                    limit_s=limit_s,
                    hint="ask status()",
                )
            await self._roster.watch(self._roster.sequence, limit_s=self._timeouts.status_s)
        outcome = self._parts.chronicle.outcomes.get(round_id)
        if outcome is None:
            raise self._roster.unchanged(
                "No engine was touched in this round: it had not begun when its answer was lost, or did not get its turn.",
                phase="recovery",
                hint="call again",
            )
        if isinstance(outcome, WeightSyncError):
            raise outcome
        return outcome

    # --- the fleet ----------------------------------------------------------------------------------------------------------

    async def adopt(self, replicas: list[Replica], *, hand_over: HandOver | None = None) -> FleetStatus:
        """Take resolved engines into the fleet.

        Args:
            replicas: The engines.
            hand_over: How other sessions are asked for engines of theirs. None: theirs are not taken, and no open update is flushed.

        Raises:
            SessionConflict: if another session has one of them, and does not hand it over.
            AttachError: if an engine has an update open that somebody else started, and it was not to be taken over; if no round could
                bring engines like these; or if what a successor of this coordinator would have to know cannot be kept.
        """
        require_servable(replicas, self._parts.settings, phase="attach")
        limit_s = self._timeouts.attach_s + (self._timeouts.round_s(0) if hand_over is not None else 0.0)
        try:
            waited = await self._parts.claims.claim(replicas, limit_s=limit_s, hand_over=hand_over)
        finally:
            self._others_turn_s = 0.0
        try:
            if waited:  # whoever had them may have changed them since they were inspected
                await takeover.look_again(replicas, self._timeouts)
            for replica in replicas:
                if any(worker.update_open for worker in replica.engine.facts.workers):
                    await takeover.flush(replica, self._timeouts, allowed=hand_over is not None)
        except BaseException:
            await self._parts.claims.release(replicas)
            raise
        self._roster.adopt(replicas, self._parts.settings.adopt)
        try:
            await self._parts.chronicle.write()  # from here on a successor knows whose engines these are
        except Exception as error:
            await self._parts.claims.release(replicas)
            raise AttachError(
                "The engines were let go again: the session could not be written to the journal in Ray's control plane.",
                phase="attach",
                engine_message=f"{type(error).__name__}: {error}",
                hint="look after Ray's head node and attach again",
            ) from error
        return self.status()

    @property
    def longest_turn_s(self) -> float:
        """The longest that what is under way here may keep others waiting, in seconds; see `Parts.longest_turn_s`."""
        settling = self._recovering is not None and not self._recovering.done()
        return max(self._parts.longest_turn_s, self._others_turn_s) + (self._recovery.limit_s if settling else 0.0)

    def waits_for_turn(self, turn_s: float) -> None:
        """Engines are handed over when another session's turn ends, which may take this long; sessions are asked one after the other."""
        self._others_turn_s += turn_s

    async def hand_over(self, identities: Sequence[str], *, to: str, limit_s: float) -> None:
        """Let another session have engines of this one; see `ray_weightsync.fleet.takeover`."""
        await takeover.hand_over(self._parts, identities, to=to, limit_s=limit_s)

    def choose_transport(self, sender: SenderFacts) -> Way:
        """How the next round is to go; see `ray_weightsync.fleet.way`. Asks no engine."""
        return way_of(self._parts, sender)

    async def refuse(self, report: SyncReport, complaints: Mapping[str, str]) -> SyncReport:
        """Take a version back from replicas that a probe complained of; see `ray_weightsync.fleet.probes.refuse`."""
        return await refuse(self._parts, report, complaints)

    def status(self) -> FleetStatus:
        """What is known here; asks no engine."""
        return self._roster.status()

    async def watch(self, sequence: int, *, limit_s: float) -> FleetStatus:
        """The status as soon as it is newer than ``sequence``, or as it is after ``limit_s`` seconds."""
        return await self._roster.watch(sequence, limit_s=limit_s)

    # --- ends ---------------------------------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """The owner is gone: end the session, whatever of it is under way. Never raises; bounded by the deadlines of a round.

        A snapshot whose writer may be gone too is given up, a round on its way goes on to its end.
        """
        try:
            await self.recovered()
            for snapshot in self._parts.staging.unsealed():
                await self.rounds.abandon(snapshot.id, "the session's owner is gone")
            await self.close()
        except Exception:
            logger.exception("session %s ends with its owner, and could not be closed in order", self._roster.name)

    async def _shut_down_end(self, replica: Replica) -> None:
        """Have workers let go of their end of a trainer engine, where none raises: stock ones might, and any with an update open."""
        able = replica.whole and not replica.unanswered and not replica.engine.facts.is_stock
        if not able or not replica.holds_end or not replica.engine.channel.supports(SHUTDOWN):
            return
        try:
            await step(replica, "close", SHUTDOWN, limit_s=self._timeouts.resume_s, timeline=Timeline())
        except StepFailed as failed:
            logger.warning("%s keeps its end of a trainer engine: %s", replica.id, failed)

    async def close(self) -> None:
        """Free what is shared. Engines are left as they are: whole ones serve, fenced ones stay fenced.

        A round in progress is waited for, one that is only being staged is given up, and what is owed to engines is undone first.
        Idempotent: it is done once, and whoever asks again is told the same.
        """
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        parts = self._parts
        if (holder := parts.turn.holder) is not None:
            staging = parts.staging.get(holder)
            if staging is None or not staging.committing:  # also one whose slot is still being had
                await self.rounds.abandon(holder, "the session was closed")
        try:
            await parts.turn.take("close", busy="wait", limit_s=parts.longest_turn_s)
            owed = [call for replica in self._roster.replicas.values() for call in replica.unanswered]
            if owed:
                await asyncio.wait(owed, timeout=self._timeouts.resume_s)
            await asyncio.gather(*map(self._shut_down_end, self._roster.members))
        finally:
            parts.cancel_all()
            try:
                await parts.claims.release_all()
            finally:  # shared memory is not to stay for the sake of a claim that holds no longer than this process
                await parts.staging.close()
            await parts.chronicle.erase()  # last: should this process die here, its successor goes on with the rest
