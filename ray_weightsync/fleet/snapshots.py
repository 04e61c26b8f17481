"""The coordinator's side of the host transport: one snapshot store per node, asked with deadlines."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from ray_weightsync.config import Host


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
    async def close(self, *, limit_s: float) -> None: ...


class RayStores:
    """One `SnapshotStoreActor` per node, started when it is first needed.

    Args:
        session: Part of the file names in shared memory; lower-case letters and digits.
        transport: Directory and number of slots.
        connect_s: Seconds a store may take to start.
    """

    def __init__(self, session: str, transport: Host, *, connect_s: float) -> None:
        self._session = session
        self._transport = transport
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
                )
        return self._actors[node_id]

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
