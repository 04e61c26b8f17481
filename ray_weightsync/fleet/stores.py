"""The coordinator's side of the host transport: one snapshot store per node, asked with deadlines."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Collection
from typing import Any, Protocol

from ray_weightsync.config import Host
from ray_weightsync.fleet.cluster import NAMESPACE, Process
from ray_weightsync.protocol.threads import in_daemon_thread

logger = logging.getLogger(__name__)


class Stores(Protocol):
    """What the coordinator needs of snapshot stores. `RayStores` is the real one; unit tests bring a store of their own process."""

    def identity(self, node_id: str) -> str: ...
    async def open_slot(
        self, node_id: str, *, snapshot: str, plan_digest: str, num_bytes: int, overlap: bool, limit_s: float
    ) -> dict[str, Any]: ...
    async def seal(self, node_id: str, *, snapshot: str, digest: str, limit_s: float) -> None: ...
    async def mark_committed(self, node_id: str, *, snapshot: str, limit_s: float) -> int: ...
    async def discard(self, node_id: str, *, snapshot: str, limit_s: float) -> None: ...
    async def probe(self, node_id: str, *, limit_s: float) -> dict[str, Any]: ...
    async def recover(self, slots: Collection[str], *, limit_s: float) -> dict[str, str]: ...
    async def close(self, *, limit_s: float) -> None: ...


class RayStores:
    """One `SnapshotStoreActor` per node, started when it is first needed. They outlive this process, and a successor finds them by name.

    Args:
        name: The session's name.
        transport: Directory and number of slots.
        coordinator: This process.
        owner: The process whose end ends the session.
        connect_s: Seconds a store may take to start.
    """

    def __init__(self, name: str, transport: Host, *, coordinator: Process, owner: Process, connect_s: float) -> None:
        self._prefix = f"store:{name}:"
        self._session = secrets.token_hex(6)  # part of the file names in shared memory
        self._transport = transport
        self._coordinator = coordinator
        self._owner = owner
        self._connect_s = connect_s
        self._actors: dict[str, Any] = {}
        self._sessions: dict[str, str] = {}
        self._starting = asyncio.Lock()
        self._started = 0

    def identity(self, node_id: str) -> str:
        """Tells stores apart, also one from the one that was started in its place."""
        return self._sessions[node_id]

    async def _store(self, node_id: str) -> Any:
        from ray_weightsync.transports.host.actor import start_store

        async with self._starting:
            if node_id not in self._actors:
                self._started += 1
                # Nodes of a simulated cluster share one directory, and a dead store's files may not be swept yet.
                self._sessions[node_id] = f"{self._session}{node_id[:6]}{self._started}"
                self._actors[node_id] = await start_store(
                    node_id,
                    session=self._sessions[node_id],
                    directory=self._transport.directory,
                    num_slots=self._transport.num_slots,
                    limit_s=self._connect_s,
                    name=self._prefix + self._sessions[node_id],
                    namespace=NAMESPACE,
                    keepers=self._keepers(),
                )
        return self._actors[node_id]

    def _keepers(self) -> Any:
        from ray_weightsync.transports.host.actor import Keepers

        return Keepers(coordinator=self._coordinator, owner=self._owner)

    async def recover(self, slots: Collection[str], *, limit_s: float) -> dict[str, str]:
        """Take over the stores of the coordinator before, with these slots as far as they are sealed; returns their digests."""
        import ray

        names = await in_daemon_thread(lambda: ray.util.list_named_actors(all_namespaces=True))
        mine = [each["name"] for each in names if each["namespace"] == NAMESPACE and each["name"].startswith(self._prefix)]
        kept: dict[str, str] = {}
        for told in await asyncio.gather(*(self._adopted(name, slots, limit_s) for name in mine), return_exceptions=True):
            if isinstance(told, BaseException):  # one that is about to end
                logger.warning("a snapshot store of the coordinator before does not answer: %s", told)
            else:
                kept.update(told)
        return kept

    async def _adopted(self, name: str, slots: Collection[str], limit_s: float) -> dict[str, str]:
        import ray

        store: Any = await in_daemon_thread(lambda: ray.get_actor(name, namespace=NAMESPACE))
        node_id, session, kept = await asyncio.wait_for(store.adopt.remote(self._keepers(), list(slots)), limit_s)
        self._actors[node_id], self._sessions[node_id] = store, session
        return dict(kept)

    async def open_slot(
        self, node_id: str, *, snapshot: str, plan_digest: str, num_bytes: int, overlap: bool, limit_s: float
    ) -> dict[str, Any]:
        from ray.exceptions import RayActorError

        store = await self._store(node_id)
        try:
            address: dict[str, Any] = await asyncio.wait_for(store.open_slot.remote(snapshot, plan_digest, num_bytes, overlap), limit_s)
        except RayActorError:
            if self._actors.get(node_id) is store:
                del self._actors[node_id]  # its janitor sweeps its files
            store = await self._store(node_id)
            address = await asyncio.wait_for(store.open_slot.remote(snapshot, plan_digest, num_bytes, overlap), limit_s)
        return address

    async def seal(self, node_id: str, *, snapshot: str, digest: str, limit_s: float) -> None:
        await asyncio.wait_for((await self._store(node_id)).seal.remote(snapshot, digest), limit_s)

    async def mark_committed(self, node_id: str, *, snapshot: str, limit_s: float) -> int:
        """Returns how many slots the node's store had to give up so far because somebody still held them."""
        stats = await asyncio.wait_for((await self._store(node_id)).mark_committed.remote(snapshot), limit_s)
        return int(stats.retired)

    async def discard(self, node_id: str, *, snapshot: str, limit_s: float) -> None:
        await asyncio.wait_for((await self._store(node_id)).discard.remote(snapshot), limit_s)

    async def probe(self, node_id: str, *, limit_s: float) -> dict[str, Any]:
        probe: dict[str, Any] = await asyncio.wait_for((await self._store(node_id)).probe.remote(), limit_s)
        return probe

    async def close(self, *, limit_s: float) -> None:
        """Unlink everything and end the store actors."""
        import ray

        actors, self._actors = self._actors, {}
        closing = [asyncio.ensure_future(asyncio.wait_for(actor.close.remote(), limit_s)) for actor in actors.values()]
        try:
            await asyncio.gather(*closing, return_exceptions=True)  # one that has died needs no closing
        finally:
            for actor in actors.values():
                ray.kill(actor)  # its janitor unlinks what an unanswered close left
