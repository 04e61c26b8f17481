"""Membership: who joins and who leaves. Rounds go by the members that they found when they began."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from ray_weightsync.engines.resolve import require_distinct
from ray_weightsync.errors import AttachError, ConfigError
from ray_weightsync.fleet.claims import identity_of
from ray_weightsync.fleet.parts import Parts
from ray_weightsync.fleet.preflight import told
from ray_weightsync.fleet.repair import Repair
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.states import ReplicaEvent, ReplicaState
from ray_weightsync.fleet.steps import StepFailed
from ray_weightsync.fleet.stock import require_servable

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
        await self._join(replicas)
        self._parts.spawn(self._repair.bring_in(replicas))
        return tuple(replica.id for replica in replicas)

    async def replace(self, replica_id: str, replica: Replica) -> str:
        """Take a resolved engine in, in the place of a replica, which is retired.

        Raises:
            ConfigError: if there is no such replica, or it was let go by its user.
            SessionConflict, AttachError: as of `add`; the old one stays.
        """
        if self._replaced(replica_id, replica):
            return replica.id
        old = self._replaceable(replica_id)
        self._require_new([replica], [each for each in self._roster.members if each is not old])
        turn = await self._repair.turn("replace")
        try:
            if self._replaced(replica_id, replica):  # by the same call, whose caller lost the answer
                return replica.id
            self._replaceable(replica_id)  # somebody may have been faster
            await self._join([replica], instead_of=old)
            old.replaced_by = replica.id
            await retire(self._parts, old, f"replaced by {replica.id}")
        finally:
            self._parts.end_turn(turn)
        self._parts.spawn(self._repair.bring_in([replica]))
        return replica.id

    async def _join(self, replicas: Sequence[Replica], *, instead_of: Replica | None = None) -> None:
        await self._parts.claims.claim(replicas, limit_s=self._parts.timeouts.attach_s)
        if self._joined(replicas):
            return
        try:
            # Asked again: the same engine, under another id, or another one under this id may have joined meanwhile.
            self._require_new(replicas, [each for each in self._roster.members if each is not instead_of])
            self._roster.join(replicas)
        except BaseException:
            await self._parts.claims.release(replicas)
            await self._parts.claims.follow(self._roster.members)  # claims go by id: one of theirs may have gone as well
            raise

    def _joined(self, replicas: Sequence[Replica]) -> bool:
        """Whether they are members already, by these ids."""
        known = [self._roster.replicas.get(replica.id) for replica in replicas]
        return all(
            old is not None and old in self._roster.members and identity_of(old.engine.facts) == identity_of(new.engine.facts) is not None
            for old, new in zip(known, replicas, strict=True)
        )

    def _replaced(self, replica_id: str, by: Replica) -> bool:
        return self._joined([by]) and self._roster.named(replica_id).replaced_by == by.id

    def _replaceable(self, replica_id: str) -> Replica:
        old = self._roster.named(replica_id)
        if old.leaving or (old.state is ReplicaState.RETIRED and (not old.lost or old.replaced_by is not None)):
            successor = f" and {old.replaced_by} is in its place" if old.replaced_by is not None else ""
            raise ConfigError(f"{replica_id} has left the fleet{successor}; add() brings more engines in")
        return old

    def _require_new(self, replicas: Sequence[Replica], members: Sequence[Replica]) -> None:
        require_distinct([each.engine for each in (*members, *replicas)])
        require_servable([*members, *replicas], self._parts.settings, phase="add")
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
            RoundAborted, FleetTorn: if a round does not end; the replica stays.
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
            turn = await self._repair.turn("remove")
        except BaseException:
            replica.leaving = False
            self._roster.changed()
            raise
        try:
            await retire(self._parts, replica, "removed")  # unless somebody was faster
        finally:
            self._parts.end_turn(turn)
        if drain_s is not None:
            await self._drain(replica, drain_s)

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


async def retire(parts: Parts, replica: Replica, why: str) -> None:
    """Let a replica go for good, in a turn. Idempotent."""
    if replica.state is not ReplicaState.RETIRED:
        replica.happen(ReplicaEvent.RETIRE, error=why)
    replica.leaving = False
    parts.roster.changed()
    await parts.claims.release([replica])
