"""An engine of this process: it obeys the protocol, remembers what it was asked, and fails as it is told."""

from __future__ import annotations

import asyncio
from typing import Any

from ray_weightsync.engines.facts import INSPECT
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
from ray_weightsync.weights.plan import Plan

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

VERSION_OF_THE_PACKAGE = "0"

SLOW_S = 0.3
"""What a slow call takes, in seconds: longer than a look at the fleet is fresh."""


class FakeEngine(StepByStep):
    """A `Channel` to an engine in this process, with one worker.

    Attributes:
        calls: What it was asked, in order, in the words of a round's phases.
        faults: By such a word, what happens then: ``"raise"``, ``"die"``, ``"hang"`` (until `release` is set), ``"late"`` (carried out,
            but answered only when `release` is set), ``"delayed"`` (carried out only then), ``"lost"`` (carried out, and the connection
            breaks), or ``"slow"`` (carried out in `SLOW_S`). Each happens once.
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
        self.owed: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        """Calls that whoever made them did not live to see carried out."""
        self.update_came = asyncio.Event()
        """Set with the next update."""
        self._received: dict[str, Any] | None = None
        self._chosen_by: str | None = None
        """The round that the next session was set up for."""
        self._round: str | None = None
        """The round of the latest session, as far as it was told."""
        self._failure: str | None = None
        """What went wrong in that session."""

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
        if fault == "slow":
            await asyncio.sleep(SLOW_S)
        if fault == "delayed":
            try:
                await self.release.wait()
            except asyncio.CancelledError:  # whoever called is dead; the call is not
                self.owed.append((verb, args, kwargs))
                self.under_way += 1
                raise
        answer = self._do(verb, args, kwargs)
        if fault == "late":
            await self.release.wait()
        if fault == "lost":
            raise EngineRestarted("the connection broke")
        return answer

    def carry_out_what_is_owed(self) -> None:
        """Calls of a caller that died end."""
        while self.owed:
            self.under_way -= 1
            verb, args, kwargs = self.owed.pop(0)
            if not self.dead:
                self._do(verb, args, kwargs)

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
        self.under_way -= len(self.owed)
        self.owed.clear()

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
            self._round, self._chosen_by, self._failure = self._chosen_by, None, None
        elif verb == UPDATE:
            self.epoch, self._received, self._round = args[0]["epoch"], args[0], args[0]["round"]
            self.updates.append(args[0].get("update_info"))
            self.update_came.set()
            self.update_came = asyncio.Event()
        elif verb == FINISH:
            self.update_open = False
            self._failure = None if self._received is not None else "finish_weight_update: got no weights at all"
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
            assert not self.update_open
            self.inits.append(info["init_info"])
            self._chosen_by = info["round"]
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
            "round": self._round,
            "failure": self._failure,
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


def restarts_after_a_look(engine: FakeEngine) -> None:
    """Have the engine restart as soon as it has told what it is, once."""
    call = engine.call

    async def called(verb: str, *args: Any, **kwargs: Any) -> Any:
        answer = await call(verb, *args, **kwargs)
        if verb == INSPECT:
            engine.call = call  # type: ignore[method-assign]
            engine.restart()
        return answer

    engine.call = called  # type: ignore[method-assign]
