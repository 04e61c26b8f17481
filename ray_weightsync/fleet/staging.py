"""The snapshots of a session, from the slot allotted to the slot freed. What is in them is the sender's, who reads them the engines'."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Collection, Sequence
from typing import Any

from ray_weightsync.config import Host, Timeouts
from ray_weightsync.fleet.copies import Ahead, Copies
from ray_weightsync.fleet.live import Live
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.round import RoundLog
from ray_weightsync.fleet.snapshot import Copy, Snapshot
from ray_weightsync.fleet.steps import StepFailed, Timeline
from ray_weightsync.fleet.stores import Stores
from ray_weightsync.fleet.turns import Unchanged
from ray_weightsync.fleet.values import Sealed
from ray_weightsync.protocol.reading import words
from ray_weightsync.weights.plan import Plan

logger = logging.getLogger(__name__)

AFTER_REPLY_S = 0.002
"""How long work that nobody waits for lets an answer go first, in seconds: both want the one interpreter."""


class Staging:
    """Every snapshot that is not freed yet: the committed one, staged ones, and the one being written.

    Args:
        stores: The snapshot stores.
        transport: Number of slots, overlap and directory.
        timeouts: Deadlines for the stores.
        unchanged: Says to a caller for whom nothing was done what holds.
        directory_option: How the session's user names another directory; empty if that is not to be had.
    """

    def __init__(self, stores: Stores, transport: Host, timeouts: Timeouts, unchanged: Unchanged, *, directory_option: str) -> None:
        self.committed: Snapshot | None = None
        self.copies = Copies(stores, transport, timeouts)
        self._transport = transport
        self._timeouts = timeouts
        self._unchanged = unchanged
        self._directory_option = directory_option
        self._open: dict[str, Snapshot] = {}
        self._retired = 0
        self._notes: list[str] = []
        self._ahead: Ahead | None = None
        self._keeping: asyncio.Future[None] | None = None

    def get(self, snapshot_id: str) -> Snapshot | None:
        """The snapshot, unless it was committed or freed."""
        return self._open.get(snapshot_id)

    @property
    def num_bytes(self) -> int:
        """Bytes of the largest weights that are committed, staged, or being written."""
        known = [*self._open.values(), *([self.committed] if self.committed is not None else [])]
        return max((snapshot.plan.num_bytes for snapshot in known), default=0)

    def unsealed(self) -> list[Snapshot]:
        """The snapshots whose writer has not come to the end."""
        return [snapshot for snapshot in self._open.values() if not snapshot.sealed.done() and snapshot.sealing is None]

    def require(self, snapshot_id: str) -> Snapshot:
        """The snapshot.

        Raises:
            RoundAborted, FleetTorn: if it was committed or freed.
        """
        snapshot = self._open.get(snapshot_id)
        if snapshot is None:
            raise self._unchanged(
                "This staged snapshot is gone: committed, given up, or replaced by a later one.",
                phase="commit",
                hint="stage the weights again",
            )
        return snapshot

    async def open(
        self,
        log: RoundLog,
        version: int | str,
        label: str,
        plan: Plan,
        node_id: str,
        *,
        kept: bool = True,
        live: Live[Any] | None = None,
    ) -> Snapshot:
        """Begin a snapshot.

        If it is ``kept``, a slot is allotted; staged ones that were never committed give way once they fill the slots, the oldest first.

        Raises:
            RoundAborted, FleetTorn: if no room can be had.
        """
        await self.settled()
        snapshot = Snapshot(
            id=log.round_id,
            slot=log.round_id,
            version=version,
            label=label,
            plan=plan,
            node_id=node_id,
            log=log,
            sealed=asyncio.get_running_loop().create_future(),
            kept=kept,
            live=live,
            group=live.group_id if live is not None else None,
            attested=live is None or live.attested,
        )
        if kept:
            await self._have_slot(snapshot)
        self._open[snapshot.id] = snapshot
        return snapshot

    async def _have_slot(self, snapshot: Snapshot) -> None:
        waiting = [snapshot for snapshot in self._open.values() if snapshot.sealed.done()]
        while len(waiting) >= self._transport.num_slots - 1:
            await self.free(waiting.pop(0))
        plan, node_id = snapshot.plan, snapshot.node_id
        limit_s = self._timeouts.for_bytes("stage", plan.num_bytes)
        try:
            snapshot.slot, copy, snapshot.ahead = await self._allotted(node_id, plan)
        except Exception as error:
            cause = getattr(error, "cause", error)
            full = type(cause).__name__ == "NoRoomError"
            named = f": transport={self._directory_option}" if self._directory_option else ""
            hint = "call again: a store that has died is started anew; one that hangs ends with the session"
            if full:
                hint = f"free or enlarge {self._transport.directory} (docker run --shm-size=...)" + (
                    f", or name another{named}" if named else ""
                )
            elif isinstance(cause, FileNotFoundError | NotADirectoryError | PermissionError) or type(cause).__name__ == "SlotError":
                hint = f"name a memory-backed directory that is there on each node{named}"
            raise self._unchanged(
                f"No {'room' if full else 'slot'} could be had for {plan.num_bytes / 1e6:.1f} MB.",
                phase="stage",
                limit_s=limit_s,
                engine_message=words(error),
                hint=hint,
            ) from error
        snapshot.copies[node_id] = copy

    async def _allotted(self, node_id: str, plan: Plan) -> tuple[str, Copy, dict[str, Copy]]:
        """A name, a slot on this node under it, and those on other nodes: had when the last round ended, as far as they fit."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.plan != plan.digest:
            await asyncio.gather(*(self.copies.discard(each, ahead.slot) for each in ahead.copies))
            ahead = None
        slot, copies = (ahead.slot, ahead.copies) if ahead is not None else (uuid.uuid4().hex, {})
        copy = copies.pop(node_id, None)
        if copy is None or self.copies.stores.identity(node_id) != copy.store:
            try:
                copy = await self.copies.begin(slot, plan, node_id)
            except BaseException:
                await asyncio.gather(*(self.copies.discard(each, slot) for each in copies))
                raise
        return slot, copy, copies

    async def seal(self, snapshot: Snapshot, sealed: Sealed) -> None:
        """Close the snapshot: from here on nobody writes to it. What comes of it is told by `Snapshot.seal_of`."""
        limit_s = self._timeouts.commit_s
        try:
            if snapshot.kept:
                await self.copies.stores.seal(snapshot.node_id, snapshot=snapshot.slot, digest=sealed.digest, limit_s=limit_s)
                snapshot.copies[snapshot.node_id].sealed = True
        except Exception as error:
            message = f"the snapshot could not be sealed: {words(error) or type(error).__name__}"
            if snapshot.live is None:
                snapshot.fail(StepFailed.refused("stage", message, limit_s))
                return
            # Every engine has the bytes: they are not to lose them for the copy's sake.
            self._notes.append(f"version {snapshot.label} is not kept: {message}")
            snapshot.kept = False
            await self.copies.discard_all(snapshot)
        snapshot.log.timeline.add("sender", "stage", time.monotonic() - sealed.stage_s, time.monotonic())
        if not snapshot.sealed.done():
            snapshot.sealed.set_result(sealed)

    async def sealed(self, snapshot: Snapshot) -> Sealed:
        """What the sender wrote, as soon as it has.

        Raises:
            RoundAborted, FleetTorn: if it gave up.
        """
        try:
            return await snapshot.seal_of()
        except StepFailed as failed:
            raise self._unchanged(
                f"Version {snapshot.label} was not staged.",
                phase="stage",
                engine_message=failed.failure.message,
                hint="call again",
            ) from failed

    async def spread(self, snapshot: Snapshot, replicas: Sequence[Replica], timeline: Timeline) -> dict[str, StepFailed]:
        """Have the bytes of a sealed snapshot on the node of each of ``replicas``, for as long as it is the committed one.

        Returns:
            By replica, why the bytes are not on its node.
        """
        failures = await self.copies.spread(snapshot, replicas, timeline)
        if snapshot is self.committed:
            _, problems = await self.copies.mark_committed(snapshot)
            for replica in replicas:
                if replica.home not in snapshot.copies and replica.id not in failures:
                    failures[replica.id] = StepFailed.refused("relay", "; ".join(problems), self._timeouts.commit_s)
        return failures

    async def give_up(self, snapshot: Snapshot, why: str) -> None:
        """The sender will not finish: whoever waits for the seal is told, receivers fail at once, the slot is freed."""
        snapshot.fail(StepFailed.refused("stage", why))
        await self.free(snapshot)

    def keep(self, snapshot: Snapshot) -> None:
        """It is the committed one from now on: never a target of staging, the source of every later repair.

        The stores hear of it when nobody waits, but before anything else is asked of them (see `settled`), and allot the slots that
        the next round of the same plan will want.
        """
        self._open.pop(snapshot.id, None)
        self._end_live(snapshot)
        self.committed = snapshot
        self._keeping = asyncio.ensure_future(self._keep(snapshot, self._keeping))

    async def _keep(self, snapshot: Snapshot, before: asyncio.Future[None] | None) -> None:
        await asyncio.sleep(AFTER_REPLY_S)
        if before is not None:
            await asyncio.wait({before})  # the stores keep what they hear of last
        try:
            self._retired, problems = await self.copies.mark_committed(snapshot)
            self._notes.extend(problems)
            if snapshot.kept and not snapshot.copies:
                self._notes.append(f"the snapshot store did not keep version {snapshot.label}; nothing could be repaired from it")
            if snapshot is not self.committed:
                return  # the one after it is about to be told of, and knows which slots and stores are wanted
            if self._ahead is None and snapshot.copies and len(self._open) < self._transport.num_slots - 1:
                self._ahead = await self.copies.ahead(snapshot.plan, snapshot.copies)
            used = {node_id for each in (snapshot, *self._open.values()) for node_id in (*each.copies, *each.ahead, *each.allotting)}
            await self.copies.stores.close(but=used, limit_s=self._timeouts.commit_s)
        except Exception:  # the engines hold the version whatever becomes of the stores; the next report says what it costs
            logger.exception("the stores were not told that version %s is committed", snapshot.label)
            self._notes.append(f"the snapshot stores were not told that version {snapshot.label} is committed")

    async def why_unreadable(self, snapshot: Snapshot) -> str | None:
        """Why the bytes of a committed snapshot can be had no more, or None. A replica cannot help it."""
        if not snapshot.kept:
            return "it went straight to the engines, and nobody kept it: Collective(keep_snapshot=True) does, and transport='host'"
        return await self.copies.why_unreadable(snapshot)

    async def settled(self) -> None:
        """Wait until the store knows which snapshot is the committed one."""
        if self._keeping is not None:
            await asyncio.shield(self._keeping)

    async def free(self, snapshot: Snapshot) -> None:
        """Free a snapshot that was not committed. Idempotent."""
        if self._open.pop(snapshot.id, None) is None:
            return
        snapshot.over = True
        self._end_live(snapshot)
        # Their calls are out, and every one of them has a deadline.
        if under_way := {task for task in (snapshot.preflight, snapshot.sealing) if task is not None and not task.done()}:
            await asyncio.wait(under_way)
        await self.copies.discard_all(snapshot)

    def _end_live(self, snapshot: Snapshot) -> None:
        live, snapshot.live, snapshot.group = snapshot.live, None, None
        if live is not None:
            live.end()

    async def discard(self, snapshot: Snapshot) -> None:
        """Free the slot of a snapshot that is not this coordinator's own."""
        await self.copies.discard_all(snapshot)

    async def recover(self, slots: Collection[str], *, limit_s: float) -> dict[str, tuple[str, dict[str, Copy]]]:
        """Find the stores of the coordinator before again, and give up whatever lies in them but these slots.

        Returns:
            Of those of ``slots`` that are there and sealed, the digest and the copies.
        """
        found: dict[str, tuple[str, dict[str, Copy]]] = {}
        for node_id, kept in (await self.copies.stores.recover(slots, limit_s=limit_s)).items():
            for slot, each in kept.items():
                _, copies = found.setdefault(slot, (each.digest, {}))
                copies[node_id] = Copy(node_id, str(self.copies.stores.identity(node_id)), each.address, sealed=True)
        return found

    def notes(self) -> list[str]:
        """Remarks on the slots, for the report."""
        notes, self._notes = self._notes, []
        if self._retired:
            notes.append(f"{self._retired} slots retired so far: somebody still held them when they were to be reused")
        return notes

    async def close(self) -> None:
        """Free everything."""
        await self.settled()
        await self.copies.stores.close(limit_s=self._timeouts.commit_s)
