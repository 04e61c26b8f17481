"""`bring`: move a set of replicas to one snapshot. The one primitive of this library.

::

    pause, mark                       barrier: all paused and marked       a failure: everything is put back, RoundAborted
    start, update, finish, outcome    barrier: all attested or fenced      a failure: that replica is fenced, the others go on
    commit (label), cache, resume     each on its own

Each line is one chain of calls: one trip to an engine whose actor carries it out by itself. From *mark* to *commit* an engine's version
label is a tombstone: the engine itself is the durable record that its weights are torn or not committed, whoever dies meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ray_weightsync.fleet.fence import fence
from ray_weightsync.fleet.publication import drops_caches, publication, require_dropped, resumption
from ray_weightsync.fleet.putback import put_back
from ray_weightsync.fleet.relay import Ended, Relay
from ray_weightsync.fleet.replica import Left, Replica
from ray_weightsync.fleet.round import Aborted, Member, NotAll, RoundLog, RoundSpec
from ray_weightsync.fleet.states import ReplicaEvent, ReplicaState
from ray_weightsync.fleet.steps import Call, StepFailed, chain
from ray_weightsync.fleet.stock import leaves_out_of_step
from ray_weightsync.protocol.channel import (
    FINISH,
    GET_VERSION,
    INIT,
    IS_PAUSED,
    PAUSE,
    SET_VERSION,
    START,
    UPDATE,
)
from ray_weightsync.protocol.fanout import fan_out
from ray_weightsync.report import ReplicaReport

Payloads = Callable[[Sequence[Replica]], Mapping[str, dict[str, Any]]]
"""Makes the ``update_weights`` payloads of those who are about to start, by id. `StepFailed` if they cannot."""


@dataclass
class Bring:
    """One run of the primitive. `run` reads from top to bottom."""

    spec: RoundSpec
    replicas: list[Replica]
    payloads: Payloads
    expected: Callable[[], Awaitable[dict[str, Any]]]
    """What the workers must have received, once the snapshot is sealed. Awaited before *start*; with ``overlap``, before *outcome*."""
    log: RoundLog
    on_phase: Callable[[str], None] = lambda phase: None
    on_lost: Callable[[str, str], None] = lambda replica, why: None
    """Told of each member that failed after *start*: its id, and why."""
    relay: Relay | None = None
    """What gives the calls from start to finish, if the sender's own engine does; it sets itself up before them."""

    async def run(self) -> list[ReplicaReport]:
        """Bring every replica to the snapshot, and say how each fared.

        Raises:
            NotAll: if some failed after *start*, and the round is for all or none; the others still wait under their tombstones.
            Aborted: if not every replica could be paused and marked, or the snapshot was not sealed; all were put back as found.
        """
        members = [Member.found(replica) for replica in self.replicas]
        timeouts = self.spec.timeouts
        self.on_phase("pause")
        await self._each(members, self._pause_and_mark, "pause", 2 * timeouts.preflight_s + timeouts.pause_s + timeouts.commit_s)
        members = await self._without_the_fenced(members)
        updates: Mapping[str, dict[str, Any]] = {}
        culprits = {member.replica.id: member.failed for member in members if member.failed} or await self._unsealed()
        if not culprits and members:
            try:
                updates = self.payloads([member.replica for member in members])
            except StepFailed as refused:
                culprits = {"sender": refused}
            else:
                culprits = await self._not_set_up(members)
        if culprits:
            self.on_phase("abort")
            await self._put_all_back(members, culprits)

        self.on_phase("update")
        for member in members:
            member.replica.happen(ReplicaEvent.START)  # from here on only a complete, attested update makes it whole
        apply = partial(self._apply, updates=updates)
        limit_s = self.spec.apply_limit_s + 3 * timeouts.commit_s + 2 * timeouts.resume_s
        limit_s += self.relay.limit_s if self.relay is not None else 0.0
        await self._each(members, apply, "update", limit_s, fence_who_fails=True)

        failed = {member.replica.id: member.failed for member in members if member.failed}
        if failed and self.spec.all_or_none:
            raise NotAll(failed)
        self.on_phase("commit")
        whole = [member for member in members if not member.failed]
        await self._each(whole, self.commit, "commit", 3 * timeouts.commit_s + 3 * timeouts.resume_s, fence_who_fails=True)
        return [member.report(dict(self.log.timeline.seconds[member.replica.id])) for member in members]

    # --- before start: all, or put back -----------------------------------------------------------------------------------

    async def _pause_and_mark(self, member: Member) -> None:
        channel, timeouts = member.replica.engine.channel, self.spec.timeouts
        calls = []
        if channel.supports(PAUSE):
            # In the same trip, so that nobody can come between the answers and the pause.
            calls = [Call("pause", timeouts.preflight_s, verb) for verb in (IS_PAUSED, GET_VERSION) if channel.supports(verb)]
            # Asked for even where it is paused already, which changes nothing: its owner may resume it at any moment.
            mode = "keep" if member.paused_as_found else self.spec.pause
            # Success is the return of the call; clear_cache=False, since an aborted round must not cost anyone a cache.
            calls.append(Call("pause", timeouts.pause_s, PAUSE, kwargs={"mode": mode, "clear_cache": False}))
            member.pause_asked_at = time.monotonic()
        if channel.supports(SET_VERSION) and not _in_one_turn(member):
            calls.append(Call("mark", timeouts.commit_s, SET_VERSION, (self.spec.tombstone,)))
        marks = any(call.phase == "mark" for call in calls)
        try:
            member.found_again(await self._chain(member, "pause", calls))
        except StepFailed as failed:
            member.marked = marks and (failed.phase == "mark" or failed.goes_on)  # perhaps: putting the label back does no harm
            raise
        member.marked = marks

    async def _without_the_fenced(self, members: list[Member]) -> list[Member]:
        """Those who take part. One that was fenced before, and still cannot be paused, keeps nobody else from the version."""
        out = [member for member in members if member.failed and member.replica.state is ReplicaState.QUARANTINED]
        if len(out) == len(members):
            return members
        for member in out:
            assert member.failed is not None
            self.log.notes.append(f"{member.replica.id} left out: {member.failed}")
            await fence(member.replica, member.failed, spec=self.spec, timeline=self.log.timeline)
        return [member for member in members if member not in out]

    async def _unsealed(self) -> dict[str, StepFailed]:
        """What became of the snapshot, if it is not sealed. Sealing ran beside the pause, and has a deadline of its own."""
        if not self.spec.overlap:
            try:
                await self.expected()
            except StepFailed as failed:
                return {"sender": failed}
        return {}

    async def _not_set_up(self, members: list[Member]) -> dict[str, StepFailed]:
        """Who keeps the sender's engine from being ready: those whose end of it was not set up, or the sender."""
        if (relay := self.relay) is None:
            return {}

        async def set_up(member: Member) -> None:
            await relay.set_up(member.replica, partial(self._chain, member))

        await self._each(members, set_up, "init", relay.limit_s)
        failed = {member.replica.id: member.failed for member in members if member.failed}
        theirs = {name: failure for name, failure in failed.items() if not isinstance(failure, Ended)}
        return theirs or dict(zip(("sender",), failed.values(), strict=False))  # it tells each of them the same

    async def _put_all_back(self, members: list[Member], culprits: dict[str, StepFailed]) -> None:
        for member in members:
            member.failed = None

        async def undo(member: Member) -> None:
            why = culprits.get(member.replica.id)
            if why is not None and leaves_out_of_step(member.replica, why):
                await fence(member.replica, why, spec=self.spec, timeline=self.log.timeline)
                member.replica.left = Left.UNKNOWN
                raise why
            await put_back(member, spec=self.spec, timeline=self.log.timeline)

        await self._each(members, undo, "put back", 3 * self.spec.timeouts.commit_s + 3 * self.spec.timeouts.resume_s)
        raise Aborted(culprits, {member.replica.id: member.failed for member in members if member.failed})

    # --- between start and commit: each replica for itself ------------------------------------------------------------------

    async def _apply(self, member: Member, updates: Mapping[str, dict[str, Any]]) -> None:
        timeouts, num_bytes = self.spec.timeouts, self.spec.num_bytes
        if self.relay is not None:
            await self.relay.update(member.replica, partial(self._chain, member))
            outcome = await self._outcome()  # a sender that failed says so here, also of those whom nobody can ask
            if not member.replica.engine.facts.is_stock:
                await self._chain(member, "outcome", [outcome])
            return
        update = updates.get(member.replica.id)
        if update is None:  # with overlap, bytes are on their way to its node while it is paused
            why = "the copy on its node was given up meanwhile"
            raise StepFailed.refused("update", why, timeouts.for_bytes("update", num_bytes))
        calls = [
            Call("start", timeouts.start_s, START),
            Call("update", timeouts.for_bytes("update", num_bytes), UPDATE, (update,)),
            Call("finish", timeouts.for_bytes("finish", num_bytes), FINISH),
        ]
        if _in_one_turn(member):
            await self._apply_in_one_turn(member, [*calls, await self._outcome()])
        elif self.spec.overlap:
            await self._chain(member, "update", calls)
            await self._chain(member, "outcome", [await self._outcome()])
        else:
            calls.append(await self._outcome())
            # With nobody to wait for, and no answer to judge in between, the rest is of the same trip: what raises ends it.
            goes_on = len(self.replicas) == 1 and not drops_caches(self.spec, member.replica)
            await self._chain(
                member, "update", [*calls, *publication(self.spec, member.replica), *resumption(self.spec, member)] if goes_on else calls
            )
            member.published = member.resumed = goes_on

    async def _outcome(self) -> Call:
        limit_s = self.spec.timeouts.attest_s
        info = {
            "op": "outcome",
            "round": self.spec.round_id,
            "epoch": self.spec.epoch,
            "expected": await self.expected(),
            # The workers' own deadline for agreeing ends before ours, so that it is they who name the missing rank.
            "limit_s": limit_s * 0.8,
        }
        return Call("outcome", limit_s, INIT, (info,))

    async def _apply_in_one_turn(self, member: Member, calls: list[Call]) -> None:
        """All of it in one turn of the actor, label and cache included: the next turn is a request's already.

        So this replica does not wait for the others to attest; under ``after_start="quarantine"`` they could not change its end, and under
        ``"all_or_none"`` it is not attached. Before its first call the turn waits for requests, as long as all of it may take.
        """
        if member.replica.engine.channel.supports(SET_VERSION):
            calls.insert(0, Call("mark", self.spec.timeouts.commit_s, SET_VERSION, (self.spec.tombstone,)))
        calls = [replace(calls[0], limit_s=self.spec.apply_limit_s), *calls[1:], *publication(self.spec, member.replica)]
        require_dropped(self.spec, member, await self._chain(member, "update", calls))
        member.published = True

    # --- commit and after ---------------------------------------------------------------------------------------------------

    async def commit(self, member: Member) -> None:
        """Let a member whose weights are attested serve them.

        Raises:
            StepFailed: if it could not be; it is to be fenced.
        """
        replica, calls = member.replica, []
        if not member.published:
            calls = publication(self.spec, member.replica)
            if drops_caches(self.spec, member.replica):
                # Not in one chain with the resume: a reset may answer False, and then nothing may run.
                require_dropped(self.spec, member, await self._chain(member, "commit", calls))
                calls = []
        if not member.resumed:
            calls.extend(resumption(self.spec, member))
        await self._chain(member, calls[0].phase if calls else "commit", calls)
        member.resumed_at = time.monotonic()
        replica.hold(self.spec.label, attested=self.spec.attested and not replica.engine.facts.is_stock)

    # --- plumbing -----------------------------------------------------------------------------------------------------------

    async def _chain(self, member: Member, phase: str, calls: list[Call]) -> dict[str, Any]:
        if not calls:
            return {}
        return await chain(member.replica, phase, calls, incarnation=member.incarnation, timeline=self.log.timeline)

    async def _each(
        self, members: list[Member], act: Callable[[Member], Awaitable[None]], what: str, limit_s: float, *, fence_who_fails: bool = False
    ) -> None:
        """Run ``act`` for all members at once; a failure is kept with its member. Every step inside has its own deadline.

        With ``fence_who_fails`` a member that fails is fenced at once: its requests are not to wait for the slowest of the others.
        """

        async def run(member: Member) -> None:
            try:
                await act(member)
            except StepFailed as failed:
                await fail(member, failed)

        async def fail(member: Member, failed: StepFailed) -> None:
            member.failed = failed
            if fence_who_fails:
                self.on_lost(member.replica.id, str(failed))
                fencing = fence(member.replica, failed, spec=self.spec, timeline=self.log.timeline)
                self.on_phase(what)  # a router is not to wait for the end of the round
                await fencing

        calls = {member.replica.id: partial(run, member) for member in members}
        warn_every_s = self.spec.timeouts.warn_every_s
        limit_s = 2 * limit_s + warn_every_s
        outcomes = await fan_out(calls, what=f"round {self.spec.round_id}, {what}", limit_s=limit_s, warn_every_s=warn_every_s)
        for member in members:
            name = member.replica.id
            if name in outcomes.late:  # it may go on whenever what it waits for has come: not to be used before
                member.replica.left_unanswered(outcomes.late[name])
                await fail(member, StepFailed(what, outcomes.failures[name], limit_s))
            elif name in outcomes.errors:
                raise outcomes.errors[name]  # a bug of ours: the coordinator fences every member


def _in_one_turn(member: Member) -> bool:
    """A synchronous LLM has no pause: what must not be interleaved with a request has to be one call of its actor."""
    return bool(member.replica.engine.facts.kind == "sync")
