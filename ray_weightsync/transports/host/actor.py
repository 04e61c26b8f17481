"""The snapshot store as a Ray actor: one per node, started by the coordinator, and detached: it outlives it, so that a successor finds it.

It ends itself when nobody is left who could want it. However it ends, the store's janitor unlinks its files.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_weightsync.transports.host.layout import SlotAddress, SlotError
from ray_weightsync.transports.host.relay import pieces, read_piece
from ray_weightsync.transports.host.slots import StoreStats
from ray_weightsync.transports.host.store import SnapshotStore

if TYPE_CHECKING:
    from ray_weightsync.transports.host.writer import SlotWriter
    from ray_weightsync.weights.plan import Plan

logger = logging.getLogger(__name__)

_CONCURRENCY = 4
"""Calls that may be under way at once, so that `probe` and `stats` need not wait for a slot's first touch."""

_RELAYS = "relays"
"""The concurrency group of calls that move bytes between nodes: control calls do not wait for them."""

_RELAY_CONCURRENCY = 8

WATCH_EVERY_S = 1.0
"""How often a store looks for those it is kept for, in seconds."""

ADOPTION_S = 60.0
"""How long a store waits for a successor of its coordinator while the session's owner lives, in seconds."""


class Mortal(Protocol):
    """A process that may die. Asking may block."""

    @property
    def is_gone(self) -> bool:
        """Whether it will never act again."""
        ...


@dataclass(frozen=True, kw_only=True)
class Keepers:
    """Whom a store is kept for: the coordinator, and the owner of the session, as long as that lives and may get another coordinator."""

    coordinator: Mortal
    owner: Mortal


class SnapshotStoreActor:
    """A `SnapshotStore` behind an actor's handle; see there for what the methods do and raise."""

    def __init__(self) -> None:
        self._store: SnapshotStore | None = None
        self._keepers: Keepers | None = None
        self._keeping = threading.Lock()
        self._ending = False
        self._writer: SlotWriter | None = None
        self._plan: Plan | None = None
        self._relaying = threading.Lock()

    def start(self, session: str, directory: str, num_slots: int, keepers: Keepers | None) -> int:
        """Open the store, and return this process's pid. Not in the constructor, whose errors Ray turns into text."""
        if self._store is None:
            self._store = SnapshotStore(session, directory_here(directory), num_slots)
            if keepers is not None:
                self._keepers = keepers
                threading.Thread(target=self._watch, name="rws-store-keepers", daemon=True).start()
        return os.getpid()

    def adopt(self, keepers: Keepers, snapshots: Collection[str]) -> tuple[str, str, dict[str, tuple[SlotAddress, str]]]:
        """Belong to a successor, and keep only these snapshots. Returns the node, the session, and what `keep_only` does."""
        with self._keeping:
            if self._ending:
                raise SlotError("this snapshot store is about to end")
            self._keepers = keepers
        return ray.get_runtime_context().get_node_id(), self._started().session, self._started().keep_only(snapshots)

    def _watch(self) -> None:
        gone_since: float | None = None
        while True:
            time.sleep(WATCH_EVERY_S)
            keepers = self._keepers
            assert keepers is not None
            try:
                if not keepers.coordinator.is_gone:
                    gone_since = None
                    continue
                gone_since = gone_since or time.monotonic()
                if not keepers.owner.is_gone and time.monotonic() - gone_since < ADOPTION_S:
                    continue
            except Exception as error:  # whoever cannot be asked about is not known to be dead
                logger.warning("whether a session's coordinator lives could not be found out: %s: %s", type(error).__name__, error)
                continue
            with self._keeping:
                self._ending = keepers is self._keepers  # else somebody has adopted it meanwhile
            if self._ending:
                break
        logger.info("the session of this snapshot store is over; it ends")
        try:
            self.close()
        finally:  # with what could not be closed: the janitor unlinks it then
            ray.kill(ray.get_runtime_context().current_actor)

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

    @ray.method(concurrency_group=_RELAYS)
    def read(self, snapshot: str, start: int, stop: int) -> Any:
        """Bytes of a sealed snapshot, for another node's `relay`; see `read_piece`."""
        return read_piece(self._started().address(snapshot), start, stop)

    @ray.method(concurrency_group=_RELAYS)
    def relay(self, snapshot: str, source: Any, digest: str, plan: Sequence[Any], piece_bytes: int, limit_s: float) -> None:
        """Fill the slot of ``snapshot`` from another node's store, and seal it if what arrived is what was sealed there.

        Args:
            snapshot: Its id; `open_slot` was called for it here.
            source: Handle of a store that has it sealed.
            digest: The digest that it was sealed with.
            plan: A reference to its plan, in a list, as it is fetched only where it is not known.
            piece_bytes: Size of the pieces.
            limit_s: Seconds that it may take.

        Raises:
            SlotError: if other bytes arrived, or the snapshot was given up meanwhile.
            TimeoutError, ray.exceptions.RayError: see `pieces`. The slot stays unsealed: it is to be discarded.
        """
        # Here, as both bring torch: a second of work at the start of every session and 200 MB, for stores that mostly never relay.
        from ray_weightsync.transports.host.writer import SlotWriter
        from ray_weightsync.weights.plan import Plan

        began = time.monotonic()
        store = self._started()
        address = store.address(snapshot)
        if not self._relaying.acquire(timeout=limit_s):
            raise TimeoutError(f"an earlier relay to this node is still under way after {limit_s:.1f} s")
        try:
            if self._plan is None or self._plan.digest != address["plan"]:
                self._plan = Plan.from_wire(ray.get(plan[0], timeout=limit_s))
            self._writer = self._writer or SlotWriter()
            left_s = limit_s - (time.monotonic() - began)
            arriving = pieces(source, snapshot, address["num_bytes"], piece_bytes=piece_bytes, limit_s=left_s)
            arrived = self._writer.copy(address, self._plan, arriving)
        finally:
            self._relaying.release()
        if arrived.digest != digest:
            raise SlotError(f"what arrived has digest {arrived.digest}, sealed was {digest}: bytes changed on the way between the nodes")
        store.seal(snapshot, digest)

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


def directory_here(directory: str) -> str:
    """``directory`` with the environment variables that it names (``$NAME``, ``${NAME}``), as they are in this process.

    Raises:
        SlotError: if one of them is not set here.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            raise SlotError(f"Host(directory={directory!r}) names the environment variable {name}, which Ray on this node does not have")
        return os.environ[name]

    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, directory)


async def start_store(
    node_id: str,
    *,
    session: str,
    directory: str,
    num_slots: int,
    limit_s: float,
    name: str | None = None,
    namespace: str | None = None,
    keepers: Keepers | None = None,
) -> Any:
    """Start a store on a node and wait until it is ready. The caller closes it.

    Args:
        node_id: Ray's hex id of the node whose shared memory is meant.
        session: Part of the file names; see `SnapshotStore`.
        directory: A memory-backed directory on that node; see `directory_here`.
        num_slots: Slots kept for reuse.
        limit_s: Seconds it may take.
        name: Name of the actor, which then outlives the caller.
        namespace: Ray namespace of that name.
        keepers: Whom it is kept for; it ends itself when they are gone.

    Returns:
        The actor's handle, with the methods of `SnapshotStoreActor`.

    Raises:
        TimeoutError: if it is not ready in time.
        OSError, SlotError: what the store itself raised.
        ray.exceptions.RayActorError: if the node is not there or the actor died. In each case the actor is gone.
    """
    # A store that restarted would be an empty one behind a handle that promises snapshots; 0 CPUs, since it must never wait for a slot
    # that engines hold.
    detached = {} if name is None else {"name": name, "namespace": namespace, "lifetime": "detached"}
    as_actor: Any = ray.remote(concurrency_groups={_RELAYS: _RELAY_CONCURRENCY})  # type: ignore[call-overload]
    handle: Any = (
        as_actor(SnapshotStoreActor)
        .options(
            num_cpus=0,
            max_concurrency=_CONCURRENCY,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            **detached,
        )
        .remote()
    )
    try:
        await asyncio.wait_for(handle.start.remote(session, directory, num_slots, keepers), limit_s)
    except BaseException as error:
        ray.kill(handle)
        if isinstance(error, TimeoutError):
            raise TimeoutError(
                f"the snapshot store on node {node_id} was not ready after {limit_s:.1f} s;"
                " can Ray start a worker process there (memory, runtime_env)?"
            ) from error
        raise
    return handle
