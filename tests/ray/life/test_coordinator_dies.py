"""The coordinator's process is killed at some point of a round, with requests in flight; its successor settles the fleet and goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import ray

import ray_weightsync as rws
from ray_weightsync.testing import Faults
from tests.ray.life.conftest import Traffic, left_of
from tests.ray.session.conftest import LIMIT_S, Fleet, make_module

StartFleet = Callable[..., Fleet]


def pid_of(coordinator: Any) -> int:
    return int(ray.get(coordinator.__ray_call__.remote(lambda actor: os.getpid()), timeout=LIMIT_S))


def phase_is(fleet: Fleet, phase: str) -> None:
    """Wait until the coordinator is in ``phase``."""
    deadline = time.monotonic() + LIMIT_S
    while (status := fleet.sync.status()).phase != phase:
        assert time.monotonic() < deadline, str(status)
        time.sleep(0.02)


def send(fleet: Fleet, module: Any, version: int) -> rws.SyncReport | rws.WeightSyncError:
    try:
        return fleet.sync.send_weights(module, version=version)
    except rws.WeightSyncError as error:
        return error


def check(fleet: Fleet, outcome: rws.SyncReport | rws.WeightSyncError) -> None:
    """Who serves, serves the version that the outcome tells of, and runs; who does not carries a tombstone and is paused."""
    status = fleet.sync.status()
    version = "2" if isinstance(outcome, rws.SyncReport | rws.ReplicasLost) else "1"
    for replica, label, paused in zip(status.replicas, fleet.versions(), fleet.paused(), strict=True):
        assert (label, paused) == (version, False) if replica.serving else (label[:5], paused) == ("!rws:", True), str(status)
    if isinstance(outcome, rws.SyncReport | rws.RoundAborted):
        assert len(status.serving) == 3, str(outcome)
    assert status.version == version


@pytest.mark.parametrize("phase", ["pause", "mark", "start", "update", "finish", "outcome", "commit", "resume"])
def test_killed_at_a_call_of_one_replica_it_is_succeeded_and_the_next_round_brings_all_to_one_version(
    start_fleet: StartFleet, phase: str
) -> None:
    fleet = start_fleet(3, on_failure=rws.FailurePolicy(auto_heal=False))
    modules = {str(version): make_module() for version in (1, 2, 3)}
    fleet.sync.send_weights(modules["1"], version=1)
    before = pid_of(fleet.sync.coordinator)
    with Traffic(fleet.engines, modules):
        with Faults(fleet.sync) as faults:
            faults.inject("r0", phase, "kill", victim="coordinator")
            began = time.monotonic()
            outcome = send(fleet, modules["2"], 2)
            assert time.monotonic() - began < 30
        assert pid_of(fleet.sync.coordinator) != before
        check(fleet, outcome)
        fleet.sync.heal()
        assert len(fleet.sync.serving()) == 3
        fleet.sync.send_weights(modules["3"], version=3)
    assert fleet.versions() == ["3"] * 3
    assert fleet.paused() == [False] * 3
    assert fleet.serve(modules["3"])


def test_killed_while_engines_read_behind_the_sender_nothing_torn_serves_and_the_next_round_brings_all_back(
    start_fleet: StartFleet,
) -> None:
    fleet = start_fleet(2, transport=rws.Host(overlap=True, bucket_bytes=4096), on_failure=rws.FailurePolicy(auto_heal=False))
    modules = {str(version): make_module() for version in (1, 2, 3)}
    fleet.sync.send_weights(modules["1"], version=1)
    with Traffic(fleet.engines, modules):
        with Faults(fleet.sync) as faults:
            faults.inject("r0", "update", "kill", victim="coordinator")
            outcome = send(fleet, modules["2"], 2)
        serving = fleet.sync.serving()
        labels = fleet.versions()
        assert all(labels[int(replica.id[1:])] == fleet.sync.status().version for replica in serving)
        assert len(serving) == (2 if isinstance(outcome, rws.SyncReport | rws.RoundAborted) else len(serving)), str(outcome)
        fleet.sync.send_weights(modules["3"], version=3)
    assert fleet.versions() == ["3", "3"]
    assert fleet.paused() == [False, False]


@pytest.mark.parametrize("for_good", [False, True], ids=["SIGKILL", "ray.kill"])
def test_killed_while_an_engine_is_at_work_its_successor_waits_for_that_and_brings_the_round_to_its_end(
    start_fleet: StartFleet, for_good: bool
) -> None:
    fleet = start_fleet(3)
    modules = {str(version): make_module() for version in (1, 2)}
    fleet.sync.send_weights(modules["1"], version=1)
    outcomes: list[Any] = []
    with Traffic(fleet.engines, modules), Faults(fleet.sync) as faults:
        fault = faults.inject("r1", "load", "hang", rank=0, carried_out=True)
        sending = threading.Thread(target=lambda: outcomes.append(send(fleet, modules["2"], 2)))
        sending.start()
        fault.wait_reached(timeout_s=LIMIT_S)
        if for_good:
            ray.kill(fleet.sync.coordinator)
        else:
            os.kill(pid_of(fleet.sync.coordinator), signal.SIGKILL)
        phase_is(fleet, "recovering")  # answered at once, also by one that is busy settling
        assert sending.is_alive()
        fault.release()
        sending.join(LIMIT_S)
        assert isinstance(outcomes[0], rws.SyncReport), outcomes
        assert outcomes[0].committed == ("r0", "r1", "r2")
        assert any("coordinator died" in note for note in outcomes[0].notes)
    assert fleet.versions() == ["2"] * 3
    assert fleet.serve(modules["2"])


def test_killed_for_good_between_rounds_the_session_goes_on_with_a_successor(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    first, second = make_module(), make_module()
    fleet.sync.send_weights(first, version=1)
    dead = fleet.sync.coordinator
    ray.kill(dead)
    report = fleet.sync.send_weights(second, version=2)
    assert (report.ordinal, report.committed) == (2, ("r0", "r1"))
    assert fleet.sync.coordinator != dead
    assert fleet.serve(second)


def test_its_successor_heals_from_the_snapshot_that_outlived_it(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2, on_failure=rws.FailurePolicy(auto_heal=False))
    module = make_module()
    fleet.sync.send_weights(module, version=1)
    ray.kill(fleet.sync.coordinator)
    phase_is(fleet, "idle")
    with Faults(fleet.sync) as faults:
        faults.inject("r1", "update", "raise")
        with pytest.raises(rws.ReplicasLost):
            fleet.sync.send_weights(make_module(), version=2)
    os.kill(pid_of(fleet.sync.coordinator), signal.SIGKILL)
    assert fleet.sync.heal().committed == ("r1",)
    assert fleet.versions() == ["2", "2"]


def test_a_session_whose_coordinator_is_dead_is_closed_and_leaves_nothing(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    fleet.sync.send_weights(make_module(), version=1)
    assert left_of(fleet.sync.name) != []
    ray.kill(fleet.sync.coordinator)
    fleet.sync.close()
    deadline = time.monotonic() + LIMIT_S
    while left_of(fleet.sync.name) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left_of(fleet.sync.name) == []
    assert fleet.paused() == [False, False]
    assert fleet.versions() == ["1", "1"]


def test_staged_weights_are_lost_with_it_and_whoever_commits_them_is_told(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    fleet.sync.send_weights(make_module(), version=1)
    staged = fleet.sync.stage_weights(make_module(), version=2)
    os.kill(pid_of(fleet.sync.coordinator), signal.SIGKILL)
    with pytest.raises(rws.RoundAborted, match="Nothing changed: version 1 still serves"):
        fleet.sync.commit_weights(staged)
    assert fleet.versions() == ["1", "1"]
