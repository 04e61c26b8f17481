"""Whose an engine is: one session's at a time.

A claim stands in Ray's control plane under the engine's identity, so it outlives every process of ours and is found whichever way the
engine is reached. It holds as long as the coordinator that it names may act again. Each new holder writes the next number and only then
deletes the older ones: of two that find a dead session's claim, one gets the number.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

from ray_weightsync.errors import SessionConflict
from ray_weightsync.fleet import cluster
from ray_weightsync.fleet.cluster import Process
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.states import ReplicaEvent, ReplicaState
from ray_weightsync.protocol.threads import in_daemon_thread

if TYPE_CHECKING:
    from ray_weightsync.engines.facts import EngineFacts

logger = logging.getLogger(__name__)

PREFIX = "claim:"
UNCHANGED = "Nothing was changed: "
ENDING_POLL_S = 0.25
"""How often a session that ends by itself is looked at, in seconds."""

HandOver = Callable[[str, tuple[str, ...], float], Awaitable[None]]
"""Asks the session of that name to hand over the engines of these identities within so many seconds; raises if it does not."""


class KeyValues(Protocol):
    """What claims need of Ray's control plane; `ray_weightsync.fleet.cluster` is the real one. Every call may block."""

    def put_if_absent(self, key: str, value: bytes) -> bool: ...
    def get(self, key: str) -> bytes | None: ...
    def delete(self, key: str) -> None: ...
    def keys(self, prefix: str) -> list[str]: ...


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a claim.

    Attributes:
        session: The session's name.
        coordinator: Its coordinator; the claim is void when that is gone for good.
        owner: The process whose end ends the session.
    """

    session: str
    coordinator: Process
    owner: Process | None = None

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> Holder:
        told = json.loads(value)
        owner = told["owner"]
        return cls(session=told["session"], coordinator=Process(**told["coordinator"]), owner=Process(**owner) if owner else None)


def identity_of(facts: EngineFacts) -> str | None:
    """What tells the engine from every other, however it is reached; None for a user's own client, which tells nothing. Pure."""
    first = min(facts.workers, key=lambda worker: worker.rank, default=None)
    return (first.incarnation if first is not None else "") or facts.incarnation


class Claims:
    """The claims of one session. Used on the coordinator's event loop; the control plane is asked on threads.

    Args:
        me: What the claims say.
        keys: Where they stand.
        is_gone: Whether a process will never act again; may block.
    """

    def __init__(
        self, me: Holder, *, keys: KeyValues = cluster, is_gone: Callable[[Process], bool] = lambda process: process.is_gone
    ) -> None:
        self.me = me
        self._keys = keys
        self._is_gone = is_gone
        self._identities: dict[str, str] = {}
        self._held_under: dict[str, str] = {}

    def identity(self, replica: Replica) -> str | None:
        """The identity under which the replica's engine is claimed, if it is."""
        return self._identities.get(replica.id)

    async def claim(self, replicas: Sequence[Replica], *, limit_s: float, hand_over: HandOver | None = None) -> bool:
        """Claim the engines of ``replicas``, all or none. A session that is about to end, because its owner is gone, is waited for.

        Args:
            replicas: None of them in the fleet yet.
            limit_s: Seconds for those who hold an engine to let it go.
            hand_over: How they are asked for it; None: they are not asked.

        Returns:
            Whether somebody had to let go first: what was learned of the engines before may not hold any more.

        Raises:
            SessionConflict: naming the sessions and the replicas; no claim of this call is left.
        """
        began = time.monotonic()
        asked: set[str] = set()
        waited = False
        while True:
            held_by = await self._take(replicas, all_or_none=True)
            if not held_by:
                return waited
            await self.release(replicas)
            left_s = limit_s - (time.monotonic() - began)
            to_ask = {holder.session for holder in held_by.values()} - asked if hand_over is not None else set()
            if left_s <= 0 or not (to_ask or await self._all_ending(held_by.values())):
                conflict = self._conflict(replicas, held_by, time.monotonic() - began if waited else None)
                raise _after(conflict, asked - {holder.session for holder in held_by.values()})
            waited = True
            if hand_over is None or not to_ask:
                await asyncio.sleep(min(ENDING_POLL_S, left_s))
            for session in sorted(to_ask):
                wanted = [identity_of(each.engine.facts) for each in replicas if each.id in held_by and held_by[each.id].session == session]
                logger.info("session %s is asked to hand over %d engines", session, len(wanted))
                try:
                    await hand_over(session, tuple(filter(None, wanted)), left_s)  # type: ignore[misc]
                except SessionConflict as refused:
                    raise _after(refused, asked) from None
                asked.add(session)

    async def follow(self, replicas: Iterable[Replica]) -> None:
        """Claim what is not claimed yet: an engine that restarted is another one. Asks nobody unless something changed.

        Also for a coordinator that was started in the place of a dead one. A replica whose engine another session has claimed meanwhile
        is retired.
        """
        # An engine out of step tells nothing that could be relied on, not even who it is.
        new = [
            replica
            for replica in replicas
            if replica.state is not ReplicaState.RETIRED
            and replica.engine.facts.in_step
            and identity_of(replica.engine.facts) != self._identities.get(replica.id)
        ]
        if not new:
            return
        before = {replica.id: self._identities.pop(replica.id, None) for replica in new}
        held_by = await self._take(new, all_or_none=False)
        await self._forget(filter(None, before.values()))
        for replica in new:
            holder = held_by.get(replica.id)
            if holder is not None and replica.state is not ReplicaState.RETIRED:  # health and a round may have found out at once
                self.retire(replica, holder.session)

    def retire(self, replica: Replica, session: str) -> None:
        """The replica's engine is another session's now."""
        why = f"session {session!r} has this engine now"
        if replica.state is ReplicaState.UPDATING:
            replica.happen(ReplicaEvent.FAIL, error=why)
        replica.happen(ReplicaEvent.RETIRE, error=why)
        replica.taken_by = session
        logger.warning("%s: session %s has this engine now; it is out of this fleet", replica.id, session)

    async def release(self, replicas: Iterable[Replica]) -> None:
        """Give up the claims on the engines of ``replicas``. Idempotent."""
        await self._forget([identity for replica in replicas if (identity := self._identities.pop(replica.id, None)) is not None])

    async def release_all(self) -> None:
        """Give up all of them. Idempotent."""
        self._identities.clear()
        await self._forget(list(self._held_under))

    def require_any(self, replicas: Iterable[Replica]) -> None:
        """Raise `SessionConflict` if this session has no engine left because others took them."""
        fleet = list(replicas)
        taken = {replica.id: replica.taken_by for replica in fleet if replica.taken_by is not None}
        if taken and all(replica.state is ReplicaState.RETIRED for replica in fleet):
            names = ", ".join(f"{replica} (by {session!r})" for replica, session in taken.items())
            raise SessionConflict(
                f"Nothing was sent: session {self.me.session!r} has no engine left. Taken over: {names}.",
                replicas=tuple(taken),
                hint="close this session; attach(..., take_over=True) would take them back",
            )

    # --- the control plane --------------------------------------------------------------------------------------------------

    async def _take(self, replicas: Sequence[Replica], *, all_or_none: bool) -> dict[str, Holder]:
        """Claim whatever is free, or, with ``all_or_none``, nothing more once somebody has one; by replica id, who holds the others."""
        wanted = {replica.id: identity for replica in replicas if (identity := identity_of(replica.engine.facts)) is not None}
        outcomes = await in_daemon_thread(lambda: self._take_each(set(wanted.values()), all_or_none))
        held_by = {}
        for name, identity in wanted.items():
            outcome = outcomes[identity]
            if isinstance(outcome, Holder):
                held_by[name] = outcome
            elif outcome is not None:
                self._identities[name] = identity
                self._held_under[identity] = outcome
        return held_by

    def _take_each(self, identities: Iterable[str], all_or_none: bool) -> dict[str, str | Holder | None]:
        """By identity, what `_take_one` says. Blocks.

        In one order for everybody: of two that want the same engines at once, one gets them all.
        """
        outcomes: dict[str, str | Holder | None] = {}
        refused = False
        for identity in sorted(identities):
            outcome = outcomes[identity] = self._take_one(identity, only_look=refused and all_or_none)
            refused = refused or isinstance(outcome, Holder)
        return outcomes

    def _take_one(self, identity: str, *, only_look: bool) -> str | Holder | None:
        """The key of our claim on ``identity``, or who has it; None if nobody has, and it was only to be looked at. Blocks."""
        while True:
            standing = sorted(self._keys.keys(f"{PREFIX}{identity}#"), key=_number)
            if standing:
                value = self._keys.get(standing[-1])
                if value is None:
                    continue  # it was released in between
                holder = Holder.from_bytes(value)
                if holder == self.me:
                    return standing[-1]
                # One of our own name is a dead predecessor's: two coordinators of one name cannot live.
                if holder.session != self.me.session and not self._is_gone(holder.coordinator):
                    return holder
            if only_look:
                return None
            key = f"{PREFIX}{identity}#{_number(standing[-1]) + 1 if standing else 1}"
            if self._keys.put_if_absent(key, self.me.to_bytes()):
                self._delete(standing)
                return key

    async def _forget(self, identities: Iterable[str]) -> None:
        still = set(self._identities.values())
        keys = [key for identity in identities if identity not in still and (key := self._held_under.pop(identity, None)) is not None]
        if keys:
            await in_daemon_thread(lambda: self._delete(keys))

    def _delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._keys.delete(key)

    async def _all_ending(self, holders: Iterable[Holder]) -> bool:
        owners = {holder.owner for holder in holders}
        return await in_daemon_thread(lambda: all(owner is not None and self._is_gone(owner) for owner in owners))

    def _conflict(self, replicas: Sequence[Replica], held_by: dict[str, Holder], waited_s: float | None) -> SessionConflict:
        of_session: dict[str, list[str]] = {}
        for replica in replicas:
            if replica.id in held_by:
                of_session.setdefault(held_by[replica.id].session, []).append(replica.id)
        holds = "; ".join(f"session {session!r} holds {', '.join(names)}" for session, names in of_session.items())
        return SessionConflict(
            f"{UNCHANGED}{holds}.",
            phase="attach",
            replicas=tuple(held_by),
            elapsed_s=waited_s,
            hint="close that session, or attach(..., take_over=True), which waits for its round and takes the engines from it",
        )


def _after(refused: SessionConflict, gave: Collection[str]) -> SessionConflict:
    """The refusal of one session, after others had let go of what was asked of them."""
    if not gave:
        return refused
    return SessionConflict(
        f"Not attached: {refused.message.removeprefix(UNCHANGED)} Before that, {', '.join(map(repr, sorted(gave)))} had let go of what was "
        "asked of them, which is nobody's now.",
        phase=refused.phase,
        replicas=refused.replicas,
        elapsed_s=refused.elapsed_s,
        limit_s=refused.limit_s,
        hint=f"{refused.hint}; or attach without these" if refused.hint else None,
    )


def _number(key: str) -> int:
    return int(key.rpartition("#")[2])
