"""{phase} x {raise, hang, late, lost, slow, kill, corrupt} x {replica, one rank}: nothing hangs, nothing torn serves, one round mends it.

The rows of the coordinator and the driver are in `tests/ray/life`, the trainer's in `tests/ray/session/test_dead_senders.py`,
those of real engines in `tests/vllm/test_faults_in_flight.py` and `test_coordinator_dies.py`.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

import ray_weightsync as rws
from ray_weightsync.testing import Faults
from tests.ray.faults.ground import LIMIT_S, PHASE_S, SLACK_S, Ground

BEFORE_START = ("preflight", "pause", "mark")
AFTER_START = ("start", "update", "finish", "outcome", "commit", "resume")


def fails(ground: Ground, expected: type[rws.WeightSyncError]) -> rws.WeightSyncError:
    """Send a version that must fail as ``expected``, within one deadline and some."""
    version, module = ground.next_version()
    began = time.monotonic()
    with pytest.raises(expected) as caught:
        ground.sync.send_weights(module, version=version)
    assert time.monotonic() - began < PHASE_S + SLACK_S
    return caught.value


def as_told(error: rws.WeightSyncError, ground: Ground, before: rws.FleetStatus) -> None:
    """What the error says holds, holds."""
    status = ground.sync.status()
    assert error.replicas == ("r1",)
    assert "r1" not in status.serving or isinstance(error, rws.RoundAborted)
    if isinstance(error, rws.RoundAborted):
        assert (status.version, status.ordinal) == (before.version, before.ordinal)
        assert {"r0", "r2"} <= set(status.serving)
    else:
        assert status.ordinal == before.ordinal + 1
        assert status.serving == ("r0", "r2")
    ground.check()


@pytest.mark.parametrize("kind", ["raise", "hang", "late", "lost", "kill"])
@pytest.mark.parametrize("phase", [*BEFORE_START, *AFTER_START])
def test_a_replica_that_fails_is_named_and_the_error_says_what_holds(ground: Ground, phase: str, kind: str) -> None:
    before = ground.sync.status()
    with Faults(ground.sync, limit_s=LIMIT_S) as faults:
        faults.inject("r1", phase, kind)
        error = fails(ground, rws.RoundAborted if phase in BEFORE_START else rws.ReplicasLost)
        assert error.phase == phase or kind in ("kill", "lost"), "of one that is gone only the chain of calls is known"
        as_told(error, ground, before)


@pytest.mark.parametrize("phase", [*BEFORE_START, *AFTER_START])
def test_a_slow_replica_costs_time_and_nothing_else(ground: Ground, phase: str) -> None:
    with Faults(ground.sync, limit_s=LIMIT_S) as faults:
        fault = faults.inject("r1", phase, "slow", seconds=0.3)
        assert ground.send().committed == ("r0", "r1", "r2")
        assert fault.struck() == 1
    ground.check()


RANK = [(phase, kind) for phase in ("start", "load", "finish", "outcome") for kind in ("raise", "hang", "kill")]


@pytest.mark.parametrize(("phase", "kind"), [*RANK, ("load", "corrupt")])
def test_a_rank_that_fails_fences_its_replica_alone(ground: Ground, phase: str, kind: str) -> None:
    before = ground.sync.status()
    with Faults(ground.sync, limit_s=LIMIT_S) as faults:
        faults.inject("r1", phase, kind, rank=0)
        as_told(fails(ground, rws.ReplicasLost), ground, before)


@pytest.mark.parametrize("phase", ["start", "load", "finish", "outcome"])
def test_a_slow_rank_costs_time_and_nothing_else(ground: Ground, phase: str) -> None:
    with Faults(ground.sync, limit_s=LIMIT_S) as faults:
        faults.inject("r1", phase, "slow", rank=0, seconds=0.3)
        assert ground.send().committed == ("r0", "r1", "r2")


@pytest.mark.parametrize("phase", ["pause", "update", "commit"])
@pytest.mark.parametrize("kind", ["raise", "hang", "kill"])
def test_when_all_fail_the_error_says_so_and_healing_brings_them_back(ground: Ground, phase: str, kind: str) -> None:
    with Faults(ground.sync, limit_s=LIMIT_S) as faults:
        for replica in ("r0", "r1", "r2"):
            faults.inject(replica, phase, kind)
        error = fails(ground, rws.RoundAborted if phase == "pause" and kind != "kill" else rws.FleetTorn)
        assert set(error.replicas) == {"r0", "r1", "r2"}
        ground.check()


@pytest.mark.parametrize("kind", ["raise", "hang", "lost"])
def test_a_label_that_cannot_be_put_back_fences_its_replica(ground: Ground, kind: str) -> None:
    with Faults(ground.sync, limit_s=LIMIT_S) as faults:
        faults.inject("r0", "pause", "raise")
        faults.inject("r2", "unmark", kind)
        version, module = ground.next_version()
        with pytest.raises(rws.RoundAborted, match="except on r2"):
            ground.sync.send_weights(module, version=version)
        assert "r2" not in ground.sync.status().serving
        ground.check()


def test_heal_brings_a_fenced_replica_to_the_committed_version_without_the_trainer(ground: Ground) -> None:
    with Faults(ground.sync, limit_s=LIMIT_S) as faults:
        faults.inject("r1", "update", "raise")
        fails(ground, rws.ReplicasLost)
    report: Any = ground.sync.heal()
    assert report.committed == ("r1",)
    status = ground.sync.status()
    assert status.serving == ("r0", "r1", "r2")
    assert {replica.version for replica in status.replicas} == {status.version}
    ground.check()
