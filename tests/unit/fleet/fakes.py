"""An engine and a snapshot store of this process: they obey the protocol, remember what they were asked, and fail as they are told."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ray_weightsync.config import FailurePolicy, Host, Native, Timeouts
from ray_weightsync.engines.facts import INSPECT, EngineFacts
from ray_weightsync.engines.ref import EngineRef
from ray_weightsync.engines.resolve import Engine
from ray_weightsync.errors import ConfigError, RoundAborted
from ray_weightsync.fleet.chronicle import Chronicle
from ray_weightsync.fleet.claims import Claims, Holder
from ray_weightsync.fleet.cluster import Process
from ray_weightsync.fleet.coordinator import Coordinator
from ray_weightsync.fleet.journal import Origin
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.stores import Kept, StoreLost
from ray_weightsync.fleet.values import Sealed, Settings, Ticket, Way
from ray_weightsync.protocol.chain import StepByStep
from ray_weightsync.protocol.channel import (
    FINISH,
    GET_VERSION,
    INIT,
    IS_PAUSED,
    PAUSE,
    RESET_PREFIX_CACHE,
    RESUME,
    SET_VERSION,
    SHUTDOWN,
    SLEEP,
    START,
    UNFINISHED,
    UPDATE,
    WAKE_UP,
)
from ray_weightsync.protocol.reading import EngineRestarted
from ray_weightsync.transports.collective.rendezvous import Meeting
from ray_weightsync.weights.plan import ParamMeta, Plan

NAMES = {
    PAUSE: "pause",
    RESUME: "resume",
    START: "start",
    UPDATE: "update",
    FINISH: "finish",
    RESET_PREFIX_CACHE: "cache",
    INSPECT: "inspect",
    UNFINISHED: "count",
    SLEEP: "sleep",
    WAKE_UP: "wake_up",
    IS_PAUSED: "found",
    GET_VERSION: "found",
    SHUTDOWN: "shutdown",
}

PLAN = ["judge", "inspect", "plan"]
"""What an engine is asked about a plan that it does not know."""

_PHASES = ("preflight", "pause", "start", "update", "finish", "attest", "commit", "resume")
QUICK = Timeouts(min_rate_bytes_per_s=1e12, **{f"{phase}_s": 0.2 for phase in _PHASES})
"""Deadlines for tests in which something does not answer."""

VERSION_OF_THE_PACKAGE = "0"


class FakeEngine(StepByStep):
    """A `Channel` to an engine in this process, with one worker.

    Attributes:
        calls: What it was asked, in order, in the words of a round's phases.
        faults: By such a word, what happens then: ``"raise"``, ``"die"``, ``"hang"`` (until `release` is set), or ``"late"``
            (carried out, but answered only when `release` is set). Each happens once.
        weights: Id of the snapshot whose weights it holds, ``"torn"`` in between.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.calls: list[str] = []
        self.faults: dict[str, str] = {}
        self.release = asyncio.Event()
        self.reached: dict[str, asyncio.Event] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.version = "v0"
        self.paused = False
        self.weights = "v0"
        self.incarnation = f"{label}-1"
        self.dead = False
        self.update_open = False
        self.plans: list[str] = []
        self.judging: str | None = None
        self.pieces_left = 0
        """How many looks still find it judging."""
        self.epoch = 0
        self.cache_answer: Any = True
        self.loses_bytes = False
        self.out_of_step = False
        self.asleep: set[str] = set()
        self.inits: list[Any] = []
        """What it was told to set up for a trainer engine of vLLM's."""
        self.updates: list[Any] = []
        self.unfinished = 0
        self.node_id: str | None = None
        self.node_ip = ""
        self.seen: list[str] = []
        """Nodes whose memory it was asked to see."""
        self.sleeps = True
        self.under_way = 0
        """Chains of somebody else's in it."""
        self._received: dict[str, Any] | None = None

    async def halt_chains(self) -> int:
        self.calls.append("halt")
        return self.under_way

    pausable = True

    def supports(self, verb: str) -> bool:
        return True

    def gate(self, name: str) -> asyncio.Event:
        """Hold the engine in ``name`` until the returned event is set; ``reached[name]`` tells that it is there."""
        self.reached[name], self.gates[name] = asyncio.Event(), asyncio.Event()
        return self.gates[name]

    async def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        name = self._name(verb, args)
        self.calls.append(name)
        if self.dead:
            raise EngineRestarted("its process is gone")
        if name in self.gates:
            self.reached[name].set()
            await self.gates[name].wait()
        fault = self.faults.pop(name, None)
        if fault == "die":
            self.dead = True
            raise EngineRestarted("its process is gone")
        if fault == "raise":
            raise RuntimeError(f"made to fail in {name}")
        if fault == "hang":
            await self.release.wait()
            raise RuntimeError(f"{name} came back at last, and failed")
        answer = self._do(verb, args, kwargs)
        if fault == "late":
            await self.release.wait()
        return answer

    @property
    def read_from(self) -> str:
        """The node whose slot it was last told to read."""
        assert self._received is not None
        return str(self._received["slot"]["node"])

    def restart(self) -> None:
        """A new process answers behind the same handle, with the weights it was started with."""
        self.incarnation += "'"
        self.version, self.weights, self.paused, self.plans, self.update_open = "default", "initial", False, [], False
        self.judging = None
        self.asleep = set()

    async def require_incarnation(self, incarnation: str) -> None:
        if self.dead or incarnation != self.incarnation:
            raise EngineRestarted("another process answers")

    def _name(self, verb: str, args: tuple[Any, ...]) -> str:
        if verb == INIT:
            return str(args[0].get("op", "init"))
        if verb == SET_VERSION:
            return "mark" if args[0].startswith("!rws:") else "unmark" if args[0] == self._label_before else "commit"
        return NAMES[verb]

    _label_before = "v0"

    def _do(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if verb == INSPECT:
            return self._told(args[0])
        if verb == PAUSE:
            self.paused = True
        elif verb == RESUME:
            self.paused = False
        elif verb == SET_VERSION:
            if args[0].startswith("!rws:") and not self.version.startswith("!rws:"):
                self._label_before = self.version
            self.version = args[0]
        elif verb == START:
            assert self.paused or not self.pausable, "a real engine's core dies of a request that runs now"
            self.update_open, self.weights, self._received = True, "torn", None
        elif verb == UPDATE:
            self.epoch, self._received = args[0]["epoch"], args[0]
            self.updates.append(args[0].get("update_info"))
        elif verb == FINISH:
            self.update_open = False
        elif verb == SLEEP:
            self.paused, self.asleep = True, {"weights", "kv_cache"}
            if args[0] > 1 and self.sleeps:
                self.weights = "gone"
        elif verb == WAKE_UP:
            self.asleep -= set(args[0] or ("weights", "kv_cache"))
            self.paused = bool(self.asleep)
        elif verb == UNFINISHED:
            return 0
        elif verb == IS_PAUSED:
            return self.paused
        elif verb == GET_VERSION:
            return self.version
        elif verb == RESET_PREFIX_CACHE:
            return self.cache_answer
        elif verb == INIT:
            self._op(args[0])
        return None

    def _op(self, info: dict[str, Any]) -> None:
        if info["op"] == "see" and not info["probe"]:
            raise ValueError("rws: rank 0: a probe has the fields directory, name and nonce")
        if info["op"] == "native":
            assert self.paused
            assert not self.update_open
            self.inits.append(info["init_info"])
        if info["op"] == "judge":
            self.judging = info["plan"]["digest"]
        if info["op"] == "see":
            self.seen.append(info["probe"].get("nonce", info["probe"].get("backend")))
        if info["op"] == "plan":
            self.plans.append(Plan.from_wire(info["plan"]).digest)
        elif info["op"] == "outcome":
            received = self._received
            if received is None or received["round"] != info["round"] or self.loses_bytes:
                raise ValueError("rws: rank 0: nothing was transferred in this round")
            if received["transport"] == "native":
                had = received["round"]  # it knows no other name for them
            else:
                had = received["group"]["id"] if "group" in received else received["slot"]["snapshot"]
            if had != info["expected"]["snapshot"]:
                raise ValueError(f"rws: rank 0: snapshot: expected {info['expected']['snapshot']}, received {had}")
            self.weights = info["expected"]["snapshot"]

    def _still_judging(self) -> str | None:
        self.pieces_left -= self.judging is not None
        if self.pieces_left < 0:
            self.judging, self.pieces_left = None, 0
        return self.judging

    def _told(self, nonce: str) -> dict[str, Any]:
        worker = {
            "nonce": "an earlier question's" if self.out_of_step else nonce,
            "rank": 0,
            "world_size": 1,
            "package_version": VERSION_OF_THE_PACKAGE,
            "plans": list(self.plans),
            "judging": self._still_judging(),
            "update_open": self.update_open,
            "round": self._received["round"] if self._received else None,
            "epoch": self.epoch,
            "resident": [each for each in ("weights", "kv_cache") if each not in self.asleep or not self.sleeps],
            "incarnation": self.incarnation,
            "node_ip": self.node_ip,
        }
        sizes = {"num_workers": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
        state: dict[str, Any] = {
            "version": self.version,
            "paused": self.paused,
            "instance_id": self.incarnation,
            "unfinished_requests": self.unfinished,
        }
        state["node_id"] = self.node_id
        return {"kind": "async", "backend": "rws", "workers": [worker], **sizes, **state}


class FakeStores:
    """Snapshot stores that hold no bytes, on nodes that are named after them.

    Attributes:
        addresses: Of the living nodes, by id.
        at: By node, the slots there and their states.
        lives: By node, how many stores were started there so far.
        relays: Which node sent to which, in order.
        torn: Nodes where other bytes arrive than were sent.
        gates: By node, holds relays to it.
    """

    def __init__(self) -> None:
        self.addresses = {"node": "10.0.0.1", "other": "10.0.0.2", "third": "10.0.0.3"}
        self.at: dict[str, dict[str, str]] = {}
        self.lives: Counter[str] = Counter()
        self.digests: dict[str, str] = {}
        self.relays: list[tuple[str, str]] = []
        self.torn: set[str] = set()
        self.gates: dict[str, asyncio.Event] = {}
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
        assert self._of(node_id).pop(snapshot) != "committed"

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
        plan = plan if plan is not None else plan_of()
        return await self.coordinator.rounds.open(
            uuid.uuid4().hex,
            version,
            plan_digest=plan.digest,
            plan=plan.to_wire(),
            node_id="node",
            busy="wait",
            sender=sender,
            offer=offer,
            way=way,
        )

    async def send(self, version: int | str, *, digest: str | None = None, plan: Plan | None = None) -> Any:
        ticket = await self.open(version, plan)
        self.sent[str(version)] = ticket.address["snapshot"]
        try:
            return await self.coordinator.rounds.commit(ticket.snapshot, sealed=sealed(digest or f"digest of {version}"), holds_turn=True)
        finally:
            await self.coordinator._parts.staging.settled()

    async def broadcast(self, version: int | str, *, digest: str | None = None, plan: Plan | None = None, fails: bool = False) -> Any:
        """A round whose sender is met by the engines; with ``fails`` it gives up when all of them receive."""
        meeting = meeting_of()
        rounds, staging = self.coordinator.rounds, self.coordinator._parts.staging
        ticket = await self.open(version, plan, offer=meeting)
        self.sent[str(version)] = meeting.id
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
            await asyncio.sleep(0)
        if fails or (ended.done() and ended.result() is not None):
            await rounds.abandon(snapshot, "the sender gave up" if fails else str(ended.result()))
        else:
            await rounds.seal(snapshot, sealed(digest), keep_turn=True)

    def _receives(self, name: str) -> bool:
        (engine,) = [each for each in self.engines if each.label == name]
        return engine._received is not None and engine._received["round"] == self.coordinator._roster.round_id

    async def relay(self, version: int | str, *, engine: FakeTrainerEngine | None = None, plan: Plan | None = None) -> Any:
        """A round whose calls are given by a trainer engine."""
        engine = engine or FakeTrainerEngine()
        rounds, staging = self.coordinator.rounds, self.coordinator._parts.staging
        ticket = await self.open(version, plan, offer=Native(engine.backend))
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


def meeting_of() -> Meeting:
    return Meeting(id=uuid.uuid4().hex, backend="gloo", address="127.0.0.1", port=1, bucket_bytes=4096, num_buckets=2)


def sealed(digest: str) -> Sealed:
    return Sealed(digest=digest, num_bytes=16, num_tensors=1, stage_s=0.01)
