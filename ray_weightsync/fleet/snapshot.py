"""One version's bytes on their way to the fleet, or sealed: what the coordinator knows of them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from ray_weightsync.fleet.live import Live
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.round import RoundLog
from ray_weightsync.fleet.steps import StepFailed
from ray_weightsync.fleet.values import Sealed
from ray_weightsync.weights.plan import Plan


@dataclass(eq=False)
class Copy:
    """A snapshot's bytes on one node.

    Attributes:
        store: Identity of the store that holds them; a store that is started anew is another one.
        address: Where they lie there (see `ray_weightsync.transports.host.layout`).
        sealed: They are complete, and the sealed ones.
    """

    node_id: str
    store: str
    address: dict[str, Any]
    sealed: bool = False


@dataclass(eq=False)
class Snapshot:
    """One version's bytes under one plan, on their way or sealed.

    Attributes:
        id: The id of the round that writes it, chosen by whoever sends.
        slot: The stores' name for it.
        node_id: The node on which it is written.
        copies: By node, where it lies and is about to lie.
        ahead: By node, slots that were had under its name before anybody asked for them; their stores may have died since.
        allotting: Copies whose slot is being had.
        spreading: Held while its bytes go to other nodes.
        live: How its bytes get to the engines, if not by a copy on their node. None when that is over.
        group: Id of the group in which it is broadcast; its receivers know it by that.
        attested: Its receivers can attest the bytes.
        kept: Stores are to have it.
        over: It is freed, or about to be.
        log: That round's.
        sealed: What the sender wrote; a `StepFailed` if it gave up.
        preflight: The check of the fleet beside the sender's packing: who takes part.
        sealing: The store's part of sealing, beside the pause.
        committing: A round brings it to the fleet right now.
        turn: How often the turn had been taken when the fleet was looked at for it.
    """

    id: str
    slot: str
    version: int | str
    label: str
    plan: Plan
    node_id: str
    log: RoundLog
    sealed: asyncio.Future[Sealed]
    live: Live[Any] | None = None
    group: str | None = None
    attested: bool = True
    kept: bool = True
    over: bool = False
    copies: dict[str, Copy] = field(default_factory=dict)
    ahead: dict[str, Copy] = field(default_factory=dict)
    allotting: dict[str, asyncio.Future[Copy]] = field(default_factory=dict)
    spreading: asyncio.Lock = field(default_factory=asyncio.Lock)
    preflight: asyncio.Task[list[Replica]] | None = None
    sealing: asyncio.Task[Any] | None = None
    committing: bool = False
    turn: int = 0

    @property
    def origin(self) -> str:
        """The node where its bytes come from; where the one that it was written on does not have them any more, another one that has."""
        return self.node_id if self.node_id in self.copies else next(iter(self.copies), self.node_id)

    def complete_on(self, node_id: str) -> bool:
        """Whether its bytes can be read on a node."""
        return node_id in self.copies and self.copies[node_id].sealed

    async def seal_of(self) -> Sealed:
        """What the sender wrote, as soon as it has."""
        return await asyncio.shield(self.sealed)

    def written(self) -> Sealed:
        """What the sender wrote; where it did not get to the end, what the plan announced, without a digest."""
        if self.sealed.done() and self.sealed.exception() is None:
            return self.sealed.result()
        blocked_s = time.monotonic() - self.log.began
        return Sealed(digest="", num_bytes=self.plan.weight_bytes, num_tensors=len(self.plan.tensors), stage_s=blocked_s)

    def fail(self, why: StepFailed) -> None:
        """It will not be sealed: whoever waits for that is told."""
        if self.live is not None:
            self.live.end(str(why))
        if not self.sealed.done():
            self.sealed.set_exception(why)
            self.sealed.exception()  # marks it as seen: often nobody waits for it

    @property
    def given_up(self) -> StepFailed | None:
        """Why it will not be sealed, if that is so."""
        error = self.sealed.exception() if self.sealed.done() and not self.sealed.cancelled() else None
        return error if isinstance(error, StepFailed) else None

    async def judged(self) -> list[Replica]:
        """Who takes part, by the preflight that runs beside the packing; its error says who refused."""
        assert self.preflight is not None
        return await asyncio.shield(self.preflight)

    async def expected(self) -> dict[str, Any]:
        """What each worker must have received (see the outcome call)."""
        sealed = await self.seal_of()
        expected = {
            "plan": self.plan.digest,
            "snapshot": self.group or self.slot,
            "digest": sealed.digest,
            "num_bytes": sealed.num_bytes,
            "num_tensors": sealed.num_tensors,
        }
        return expected if self.attested else {**expected, "attested": False}
