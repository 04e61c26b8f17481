"""The fault kit on sessions over `TorchEngine`s, as a user's own tests have it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

import ray_weightsync as rws
from ray_weightsync.testing import FaultNotReached, Faults
from tests.ray.session.conftest import LIMIT_S, Fleet, make_module
from tests.ray.testing.conftest import files_of_the_kit

StartFleet = Callable[..., Fleet]


def sending(fleet: Fleet, version: int | str) -> concurrent.futures.Future[rws.SyncReport]:
    """A round on a thread of its own, so that a test can look on."""
    with_one = concurrent.futures.ThreadPoolExecutor(1)
    future = with_one.submit(fleet.sync.send_weights, make_module(), version=version)
    with_one.shutdown(wait=False)
    return future


def heals(fleet: Fleet, version: int | str) -> None:
    """One more round makes all of the fleet whole."""
    module = make_module()
    assert len(fleet.sync.send_weights(module, version=version).committed) == len(fleet.engines)
    assert fleet.serve(module)
    assert fleet.versions() == [str(version)] * len(fleet.engines)


@pytest.mark.parametrize(
    ("phase", "error"),
    [("preflight", rws.RoundAborted), ("pause", rws.RoundAborted), ("mark", rws.RoundAborted)]
    + [(phase, rws.ReplicasLost) for phase in ("start", "update", "finish", "outcome", "commit", "resume")],
)
def test_a_replica_fails_at_the_phase_that_was_named(start_fleet: StartFleet, phase: str, error: type[rws.WeightSyncError]) -> None:
    fleet = start_fleet(3)
    fleet.sync.send_weights(make_module(), version=1)
    with Faults(fleet.sync) as faults:
        fault = faults.inject("r1", phase, "raise")
        assert fault.struck() == 0
        with pytest.raises(error, match=f"made to fail in {phase}") as caught:
            fleet.sync.send_weights(make_module(), version=2)
        assert (caught.value.replicas, caught.value.phase) == (("r1",), phase)
        assert fault.struck() == 1
    heals(fleet, 3)


@pytest.mark.parametrize("phase", ["start", "load", "finish", "outcome"])
def test_a_worker_fails_at_the_phase_that_was_named(start_fleet: StartFleet, phase: str) -> None:
    fleet, before = start_fleet(3), files_of_the_kit()
    with Faults(fleet.sync) as faults:
        fault = faults.inject("r1", phase, "raise", rank=0)
        with pytest.raises(rws.ReplicasLost, match=f"rank 0: .*made to fail in {phase}") as caught:
            fleet.sync.send_weights(make_module(), version=1)
        assert (caught.value.replicas, caught.value.phase) == (("r1",), "outcome")
        assert fault.struck() == 1
    assert files_of_the_kit() == before
    heals(fleet, 2)


def test_a_flipped_byte_is_refused_by_the_outcome_and_a_silent_one_only_shows_in_the_outputs(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    with Faults(fleet.sync) as faults:
        faults.inject("r1", "load", "corrupt", rank=0)
        with pytest.raises(rws.ReplicasLost, match=r"digest: expected .*, received") as caught:
            fleet.sync.send_weights(make_module(), version=1)
        assert caught.value.replicas == ("r1",)
        faults.inject("r1", "load", "corrupt", rank=0, silent=True)
        module = make_module()
        assert fleet.sync.send_weights(module, version=2).committed == ("r0", "r1")
        assert Fleet(fleet.engines[:1], fleet.sync).serve(module)
        assert not Fleet(fleet.engines[1:], fleet.sync).serve(module)
    heals(fleet, 3)


def test_a_call_that_hangs_is_reached_and_released(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    with Faults(fleet.sync) as faults:
        fault = faults.inject("r1", "update", "hang", carried_out=True)
        with pytest.raises(FaultNotReached, match=r"(?s)hang in update of r1.*0\.0 s of 0\.0 s allowed") as caught:
            fault.wait_reached(timeout_s=0.01)
        assert caught.value.replicas == ("r1",)
        round_one = sending(fleet, 1)
        fault.wait_reached(timeout_s=LIMIT_S)
        assert fleet.paused() == [True, True]
        assert not round_one.done()
        fault.release()
        assert round_one.result(LIMIT_S).committed == ("r0", "r1")


def test_a_worker_that_hangs_is_reached_and_released(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    with Faults(fleet.sync) as faults:
        fault = faults.inject("r1", "load", "hang", rank=0, carried_out=True)
        round_one = sending(fleet, 1)
        fault.wait_reached(timeout_s=LIMIT_S)
        assert not round_one.done()
        fault.release()
        assert round_one.result(LIMIT_S).committed == ("r0", "r1")


def test_leaving_releases_what_hangs_wherever_it_does(start_fleet: StartFleet) -> None:
    fleet, before = start_fleet(2), files_of_the_kit()
    with Faults(fleet.sync) as faults:
        at_replica = faults.inject("r0", "finish", "hang", carried_out=True)
        in_worker = faults.inject("r1", "load", "hang", rank=0, carried_out=True)
        round_one = sending(fleet, 1)
        at_replica.wait_reached(timeout_s=LIMIT_S)
        in_worker.wait_reached(timeout_s=LIMIT_S)
    assert round_one.result(LIMIT_S).committed == ("r0", "r1")
    assert files_of_the_kit() == before
    heals(fleet, 2)


def test_a_replica_that_hangs_past_its_deadline_is_lost_and_back_when_it_was_released(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2, timeouts=rws.Timeouts(finish_s=1, min_rate_bytes_per_s=1e12))
    with Faults(fleet.sync) as faults:
        fault = faults.inject("r1", "finish", "hang")
        began = time.monotonic()
        with pytest.raises(rws.ReplicasLost, match="was not answered") as caught:
            fleet.sync.send_weights(make_module(), version=1)
        assert (caught.value.replicas, caught.value.phase) == (("r1",), "finish")
        assert time.monotonic() - began < 20
        fault.release()
        for status in fleet.sync.view().events(timeout_s=LIMIT_S):
            if status.phase == "idle":
                break
    until = time.monotonic() + LIMIT_S
    while len(fleet.sync.send_weights(module := make_module(), version=f"try {time.monotonic()}").committed) < 2:
        assert time.monotonic() < until, "the late answer never came"
    assert fleet.serve(module)


def test_an_answer_can_be_late_and_lost(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    with Faults(fleet.sync) as faults:
        late = faults.inject("r0", "mark", "late")
        lost = faults.inject("r1", "finish", "lost")
        round_one = sending(fleet, 1)
        late.wait_reached(timeout_s=LIMIT_S)
        assert fleet.versions()[0].startswith("!rws:"), "it was carried out"
        late.release()
        with pytest.raises(rws.ReplicasLost, match="made to lose the answer of finish") as caught:
            round_one.result(LIMIT_S)
        assert caught.value.replicas == ("r1",)
        assert lost.struck() == 1


@pytest.mark.parametrize("rank", [None, 0], ids=["replica", "rank"])
def test_a_replica_is_killed_at_the_phase_that_was_named(start_fleet: StartFleet, rank: int | None) -> None:
    fleet, before = start_fleet(2, fresh=True), files_of_the_kit()
    module = make_module()
    with Faults(fleet.sync) as faults:
        fault = faults.inject("r1", "finish", "kill", rank=rank)
        with pytest.raises(rws.ReplicasLost) as caught:
            fleet.sync.send_weights(module, version=1)
        fault.wait_reached(timeout_s=LIMIT_S)
        assert caught.value.replicas == ("r1",)
    assert files_of_the_kit() == before
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(fleet.engines[1].get_weight_version.remote(), timeout=LIMIT_S)
    assert Fleet(fleet.engines[:1], fleet.sync).serve(module)


def test_any_process_of_the_node_is_killed_at_the_phase_that_was_named(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as trainer:
        with Faults(fleet.sync) as faults:
            faults.inject("r0", "update", "kill", victim=trainer.pid)
            assert fleet.sync.send_weights(make_module(), version=1).committed == ("r0", "r1")
        assert trainer.wait(LIMIT_S) == -9


def test_the_coordinator_is_killed_at_the_phase_that_was_named_and_its_faults_are_gone_with_it(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2, fresh=True)
    fleet.sync.send_weights(make_module(), version=1)
    with Faults(fleet.sync) as faults:
        fault = faults.inject("r1", "finish", "kill", victim="coordinator")
        other = faults.inject("r0", "commit", "hang")
        with contextlib.suppress(rws.WeightSyncError):  # how its successor ends the round is not the kit's matter
            fleet.sync.send_weights(make_module(), version=2)
        fault.wait_reached(timeout_s=LIMIT_S)
        with pytest.raises(rws.WeightSyncError, match="its faults"):
            other.wait_reached(timeout_s=LIMIT_S)
    fleet.sync.send_weights(make_module(), version=3)
    assert fleet.versions() == ["3", "3"]


def test_what_cannot_be_armed_is_refused_by_name(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    with Faults(fleet.sync) as faults:
        with pytest.raises(rws.ConfigError, match="no replica 'r2'; this session has r0, r1"):
            faults.inject("r2", "update", "raise")
        with pytest.raises(rws.ConfigError, match="no replica 'r2'"):
            faults.inject("r2", "load", "raise", rank=0)
        with pytest.raises(rws.ConfigError, match="r0 has no worker of rank 3; it has 0"):
            faults.inject("r0", "load", "raise", rank=3)
        with pytest.raises(rws.ConfigError, match="holds nothing that could be released"):
            faults.inject("r0", "update", "raise").release()
    with pytest.raises(rws.ConfigError, match="limit_s must be a positive number"):
        Faults(fleet.sync, limit_s=0)


def test_faults_that_were_cleared_strike_no_more_and_the_kit_can_be_used_again(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    faults = Faults(fleet.sync)
    for version in range(2):
        faults.inject("r0", "pause", "raise", times=9)
        faults.inject("r1", "load", "raise", rank=0, times=9)
        faults.clear()
        faults.clear()
        heals(fleet, version)


def test_faults_can_be_injected_from_a_running_event_loop(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)

    async def story() -> None:
        with Faults(fleet.sync) as faults:
            faults.inject("r1", "load", "raise", rank=0)
            with pytest.raises(rws.ReplicasLost, match="made to fail in load"):
                await fleet.sync.asend_weights(make_module(), version=1)

    asyncio.run(story())
    heals(fleet, 2)


def test_the_session_may_be_closed_before_the_faults_are_taken_out(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    with Faults(fleet.sync) as faults:
        faults.inject("r0", "update", "raise")
        faults.inject("r1", "load", "raise", rank=0)
        fleet.sync.close()
    again = start_fleet(2)
    heals(again, 1)


DOCUMENT = Path(__file__).parents[3] / "docs" / "testing.md"
BLOCKS = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def test_the_documented_tests_pass_as_they_stand(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    names: dict[str, Any] = {"sync": fleet.sync, "make_model": make_module, "serves": lambda module: fleet.serve(module)}
    exec(compile(BLOCKS[0], "docs/testing.md", "exec"), names)
    tests = [each for name, each in names.items() if name.startswith("test_")]
    assert len(tests) == 3
    for test in tests:
        test(fleet.sync)
