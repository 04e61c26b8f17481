"""`bring`: move a set of replicas to one snapshot. The one primitive of this library.

::

    pause, mark                       barrier: all paused and marked       a failure: everything is put back, RoundAborted
    start, update, finish, outcome    barrier: all attested or fenced      a failure: that replica is fenced, the others go on
    commit (label), cache, resume     each on its own

From *mark* to *commit* an engine's version label is a tombstone: the engine itself is the durable record that its weights
are torn or not committed, whoever dies meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ray_weightsync.config import CachePolicy, FailurePolicy, PauseMode, Timeouts, is_tombstone
from ray_weightsync.engines.resolve import inspect
from ray_weightsync.errors import CallFailure
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.states import ReplicaEvent
from ray_weightsync.fleet.steps import StepFailed, Timeline, chain, step
from ray_weightsync.protocol.channel import FINISH, INIT, PAUSE, RESET_PREFIX_CACHE, RESUME, SET_VERSION, START, UPDATE
from ray_weightsync.protocol.fanout import fan_out
from ray_weightsync.report import ReplicaReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RoundSpec:
    """What a round is about. The same for every member.

    Attributes:
        round_id: Part of the tombstone and of every payload.
        epoch: Receivers refuse an older one.
        label: The version's label.
        num_bytes: Bytes moved to each replica; deadlines grow with them.
        update: The ``update_weights`` payload.
    """

    round_id: str
    epoch: int
    label: str
    num_bytes: int
    update: dict[str, Any]
    pause: PauseMode
    cache: CachePolicy
    timeouts: Timeouts
    policy: FailurePolicy

    @property
    def tombstone(self) -> str:
        return f"!rws:{self.round_id}"


class Aborted(Exception):
    """The round ended before *start* and was put back. ``failures`` names the culprits, ``stuck`` those that could not be put back."""

    def __init__(self, failures: dict[str, StepFailed], stuck: dict[str, StepFailed]) -> None:
        super().__init__("; ".join(f"{name}: {failure}" for name, failure in failures.items()))
        self.failures = failures
        self.stuck = stuck


@dataclass
class _Member:
    """One replica's course through the round: how it was found, what was done to it, how it fares."""

    replica: Replica
    paused_as_found: bool
    label_as_found: str | None
    pause_asked_at: float | None = None
    resumed_at: float | None = None
    marked: bool = False
    recomputed: int | None = 0
    failed: StepFailed | None = None

    @property
    def resume_is_ours(self) -> bool:
        """Whether this session must end the pause: it began it, or a dead session's tombstone says it was never ended."""
        return self.pause_asked_at is not None or self.replica.fenced_by_us


@dataclass
class Bring:
    """One run of the primitive. `run` reads from top to bottom."""

    spec: RoundSpec
    replicas: list[Replica]
    expected: Callable[[], Awaitable[dict[str, Any]]]
    """What the workers must have received; awaited between finish and outcome (while bytes still flow, it waits for the seal)."""
    on_phase: Callable[[str], None] = lambda phase: None
    timeline: Timeline = field(default_factory=Timeline)
    background: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self) -> list[ReplicaReport]:
        """Bring every replica to the snapshot, and say how each fared.

        Raises:
            Aborted: if not every replica could be paused and marked; they were put back as found.
        """
        members = [_found(replica) for replica in self.replicas]
        self.on_phase("pause")
        await self._all_or_put_back(members)

        self.on_phase("update")
        for member in members:
            member.replica.happen(ReplicaEvent.START)  # from here on only a complete, attested update makes it whole
        await self._each(members, self._apply, "update", self._apply_limit_s)
        await self._each([m for m in members if m.failed], self._fence, "fence", self.spec.timeouts.resume_s)

        self.on_phase("commit")
        whole = [member for member in members if not member.failed]
        await self._each(whole, self._commit, "commit", self._commit_limit_s)
        await self._each([m for m in whole if m.failed], self._fence, "fence", self.spec.timeouts.resume_s)
        return [self._report(member) for member in members]

    # --- before start: all, or put back -----------------------------------------------------------------------------------

    async def _all_or_put_back(self, members: list[_Member]) -> None:
        timeouts = self.spec.timeouts
        await self._each(members, self._pause_and_mark, "pause", timeouts.pause_s + timeouts.commit_s)
        culprits = {member.replica.id: member.failed for member in members if member.failed}
        if not culprits:
            return
        self.on_phase("abort")
        for member in members:
            member.failed = None
        await self._each(members, self._put_back, "put back", timeouts.commit_s + timeouts.resume_s)
        stuck = {member.replica.id: member.failed for member in members if member.failed}
        for member in members:
            if member.failed:
                member.replica.happen(ReplicaEvent.FAIL, error=f"not put back after an aborted round: {member.failed}")
                member.replica.fenced_by_us |= member.pause_asked_at is not None
        raise Aborted(culprits, stuck)

    async def _pause_and_mark(self, member: _Member) -> None:
        channel = member.replica.engine.channel
        if not member.paused_as_found and channel.supports(PAUSE):
            member.pause_asked_at = time.monotonic()
            # Success is the return of the call; clear_cache=False, since an aborted round must not cost anyone a cache.
            await self._step(member, "pause", PAUSE, mode=self.spec.pause, clear_cache=False, limit_s=self.spec.timeouts.pause_s)
        if channel.supports(SET_VERSION) and not self._in_one_call(member):
            member.marked = True
            await self._step(member, "mark", SET_VERSION, self.spec.tombstone, limit_s=self.spec.timeouts.commit_s)

    async def _put_back(self, member: _Member) -> None:
        if member.marked and member.label_as_found is not None:
            await self._step(member, "mark", SET_VERSION, member.label_as_found, limit_s=self.spec.timeouts.commit_s)
        if member.pause_asked_at is None or member.replica.fenced_by_us:
            return  # not our pause, or a replica that was torn before this round and stays fenced
        pending = [call for call in member.replica.unanswered if not call.done()]
        await self._step(member, "resume", RESUME, limit_s=self.spec.timeouts.resume_s)
        if pending:
            # That pause may take effect after our resume: undo it once more when it has been answered.
            task = asyncio.create_task(self._resume_after(member, pending))
            self.background.add(task)
            task.add_done_callback(self.background.discard)

    async def _resume_after(self, member: _Member, pending: list[asyncio.Future[Any]]) -> None:
        await asyncio.wait(pending)
        try:
            await self._step(member, "resume", RESUME, limit_s=self.spec.timeouts.resume_s)
        except StepFailed as failed:
            logger.error("%s may have been left paused: %s", member.replica.id, failed)
            member.replica.happen(ReplicaEvent.FAIL, error=f"left paused: {failed}")
            member.replica.fenced_by_us = True

    # --- between start and commit: each replica for itself ------------------------------------------------------------------

    async def _apply(self, member: _Member) -> None:
        timeouts, num_bytes = self.spec.timeouts, self.spec.num_bytes
        if self._in_one_call(member):
            await self._apply_in_one_call(member)
            return
        await self._step(member, "start", START, limit_s=timeouts.start_s)
        await self._step(member, "update", UPDATE, self.spec.update, limit_s=timeouts.for_bytes("update", num_bytes))
        await self._step(member, "finish", FINISH, limit_s=timeouts.for_bytes("finish", num_bytes))
        await self._step(member, "outcome", INIT, await self._outcome(), limit_s=timeouts.attest_s)

    async def _outcome(self) -> dict[str, Any]:
        return {
            "op": "outcome",
            "round": self.spec.round_id,
            "epoch": self.spec.epoch,
            "expected": await self.expected(),
            # The workers' own deadline for agreeing ends before ours, so that it is they who name the missing rank.
            "limit_s": self.spec.timeouts.attest_s * 0.8,
        }

    def _in_one_call(self, member: _Member) -> bool:
        """A synchronous LLM has no pause: what must not be interleaved with a request has to be one call of its actor."""
        return bool(member.replica.engine.facts.kind == "sync")

    async def _apply_in_one_call(self, member: _Member) -> None:
        """All of it in one turn of the actor, label and cache included: the next turn is a request's already.

        So this replica does not wait for the others to attest; under ``after_start="quarantine"`` they could not change its end.
        """
        channel, spec = member.replica.engine.channel, self.spec
        calls: list[tuple[str, tuple[str, tuple[Any, ...], dict[str, Any]]]] = [
            ("start", (START, (), {})),
            ("update", (UPDATE, (spec.update,), {})),
            ("finish", (FINISH, (), {})),
            ("outcome", (INIT, (await self._outcome(),), {})),
        ]
        if channel.supports(SET_VERSION):
            calls = [("mark", (SET_VERSION, (spec.tombstone,), {})), *calls, ("commit", (SET_VERSION, (spec.label,), {}))]
        if self._drops_caches(member):
            calls.append(("cache", (RESET_PREFIX_CACHE, (), self._reset_options(member))))
        answers = await chain(member.replica, "update", calls, limit_s=self._apply_limit_s, timeline=self.timeline)
        if "cache" in answers:
            self._require_dropped(answers["cache"])

    async def _fence(self, member: _Member) -> None:
        """Keep a torn replica from serving: paused, tombstone, out of the serving set; its frozen requests go back to their callers."""
        assert member.failed is not None
        replica, why = member.replica, member.failed
        replica.happen(ReplicaEvent.FAIL, error=str(why))
        replica.version = None
        replica.fenced_by_us = True
        if why.failure.kind == "died" or replica.unanswered:
            return  # gone, or not to be used before it has answered: its label and its pause stand as they are
        limit_s = self.spec.timeouts.resume_s
        try:
            if replica.engine.channel.supports(SET_VERSION):
                await self._step(member, "mark", SET_VERSION, self.spec.tombstone, limit_s=limit_s)
            if replica.engine.channel.supports(PAUSE):
                mode = "abort" if self.spec.policy.release_requests else "keep"
                await self._step(member, "pause", PAUSE, mode=mode, clear_cache=False, limit_s=limit_s)
        except StepFailed as failed:
            replica.error = f"{why}; and fencing it failed: {failed}"
            logger.error("%s could not be fenced: %s", replica.id, failed)

    # --- commit and after ---------------------------------------------------------------------------------------------------

    async def _commit(self, member: _Member) -> None:
        replica, timeouts = member.replica, self.spec.timeouts
        channel = replica.engine.channel
        if not self._in_one_call(member):
            if self.spec.cache == "recompute":
                member.recomputed = await self._requests_in_flight(member)
            if channel.supports(SET_VERSION):
                await self._step(member, "commit", SET_VERSION, self.spec.label, limit_s=timeouts.commit_s)
            if self._drops_caches(member):
                options = self._reset_options(member)
                self._require_dropped(await self._step(member, "cache", RESET_PREFIX_CACHE, limit_s=timeouts.commit_s, **options))
        replica.happen(ReplicaEvent.COMMIT)
        replica.version, replica.attested = self.spec.label, True
        if member.resume_is_ours and channel.supports(RESUME):
            await self._step(member, "resume", RESUME, limit_s=timeouts.resume_s)
            member.resumed_at = time.monotonic()
        replica.fenced_by_us = False

    async def _requests_in_flight(self, member: _Member) -> int | None:
        if member.replica.engine.facts.kind == "torch":
            return 0  # it has no KV cache
        return (await inspect(member.replica.engine, nonce=self.spec.round_id, limit_s=self.spec.timeouts.commit_s)).unfinished_requests

    def _drops_caches(self, member: _Member) -> bool:
        return self.spec.cache == "recompute" and member.replica.engine.channel.supports(RESET_PREFIX_CACHE)

    def _reset_options(self, member: _Member) -> dict[str, Any]:
        return {"reset_running_requests": True, "reset_connector": bool(member.replica.engine.facts.kv_connector)}

    def _require_dropped(self, answer: object) -> None:
        if answer is not True:
            message = f"{RESET_PREFIX_CACHE} answered {answer!r}: KV computed with the old weights might be used again"
            raise StepFailed("cache", CallFailure(message=message, kind="raised", elapsed_s=0.0), self.spec.timeouts.commit_s)

    # --- plumbing -----------------------------------------------------------------------------------------------------------

    async def _step(self, member: _Member, phase: str, verb: str, *args: Any, limit_s: float, **kwargs: Any) -> Any:
        return await step(member.replica, phase, verb, *args, limit_s=limit_s, timeline=self.timeline, **kwargs)

    async def _each(self, members: list[_Member], act: Callable[[_Member], Awaitable[None]], what: str, limit_s: float) -> None:
        """Run ``act`` for all members at once; a failure is kept with its member. Every step inside has its own deadline."""
        if not members:
            return
        calls = {member.replica.id: partial(act, member) for member in members}
        warn_every_s = self.spec.timeouts.warn_every_s
        limit_s = 2 * limit_s + warn_every_s
        outcomes = await fan_out(calls, what=f"round {self.spec.round_id}, {what}", limit_s=limit_s, warn_every_s=warn_every_s)
        for member in members:
            name = member.replica.id
            error = outcomes.errors.get(name)
            if name in outcomes.late:  # it may go on whenever what it waits for has come: not to be used before
                member.replica.left_unanswered(outcomes.late[name])
                member.failed = StepFailed(what, outcomes.failures[name], limit_s)
            elif isinstance(error, StepFailed):
                member.failed = error
            elif error is not None:
                raise error  # a bug of ours: the coordinator fences every member

    @property
    def _apply_limit_s(self) -> float:
        timeouts = self.spec.timeouts
        moving = timeouts.for_bytes("update", self.spec.num_bytes) + timeouts.for_bytes("finish", self.spec.num_bytes)
        return timeouts.start_s + moving + timeouts.attest_s

    @property
    def _commit_limit_s(self) -> float:
        return 3 * self.spec.timeouts.commit_s + self.spec.timeouts.resume_s

    def _report(self, member: _Member) -> ReplicaReport:
        paused = 0.0
        if member.pause_asked_at is not None:
            paused = (member.resumed_at or time.monotonic()) - member.pause_asked_at
        return ReplicaReport(
            id=member.replica.id,
            state=member.replica.state.value,
            version=member.replica.version,
            phases_s=dict(self.timeline.seconds[member.replica.id]),
            pause_s=paused,
            requests_recomputed=member.recomputed,
            failed_phase=member.failed.phase if member.failed else None,
            error=member.failed.failure.message if member.failed else None,
        )


def _found(replica: Replica) -> _Member:
    facts = replica.engine.facts
    return _Member(
        replica=replica, paused_as_found=bool(facts.paused), label_as_found=None if is_tombstone(facts.version) else facts.version
    )
