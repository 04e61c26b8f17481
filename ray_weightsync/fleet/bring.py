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
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ray_weightsync.errors import CallFailure
from ray_weightsync.fleet.fence import fence, same_process
from ray_weightsync.fleet.putback import put_back
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.round import Aborted, Member, RoundSpec
from ray_weightsync.fleet.states import ReplicaEvent
from ray_weightsync.fleet.steps import StepFailed, Timeline, chain, step
from ray_weightsync.protocol.channel import (
    FINISH,
    INIT,
    PAUSE,
    RESET_ENCODER_CACHE,
    RESET_MM_CACHE,
    RESET_PREFIX_CACHE,
    RESUME,
    SET_VERSION,
    START,
    UPDATE,
)
from ray_weightsync.protocol.fanout import fan_out
from ray_weightsync.report import ReplicaReport


@dataclass
class Bring:
    """One run of the primitive. `run` reads from top to bottom."""

    spec: RoundSpec
    replicas: list[Replica]
    expected: Callable[[], Awaitable[dict[str, Any]]]
    """What the workers must have received; awaited between finish and outcome (while bytes still flow, it waits for the seal)."""
    on_phase: Callable[[str], None] = lambda phase: None
    timeline: Timeline = field(default_factory=Timeline)

    async def run(self) -> list[ReplicaReport]:
        """Bring every replica to the snapshot, and say how each fared.

        Raises:
            Aborted: if not every replica could be paused and marked; they were put back as found.
        """
        members = [Member.found(replica) for replica in self.replicas]
        timeouts = self.spec.timeouts
        self.on_phase("pause")
        await self._each(members, self._pause_and_mark, "pause", timeouts.pause_s + timeouts.commit_s)
        if any(member.failed for member in members):
            self.on_phase("abort")
            await self._put_all_back(members)

        self.on_phase("update")
        for member in members:
            member.replica.happen(ReplicaEvent.START)  # from here on only a complete, attested update makes it whole
        await self._each(members, self._apply, "update", self.spec.apply_limit_s + 2 * timeouts.resume_s, fence_who_fails=True)

        self.on_phase("commit")
        whole = [member for member in members if not member.failed]
        await self._each(whole, self._commit, "commit", 3 * timeouts.commit_s + 3 * timeouts.resume_s, fence_who_fails=True)
        return [member.report(dict(self.timeline.seconds[member.replica.id])) for member in members]

    # --- before start: all, or put back -----------------------------------------------------------------------------------

    async def _pause_and_mark(self, member: Member) -> None:
        channel, timeouts = member.replica.engine.channel, self.spec.timeouts
        if channel.supports(PAUSE):
            # Asked for even where it is paused already, which changes nothing: its owner may resume it at any moment.
            mode = "keep" if member.paused_as_found else self.spec.pause
            member.pause_asked_at = time.monotonic()
            # Success is the return of the call; clear_cache=False, since an aborted round must not cost anyone a cache.
            await self._step(member, "pause", PAUSE, mode=mode, clear_cache=False, limit_s=timeouts.pause_s)
        if channel.supports(SET_VERSION) and not self._in_one_call(member):
            member.marked = True
            await self._step(member, "mark", SET_VERSION, self.spec.tombstone, limit_s=timeouts.commit_s)

    async def _put_all_back(self, members: list[Member]) -> None:
        culprits = {member.replica.id: member.failed for member in members if member.failed}
        for member in members:
            member.failed = None
        act = partial(put_back, spec=self.spec, timeline=self.timeline)
        await self._each(members, act, "put back", 3 * self.spec.timeouts.commit_s + 3 * self.spec.timeouts.resume_s)
        raise Aborted(culprits, {member.replica.id: member.failed for member in members if member.failed})

    # --- between start and commit: each replica for itself ------------------------------------------------------------------

    async def _apply(self, member: Member) -> None:
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

    def _in_one_call(self, member: Member) -> bool:
        """A synchronous LLM has no pause: what must not be interleaved with a request has to be one call of its actor."""
        return bool(member.replica.engine.facts.kind == "sync")

    async def _apply_in_one_call(self, member: Member) -> None:
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
            calls.extend(("cache", (verb, (), {})) for verb in self._multimodal_resets(member))
            calls.append(("cache", (RESET_PREFIX_CACHE, (), self._reset_options(member))))
        answers = await chain(member.replica, "update", calls, limit_s=spec.apply_limit_s, timeline=self.timeline)
        if "cache" in answers:
            self._require_dropped(answers["cache"])

    # --- commit and after ---------------------------------------------------------------------------------------------------

    async def _commit(self, member: Member) -> None:
        replica, timeouts = member.replica, self.spec.timeouts
        channel = replica.engine.channel
        # Of one that did it all in one turn, label, cache and proof are of one process; another call would wait behind its requests.
        if not self._in_one_call(member):
            if channel.supports(SET_VERSION):
                await self._step(member, "commit", SET_VERSION, self.spec.label, limit_s=timeouts.commit_s)
            # Beside one another: neither changes what the other finds, and every call here is part of the pause.
            looking = same_process(member, "commit", limit_s=timeouts.commit_s, timeline=self.timeline)
            results = await asyncio.gather(looking, self._drop_caches(member), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
        if self._drops_caches(member):
            member.recomputed = replica.engine.facts.unfinished_requests
        replica.happen(ReplicaEvent.COMMIT)
        replica.version, replica.attested = self.spec.label, True
        if member.resume_is_ours and channel.supports(RESUME):
            await self._step(member, "resume", RESUME, limit_s=timeouts.resume_s)
            member.resumed_at = time.monotonic()
        replica.fenced_by_us = False

    def _drops_caches(self, member: Member) -> bool:
        """A `TorchEngine` keeps nothing between two requests."""
        engine = member.replica.engine
        return self.spec.cache == "recompute" and engine.facts.kind != "torch" and engine.channel.supports(RESET_PREFIX_CACHE)

    def _multimodal_resets(self, member: Member) -> list[str]:
        """Calls that drop what images became under the old weights."""
        engine = member.replica.engine
        return [verb for verb in (RESET_MM_CACHE, RESET_ENCODER_CACHE) if engine.facts.is_multimodal and engine.channel.supports(verb)]

    def _reset_options(self, member: Member) -> dict[str, Any]:
        return {"reset_running_requests": True, "reset_connector": bool(member.replica.engine.facts.kv_connector)}

    async def _drop_caches(self, member: Member) -> None:
        if not self._drops_caches(member):
            return
        limit_s = self.spec.timeouts.commit_s
        for verb in self._multimodal_resets(member):
            await self._step(member, "cache", verb, limit_s=limit_s)
        self._require_dropped(await self._step(member, "cache", RESET_PREFIX_CACHE, limit_s=limit_s, **self._reset_options(member)))

    def _require_dropped(self, answer: object) -> None:
        if answer is not True:
            message = f"{RESET_PREFIX_CACHE} answered {answer!r}: KV computed with the old weights might be used again"
            raise StepFailed("cache", CallFailure(message=message, kind="raised", elapsed_s=0.0), self.spec.timeouts.commit_s)

    # --- plumbing -----------------------------------------------------------------------------------------------------------

    async def _step(self, member: Member, phase: str, verb: str, *args: Any, limit_s: float, **kwargs: Any) -> Any:
        return await step(member.replica, phase, verb, *args, limit_s=limit_s, timeline=self.timeline, **kwargs)

    async def _each(
        self, members: list[Member], act: Callable[[Member], Awaitable[None]], what: str, limit_s: float, *, fence_who_fails: bool = False
    ) -> None:
        """Run ``act`` for all members at once; a failure is kept with its member. Every step inside has its own deadline.

        With ``fence_who_fails`` a member that fails is fenced at once: its requests are not to wait for the slowest of the others.
        """
        if not members:
            return

        async def run(member: Member) -> None:
            try:
                await act(member)
            except StepFailed as failed:
                member.failed = failed
                if fence_who_fails:
                    await fence(member.replica, failed, spec=self.spec, timeline=self.timeline)

        calls = {member.replica.id: partial(run, member) for member in members}
        warn_every_s = self.spec.timeouts.warn_every_s
        limit_s = 2 * limit_s + warn_every_s
        outcomes = await fan_out(calls, what=f"round {self.spec.round_id}, {what}", limit_s=limit_s, warn_every_s=warn_every_s)
        for member in members:
            name = member.replica.id
            if name in outcomes.late:  # it may go on whenever what it waits for has come: not to be used before
                member.replica.left_unanswered(outcomes.late[name])
                member.failed = StepFailed(what, outcomes.failures[name], limit_s)
                if fence_who_fails:
                    await fence(member.replica, member.failed, spec=self.spec, timeline=self.timeline)
            elif name in outcomes.errors:
                raise outcomes.errors[name]  # a bug of ours: the coordinator fences every member
