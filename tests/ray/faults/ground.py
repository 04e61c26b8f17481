"""Three engines, one session, and what must hold of them whatever happened: the ground of the fault matrix and of the soak."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

import ray
import torch

import ray_weightsync as rws

LIMIT_S = 60
PHASE_S = 3.0
SLACK_S = 5.0
TIMEOUTS = rws.Timeouts(
    min_rate_bytes_per_s=1e12,
    stage_s=30,
    status_s=30,
    health_interval_s=3600,  # what heals here does so because it was asked
    **{f"{phase}_s": PHASE_S for phase in ("preflight", "pause", "start", "update", "finish", "attest", "commit", "resume")},
)
"""A phase that hangs costs three seconds: long enough for a busy machine's good calls."""


def make_module() -> torch.nn.Module:
    """What the engines serve: different random weights at each call."""
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))


INPUTS = torch.arange(32, dtype=torch.float32).reshape(2, 16) / 7


def output_of(module: torch.nn.Module) -> torch.Tensor:
    """What an engine that serves this module answers to `INPUTS`."""
    with torch.no_grad():
        result: torch.Tensor = module(INPUTS)
    return result


class Ground:
    """Engines that Ray starts anew when they are killed, and a session on them.

    Attributes:
        expected: By version, the output of the module that was sent under it.
    """

    def __init__(self, num_engines: int = 3, **options: Any) -> None:
        self.engines = [rws.TorchEngine.options(max_restarts=-1).remote(make_module) for _ in range(num_engines)]
        self.expected: dict[str, torch.Tensor] = {}
        self._options = {"timeouts": TIMEOUTS, "on_failure": rws.FailurePolicy(auto_heal=False)} | options
        self._number = 0
        self.sync = self.attached()

    def attached(self, **options: Any) -> rws.WeightSync:
        """A session on the engines."""
        return rws.WeightSync.attach(self.engines, name=f"ground-{uuid.uuid4().hex[:8]}", **(self._options | options))

    def next_version(self) -> tuple[str, torch.nn.Module]:
        """A fresh version and its module, noted as one that may be served from now on."""
        self._number += 1
        version, module = f"v{self._number}", make_module()
        self.expected[version] = output_of(module)
        return version, module

    def send(self, **options: Any) -> rws.SyncReport:
        """Send a fresh version."""
        version, module = self.next_version()
        return self.sync.send_weights(module, version=version, **options)

    # --- what must hold -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """The invariants that hold at every moment between two rounds.

        * A label that is not a tombstone, and not an engine's first, means the whole weights of that version.
        * No two serving replicas differ in version, and each of them answers: it is not paused, and its output is its version's.
        """
        status = self.sync.status()
        for replica, engine in zip(status.replicas, self.engines, strict=True):
            state = self._state(engine)
            if state is None:
                assert not replica.serving or replica.incarnation is not None, f"{replica.id} is gone"
                continue
            label, paused, output = state
            if label in self.expected:
                assert torch.equal(output, self.expected[label]), f"{replica.id} says {label} and holds something else"
            else:
                assert label == "default" or label.startswith("!rws:"), label
            if replica.serving and replica.incarnation == self._incarnation(engine):
                assert (label, paused) == (status.version, False), (replica.id, label, paused, str(status))

    def heal(self) -> None:
        """One more round, after everything owed was answered: the whole fleet serves it, with right outputs."""
        self.wait_until_nothing_is_owed()
        try:
            report = self.send()
        except (rws.RoundAborted, rws.FleetTorn):  # it found the dead and the restarted, and nothing else may stand in the way
            report = self.send()
        assert report.committed == tuple(f"r{index}" for index in range(len(self.engines))), str(report)
        assert self.sync.status().serving == report.committed
        self.check()
        expected = self.expected[str(report.version)]
        outputs = ray.get([engine.forward.remote(INPUTS) for engine in self.engines], timeout=LIMIT_S)
        assert all(torch.equal(output, expected) for output in outputs)

    def wait_until_nothing_is_owed(self) -> None:
        """Wait until every replica has answered what it was asked, and each engine's process is there."""

        def owed(actor: Any) -> int:
            return sum(len(replica.unanswered) for replica in actor._coordinator._parts.roster.replicas.values())

        def nothing_is_owed() -> bool:
            try:
                return bool(ray.get(self.sync.coordinator.__ray_call__.remote(owed), timeout=LIMIT_S) == 0)
            except ray.exceptions.RayActorError:  # a coordinator that was killed is on its way back
                return False

        eventually(lambda: self.sync.status().phase == "idle", "the coordinator is there, and has settled what it found")
        eventually(nothing_is_owed, "everything owed is answered")
        eventually(lambda: all(self._incarnation(engine) is not None for engine in self.engines), "every engine runs")

    def _state(self, engine: Any) -> tuple[str, bool, torch.Tensor] | None:
        def look(actor: Any) -> Any:
            with torch.no_grad():
                return actor._version, actor._gate.paused, actor._module(INPUTS)

        try:
            state: tuple[str, bool, torch.Tensor] = ray.get(engine.__ray_call__.remote(_with_inputs(look, INPUTS)), timeout=LIMIT_S)
        except ray.exceptions.RayActorError:
            return None
        return state

    @staticmethod
    def _incarnation(engine: Any) -> str | None:
        try:
            told: dict[str, Any] = ray.get(engine.rws_inspect.remote("nonce"), timeout=LIMIT_S)
        except ray.exceptions.RayActorError:
            return None
        return str(told["worker_id"])

    def close(self) -> None:
        """End the session and the engines."""
        self.sync.close()
        for engine in self.engines:
            ray.kill(engine)


def _with_inputs(look: Any, inputs: torch.Tensor) -> Any:
    import types

    # By value: the engine's process has no tests to import.
    return types.FunctionType(look.__code__, {"torch": torch, "INPUTS": inputs, "__builtins__": __builtins__}, look.__name__)


def eventually(holds: Callable[[], bool], what: str, *, limit_s: float = LIMIT_S) -> None:
    """Wait until ``holds()``; it is asked, not told, so it is asked again and again."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit_s:.0f} s: {what}"
        time.sleep(0.05)
