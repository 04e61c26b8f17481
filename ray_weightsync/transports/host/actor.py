"""The snapshot store as a Ray actor: one per node, created by the coordinator, which is its owner; nothing is decided here.

When the coordinator dies, Ray kills the actor without a word, and the store's janitor unlinks its files.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_weightsync.transports.host.layout import SlotAddress, SlotError
from ray_weightsync.transports.host.slots import StoreStats
from ray_weightsync.transports.host.store import SnapshotStore

_CONCURRENCY = 4
"""Calls that may be under way at once, so that `probe` and `stats` need not wait for a slot's first touch."""


class SnapshotStoreActor:
    """A `SnapshotStore` behind an actor's handle; see there for what the methods do and raise."""

    def __init__(self) -> None:
        self._store: SnapshotStore | None = None

    def start(self, session: str, directory: str, num_slots: int) -> int:
        """Open the store, and return this process's pid. Not in the constructor, whose errors Ray turns into text."""
        if self._store is None:
            self._store = SnapshotStore(session, directory, num_slots)
        return os.getpid()

    def open_slot(self, snapshot: str, plan_digest: str, num_bytes: int, overlap: bool) -> SlotAddress:
        return self._started().open_slot(snapshot, plan_digest, num_bytes, overlap)

    def seal(self, snapshot: str, digest: str) -> None:
        self._started().seal(snapshot, digest)

    def mark_committed(self, snapshot: str) -> StoreStats:
        """Returns the stats as well: a call saved in every round."""
        store = self._started()
        store.mark_committed(snapshot)
        return store.stats()

    def discard(self, snapshot: str) -> bool:
        return self._started().discard(snapshot)

    def address(self, snapshot: str) -> SlotAddress:
        return self._started().address(snapshot)

    def probe(self) -> dict[str, str]:
        return self._started().probe()

    def stats(self) -> StoreStats:
        return self._started().stats()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _started(self) -> SnapshotStore:
        if self._store is None:
            raise SlotError("this snapshot store was not started")
        return self._store


async def start_store(node_id: str, *, session: str, directory: str, num_slots: int, limit_s: float) -> Any:
    """Start a store on a node and wait until it is ready. The caller owns the actor and closes it.

    Args:
        node_id: Ray's hex id of the node whose shared memory is meant.
        session: Part of the file names; see `SnapshotStore`.
        directory: A memory-backed directory on that node.
        num_slots: Slots kept for reuse.
        limit_s: Seconds it may take.

    Returns:
        The actor's handle, with the methods of `SnapshotStoreActor`.

    Raises:
        TimeoutError: if it is not ready in time.
        OSError, SlotError: what the store itself raised.
        ray.exceptions.RayActorError: if the node is not there or the actor died. In each case the actor is gone.
    """
    # A store that restarted would be an empty one behind a handle that promises snapshots; 0 CPUs, since it must never wait for a slot
    # that engines hold.
    handle: Any = (
        ray.remote(SnapshotStoreActor)
        .options(
            num_cpus=0,
            max_concurrency=_CONCURRENCY,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote()
    )
    try:
        await asyncio.wait_for(handle.start.remote(session, directory, num_slots), limit_s)
    except BaseException as error:
        ray.kill(handle)
        if isinstance(error, TimeoutError):
            raise TimeoutError(
                f"the snapshot store on node {node_id} was not ready after {limit_s:.1f} s;"
                " can Ray start a worker process there (memory, runtime_env)?"
            ) from error
        raise
    return handle
