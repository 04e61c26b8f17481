"""The snapshots of a session, from the slot allotted to the slot freed. What is in them is the sender's, who reads them the engines'."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ray_weightsync.config import Host, Timeouts
from ray_weightsync.errors import CallFailure, RoundAborted
from ray_weightsync.fleet.round import RoundLog
from ray_weightsync.fleet.snapshot import Snapshot
from ray_weightsync.fleet.steps import StepFailed
from ray_weightsync.fleet.stores import Stores
from ray_weightsync.fleet.values import Sealed
from ray_weightsync.protocol.reading import words
from ray_weightsync.weights.plan import Plan

logger = logging.getLogger(__name__)

AFTER_REPLY_S = 0.002
"""How long work that nobody waits for lets an answer go first, in seconds: both want the one interpreter."""


@dataclass(frozen=True)
class _Ahead:
    """A slot that nobody has asked for yet."""

    node_id: str
    plan: str
    address: dict[str, Any]


class Staging:
    """Every snapshot that is not freed yet: the committed one, staged ones, and the one being written.

    Args:
        stores: The snapshot stores.
        transport: Number of slots, overlap and directory.
        timeouts: Deadlines for the stores.
    """

    def __init__(self, stores: Stores, transport: Host, timeouts: Timeouts) -> None:
        self.committed: Snapshot | None = None
        self._stores = stores
        self._transport = transport
        self._timeouts = timeouts
        self._open: dict[str, Snapshot] = {}
        self._retired = 0
        self._notes: list[str] = []
        self._ahead: _Ahead | None = None
        self._keeping: asyncio.Future[None] | None = None
        self._unkept: Snapshot | None = None

    def get(self, snapshot_id: str) -> Snapshot | None:
        """The snapshot, unless it was committed or freed."""
        return self._open.get(snapshot_id)

    def unsealed(self) -> list[Snapshot]:
        """The snapshots whose writer has not come to the end."""
        return [snapshot for snapshot in self._open.values() if not snapshot.sealed.done() and snapshot.sealing is None]

    def require(self, snapshot_id: str, serves: str) -> Snapshot:
        """The snapshot.

        Raises:
            RoundAborted: if it was committed or freed.
        """
        snapshot = self._open.get(snapshot_id)
        if snapshot is None:
            raise RoundAborted(
                f"Nothing changed: {serves}. This staged snapshot is gone: committed, given up, or replaced by a later one.",
                phase="commit",
                hint="stage the weights again",
            )
        return snapshot

    async def open(self, log: RoundLog, version: int | str, label: str, plan: Plan, node_id: str, serves: str) -> Snapshot:
        """Allot a slot. Staged snapshots that were never committed give way once they fill the slots, the oldest first.

        Raises:
            RoundAborted: if no room can be had.
        """
        await self.settled()
        waiting = [snapshot for snapshot in self._open.values() if snapshot.sealed.done()]
        while len(waiting) >= self._transport.num_slots - 1:
            await self.free(waiting.pop(0))
        limit_s = self._timeouts.for_bytes("stage", plan.num_bytes)
        try:
            address = await self._allotted_ahead(node_id, plan) or await self._allot(node_id, plan, limit_s)
        except Exception as error:
            full = type(getattr(error, "cause", error)).__name__ == "NoRoomError"
            room = f"free or enlarge {self._transport.directory} (docker run --shm-size=...), or choose Host(directory=...)"
            raise RoundAborted(
                f"Nothing changed: {serves}. No {'room' if full else 'slot'} could be had for {plan.num_bytes / 1e6:.1f} MB.",
                phase="stage",
                limit_s=limit_s,
                engine_message=words(error),
                hint=room if full else "call again: a store that has died or hangs is started anew",
            ) from error
        snapshot = Snapshot(
            id=log.round_id,
            slot=address["snapshot"],
            version=version,
            label=label,
            plan=plan,
            node_id=node_id,
            store=self._stores.identity(node_id),
            address=address,
            log=log,
            sealed=asyncio.get_running_loop().create_future(),
        )
        self._open[snapshot.id] = snapshot
        return snapshot

    async def _allot(self, node_id: str, plan: Plan, limit_s: float) -> dict[str, Any]:
        return await self._stores.open_slot(
            node_id,
            snapshot=uuid.uuid4().hex,
            plan_digest=plan.digest,
            num_bytes=plan.num_bytes,
            overlap=self._transport.overlap,
            limit_s=limit_s,
        )

    async def _allotted_ahead(self, node_id: str, plan: Plan) -> dict[str, Any] | None:
        """The slot that was allotted when the last round ended, if it is of this node and plan."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        if (ahead.node_id, ahead.plan) == (node_id, plan.digest):
            return ahead.address
        await self._discard(ahead.node_id, ahead.address["snapshot"])
        return None

    async def seal(self, snapshot: Snapshot, sealed: Sealed) -> None:
        """Close the snapshot: from here on nobody writes to it. What comes of it is told by `Snapshot.seal_of`."""
        limit_s = self._timeouts.commit_s
        try:
            await self._stores.seal(snapshot.node_id, snapshot=snapshot.slot, digest=sealed.digest, limit_s=limit_s)
        except Exception as error:
            message = f"the snapshot could not be sealed: {words(error) or type(error).__name__}"
            snapshot.fail(StepFailed("stage", CallFailure(message=message, kind="raised", elapsed_s=0.0), limit_s))
            return
        snapshot.log.timeline.add("sender", "stage", time.monotonic() - sealed.stage_s, time.monotonic())
        if not snapshot.sealed.done():
            snapshot.sealed.set_result(sealed)

    async def give_up(self, snapshot: Snapshot, why: str) -> None:
        """The sender will not finish: whoever waits for the seal is told, receivers fail at once, the slot is freed."""
        snapshot.fail(StepFailed("stage", CallFailure(message=why, kind="raised", elapsed_s=0.0), 0.0))
        await self.free(snapshot)

    def keep(self, snapshot: Snapshot) -> None:
        """It is the committed one from now on: never a target of staging, the source of every later repair.

        The store hears of it when nobody waits, but before anything else is asked of it (see `settled`), and allots the slot that
        the next round of the same plan will want.
        """
        self._open.pop(snapshot.id, None)
        self.committed = snapshot
        self._keeping = asyncio.ensure_future(self._keep(snapshot))

    async def _keep(self, snapshot: Snapshot) -> None:
        await asyncio.sleep(AFTER_REPLY_S)
        try:
            self._retired = await self._stores.mark_committed(snapshot.node_id, snapshot=snapshot.slot, limit_s=self._timeouts.commit_s)
            if len(self._open) < self._transport.num_slots - 1:
                address = await self._allot(snapshot.node_id, snapshot.plan, self._timeouts.for_bytes("stage", snapshot.plan.num_bytes))
                self._ahead = _Ahead(snapshot.node_id, snapshot.plan.digest, address)
        except Exception:  # the engines hold the version whatever becomes of the store; the next report says what it costs
            logger.exception("the store could not keep version %s", snapshot.label)
            self._notes.append(f"the snapshot store did not keep version {snapshot.label}; nothing could be repaired from it")
            self._unkept = snapshot

    async def why_unreadable(self, snapshot: Snapshot) -> str | None:
        """Why the bytes of a committed snapshot can be had no more, or None. A replica cannot help it."""
        if snapshot is self._unkept:
            return "its store did not keep it"
        try:
            await self.probe(snapshot.node_id)
        except StepFailed as failed:
            return str(failed)
        return None if self._stores.identity(snapshot.node_id) == snapshot.store else "its store died, and another one is in its place"

    async def settled(self) -> None:
        """Wait until the store knows which snapshot is the committed one."""
        if self._keeping is not None:
            await asyncio.shield(self._keeping)

    async def free(self, snapshot: Snapshot) -> None:
        """Free a snapshot that was not committed. Idempotent."""
        if self._open.pop(snapshot.id, None) is None:
            return
        # Their calls are out, and every one of them has a deadline.
        if under_way := {task for task in (snapshot.preflight, snapshot.sealing) if task is not None and not task.done()}:
            await asyncio.wait(under_way)
        await self._discard(snapshot.node_id, snapshot.slot)

    async def discard(self, snapshot: Snapshot) -> None:
        """Free the slot of a snapshot that is not this coordinator's own."""
        await self._discard(snapshot.node_id, snapshot.slot)

    async def _discard(self, node_id: str, slot: str) -> None:
        try:
            await self._stores.discard(node_id, snapshot=slot, limit_s=self._timeouts.commit_s)
        except Exception:
            logger.exception("slot %s could not be freed; its store frees it when the session closes", slot)

    async def probe(self, node_id: str) -> dict[str, Any]:
        """The nonce by which a worker proves that it sees the memory of ``node_id``.

        Raises:
            StepFailed: if the store does not answer.
        """
        try:
            return await self._stores.probe(node_id, limit_s=self._timeouts.preflight_s)
        except Exception as error:
            failure = CallFailure(message=f"the snapshot store did not answer: {words(error)}", kind="raised", elapsed_s=0.0)
            raise StepFailed("preflight", failure, self._timeouts.preflight_s) from error

    async def recover(self, slots: Collection[str], *, limit_s: float) -> dict[str, str]:
        """Find the stores of the coordinator before again, and give up whatever lies in them but these slots.

        Returns:
            The digests of those of ``slots`` that are there and sealed.
        """
        return await self._stores.recover(slots, limit_s=limit_s)

    def notes(self) -> list[str]:
        """Remarks on the slots, for the report."""
        notes, self._notes = self._notes, []
        if self._retired:
            notes.append(f"{self._retired} slots retired so far: somebody still held them when they were to be reused")
        return notes

    async def close(self) -> None:
        """Free everything."""
        await self.settled()
        await self._stores.close(limit_s=self._timeouts.commit_s)
