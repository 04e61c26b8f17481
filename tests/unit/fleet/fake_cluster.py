"""What a coordinator has of a cluster, in memory: snapshot stores, the control plane's keys, a journal."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from ray_weightsync.fleet.cluster import Process
from ray_weightsync.fleet.stores import Kept, StoreLost
from ray_weightsync.weights.plan import Plan


class FakeStores:
    """Snapshot stores that hold no bytes, on nodes that are named after them.

    Attributes:
        addresses: Of the living nodes, by id.
        at: By node, the slots there and their states.
        lives: By node, how many stores were started there so far.
        relays: Which node sent to which, in order.
        torn: Nodes where other bytes arrive than were sent.
        gates: By node, holds relays to it.
        breaks: By node, which store dies while bytes come to it.
    """

    def __init__(self) -> None:
        self.addresses = {"node": "10.0.0.1", "other": "10.0.0.2", "third": "10.0.0.3"}
        self.at: dict[str, dict[str, str]] = {}
        self.lives: Counter[str] = Counter()
        self.digests: dict[str, str] = {}
        self.relays: list[tuple[str, str]] = []
        self.torn: set[str] = set()
        self.gates: dict[str, asyncio.Event] = {}
        self.breaks: dict[str, str] = {}
        self.closed = False
        self.refuse_seal = False
        self.full: set[str] = set()
        self.dead = False

    @property
    def open(self) -> dict[str, str]:
        """The slots beside the sender."""
        return self.at.get("node", {})

    @property
    def committed(self) -> str | None:
        """The snapshot that is committed beside the sender."""
        return next((slot for slot, state in self.open.items() if state == "committed"), None)

    def kill(self, node_id: str) -> None:
        """End the store of a node."""
        del self.at[node_id]

    def start(self, node_id: str) -> dict[str, str]:
        """The slots of a node's store, which is started if there is none."""
        if node_id not in self.addresses:
            raise OSError(f"there is no node {node_id}")
        if node_id not in self.at:
            self.lives[node_id] += 1
        return self.at.setdefault(node_id, {})

    def _of(self, node_id: str) -> dict[str, str]:
        if node_id not in self.at:
            raise StoreLost(f"the store on {node_id} has died")
        return self.at[node_id]

    def identity(self, node_id: str) -> str | None:
        return f"{node_id}-{self.lives[node_id]}" if node_id in self.at else None

    async def nodes(self) -> dict[str, str]:
        return dict(self.addresses)

    async def open_slot(
        self, node_id: str, *, snapshot: str, plan_digest: str, num_bytes: int, overlap: bool, limit_s: float
    ) -> dict[str, Any]:
        if node_id in self.full:
            raise OSError("no space left")
        slots = self.start(node_id)
        assert snapshot not in slots, "it has a slot there already"
        slots[snapshot] = "writing"
        return {"snapshot": snapshot, "overlap": overlap, "node": node_id}

    async def seal(self, node_id: str, *, snapshot: str, digest: str, limit_s: float) -> None:
        if self.refuse_seal or snapshot not in self._of(node_id):
            raise ValueError("the watermark has not reached the end")
        self._of(node_id)[snapshot] = "sealed"
        self.digests[snapshot] = digest

    async def relay(self, source: str, target: str, *, snapshot: str, plan: Plan, digest: str, limit_s: float) -> None:
        self.relays.append((source, target))
        if target in self.gates:
            await self.gates[target].wait()
        if target in self.breaks:
            self.kill(self.breaks.pop(target))
        if source not in self.at:
            raise ValueError("the target's store tells that its source has died")
        assert self._of(source)[snapshot] in ("sealed", "committed"), "only sealed bytes travel"
        assert self._of(target)[snapshot] == "writing"
        if target in self.torn:
            raise ValueError("what arrived has another digest")
        self._of(target)[snapshot] = "sealed"

    async def mark_committed(self, node_id: str, *, snapshot: str, limit_s: float) -> int:
        slots = self._of(node_id)
        assert slots[snapshot] in ("sealed", "committed")
        slots.update({slot: "former" for slot, state in slots.items() if state == "committed"})
        slots[snapshot] = "committed"
        return 0

    async def discard(self, node_id: str, *, snapshot: str, limit_s: float) -> None:
        assert self._of(node_id).pop(snapshot, None) != "committed"

    async def probe(self, node_id: str, *, limit_s: float) -> dict[str, Any]:
        if self.dead:
            raise RuntimeError("the store's actor does not answer")
        self._of(node_id)
        return {"nonce": node_id}

    async def recover(self, slots: Any, *, limit_s: float) -> dict[str, dict[str, Kept]]:
        for node_id, held in self.at.items():
            self.at[node_id] = {slot: state for slot, state in held.items() if slot in slots and state != "writing"}
        return {
            node_id: {slot: Kept(address={"snapshot": slot, "node": node_id}, digest=self.digests[slot]) for slot in held}
            for node_id, held in self.at.items()
        }

    async def close(self, *, but: Any = (), limit_s: float) -> None:
        self.at = {node_id: held for node_id, held in self.at.items() if node_id in but}
        self.closed = self.closed or not but


class FakeKeys:
    """Ray's control plane, in memory: claims."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def put_if_absent(self, key: str, value: bytes) -> bool:
        return self.values.setdefault(key, value) is value

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def delete(self, key: str) -> None:
        self.values.pop(key, None)

    def keys(self, prefix: str) -> list[str]:
        return [key for key in list(self.values) if key.startswith(prefix)]


class FakeJournal:
    """A journal in memory. What is written is pickled, as the real one does."""

    def __init__(self) -> None:
        self.record: Any = None
        self.plans: dict[str, dict[str, Any]] = {}

    def read(self) -> Any:
        return self.record

    def write(self, record: Any) -> None:
        self.record = record

    def read_plan(self, digest: str) -> dict[str, Any] | None:
        return self.plans.get(digest)

    def write_plan(self, digest: str, plan: dict[str, Any]) -> None:
        self.plans[digest] = plan

    def forget_plan(self, digest: str) -> None:
        self.plans.pop(digest, None)

    def erase(self) -> None:
        self.record, self.plans = None, {}


class Alive(Process):
    """A process that does not die."""

    @property
    def is_gone(self) -> bool:
        return False


ALIVE = Alive(job_id="1")
