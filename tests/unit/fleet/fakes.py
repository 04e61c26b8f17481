"""An engine and a snapshot store of this process: they obey the protocol, remember what they were asked, and fail as they are told."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from ray_weightsync.config import FailurePolicy, Host, Timeouts
from ray_weightsync.engines.facts import INSPECT, EngineFacts
from ray_weightsync.engines.ref import EngineRef
from ray_weightsync.engines.resolve import Engine
from ray_weightsync.fleet.coordinator import Coordinator
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.values import Sealed, Settings, Ticket
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
    START,
    UNFINISHED,
    UPDATE,
)
from ray_weightsync.protocol.reading import EngineRestarted
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
    IS_PAUSED: "found",
    GET_VERSION: "found",
}

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
        self.epoch = 0
        self.cache_answer: Any = True
        self.loses_bytes = False
        self.out_of_step = False
        self._received: dict[str, Any] | None = None

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

    async def require_incarnation(self, incarnation: str) -> None:
        if self.dead or incarnation != self.incarnation:
            raise EngineRestarted("another process answers")

    def _name(self, verb: str, args: tuple[Any, ...]) -> str:
        if verb == INIT:
            return str(args[0]["op"])
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
        elif verb == FINISH:
            self.update_open = False
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
        if info["op"] == "plan":
            self.plans.append(Plan.from_wire(info["plan"]).digest)
        elif info["op"] == "outcome":
            received = self._received
            if received is None or received["round"] != info["round"] or self.loses_bytes:
                raise ValueError("rws: rank 0: nothing was transferred in this round")
            self.weights = info["expected"]["snapshot"]

    def _told(self, nonce: str) -> dict[str, Any]:
        worker = {
            "nonce": "an earlier question's" if self.out_of_step else nonce,
            "rank": 0,
            "world_size": 1,
            "package_version": VERSION_OF_THE_PACKAGE,
            "plans": list(self.plans),
            "update_open": self.update_open,
            "epoch": self.epoch,
            "resident": ["weights", "kv_cache"],
        }
        sizes = {"num_workers": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
        state = {"version": self.version, "paused": self.paused, "instance_id": self.incarnation, "unfinished_requests": 0}
        return {"kind": "async", "backend": "rws", "workers": [worker], **sizes, **state}


class FakeStores:
    """Snapshot stores that hold no bytes."""

    def __init__(self) -> None:
        self.open: dict[str, str] = {}
        self.committed: str | None = None
        self.closed = False
        self.refuse_seal = False
        self.full = False

    def identity(self, node_id: str) -> str:
        return node_id

    async def open_slot(
        self, node_id: str, *, snapshot: str, plan_digest: str, num_bytes: int, overlap: bool, limit_s: float
    ) -> dict[str, Any]:
        if self.full:
            raise OSError("no space left")
        self.open[snapshot] = "writing"
        return {"snapshot": snapshot, "overlap": overlap}

    async def seal(self, node_id: str, *, snapshot: str, digest: str, limit_s: float) -> None:
        if self.refuse_seal or snapshot not in self.open:
            raise ValueError("the watermark has not reached the end")
        self.open[snapshot] = "sealed"

    async def mark_committed(self, node_id: str, *, snapshot: str, limit_s: float) -> int:
        self.committed = snapshot
        return 0

    async def discard(self, node_id: str, *, snapshot: str, limit_s: float) -> None:
        del self.open[snapshot]

    async def probe(self, node_id: str, *, limit_s: float) -> dict[str, Any]:
        return {"nonce": "n"}

    async def close(self, *, limit_s: float) -> None:
        self.closed = True


def plan_of(*names: str) -> Plan:
    import torch

    return Plan.from_metadata([ParamMeta(name, torch.float32, (4,)) for name in names or ("weight",)])


class FakeFleet:
    """A coordinator over fake engines, and a sender that writes nothing."""

    def __init__(self, num_engines: int = 3, **settings: Any) -> None:
        self.engines = [FakeEngine(f"r{index}") for index in range(num_engines)]
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
        self.coordinator = Coordinator("fake", Settings(**chosen), self.stores)

    async def attach(self, *, take_over: bool = False) -> FakeFleet:
        from ray_weightsync.engines.inspect import ask

        replicas = []
        for engine in self.engines:
            facts: EngineFacts = await ask(engine, "attach", limit_s=1)
            ref = EngineRef(engine.label, id=engine.label)
            replicas.append(Replica(Engine(id=engine.label, label=engine.label, channel=engine, facts=facts, ref=ref)))
        await self.coordinator.adopt(replicas, take_over=take_over)
        self.forget_calls()
        return self

    def forget_calls(self) -> None:
        for engine in self.engines:
            engine.calls.clear()

    async def open(self, version: int | str, plan: Plan | None = None) -> Ticket:
        plan = plan if plan is not None else plan_of()
        return await self.coordinator.rounds.open(
            uuid.uuid4().hex, version, plan_digest=plan.digest, plan=plan.to_wire(), node_id="node", busy="wait"
        )

    async def send(self, version: int | str, *, digest: str | None = None, plan: Plan | None = None) -> Any:
        ticket = await self.open(version, plan)
        self.sent[str(version)] = ticket.address["snapshot"]
        try:
            return await self.coordinator.rounds.commit(ticket.snapshot, sealed=sealed(digest or f"digest of {version}"), holds_turn=True)
        finally:
            await self.coordinator._parts.staging.settled()


def sealed(digest: str) -> Sealed:
    return Sealed(digest=digest, num_bytes=16, num_tensors=1, stage_s=0.01)
