"""The copies of a snapshot on the nodes where engines read it: their slots, their way there, what is kept and what is given up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from ray_weightsync.config import Host, Timeouts
from ray_weightsync.errors import CallFailure
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.snapshot import Copy, Snapshot
from ray_weightsync.fleet.spreading import SourceLost, spread
from ray_weightsync.fleet.steps import StepFailed, Timeline
from ray_weightsync.fleet.stores import StoreLost, Stores
from ray_weightsync.protocol.reading import words
from ray_weightsync.weights.plan import Plan

logger = logging.getLogger(__name__)

PHASE = "relay"


@dataclass(frozen=True)
class Ahead:
    """Slots that nobody has asked for yet: under one name, of one plan, by node."""

    slot: str
    plan: str
    copies: dict[str, Copy]


class Copies:
    """Of all snapshots of one session.

    Args:
        stores: The snapshot stores.
        transport: Whether engines may read a slot that is being filled.
        timeouts: Deadlines for the stores.
    """

    def __init__(self, stores: Stores, transport: Host, timeouts: Timeouts) -> None:
        self.stores = stores
        self._transport = transport
        self._timeouts = timeouts
        self._giving_back: set[asyncio.Future[None]] = set()

    # --- slots --------------------------------------------------------------------------------------------------------------

    async def begin(self, slot: str, plan: Plan, node_id: str) -> Copy:
        """Have a slot on a node. A store that is not there yet, or has died, is started.

        Raises:
            Exception: what kept the store from it.
        """
        limit_s = self._timeouts.for_bytes("stage", plan.num_bytes)
        try:
            address = await self.stores.open_slot(
                node_id,
                snapshot=slot,
                plan_digest=plan.digest,
                num_bytes=plan.num_bytes,
                overlap=self._transport.overlap,
                limit_s=limit_s,
            )
        except TimeoutError:  # it may be had yet, and then it is nobody's
            giving_back = asyncio.ensure_future(self.discard(node_id, slot))
            self._giving_back.add(giving_back)
            giving_back.add_done_callback(self._giving_back.discard)
            raise
        store = self.stores.identity(node_id)
        if store is None:
            raise StoreLost(f"the snapshot store on node {node_id} died as soon as it had been asked for a slot")
        return Copy(node_id, store, address)

    async def allotted(self, snapshot: Snapshot, node_id: str) -> Copy:
        """The copy on a node; begun if there is none.

        Raises:
            StepFailed: if no slot can be had there.
        """
        if node_id in snapshot.copies:
            return snapshot.copies[node_id]
        if snapshot.over:
            raise StepFailed.refused("stage", "the snapshot was given up meanwhile")
        if node_id not in snapshot.allotting:
            snapshot.allotting[node_id] = asyncio.ensure_future(self._allot(snapshot, node_id))
        return await asyncio.shield(snapshot.allotting[node_id])

    async def _allot(self, snapshot: Snapshot, node_id: str) -> Copy:
        began = time.monotonic()
        try:
            copy = snapshot.ahead.pop(node_id, None)
            if copy is None or not await self._lives(copy):
                copy = await self.begin(snapshot.slot, snapshot.plan, node_id)
            snapshot.copies[node_id] = copy
            return copy
        except Exception as error:
            limit_s = self._timeouts.for_bytes("stage", snapshot.plan.num_bytes)
            what = f"no slot of {snapshot.plan.num_bytes / 1e6:.1f} MB could be had on node {node_id}: {words(error)}"
            raise StepFailed("stage", CallFailure(message=what, kind="raised", elapsed_s=time.monotonic() - began), limit_s) from error
        finally:
            snapshot.allotting.pop(node_id, None)

    async def _lives(self, copy: Copy) -> bool:
        with contextlib.suppress(StoreLost):
            await self.stores.probe(copy.node_id, limit_s=self._timeouts.preflight_s)
        return self.stores.identity(copy.node_id) == copy.store

    async def ahead(self, plan: Plan, nodes: Iterable[str]) -> Ahead:
        """Slots for the next snapshot of a plan, on each of the nodes that can give one."""
        slot, wanted = uuid.uuid4().hex, list(nodes)
        begun = await asyncio.gather(*(self.begin(slot, plan, node_id) for node_id in wanted), return_exceptions=True)
        copies = {}
        for node_id, copy in zip(wanted, begun, strict=True):
            if isinstance(copy, BaseException):  # whoever needs it there asks again, and is told
                logger.warning("no slot could be had ahead on node %s: %s", node_id, words(copy))
            else:
                copies[node_id] = copy
        return Ahead(slot, plan.digest, copies)

    # --- the way to other nodes ---------------------------------------------------------------------------------------------

    async def spread(self, snapshot: Snapshot, replicas: Collection[Replica], timeline: Timeline) -> dict[str, StepFailed]:
        """Have the bytes of a sealed snapshot on the node of each of ``replicas``; whoever has got them serves others.

        Args:
            snapshot: Sealed on one node at least.
            replicas: Who will read it; each knows its home.
            timeline: Where the seconds are written, under each replica of a node.

        Returns:
            By replica, why the bytes are not on its node. What was begun there is given up.
        """
        digest = (await snapshot.seal_of()).digest
        async with snapshot.spreading:
            failures = await self._spread(snapshot, replicas, digest, timeline)
        return {replica.id: failures[str(replica.home)] for replica in replicas if replica.home in failures}

    async def _spread(self, snapshot: Snapshot, replicas: Collection[Replica], digest: str, timeline: Timeline) -> dict[str, StepFailed]:
        limit_s, began = self._timeouts.for_bytes("stage", snapshot.plan.num_bytes), time.monotonic()
        failures: dict[str, StepFailed] = {}

        async def copy(source: str, target: str) -> None:
            since = time.monotonic()
            try:
                await self._copy(snapshot, source, target, digest, limit_s - (since - began))
            except SourceLost as lost:
                why = await self._lost(snapshot, source, target, lost, time.monotonic() - since, limit_s)
                failures.setdefault(target, why)
                raise
            except Exception as error:
                failures[target] = await self._lost(snapshot, source, target, error, time.monotonic() - since, limit_s)
                raise
            failures.pop(target, None)
            for replica in replicas:
                if replica.home == target:
                    timeline.add(replica.id, PHASE, since, time.monotonic())

        targets = {str(replica.home) for replica in replicas if not snapshot.complete_on(str(replica.home))}
        await spread([node_id for node_id in snapshot.copies if snapshot.complete_on(node_id)], targets, copy)
        for target in targets:
            if target not in failures and not snapshot.complete_on(target):  # nobody was left to begin with it
                failures[target] = StepFailed.refused(PHASE, f"no store has the bytes of version {snapshot.label} any more", limit_s)
        return failures

    async def _copy(self, snapshot: Snapshot, source: str, target: str, digest: str, limit_s: float) -> None:
        if limit_s <= 0:
            raise TimeoutError("the nodes that have the bytes were not done with others in time")
        copy = await self.allotted(snapshot, target)
        try:
            await self.stores.relay(source, target, snapshot=snapshot.slot, plan=snapshot.plan, digest=digest, limit_s=limit_s)
        except TimeoutError:
            raise
        except Exception as error:
            # The target tells of its source's death in several ways; asking the source is sure.
            if source in snapshot.copies and await self._lives(snapshot.copies[source]):
                raise
            raise SourceLost(f"the store that they came from has died: {words(error)}") from error
        copy.sealed = True

    async def _lost(self, snapshot: Snapshot, source: str, target: str, error: Exception, elapsed_s: float, limit_s: float) -> StepFailed:
        """What became of a copy that was not completed. Receivers that wait for its end are told."""
        if snapshot.copies.pop(target, None) is not None:
            await self.discard(target, snapshot.slot)
        if isinstance(error, StepFailed):
            return error
        what = f"the bytes of version {snapshot.label} did not get from node {source} to node {target}: {words(error)}"
        return StepFailed(PHASE, CallFailure(message=what, kind="raised", elapsed_s=elapsed_s), limit_s)

    # --- kept, or given up --------------------------------------------------------------------------------------------------

    async def mark_committed(self, snapshot: Snapshot) -> tuple[int, list[str]]:
        """Have every copy kept; those that were not completed are given up, as are those that the store has lost.

        Returns:
            How many slots the stores had to give up so far because somebody still held them; and what could not be kept, in words.
        """
        await self._discard_incomplete(snapshot)
        nodes, limit_s = list(snapshot.copies), self._timeouts.commit_s
        asked = (self.stores.mark_committed(node_id, snapshot=snapshot.slot, limit_s=limit_s) for node_id in nodes)
        retired, problems = 0, []
        for node_id, told in zip(nodes, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(told, BaseException):
                del snapshot.copies[node_id]
                await self.discard(node_id, snapshot.slot)  # should it live, the slot would be in the way of another one of this name
                problems.append(f"node {node_id} did not keep version {snapshot.label}: {words(told)}")
                logger.warning("%s", problems[-1])
            else:
                retired += told
        return retired, problems

    async def why_unreadable(self, snapshot: Snapshot) -> str | None:
        """Why no node has the bytes of a committed snapshot any more, or None. Forgets the copies of stores that have died."""
        nodes = list(snapshot.copies)
        told = await asyncio.gather(*(self._trouble(snapshot, node_id) for node_id in nodes))
        problems = [each for each in told if each is not None]
        if len(problems) < len(nodes):
            return None
        return "; ".join(problems) or "no store kept it"

    async def _trouble(self, snapshot: Snapshot, node_id: str) -> str | None:
        said = None
        try:
            await self.probe(node_id)
        except StepFailed as failed:
            said = str(failed)
        if self.stores.identity(node_id) == snapshot.copies[node_id].store:
            return said
        del snapshot.copies[node_id]
        return said or f"the store on node {node_id} died, and another one is in its place"

    async def discard(self, node_id: str, slot: str) -> None:
        """Free a slot on a node. What cannot be freed now goes with its store."""
        try:
            await self.stores.discard(node_id, snapshot=slot, limit_s=self._timeouts.commit_s)
        except StoreLost:
            return  # and with it all that it held
        except Exception:
            logger.exception("slot %s on node %s could not be freed; its store frees it when the session closes", slot, node_id)

    async def _discard_incomplete(self, snapshot: Snapshot) -> None:
        unused, snapshot.ahead = set(snapshot.ahead), {}
        unused |= {node_id for node_id in snapshot.copies if not snapshot.complete_on(node_id)}
        for node_id in unused:
            snapshot.copies.pop(node_id, None)
        await asyncio.gather(*(self.discard(node_id, snapshot.slot) for node_id in unused))

    async def discard_all(self, snapshot: Snapshot) -> None:
        """Free all of a snapshot."""
        if under_way := list(snapshot.allotting.values()):
            await asyncio.wait(under_way)
        nodes = {*snapshot.copies, *snapshot.ahead}
        snapshot.copies, snapshot.ahead = {}, {}
        await asyncio.gather(*(self.discard(node_id, snapshot.slot) for node_id in nodes))

    async def probe(self, node_id: str) -> dict[str, Any]:
        """The nonce by which a worker proves that it sees the memory of a node.

        Raises:
            StepFailed: if the store does not answer.
        """
        try:
            return await self.stores.probe(node_id, limit_s=self._timeouts.preflight_s)
        except Exception as error:
            why = f"the snapshot store did not answer: {words(error)}"
            raise StepFailed.refused("preflight", why, self._timeouts.preflight_s) from error
