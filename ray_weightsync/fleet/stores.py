"""The coordinator's side of the host transport: one snapshot store per node, asked with deadlines."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from ray_weightsync.config import Host
from ray_weightsync.fleet.cluster import NAMESPACE, Process
from ray_weightsync.protocol.reading import words
from ray_weightsync.protocol.threads import in_daemon_thread
from ray_weightsync.weights.plan import Plan

logger = logging.getLogger(__name__)


class StoreLost(Exception):
    """The snapshot store of a node has died, with all that it held. Another one is started there when a slot is wanted."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A sealed snapshot that a store still has: where, and the digest that it was sealed with."""

    address: dict[str, Any]
    digest: str


class Stores(Protocol):
    """What the coordinator needs of snapshot stores, one per node. `RayStores` is the real one; unit tests bring stores of their own.

    Only `open_slot` starts a store; all else raises `StoreLost` where there is none any more.
    """

    def identity(self, node_id: str) -> str | None: ...
    async def nodes(self) -> dict[str, str]: ...
    async def open_slot(
        self, node_id: str, *, snapshot: str, plan_digest: str, num_bytes: int, overlap: bool, limit_s: float
    ) -> dict[str, Any]: ...
    async def seal(self, node_id: str, *, snapshot: str, digest: str, limit_s: float) -> None: ...
    async def relay(self, source: str, target: str, *, snapshot: str, plan: Plan, digest: str, limit_s: float) -> None: ...
    async def mark_committed(self, node_id: str, *, snapshot: str, limit_s: float) -> int: ...
    async def discard(self, node_id: str, *, snapshot: str, limit_s: float) -> None: ...
    async def probe(self, node_id: str, *, limit_s: float) -> dict[str, Any]: ...
    async def recover(self, slots: Collection[str], *, limit_s: float) -> dict[str, dict[str, Kept]]: ...
    async def close(self, *, but: Collection[str] = (), limit_s: float) -> None: ...


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
        self._plans: dict[str, Any] = {}
        self._starting: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._started = 0

    def identity(self, node_id: str) -> str | None:
        """Tells stores apart, also one from the one that was started in its place. None if there is none on this node."""
        return self._sessions[node_id] if node_id in self._actors else None

    async def nodes(self) -> dict[str, str]:
        """Addresses of the living nodes, by id."""
        import ray

        found: list[dict[str, Any]] = await in_daemon_thread(ray.nodes)
        return {node["NodeID"]: node["NodeManagerAddress"] for node in found if node["Alive"]}

    async def _started_on(self, node_id: str) -> Any:
        from ray_weightsync.transports.host.actor import start_store

        async with self._starting[node_id]:
            if node_id not in self._actors:
                self._started += 1
                # Nodes of a simulated cluster share one directory, and a dead store's files may not be swept yet.
                session = f"{self._session}{node_id[:6]}{self._started}"
                self._actors[node_id] = await start_store(
                    node_id,
                    session=session,
                    directory=self._transport.directory,
                    num_slots=self._transport.num_slots,
                    limit_s=self._connect_s,
                    name=self._prefix + session,
                    namespace=NAMESPACE,
                    keepers=self._keepers(),
                )
                self._sessions[node_id] = session
        return self._actors[node_id]

    async def _ask(self, node_id: str, method: str, *args: Any, limit_s: float) -> Any:
        from ray.exceptions import RayActorError, RayTaskError

        store = self._actors.get(node_id)
        if store is None:
            raise StoreLost(f"there is no snapshot store on node {node_id}: it has died")
        try:
            return await asyncio.wait_for(getattr(store, method).remote(*args), limit_s)
        except RayActorError as error:
            if isinstance(error, RayTaskError):  # it lives, and tells of the death of another one
                raise
            if self._actors.get(node_id) is store:
                del self._actors[node_id]  # its janitor sweeps its files
            raise StoreLost(f"the snapshot store on node {node_id} has died: {words(error)}") from error
        except TimeoutError as error:
            raise TimeoutError(f"the snapshot store on node {node_id} did not answer {method} within {limit_s:.1f} s") from error

    def _keepers(self) -> Any:
        from ray_weightsync.transports.host.actor import Keepers

        return Keepers(coordinator=self._coordinator, owner=self._owner)

    async def recover(self, slots: Collection[str], *, limit_s: float) -> dict[str, dict[str, Kept]]:
        """Take over the stores of the coordinator before; returns what is sealed of these slots, by node. All else in them is given up."""
        import ray

        names = await in_daemon_thread(lambda: ray.util.list_named_actors(all_namespaces=True))
        mine = [each["name"] for each in names if each["namespace"] == NAMESPACE and each["name"].startswith(self._prefix)]
        kept: dict[str, dict[str, Kept]] = {}
        for told in await asyncio.gather(*(self._adopted(name, slots, limit_s) for name in mine), return_exceptions=True):
            if isinstance(told, BaseException):  # one that is about to end
                logger.warning("a snapshot store of the coordinator before does not answer: %s", told)
            else:
                node_id, found = told
                kept[node_id] = found
        return kept

    async def _adopted(self, name: str, slots: Collection[str], limit_s: float) -> tuple[str, dict[str, Kept]]:
        import ray

        store: Any = await in_daemon_thread(lambda: ray.get_actor(name, namespace=NAMESPACE))
        node_id, session, kept = await asyncio.wait_for(store.adopt.remote(self._keepers(), list(slots)), limit_s)
        self._actors[node_id], self._sessions[node_id] = store, session
        return node_id, {slot: Kept(address=dict(address), digest=digest) for slot, (address, digest) in kept.items()}

    async def open_slot(
        self, node_id: str, *, snapshot: str, plan_digest: str, num_bytes: int, overlap: bool, limit_s: float
    ) -> dict[str, Any]:
        asked = (snapshot, plan_digest, num_bytes, overlap)
        await self._started_on(node_id)
        try:
            address: dict[str, Any] = await self._ask(node_id, "open_slot", *asked, limit_s=limit_s)
        except StoreLost:
            await self._started_on(node_id)
            address = await self._ask(node_id, "open_slot", *asked, limit_s=limit_s)
        return address

    async def seal(self, node_id: str, *, snapshot: str, digest: str, limit_s: float) -> None:
        await self._ask(node_id, "seal", snapshot, digest, limit_s=limit_s)

    async def relay(self, source: str, target: str, *, snapshot: str, plan: Plan, digest: str, limit_s: float) -> None:
        """Fill the slot of ``snapshot`` on the node ``target`` from the store on ``source``, check what arrived, and seal it."""
        from ray_weightsync.transports.host.relay import PIECE_BYTES

        if (origin := self._actors.get(source)) is None:
            raise StoreLost(f"there is no snapshot store on node {source}: it has died")
        piece_bytes = min(self._transport.bucket_bytes, PIECE_BYTES)
        # Its own deadline ends before ours: it knows how far the bytes had come.
        limits_s = 0.9 * limit_s
        await self._ask(target, "relay", snapshot, origin, digest, [await self._shared(plan)], piece_bytes, limits_s, limit_s=limit_s)

    async def _shared(self, plan: Plan) -> Any:
        """A reference to the plan in the object store: a relay that knows it does not fetch it."""
        import ray

        if plan.digest not in self._plans:
            ref = await in_daemon_thread(lambda: ray.put(plan.to_wire()))
            self._plans = dict([*self._plans.items(), (plan.digest, ref)][-2:])
        return self._plans[plan.digest]

    async def mark_committed(self, node_id: str, *, snapshot: str, limit_s: float) -> int:
        """Returns how many slots the node's store had to give up so far because somebody still held them."""
        return int((await self._ask(node_id, "mark_committed", snapshot, limit_s=limit_s)).retired)

    async def discard(self, node_id: str, *, snapshot: str, limit_s: float) -> None:
        await self._ask(node_id, "discard", snapshot, limit_s=limit_s)

    async def probe(self, node_id: str, *, limit_s: float) -> dict[str, Any]:
        probe: dict[str, Any] = await self._ask(node_id, "probe", limit_s=limit_s)
        return probe

    async def close(self, *, but: Collection[str] = (), limit_s: float) -> None:
        """Unlink everything and end the store actors, ``but`` those on these nodes."""
        import ray

        actors = {node_id: actor for node_id, actor in self._actors.items() if node_id not in but}
        for node_id in actors:
            del self._actors[node_id]
        closing = [asyncio.ensure_future(asyncio.wait_for(actor.close.remote(), limit_s)) for actor in actors.values()]
        try:
            await asyncio.gather(*closing, return_exceptions=True)  # one that has died needs no closing
        finally:
            for actor in actors.values():
                ray.kill(actor)  # its janitor unlinks what an unanswered close left
