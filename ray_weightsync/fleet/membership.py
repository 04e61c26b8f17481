"""Membership: who joins, who leaves, and who sleeps. Rounds go by the members that they found when they began."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ray_weightsync.config import TOMBSTONE_PREFIX, require_choice
from ray_weightsync.engines.resolve import require_distinct
from ray_weightsync.errors import AttachError, ConfigError, WeightSyncError
from ray_weightsync.fleet.claims import identity_of
from ray_weightsync.fleet.parts import Parts
from ray_weightsync.fleet.preflight import look, told
from ray_weightsync.fleet.repair import Repair
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.states import ReplicaEvent, ReplicaState
from ray_weightsync.fleet.steps import Call, StepFailed, Timeline, chain
from ray_weightsync.protocol.channel import PAUSE, RESUME, SET_VERSION, SLEEP, WAKE_UP
from ray_weightsync.protocol.fanout import fan_out
from ray_weightsync.worker.identity import RESIDENT

if TYPE_CHECKING:
    from ray_weightsync.engines.facts import EngineFacts

logger = logging.getLogger(__name__)

DRAIN_POLL_S = 0.1
"""How often an engine that is to be drained is asked for its requests, in seconds."""


class Membership:
    """Joins and leaves of one session."""

    def __init__(self, parts: Parts, repair: Repair) -> None:
        self._parts = parts
        self._roster = parts.roster
        self._repair = repair

    # --- joining ------------------------------------------------------------------------------------------------------------

    async def add(self, replicas: Sequence[Replica]) -> tuple[str, ...]:
        """Take resolved engines in. What is committed is brought to them when the turn is free; until then they are JOINING.

        Asked again, by a caller who lost the answer, it answers the same.

        Raises:
            ConfigError: if an id is taken.
            SessionConflict: if another session has one of them.
            AttachError: if one is a member already, or somebody else has an update open on it. Nobody has joined.
        """
        if self._joined(replicas):
            return tuple(replica.id for replica in replicas)
        self._require_new(replicas, self._roster.members)
        await self._parts.claims.claim(replicas, limit_s=self._parts.timeouts.attach_s)
        try:
            self._roster.join(replicas)
        except BaseException:
            await self._parts.claims.release(replicas)
            raise
        self._parts.spawn(self._repair.bring_in(replicas))
        return tuple(replica.id for replica in replicas)

    async def replace(self, replica_id: str, replica: Replica) -> str:
        """Take a resolved engine in, in the place of a replica, which is retired.

        Raises:
            ConfigError: if there is no such replica, or it was let go by its user.
            SessionConflict, AttachError: as of `add`; the old one stays.
        """
        if self._joined([replica]) and self._roster.named(replica_id).replaced_by == replica.id:
            return replica.id
        old = self._replaceable(replica_id)
        self._require_new([replica], [each for each in self._roster.members if each is not old])
        turn = await self._turn("replace")
        try:
            self._replaceable(replica_id)  # somebody may have been faster
            await self._parts.claims.claim([replica], limit_s=self._parts.timeouts.attach_s)
            try:
                self._roster.join([replica])
            except BaseException:
                await self._parts.claims.release([replica])
                raise
            old.replaced_by = replica.id
            await self._retire(old, f"replaced by {replica.id}")
        finally:
            self._parts.end_turn(turn)
        self._parts.spawn(self._repair.bring_in([replica]))
        return replica.id

    def _joined(self, replicas: Sequence[Replica]) -> bool:
        """Whether they are members already, by these ids."""
        known = [self._roster.replicas.get(replica.id) for replica in replicas]
        return all(
            old is not None and old in self._roster.members and identity_of(old.engine.facts) == identity_of(new.engine.facts) is not None
            for old, new in zip(known, replicas, strict=True)
        )

    def _replaceable(self, replica_id: str) -> Replica:
        old = self._roster.named(replica_id)
        if old.leaving or (old.state is ReplicaState.RETIRED and (not old.lost or old.replaced_by is not None)):
            successor = f" and {old.replaced_by} is in its place" if old.replaced_by is not None else ""
            raise ConfigError(f"{replica_id} has left the fleet{successor}; add() brings more engines in")
        return old

    def _require_new(self, replicas: Sequence[Replica], members: Sequence[Replica]) -> None:
        require_distinct([each.engine for each in (*members, *replicas)])
        for replica in replicas:
            if any(worker.update_open for worker in replica.engine.facts.workers):
                raise AttachError(
                    f"{replica.id} has a weight update open that another client started; it was left as found.",
                    phase="add",
                    replicas=(replica.id,),
                    hint="end it there, or start the engine anew",
                )

    # --- leaving ------------------------------------------------------------------------------------------------------------

    async def remove(self, replica_id: str, *, drain_s: float | None = None) -> None:
        """Let a replica go: no new requests from now on, no further round. Its engine is left running as it is.

        Args:
            replica_id: Whom.
            drain_s: Seconds to wait for the end of its requests, after the round in progress. None waits for none.

        Raises:
            ConfigError: if there is no such replica, or nobody would be left. One that has left already is no error.
            RoundAborted: if a round does not end; the replica stays.
        """
        replica = self._roster.named(replica_id)
        if replica.state is ReplicaState.RETIRED:
            return
        if self._roster.members == [replica]:
            raise ConfigError(
                f"{replica_id} is the last replica of this session; it was not removed",
                hint="replace() it, add() another one first, or close() the session, which leaves the engine running",
            )
        replica.leaving = True
        self._roster.changed()
        try:
            turn = await self._turn("remove")
        except BaseException:
            replica.leaving = False
            self._roster.changed()
            raise
        try:
            if replica.state is not ReplicaState.RETIRED:  # somebody may have been faster
                await self._retire(replica, "removed")
        finally:
            self._parts.end_turn(turn)
        if drain_s is not None:
            await self._drain(replica, drain_s)

    async def _retire(self, replica: Replica, why: str) -> None:
        if replica.state is not ReplicaState.RETIRED:
            replica.happen(ReplicaEvent.RETIRE, error=why)
        replica.leaving = False
        self._roster.changed()
        await self._parts.claims.release([replica])

    async def _drain(self, replica: Replica, limit_s: float) -> None:
        """Wait for the end of its requests; those of a paused engine do not end."""
        began = time.monotonic()
        while True:
            left_s = limit_s - (time.monotonic() - began)
            try:
                facts = await told(replica, limit_s=max(left_s, DRAIN_POLL_S))
            except StepFailed as failed:
                logger.warning("%s is not waited for: %s", replica.id, failed)
                return
            if not facts.unfinished_requests or facts.paused:
                return
            if left_s <= 0:
                logger.warning("%s still has %d requests after %.1f s", replica.id, facts.unfinished_requests, limit_s)
                return
            await asyncio.sleep(min(DRAIN_POLL_S, left_s))

    # --- sleeping -----------------------------------------------------------------------------------------------------------

    async def sleep(self, level: int) -> None:
        """Put every engine that can to sleep; see `WeightSync.sleep`."""
        require_choice("level", level, (1, 2))
        await self._each_in_turn(SLEEP, partial(self._put_to_sleep, level=level))

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        """Wake every engine that can sleep up; see `WeightSync.wake_up`."""
        for tag in tags or ():
            require_choice("tags", tag, RESIDENT)
        await self._each_in_turn(WAKE_UP, partial(self._wake, tags=None if tags is None else list(tags)))

    async def _put_to_sleep(self, replica: Replica, *, level: int) -> None:
        await self._look(replica)
        found = replica.engine.facts
        calls = [Call(SLEEP, self._parts.timeouts.finish_s, SLEEP, (level,))]
        if level > 1 and replica.engine.channel.supports(SET_VERSION):
            # Its label must not outlive its weights: whoever wakes it up would serve whatever is in that memory under a valid version.
            calls.insert(0, Call("mark", self._parts.timeouts.commit_s, SET_VERSION, (f"{TOMBSTONE_PREFIX}asleep",)))
        try:
            await self._chain(replica, SLEEP, calls)
        except StepFailed as failed:
            await self._undo_sleep(replica, found, failed, level=level)
            raise
        if level > 1:
            self._lost_weights(replica, "its weights were given up by sleep(level=2); a round or a repair brings them back")
        replica.asleep_tags = set(RESIDENT)
        await self._look(replica)

    async def _undo_sleep(self, replica: Replica, found: EngineFacts, failed: StepFailed, *, level: int) -> None:
        """Leave one that did not go to sleep as it was found; one of which that is not known counts as having no weights."""
        why = f"it may have given up its weights: {failed}"
        calls = []
        if level > 1 and found.version is not None:
            calls.append(Call("mark", self._parts.timeouts.commit_s, SET_VERSION, (found.version,)))
        if found.paused is False and replica.engine.channel.supports(RESUME):
            calls.append(Call("resume", self._parts.timeouts.resume_s, RESUME))
        try:
            if failed.failure.kind == "raised":
                await self._look(replica)
                if not replica.asleep:
                    return await self._chain(replica, SLEEP, calls)
        except StepFailed as again:
            why = f"{why}; and it could not be left as it was: {again}"
        if level > 1:
            self._lost_weights(replica, why)
        else:
            replica.asleep_tags = set(RESIDENT)

    def _lost_weights(self, replica: Replica, why: str) -> None:
        replica.happen(ReplicaEvent.FAIL, error=why)
        replica.version, replica.fenced_by_us = None, True

    async def _wake(self, replica: Replica, *, tags: list[str] | None) -> None:
        calls = [Call(WAKE_UP, self._parts.timeouts.finish_s, WAKE_UP, (tags,))]
        if replica.fenced_by_us and replica.engine.channel.supports(PAUSE):
            # An engine that is fully awake runs; this one must not before it has weights.
            calls.append(Call(WAKE_UP, self._parts.timeouts.pause_s, PAUSE, kwargs={"mode": "keep", "clear_cache": False}))
        await self._chain(replica, WAKE_UP, calls)
        replica.asleep_tags -= set(RESIDENT if tags is None else tags)
        await self._look(replica)

    async def _chain(self, replica: Replica, phase: str, calls: list[Call]) -> None:
        if calls:
            await chain(replica, phase, calls, incarnation=replica.engine.facts.incarnation, timeline=Timeline())

    async def _look(self, replica: Replica) -> None:
        await look(replica, timeouts=self._parts.timeouts, timeline=Timeline())

    async def _each_in_turn(self, verb: str, act: Callable[[Replica], Awaitable[None]]) -> None:
        """``act`` for every member that has ``verb``, at once. All are asked before one that failed is told.

        Raises:
            ConfigError: if no member has it.
            RoundAborted: if a round does not end.
            WeightSyncError: naming those that failed. One that is fenced is no reason: it may be dead.
        """
        timeouts = self._parts.timeouts
        turn = await self._turn(verb)
        try:
            able = [each for each in self._roster.members if each.engine.channel.supports(verb) and not each.unanswered]
            if not able:
                raise ConfigError(
                    f"no replica of this session can {verb.replace('_', ' ')}", hint="an engine has to have vLLM's sleep mode"
                )
            fenced = {replica.id for replica in able if replica.state is ReplicaState.QUARANTINED}
            limit_s = timeouts.finish_s + timeouts.pause_s + 2 * timeouts.commit_s + timeouts.resume_s + 3 * timeouts.preflight_s
            outcomes = await fan_out(
                {replica.id: partial(act, replica) for replica in able}, what=verb, limit_s=limit_s, warn_every_s=timeouts.warn_every_s
            )
            for name, late in outcomes.late.items():
                self._roster.replicas[name].left_unanswered(late)
        finally:
            self._parts.end_turn(turn)
        for error in outcomes.errors.values():
            if not isinstance(error, StepFailed):
                raise error
        failures = {name: failure for name, failure in outcomes.failures.items() if name not in fenced}
        if failures:
            raise WeightSyncError(
                f"Not every engine did {verb}: {', '.join(failures)} did not, the others did.",
                phase=verb,
                replicas=tuple(failures),
                limit_s=limit_s,
                engine_message="; ".join(f"{name}: {failure.message or outcomes.errors.get(name)}" for name, failure in failures.items()),
                hint="vLLM sleeps only if started with enable_sleep_mode=True; see status()",
            )

    async def _turn(self, what: str) -> str:
        """Wait for the turn, and say who has it."""
        holder = f"{what}-{uuid.uuid4().hex}"
        await self._parts.turn.take(holder, busy="wait", limit_s=self._repair.longest_turn_s)
        self._roster.changed(what)
        return holder
