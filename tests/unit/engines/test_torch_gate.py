"""The scheduling rules of `StepGate`, with threads and gates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from ray_weightsync.engines.torch_gate import EngineDeadError, RequestAbortedError, StepGate

LIMIT_S = 20.0


@pytest.fixture
def gate() -> StepGate:
    return StepGate()


@pytest.fixture
def threads(gate: StepGate) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool
        if gate.dead is None:
            gate.resume()  # a test that failed may have left requests frozen, and the pool waits for them


def run_step(gate: StepGate, body: Callable[[], Any] = lambda: "ran") -> Any:
    with gate.step():
        return body()


@contextmanager
def long_step(gate: StepGate, threads: ThreadPoolExecutor) -> Iterator[Future[Any]]:
    """A step that runs until the block ends."""
    begun, end = threading.Event(), threading.Event()

    def body() -> str:
        begun.set()
        end.wait(LIMIT_S)
        return "ran"

    step = threads.submit(run_step, gate, body)
    assert begun.wait(LIMIT_S)
    try:
        yield step
    finally:
        end.set()


def frozen_step(gate: StepGate, threads: ThreadPoolExecutor) -> Future[Any]:
    before = gate.frozen
    step = threads.submit(run_step, gate)
    assert gate.wait_frozen(before + 1, LIMIT_S)
    return step


class TestPause:
    def test_a_request_runs_while_nothing_is_paused(self, gate: StepGate) -> None:
        assert run_step(gate) == "ran"

    @pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
    def test_a_request_that_comes_during_a_pause_runs_after_the_resume(
        self, gate: StepGate, threads: ThreadPoolExecutor, mode: str
    ) -> None:
        gate.pause(mode)
        step = frozen_step(gate, threads)
        assert not step.done()
        gate.resume()
        assert step.result(LIMIT_S) == "ran"

    @pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
    def test_pause_returns_only_when_no_step_runs(self, gate: StepGate, threads: ThreadPoolExecutor, mode: str) -> None:
        with long_step(gate, threads) as step:
            pausing = threads.submit(gate.pause, mode)
            frozen_step(gate, threads)
            assert not pausing.done()
        pausing.result(LIMIT_S)
        assert step.result(LIMIT_S) == "ran"
        gate.resume()

    def test_abort_ends_the_frozen_requests_at_once_and_stays_paused(self, gate: StepGate, threads: ThreadPoolExecutor) -> None:
        gate.pause("keep")
        steps = [frozen_step(gate, threads) for _ in range(3)]
        gate.pause("abort")
        for step in steps:
            with pytest.raises(RequestAbortedError, match="before it ran"):
                step.result(LIMIT_S)
        assert gate.paused
        assert gate.frozen == 0

    def test_abort_twice_ends_what_was_queued_in_between(self, gate: StepGate, threads: ThreadPoolExecutor) -> None:
        gate.pause("abort")
        step = frozen_step(gate, threads)
        gate.pause("abort")
        with pytest.raises(RequestAbortedError):
            step.result(LIMIT_S)

    def test_an_unknown_mode_is_refused_and_nothing_is_paused(self, gate: StepGate) -> None:
        with pytest.raises(ValueError, match="Invalid pause mode: stop"):
            gate.pause("stop")
        assert not gate.paused

    def test_whoever_waits_for_frozen_requests_is_told_when_they_arrive(self, gate: StepGate, threads: ThreadPoolExecutor) -> None:
        gate.pause("keep")
        waiting = threads.submit(gate.wait_frozen, 1, LIMIT_S)
        changed: threading.Condition = gate._changed
        while not changed._waiters:  # type: ignore[attr-defined]  # it must be waiting before the request comes
            assert not waiting.done()
        threads.submit(run_step, gate)
        assert waiting.result(LIMIT_S / 2) is True
        gate.resume()

    def test_resume_twice_is_harmless(self, gate: StepGate) -> None:
        gate.pause("keep")
        gate.resume()
        gate.resume()
        assert run_step(gate) == "ran"

    def test_a_pause_that_waits_is_ended_by_a_resume(self, gate: StepGate, threads: ThreadPoolExecutor) -> None:
        with long_step(gate, threads):
            pausing = threads.submit(gate.pause, "keep")
            frozen_step(gate, threads)
            gate.resume()
            pausing.result(LIMIT_S)


class TestRPC:
    def test_an_rpc_waits_for_the_running_step_and_holds_new_ones_back(self, gate: StepGate, threads: ThreadPoolExecutor) -> None:
        order: list[str] = []

        def rpc() -> None:
            with gate.rpc():
                order.append("rpc")

        with long_step(gate, threads):
            calling = threads.submit(rpc)
            # It is held back by the waiting RPC, or it would run beside the long step.
            step = frozen_step_behind_rpc(gate, threads, order)
            assert not calling.done()
            assert order == []
        calling.result(LIMIT_S)
        step.result(LIMIT_S)
        assert order == ["rpc", "step"]

    def test_rpcs_run_one_at_a_time(self, gate: StepGate, threads: ThreadPoolExecutor) -> None:
        inside, most = 0, 0

        def rpc() -> None:
            nonlocal inside, most
            with gate.rpc():
                inside += 1
                most = max(most, inside)
                inside -= 1

        for call in [threads.submit(rpc) for _ in range(50)]:
            call.result(LIMIT_S)
        assert most == 1

    def test_an_rpc_that_does_not_touch_the_model_runs_beside_a_step(self, gate: StepGate, threads: ThreadPoolExecutor) -> None:
        with long_step(gate, threads) as step, gate.rpc(between_steps=False):
            assert not step.done()

    def test_an_rpc_that_raises_leaves_the_gate_open(self, gate: StepGate) -> None:
        with pytest.raises(KeyError), gate.rpc():
            raise KeyError
        assert run_step(gate) == "ran"

    def test_rpcs_run_while_paused(self, gate: StepGate) -> None:
        gate.pause("keep")
        with gate.rpc():
            assert gate.paused


def frozen_step_behind_rpc(gate: StepGate, threads: ThreadPoolExecutor, order: list[str]) -> Future[Any]:
    """A step that arrives after an RPC has begun to wait: probed with steps until one is held back."""
    for _ in range(2000):
        step = threads.submit(run_step, gate, lambda: order.append("step"))
        if gate.wait_frozen(1, 0.01):
            return step
        step.result(LIMIT_S)
        order.clear()
    raise AssertionError("no step was held back by the waiting RPC")


class TestDeath:
    def test_a_request_during_an_open_update_kills_the_engine_for_good(self, gate: StepGate) -> None:
        gate.open_update()
        with pytest.raises(EngineDeadError, match="engine is dead"):
            run_step(gate)
        gate.close_update()
        for use in (lambda: run_step(gate), lambda: gate.pause("keep"), gate.resume, gate.check_alive, lambda: gate.rpc().__enter__()):
            with pytest.raises(EngineDeadError, match="engine is dead"):
                use()

    def test_a_frozen_request_that_is_resumed_into_an_open_update_kills_the_engine(
        self, gate: StepGate, threads: ThreadPoolExecutor
    ) -> None:
        gate.pause("keep")
        step = frozen_step(gate, threads)
        gate.open_update()
        assert not step.done()
        gate.resume()
        with pytest.raises(EngineDeadError):
            step.result(LIMIT_S)
        assert gate.dead is not None

    def test_death_wakes_every_request_that_waits(self, gate: StepGate, threads: ThreadPoolExecutor) -> None:
        gate.pause("keep")
        steps = [frozen_step(gate, threads) for _ in range(4)]
        gate.open_update()
        gate.resume()
        for step in steps:
            with pytest.raises(EngineDeadError):
                step.result(LIMIT_S)
        assert gate.unfinished == 0

    def test_a_second_start_is_refused_in_vllms_words_and_the_first_stays_open(self, gate: StepGate) -> None:
        gate.open_update()
        with pytest.raises(RuntimeError, match=r"already active\. Call finish_weight_update first"):
            gate.open_update()
        assert gate.update_open
