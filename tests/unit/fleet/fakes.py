"""A fleet of this process: a coordinator over fake engines, and senders that write nothing."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

from ray_weightsync.config import FailurePolicy, Host, Native, Timeouts
from ray_weightsync.engines.facts import EngineFacts
from ray_weightsync.engines.ref import EngineRef
from ray_weightsync.engines.resolve import Engine
from ray_weightsync.errors import ConfigError, RoundAborted
from ray_weightsync.fleet.chronicle import Chronicle
from ray_weightsync.fleet.claims import Claims, Holder
from ray_weightsync.fleet.cluster import Process
from ray_weightsync.fleet.coordinator import Coordinator
from ray_weightsync.fleet.journal import Origin
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.values import Opening, Sealed, Settings, Ticket, Way
from ray_weightsync.protocol.channel import (
    FINISH,
    INIT,
    START,
    UPDATE,
)
from ray_weightsync.transports.collective.rendezvous import Meeting
from ray_weightsync.weights.plan import ParamMeta, Plan
from tests.unit.fleet.fake_cluster import ALIVE, FakeJournal, FakeKeys, FakeStores
from tests.unit.fleet.fake_engine import FakeEngine

_PHASES = ("preflight", "pause", "start", "update", "finish", "attest", "commit", "resume")
QUICK = Timeouts(min_rate_bytes_per_s=1e12, **{f"{phase}_s": 0.2 for phase in _PHASES})
"""Deadlines for tests in which something does not answer."""


def plan_of(*names: str) -> Plan:
    import torch

    return Plan.from_metadata([ParamMeta(name, torch.float32, (4,)) for name in names or ("weight",)])


class FakeFleet:
    """A coordinator over fake engines, and a sender that writes nothing. With ``other`` a second one on the same engines."""

    def __init__(self, num_engines: int = 3, *, name: str = "fake", other: FakeFleet | None = None, **settings: Any) -> None:
        self.name = name
        self.other = other
        self.engines = other.engines if other is not None else [FakeEngine(f"r{index}") for index in range(num_engines)]
        self.stores = FakeStores()
        self.sent = {"v0": "v0"}
        """By version, the snapshot last sent under it."""
        self.kept: dict[str, str] = {}
        """By version, the slot in which what was broadcast under it is kept."""
        self.opened: list[str] = []
        """The rounds that were asked for."""
        chosen: dict[str, Any] = {
            "transport": Host(),
            "transport_reason": "test",
            "pause": "keep",
            "cache": "recompute",
            "adopt": "reported",
            "on_failure": FailurePolicy(),
            "timeouts": QUICK,
            **settings,
        }
        self.keys, self.journal = other.keys if other is not None else FakeKeys(), FakeJournal()
        self.settings = Settings(**chosen)
        self.coordinator = self.coordinator_of()

    def coordinator_of(self) -> Coordinator:
        claims = Claims(Holder(session=self.name, coordinator=ALIVE, owner=ALIVE), keys=self.keys, is_gone=lambda process: False)
        chronicle = Chronicle(self.journal, Origin(session_id="s", owner=ALIVE))
        return Coordinator(
            self.name,
            self.settings,
            self.stores,
            claims,
            chronicle,
            predecessor=self.journal.read(),
            reach=self.reach,
            is_gone=self.is_gone,
        )

    async def reach(self, engine: EngineRef, *, limit_s: float, first: Any = None) -> Engine:
        """How a successor reaches an engine again."""
        from ray_weightsync.engines.inspect import ask

        (channel,) = [each for each in self.engines if each.label == engine.id]
        if first is not None:
            await first(channel)
        facts = await ask(channel, "successor", limit_s=limit_s)
        return Engine(id=str(engine.id), label=str(engine.id), channel=channel, facts=facts, ref=engine)

    async def kill_coordinator(self) -> None:
        """End whatever the coordinator is doing. A process that is killed does nothing more: what its tasks still do reaches nobody."""
        dead = self.coordinator
        dead.chronicle.journal, dead._parts.staging.copies.stores = FakeJournal(), FakeStores()
        tasks = asyncio.all_tasks() - self._others
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks) if tasks else None
        for engine in self.engines:
            engine.gates.clear()

    async def succeed(self) -> Coordinator:
        """The coordinator dies, with whatever it was doing; another one takes its place."""
        await self.kill_coordinator()
        self.coordinator = self.coordinator_of()
        await self.coordinator.recover()
        await self.coordinator._parts.staging.settled()
        return self.coordinator

    async def is_gone(self, facts: EngineFacts) -> bool:
        """Whether the engine that told these facts is dead for good."""
        return any(engine.dead and engine.incarnation == facts.incarnation for engine in self.engines)

    async def attach(self, *, take_over: bool = False) -> FakeFleet:
        from ray_weightsync.engines.inspect import ask

        self._others = asyncio.all_tasks()
        await self.coordinator.recover()
        replicas = []
        for engine in self.engines:
            facts: EngineFacts = await ask(engine, "attach", limit_s=1)
            ref = EngineRef(engine.label, id=engine.label)
            replicas.append(Replica(Engine(id=engine.label, label=engine.label, channel=engine, facts=facts, ref=ref)))
        await self.coordinator.adopt(replicas, hand_over=self.ask_to_hand_over if take_over else None)
        self.forget_calls()
        return self

    def forget_calls(self) -> None:
        for engine in self.engines:
            engine.calls.clear()

    async def ask_to_hand_over(self, session: str, identities: tuple[str, ...], limit_s: float) -> None:
        """Asks the other fleet on the same engines."""
        assert self.other is not None
        assert session == self.other.name
        await self.other.coordinator.hand_over(identities, to=self.name, limit_s=limit_s)

    async def open(
        self,
        version: int | str,
        plan: Plan | None = None,
        *,
        sender: Process = ALIVE,
        offer: Meeting | Native | None = None,
        way: Way | None = None,
    ) -> Ticket:
        self.opened.append(uuid.uuid4().hex)
        asked = opening_of(version, plan, snapshot=self.opened[-1], sender=sender, offer=offer, way=way)
        return await self.coordinator.rounds.open(asked)

    async def send(self, version: int | str, *, digest: str | None = None, plan: Plan | None = None) -> Any:
        ticket = await self.open(version, plan)
        self.sent[str(version)] = ticket.address["snapshot"]
        try:
            return await self.coordinator.rounds.commit(ticket.snapshot, sealed=sealed(digest or f"digest of {version}"), holds_turn=True)
        finally:
            await self.coordinator._parts.staging.settled()

    async def broadcast(
        self, version: int | str, *, digest: str | None = None, plan: Plan | None = None, way: Way | None = None, fails: bool = False
    ) -> Any:
        """A round whose sender is met by the engines; with ``fails`` it gives up when all of them receive."""
        meeting = meeting_of()
        rounds, staging = self.coordinator.rounds, self.coordinator._parts.staging
        ticket = await self.open(version, plan, offer=meeting, way=way)
        self.sent[str(version)] = meeting.id
        if ticket.address is not None:
            self.kept[str(version)] = ticket.address["snapshot"]
        committing = asyncio.ensure_future(rounds.commit(ticket.snapshot, holds_turn=True))
        ended = asyncio.ensure_future(rounds.live.ended(ticket.snapshot))
        try:
            await self._send(ticket.snapshot, digest or f"digest of {version}", ended, fails=fails)
            return await committing
        except RoundAborted:
            return await committing  # what it says of the round counts for more
        finally:
            await asyncio.wait({committing, ended})
            ended.exception()
            await staging.settled()

    async def _send(self, snapshot: str, digest: str, ended: asyncio.Future[str | None], *, fails: bool) -> None:
        rounds = self.coordinator.rounds
        group = await rounds.live.members(snapshot)
        while group is not None and not ended.done() and not all(self._receives(each.id) for each in group.members):
            came = {asyncio.ensure_future(engine.update_came.wait()) for engine in self.engines}
            await asyncio.wait({ended, *came}, return_when=asyncio.FIRST_COMPLETED)
            for each in came:
                each.cancel()
        if fails or (ended.done() and ended.result() is not None):
            await rounds.abandon(snapshot, "the sender gave up" if fails else str(ended.result()))
        else:
            await rounds.seal(snapshot, sealed(digest), keep_turn=True)

    def _receives(self, name: str) -> bool:
        (engine,) = [each for each in self.engines if each.label == name]
        return engine._received is not None and engine._received["round"] == self.coordinator._roster.round_id

    async def relay(
        self, version: int | str, *, engine: FakeTrainerEngine | None = None, plan: Plan | None = None, way: Way | None = None
    ) -> Any:
        """A round whose calls are given by a trainer engine."""
        engine = engine or FakeTrainerEngine()
        rounds, staging = self.coordinator.rounds, self.coordinator._parts.staging
        ticket = await self.open(version, plan, offer=Native(engine.backend), way=way)
        self.sent[str(version)] = ticket.snapshot
        committing = asyncio.ensure_future(rounds.commit(ticket.snapshot, holds_turn=True))
        try:
            engine.members = await rounds.live.members(ticket.snapshot)
            if engine.members is not None:
                for verb, payload in engine.calls():
                    await rounds.live.call(ticket.snapshot, verb, payload)
            await rounds.seal(ticket.snapshot, sealed(engine.digest or f"digest of {version}"), keep_turn=True)
        except (RoundAborted, ConfigError, ZeroDivisionError) as error:
            engine.error = error
            await rounds.abandon(ticket.snapshot, str(error))
        finally:
            await asyncio.wait({committing})
            await staging.settled()
        return await committing


class FakeTrainerEngine:
    """Gives the calls of one session.

    Attributes:
        init: What is to be set up; None if an earlier round's is used again.
        updates: What each update says.
        fails_at: The verb in whose place the source fails.
        members: Whom it was told to reach.
        error: What ended it.
    """

    def __init__(
        self, backend: str = "ipc", *, init: Any = None, updates: Any = ({},), fails_at: str | None = None, digest: str = ""
    ) -> None:
        self.backend = backend
        self.init = init
        self.updates = updates
        self.fails_at = fails_at
        self.digest = digest
        self.members: Any = None
        self.error: BaseException | None = None

    def calls(self) -> Iterator[tuple[str, Any]]:
        for verb, payload in [(INIT, self.init), (START, None), *((UPDATE, each) for each in self.updates), (FINISH, None)]:
            if verb == self.fails_at:
                raise ZeroDivisionError("the source failed")
            yield verb, payload


def opening_of(version: int | str, plan: Plan | None = None, *, snapshot: str | None = None, **fields: Any) -> Opening:
    """What a sender on the node ``"node"`` asks for."""
    plan = plan if plan is not None else plan_of()
    asked: dict[str, Any] = {"node_id": "node", "busy": "wait", "sender": ALIVE, **fields}
    return Opening(snapshot=snapshot or uuid.uuid4().hex, version=version, plan_digest=plan.digest, plan=plan.to_wire(), **asked)


def meeting_of() -> Meeting:
    return Meeting(id=uuid.uuid4().hex, backend="gloo", address="127.0.0.1", port=1, bucket_bytes=4096, num_buckets=2)


def sealed(digest: str) -> Sealed:
    return Sealed(digest=digest, num_bytes=16, num_tensors=1, stage_s=0.01)
