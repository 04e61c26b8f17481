"""The snapshots of a session, from the slot allotted to the slot freed. What is in them is the sender's, who reads them the engines'."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from ray_weightsync.config import Host, Timeouts
from ray_weightsync.errors import CallFailure, RoundAborted
from ray_weightsync.fleet.snapshots import Stores
from ray_weightsync.fleet.steps import StepFailed, Timeline
from ray_weightsync.fleet.values import Sealed
from ray_weightsync.protocol.reading import words
from ray_weightsync.weights.plan import Plan

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Snapshot:
    """One version's bytes under one plan, on their way or sealed.

    Attributes:
        sealed: What the sender wrote; a `StepFailed` if it gave up.
        store: Identity of the store that holds it; a store that is started anew is another one.
        preflight: The check of the fleet against a plan or a store that somebody does not know, beside the sender's packing.
        notes: Remarks for the report.
        committing: A round brings it to the fleet right now.
    """

    id: str
    version: int | str
    label: str
    plan: Plan
    node_id: str
    store: str
    address: dict[str, Any]
    opened_at: float
    sealed: asyncio.Future[Sealed]
    timeline: Timeline = field(default_factory=Timeline)
    preflight: asyncio.Task[Any] | None = None
    notes: list[str] = field(default_factory=list)
    committing: bool = False

    async def seal_of(self) -> Sealed:
        """What the sender wrote, as soon as it has."""
        return await asyncio.shield(self.sealed)

    def written(self) -> Sealed:
        """What the sender wrote; where it did not get to the end, what the plan announced, without a digest."""
        if self.sealed.done() and self.sealed.exception() is None:
            return self.sealed.result()
        blocked_s = time.monotonic() - self.opened_at
        return Sealed(digest="", num_bytes=self.plan.weight_bytes, num_tensors=len(self.plan.tensors), stage_s=blocked_s)

    async def judged(self) -> None:
        """Wait for the preflight that runs beside the packing; its error says who refused."""
        if self.preflight is not None:
            await asyncio.shield(self.preflight)

    async def expected(self) -> dict[str, Any]:
        """What each worker must have received (see the outcome call)."""
        sealed = await self.seal_of()
        return {
            "plan": self.plan.digest,
            "snapshot": self.id,
            "digest": sealed.digest,
            "num_bytes": sealed.num_bytes,
            "num_tensors": sealed.num_tensors,
        }


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

    def get(self, snapshot_id: str) -> Snapshot | None:
        """The snapshot, unless it was committed or freed."""
        return self._open.get(snapshot_id)

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

    async def open(
        self, snapshot_id: str, version: int | str, label: str, plan: Plan, node_id: str, opened_at: float, serves: str
    ) -> Snapshot:
        """Allot a slot. Staged snapshots that were never committed give way once they fill the slots, the oldest first.

        Raises:
            RoundAborted: if no room can be had.
        """
        waiting = [snapshot for snapshot in self._open.values() if snapshot.sealed.done()]
        while len(waiting) >= self._transport.num_slots - 1:
            await self.free(waiting.pop(0))
        limit_s = self._timeouts.for_bytes("stage", plan.num_bytes)
        try:
            address = await self._stores.open_slot(
                node_id,
                snapshot=snapshot_id,
                plan_digest=plan.digest,
                num_bytes=plan.num_bytes,
                overlap=self._transport.overlap,
                limit_s=limit_s,
            )
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
            id=snapshot_id,
            version=version,
            label=label,
            plan=plan,
            node_id=node_id,
            store=self._stores.identity(node_id),
            address=address,
            opened_at=opened_at,
            sealed=asyncio.get_running_loop().create_future(),
        )
        self._open[snapshot_id] = snapshot
        return snapshot

    async def seal(self, snapshot: Snapshot, sealed: Sealed, serves: str) -> None:
        """Close the snapshot: from here on nobody writes to it.

        Raises:
            RoundAborted: if the store refuses it.
        """
        try:
            await self._stores.seal(snapshot.node_id, snapshot=snapshot.id, digest=sealed.digest, limit_s=self._timeouts.commit_s)
        except Exception as error:
            raise RoundAborted(
                f"Nothing changed: {serves}. The snapshot of version {snapshot.label} could not be sealed.",
                phase="stage",
                engine_message=words(error),
                hint="call again",
            ) from error
        snapshot.timeline.add("sender", "stage", time.monotonic() - sealed.stage_s, time.monotonic())
        if not snapshot.sealed.done():
            snapshot.sealed.set_result(sealed)

    async def give_up(self, snapshot: Snapshot, why: str) -> None:
        """The sender will not finish: whoever waits for the seal is told, receivers fail at once, the slot is freed."""
        if not snapshot.sealed.done():
            snapshot.sealed.set_exception(StepFailed("stage", CallFailure(message=why, kind="raised", elapsed_s=0.0), 0.0))
            snapshot.sealed.exception()  # marks it as seen: often nobody waits for it
        await self.free(snapshot)

    async def keep(self, snapshot: Snapshot) -> None:
        """It is the committed one from now on: never a target of staging, the source of every later repair."""
        self._open.pop(snapshot.id, None)
        self.committed = snapshot
        self._retired = await self._stores.mark_committed(snapshot.node_id, snapshot=snapshot.id, limit_s=self._timeouts.commit_s)

    async def free(self, snapshot: Snapshot) -> None:
        """Free a snapshot that was not committed. Idempotent."""
        if self._open.pop(snapshot.id, None) is None:
            return
        if snapshot.preflight is not None and not snapshot.preflight.done():
            await asyncio.wait({snapshot.preflight})  # its calls are out, and every one of them has a deadline
        try:
            await self._stores.discard(snapshot.node_id, snapshot=snapshot.id, limit_s=self._timeouts.commit_s)
        except Exception:
            logger.exception("the slot of version %s could not be freed; its store frees it when the session closes", snapshot.label)

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

    def notes(self) -> list[str]:
        """Remarks on the slots, for the report."""
        return [f"{self._retired} slots retired so far: somebody still held them when they were to be reused"] if self._retired else []

    async def close(self) -> None:
        """Free everything."""
        await self._stores.close(limit_s=self._timeouts.commit_s)
