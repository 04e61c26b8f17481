"""The coordinator: the one place that drives the fleet's handshake. Its parts do the work; this is who is asked.

It runs on one event loop (an async Ray actor, see `ray_weightsync.fleet.actor`; plain asyncio in unit tests). `status` and `watch` only
read what is known here, so they answer at once, during a round too.
"""

from __future__ import annotations

import asyncio

from ray_weightsync.config import TOMBSTONE_PREFIX
from ray_weightsync.errors import AttachError
from ray_weightsync.fleet.parts import Parts
from ray_weightsync.fleet.preflight import look
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.rounds import Rounds
from ray_weightsync.fleet.snapshots import Stores
from ray_weightsync.fleet.steps import Timeline
from ray_weightsync.fleet.values import Settings
from ray_weightsync.protocol.channel import FINISH, PAUSE, SET_VERSION
from ray_weightsync.report import FleetStatus


class Coordinator:
    """Owns one session: its fleet, its snapshots, its rounds.

    Attributes:
        rounds: What senders ask for.

    Args:
        name: The session's name.
        settings: What the session was attached with.
        stores: The snapshot stores.
    """

    def __init__(self, name: str, settings: Settings, stores: Stores) -> None:
        self._parts = Parts(name, settings, stores)
        self._timeouts = settings.timeouts
        self._roster = self._parts.roster
        self.rounds = Rounds(self._parts)

    # --- the fleet ----------------------------------------------------------------------------------------------------------

    async def adopt(self, replicas: list[Replica], *, take_over: bool) -> FleetStatus:
        """Take resolved engines into the fleet.

        Raises:
            AttachError: if an engine has an update open that somebody else started, and ``take_over`` is not set.
        """
        for replica in replicas:
            if any(worker.update_open for worker in replica.engine.facts.workers):
                await self._flush(replica, take_over=take_over)
        self._roster.adopt(replicas, self._parts.settings.adopt)
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

    # --- ends ---------------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Free what is shared. Engines are left as they are: whole ones serve, fenced ones stay fenced.

        A round in progress is waited for, one that is only being staged is given up, and what is owed to engines is undone first.
        """
        parts = self._parts
        staging = parts.staging.get(parts.turn.holder or "")
        if staging is not None and not staging.committing:
            await self.rounds.abandon(staging.id, "the session was closed")
        try:
            await parts.turn.take("close", busy="wait", limit_s=self.rounds.longest_s)
            owed = [call for replica in self._roster.replicas.values() for call in replica.unanswered]
            if owed:
                await asyncio.wait(owed, timeout=self._timeouts.resume_s)
        finally:
            parts.cancel_all()
            await parts.staging.close()
