"""Sleep: engines that give up memory to a trainer beside them, and what they count as until they are awake and whole again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ray_weightsync.config import require_choice, tombstone
from ray_weightsync.errors import ConfigError, WeightSyncError
from ray_weightsync.fleet.parts import Parts
from ray_weightsync.fleet.preflight import look
from ray_weightsync.fleet.repair import Repair
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.states import ReplicaState
from ray_weightsync.fleet.steps import Call, StepFailed, Timeline, chain
from ray_weightsync.protocol.channel import PAUSE, RESUME, SET_VERSION, SLEEP, WAKE_UP
from ray_weightsync.protocol.fanout import fan_out
from ray_weightsync.worker.identity import RESIDENT

if TYPE_CHECKING:
    from ray_weightsync.engines.facts import EngineFacts


class SleepMode:
    """The sleep of one session's engines."""

    def __init__(self, parts: Parts, repair: Repair) -> None:
        self._parts = parts
        self._roster = parts.roster
        self._repair = repair

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
        await self._parts.claims.follow([replica])
        if replica.state is ReplicaState.RETIRED:
            return  # it restarted, and is another session's by now
        found = replica.engine.facts
        calls = [Call(SLEEP, self._parts.timeouts.finish_s, SLEEP, (level,))]
        if level > 1 and replica.engine.channel.supports(SET_VERSION):
            # Its label must not outlive its weights: whoever wakes it up would serve whatever is in that memory under a valid version.
            calls.insert(0, Call("mark", self._parts.timeouts.commit_s, SET_VERSION, (tombstone("asleep"),)))
        try:
            await self._chain(replica, SLEEP, calls)
        except StepFailed as failed:
            await self._undo_sleep(replica, found, failed, level=level)
            raise
        if level > 1:
            replica.lose_weights("its weights were given up by sleep(level=2); a round or a repair brings them back")
        replica.asleep_tags = set(RESIDENT)
        await self._look(replica)

    async def _undo_sleep(self, replica: Replica, found: EngineFacts, failed: StepFailed, *, level: int) -> None:
        """Leave one that did not go to sleep as it was found; one of which that is not known counts as having no weights."""
        why = f"it may have given up its weights: {failed}"
        fenced, left = replica.fenced_by_us, replica.left  # the look below finds our own mark, which tells of nobody's round
        calls = []
        if level > 1 and found.version is not None:
            calls.append(Call("mark", self._parts.timeouts.commit_s, SET_VERSION, (found.version,)))
        if found.paused is False and replica.engine.channel.supports(RESUME):
            calls.append(Call("resume", self._parts.timeouts.resume_s, RESUME))
        try:
            if failed.failure.kind == "raised":
                await self._look(replica)
                if replica.engine.facts.incarnation != found.incarnation:
                    return  # what was found is not of the process that answers now: that one never had this label
                if not replica.asleep:
                    await self._chain(replica, SLEEP, calls)
                    replica.fenced_by_us, replica.left = fenced, left
                    replica.engine = replica.engine.with_facts(found)
                    return
        except StepFailed as again:
            why = f"{why}; and it could not be left as it was: {again}"
        if level > 1:
            replica.lose_weights(why)
        else:
            replica.asleep_tags = set(RESIDENT)

    async def _wake(self, replica: Replica, *, tags: list[str] | None) -> None:
        calls = [Call(WAKE_UP, self._parts.timeouts.finish_s, WAKE_UP, (tags,))]
        if replica.fenced_by_us and replica.engine.channel.supports(PAUSE):
            # An engine that is fully awake runs; this one must not before it has weights.
            calls.append(Call(WAKE_UP, self._parts.timeouts.pause_s, PAUSE, kwargs={"mode": "keep", "clear_cache": False}))
        await self._chain(replica, WAKE_UP, calls)
        replica.asleep_tags = replica.asleep_tags.difference(RESIDENT if tags is None else tags)
        await self._look(replica)
        if not replica.asleep:
            replica.owner_paused = False  # being awake ended their pause; if it is paused now, then by the call above

    async def _chain(self, replica: Replica, phase: str, calls: list[Call]) -> None:
        if calls:
            await chain(replica, phase, calls, incarnation=replica.engine.facts.incarnation, timeline=Timeline())

    async def _look(self, replica: Replica) -> None:
        await look(replica, timeouts=self._parts.timeouts, timeline=Timeline())

    async def _each_in_turn(self, verb: str, act: Callable[[Replica], Awaitable[None]]) -> None:
        """``act`` for every member that has ``verb``, at once. All are asked before one that failed is told.

        Raises:
            ConfigError: if no member has it.
            RoundAborted, FleetTorn: if a round does not end.
            WeightSyncError: naming those that failed. One that is fenced is no reason: it may be dead.
        """
        timeouts = self._parts.timeouts
        turn = await self._repair.turn(verb)
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
                f"Not every engine did {verb}: {', '.join(failures)} did not, {', '.join(outcomes.answers) or 'none'} did.",
                phase=verb,
                replicas=tuple(failures),
                limit_s=limit_s,
                engine_message="; ".join(f"{name}: {failure.message or outcomes.errors.get(name)}" for name, failure in failures.items()),
                hint="vLLM sleeps only if started with enable_sleep_mode=True; see status()",
            )
