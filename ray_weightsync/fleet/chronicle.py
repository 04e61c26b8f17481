"""Keeps the journal true: written before a round first touches an engine, and when nobody waits after every change."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ray_weightsync.config import is_tombstone
from ray_weightsync.fleet.journal import (
    MAX_OUTCOMES,
    Journal,
    MemberRecord,
    Origin,
    Outcome,
    Record,
    ReplicaRecord,
    RoundRecord,
    SnapshotRecord,
    Undone,
)
from ray_weightsync.fleet.keyring import Keyring
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.snapshot import Snapshot
from ray_weightsync.fleet.staging import AFTER_REPLY_S
from ray_weightsync.protocol.reading import words
from ray_weightsync.protocol.threads import in_daemon_thread
from ray_weightsync.weights.plan import Plan

if TYPE_CHECKING:
    from ray_weightsync.fleet.parts import Parts

logger = logging.getLogger(__name__)

AGAIN_S = 10.0
"""After how long a record that could not be written when nobody waited is tried again, in seconds."""

KEPT = (
    *("version", "brought", "attested", "left", "holds_end", "owner_paused", "fenced_by_us", "error"),
    *("heals", "refused_in", "doubted", "asleep_tags", "leaving", "lost", "replaced_by", "taken_by"),
)
"""What a successor has to know of a replica, by the names of its attributes."""


class Chronicle:
    """One session's. Every record says all that is known when it is written, and one is written at a time.

    Attributes:
        keyring: The keys of its engines.

    Args:
        journal: Where it is kept.
        origin: Whose it is.
        limit_s: Seconds that writing it may take.
    """

    def __init__(self, journal: Journal, origin: Origin, *, limit_s: float = 30.0) -> None:
        self.journal = journal
        self.origin = origin
        self.keyring = Keyring()
        self.outcomes: dict[str, Outcome] = {}
        self._limit_s = limit_s
        self._parts: Parts | None = None
        self._writing = asyncio.Lock()
        self._doing: asyncio.Future[None] | None = None
        self._round: RoundRecord | None = None
        self._plans: set[str] = set()
        self._noting: asyncio.Task[None] | None = None
        self._unwritten = False
        self._over = False

    def follow(self, parts: Parts) -> None:
        """Write down whatever changes in ``parts`` between rounds."""
        self._parts = parts
        parts.roster.on_change = self._changed

    def succeed(self, record: Record) -> None:
        """Go on where the coordinator before stood. Its round stays on record until the first `after`."""
        self.outcomes, self._round = dict(record.outcomes), record.round
        self.keyring.add(record.keys)

    async def before(
        self,
        snapshot: Snapshot,
        members: Iterable[Replica],
        round_id: str,
        *,
        each_for_itself: bool = False,
        undone: Undone | None = None,
    ) -> None:
        """Make a round durable. Costs nothing if it is already, with these members as they are.

        Args:
            snapshot: What it brings.
            members: To whom.
            round_id: Its id.
            each_for_itself: No member's end depends on the others, whatever the policy.
            undone: The round that this one takes back, if it does.

        Raises:
            RoundAborted, FleetTorn: if it could not be written; no engine was touched.
        """
        found = {replica.id: _found(replica) for replica in members}
        known = self._round
        if known is not None and known.id == round_id and found.items() <= known.members.items():
            return
        assert self._parts is not None
        # There is nothing to go back to before the first commit.
        backwards = self._parts.staging.committed not in (None, snapshot) and not each_for_itself
        self._round = RoundRecord(
            id=round_id,
            snapshot=recorded(snapshot),
            members=found,
            all_or_none=backwards and self._parts.settings.on_failure.after_start == "all_or_none",
            undone=undone,
        )
        try:
            await self.write(snapshot.plan)
        except Exception as error:
            self._round = None
            raise self._parts.roster.unchanged(
                "The round could not be written to the journal in Ray's control plane.",
                phase="preflight",
                limit_s=self._limit_s,
                engine_message=words(error) or type(error).__name__,
                hint="without it nobody could settle the engines if the coordinator died; look after Ray's head node and call again",
            ) from error

    async def sealed(self, snapshot: Snapshot) -> None:
        """Keep what the members of a live round must have received: no store could tell it to a successor."""
        if self._round is None or self._round.id != snapshot.id:
            return
        self._round = dataclasses.replace(self._round, snapshot=recorded(snapshot))
        try:
            await self.write()
        except Exception:  # should this process die now as well, its successor finds the weights unproved
            logger.exception("the journal does not know yet what was sent as version %s", snapshot.label)

    def after(self) -> None:
        """No round is in progress any more. Written when nobody waits; a later record says it too."""
        self._round = None
        self._note()

    def ended(self, round_id: str, outcome: Outcome) -> None:
        """Keep how a round ended, for a caller whose call was lost with its coordinator."""
        kept = [(each, known) for each, known in self.outcomes.items() if each != round_id]
        self.outcomes = dict([*kept, (round_id, outcome)][-MAX_OUTCOMES:])

    async def write(self, plan: Plan | None = None) -> None:
        """Write all that is known now.

        Raises:
            Exception: whatever the control plane raised; or TimeoutError.
        """
        async with self._writing:
            if self._over:
                return
            record = self._record()
            used = {each.plan for each in (record.committed, record.round and record.round.snapshot) if each}
            forgotten = self._plans - used
            self._plans -= forgotten  # not after: a call that is late forgets them all the same
            await self._do(lambda: self._put(record, plan, forgotten))
            if plan is not None:
                self._plans.add(plan.digest)

    async def _do(self, work: Callable[[], None]) -> None:
        """Have ``work`` done by the journal, after what it was given before: one that is late must not undo a later one."""
        deadline = time.monotonic() + self._limit_s
        if self._doing is not None and (await asyncio.wait({self._doing}, timeout=self._limit_s))[1]:
            raise TimeoutError(f"an earlier call of the journal has not returned within {self._limit_s:.1f} s")
        self._doing = asyncio.ensure_future(in_daemon_thread(work))
        await asyncio.wait_for(asyncio.shield(self._doing), max(0.0, deadline - time.monotonic()))

    def _put(self, record: Record, plan: Plan | None, forgotten: set[str]) -> None:
        if plan is not None and plan.digest not in self._plans:
            self.journal.write_plan(plan.digest, plan.to_wire())
        self.journal.write(record)
        for digest in forgotten:
            self.journal.forget_plan(digest)

    async def erase(self) -> None:
        """The session is over: nobody is to succeed it."""
        async with self._writing:
            self._over = True
            await self._do(self.journal.erase)

    async def noted(self) -> None:
        """Wait until everything is written that was to be written when nobody waits."""
        while self._noting is not None and not self._noting.done():
            await asyncio.wait({self._noting})

    def _changed(self) -> None:
        assert self._parts is not None
        if self._parts.turn.holder is None:  # a round writes for itself, and is not to be slowed down
            self._note()

    def _note(self) -> None:
        self._unwritten = True
        if self._noting is None or self._noting.done():
            self._noting = asyncio.ensure_future(self._write_later())

    async def _write_later(self) -> None:
        while self._unwritten:
            await asyncio.sleep(AFTER_REPLY_S)
            self._unwritten = False
            if self._parts is not None and self._parts.turn.holder is not None:
                return  # its own record says all of it
            try:
                await self.write()
            except Exception:  # a round that comes meanwhile writes before it touches an engine, and fails if it cannot
                logger.exception("the journal could not be written; it is tried again in %.0f s", AGAIN_S)
                self._unwritten = True  # a successor would settle a round that has ended long ago
                await asyncio.sleep(AGAIN_S)

    def _record(self) -> Record:
        assert self._parts is not None
        roster, staging = self._parts.roster, self._parts.staging
        return Record(
            origin=self.origin,
            settings=self._parts.settings,
            replicas=tuple(map(_replica, roster.replicas.values())),
            label=roster.label,
            ordinal=roster.ordinal,
            epoch=roster.epoch,
            ordinals=dict(roster.ordinals),
            committed=recorded(staging.committed) if staging.committed is not None else None,
            round=self._round,
            outcomes=dict(self.outcomes),
            keys=self.keyring.references,
        )


def recorded(snapshot: Snapshot) -> SnapshotRecord:
    """The snapshot, as the journal keeps it."""
    known = snapshot.sealed.done() and not snapshot.sealed.cancelled() and snapshot.sealed.exception() is None
    return SnapshotRecord(
        id=snapshot.id,
        slot=snapshot.slot,
        version=snapshot.version,
        label=snapshot.label,
        plan=snapshot.plan.digest,
        node_id=snapshot.node_id,
        sealed=snapshot.sealed.result() if known else None,
        group=snapshot.group,
        kept=snapshot.kept,
        attested=snapshot.attested,
        transport=snapshot.log.transport,
        transport_reason=snapshot.log.transport_reason,
        grouped=snapshot.log.grouped,
    )


def _found(replica: Replica) -> MemberRecord:
    facts = replica.engine.facts
    torn = is_tombstone(facts.version) or replica.fenced_by_us
    return MemberRecord(incarnation=facts.incarnation, paused=bool(facts.paused), label=facts.version, torn=torn)


def _replica(replica: Replica) -> ReplicaRecord:
    values: dict[str, Any] = {name: getattr(replica, name) for name in KEPT}
    return ReplicaRecord(ref=replica.engine.ref, facts=replica.engine.facts, state=replica.state.value, values=values)
