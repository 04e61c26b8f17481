"""Health: between rounds every replica is looked at, so that one that died, restarted or was resumed by others does not go on serving.

A look is one cheap question. It never waits for the turn and nobody waits for it: an answer that arrives during a round, or after one that
began meanwhile, is dropped. What is found wrong leads to the same states as in a round; `Repair` then does what the policy says.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from ray_weightsync.config import is_tombstone, tombstone
from ray_weightsync.errors import FleetTorn, RoundAborted
from ray_weightsync.fleet.cluster import Process
from ray_weightsync.fleet.fence import fence_engine
from ray_weightsync.fleet.parts import Parts
from ray_weightsync.fleet.preflight import learn, told
from ray_weightsync.fleet.repair import Repair
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.states import ReplicaEvent, ReplicaState
from ray_weightsync.fleet.steps import StepFailed, Timeline
from ray_weightsync.protocol.channel import PAUSE
from ray_weightsync.protocol.reading import ENGINE_DEAD
from ray_weightsync.protocol.threads import in_daemon_thread

if TYPE_CHECKING:
    from ray_weightsync.engines.facts import EngineFacts

logger = logging.getLogger(__name__)

IsGone = Callable[["EngineFacts"], Awaitable[bool]]
"""Whether an engine's process will never answer again."""


class Health:
    """The health checks of one session.

    Args:
        parts: The session's.
        repair: What heals.
        is_gone: Whether the process behind these facts is dead for good.
    """

    def __init__(self, parts: Parts, repair: Repair, *, is_gone: IsGone) -> None:
        self._parts = parts
        self._roster = parts.roster
        self._repair = repair
        self._is_gone = is_gone
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._loose: set[str] = set()
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Check every ``Timeouts.health_interval_s`` from now on. Idempotent."""
        if self._watching is None:
            self._watching = self._parts.spawn(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._parts.timeouts.health_interval_s)
            try:
                await self.check()
            except Exception:  # a bug of ours in one check must not be the end of all checks
                logger.exception("a health check failed")

    async def check(self) -> None:
        """Look at every replica, then fence again who was resumed, and heal who can be healed. Nothing of it during a round."""
        if self._parts.turn.holder is not None:
            return
        for replica in self._roster.members:
            # One question at a time: an engine that is slow to answer is not to be buried under them.
            if replica.id not in self._looking and replica.engine.facts.kind != "client":
                task = self._parts.spawn(self._look(replica))
                self._looking[replica.id] = task
                task.add_done_callback(lambda _, name=replica.id: self._looking.pop(name, None))  # type: ignore[misc]
        if self._looking:
            await asyncio.wait(self._looking.values(), timeout=self._parts.timeouts.health_interval_s)
        members = self._roster.members
        await self._parts.claims.follow(members)  # one that restarted may be another session's by now
        if self._roster.members != members:
            self._roster.changed()
        await self._fence_again()
        await self._repair.heal_unasked()

    # --- looking ------------------------------------------------------------------------------------------------------------

    async def _look(self, replica: Replica) -> None:
        engine, turns = replica.engine, self._parts.turn.taken
        try:
            facts = await told(replica, limit_s=self._parts.timeouts.preflight_s)
        except StepFailed as failed:
            gone = failed.failure.kind == "died" and (ENGINE_DEAD in failed.failure.message or await self._is_gone(engine.facts))
            if self._is_fresh(replica, turns) and replica.engine is engine:
                await self._unreached(replica, failed, gone=gone)
            return
        if self._is_fresh(replica, turns) and replica.engine is engine:
            self._judge(replica, facts)

    def _is_fresh(self, replica: Replica, turns: int) -> bool:
        """Whether what was learned still holds: nobody had the turn since it was asked."""
        turn = self._parts.turn
        return turn.holder is None and turn.taken == turns and replica in self._roster.members

    async def _unreached(self, replica: Replica, failed: StepFailed, *, gone: bool) -> None:
        if failed.failure.kind != "died":
            # A synchronous engine answers between its requests only; an engine that hangs is for the next round's deadlines to find.
            logger.info("%s did not answer a health check: %s", replica.id, failed.failure.message)
            return
        if gone and self._parts.settings.on_failure.auto_heal:
            await self._repair.lose(replica, f"its process is gone: {failed.failure.message}", lives=False)
        elif replica.state is not ReplicaState.QUARANTINED:
            replica.happen(ReplicaEvent.FAIL, error=f"its process is gone: {failed.failure.message}")
            self._roster.changed()

    def _judge(self, replica: Replica, facts: EngineFacts) -> None:
        before = replica.status()
        learn(replica, facts)
        if replica.state is not ReplicaState.QUARANTINED and (why := ailment(replica)) is not None:
            replica.happen(ReplicaEvent.FAIL, error=why)
        if is_loose(replica):
            self._loose.add(replica.id)
        if replica.status() != before:
            self._roster.changed()

    # --- fencing again ------------------------------------------------------------------------------------------------------

    async def _fence_again(self) -> None:
        """A fenced replica that runs again, or lost its tombstone, is marked and paused anew."""
        loose, self._loose = self._loose, set()
        if not loose:
            return
        holder, timeouts = uuid.uuid4().hex, self._parts.timeouts
        try:
            await self._parts.turn.take(holder, busy="raise", limit_s=timeouts.status_s)
        except (RoundAborted, FleetTorn):
            return  # a round has begun: it pauses and marks everyone itself
        try:
            for replica in [each for each in self._roster.members if each.id in loose and is_loose(each)]:
                logger.warning("%s is fenced, and somebody resumed it; it is paused again", replica.id)
                await fence_engine(
                    replica,
                    tombstone(holder),
                    limit_s=timeouts.resume_s,
                    release=self._parts.settings.on_failure.release_requests,
                    timeline=Timeline(),
                    incarnation=replica.engine.facts.incarnation,
                )
        finally:
            self._parts.end_turn(holder)


def ailment(replica: Replica) -> str | None:
    """Why a replica that counts as whole (or is to be made so) cannot be trusted, going by what it last told; None if it can. Pure."""
    facts = replica.engine.facts
    if not facts.in_step:
        return f"its workers' replies are out of step with the calls ({facts.step_problem}); only a new engine in its place helps"
    if not replica.whole:
        return None
    if is_tombstone(facts.version):
        return f"found with the label {facts.version}: another session fenced it, or updates it"
    if any(worker.update_open for worker in facts.workers):
        return "another client began a weight update"
    if replica.brought and facts.version is not None and facts.version != replica.version:
        return f"its label is {facts.version!r} instead of {replica.version!r}: another client changed its weights"
    return None


def is_loose(replica: Replica) -> bool:
    """Whether a replica that this session fenced was let go by somebody else. Pure."""
    facts = replica.engine.facts
    if replica.state is not ReplicaState.QUARANTINED or not replica.fenced_by_us or replica.unanswered or not facts.in_step:
        return False
    runs = facts.paused is False and replica.engine.channel.supports(PAUSE)
    return runs or (facts.version is not None and not is_tombstone(facts.version))


async def actor_is_gone(facts: EngineFacts) -> bool:
    """Whether the actor that told these facts is dead for good. Of anything but an actor that cannot be told."""
    if facts.actor_id is None:
        return False
    actor = Process(job_id="", actor_id=facts.actor_id)
    return bool(await in_daemon_thread(lambda: actor.is_gone))
