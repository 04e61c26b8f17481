"""Failures before start put everything back; failures after start fence the replica and let the others commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ray

import ray_weightsync as rws
from ray_weightsync.engines.facts import CONTROL_GROUP
from ray_weightsync.engines.torch_engine import TorchEngineActor
from ray_weightsync.testing import Faults
from tests.ray.killing import kill
from tests.ray.session.conftest import LIMIT_S, Fleet, make_module

StartFleet = Callable[..., Fleet]


class _Raising(TorchEngineActor):
    """An engine that raises by itself, as no fault of the kit does: what it says travels back through Ray."""

    @ray.method(concurrency_group=CONTROL_GROUP)
    def update_weights(self, request: Any) -> None:
        raise MemoryError("the engine's own words")


Raising: Any = ray.remote(concurrency_groups={CONTROL_GROUP: 4}, num_cpus=0)(_Raising)


@pytest.mark.parametrize("phase", ["pause", "mark"])
def test_a_replica_that_cannot_be_paused_or_marked_aborts_the_round(start_fleet: StartFleet, phase: str) -> None:
    fleet = start_fleet(3)
    served = make_module()
    fleet.sync.send_weights(served, version="good")
    with Faults(fleet.sync) as faults:
        faults.inject("r1", phase, "raise")
        with pytest.raises(rws.RoundAborted, match=f"made to fail in {phase}") as caught:
            fleet.sync.send_weights(make_module(), version="bad")
    assert caught.value.replicas == ("r1",)
    assert caught.value.phase == phase
    assert fleet.paused() == [False] * 3
    assert fleet.versions() == ["good"] * 3
    assert fleet.serve(served)
    assert len(fleet.sync.serving()) == 3
    after = make_module()
    fleet.sync.send_weights(after, version="bad")
    assert fleet.serve(after)


@pytest.mark.parametrize("phase", ["start", "update", "finish", "commit"])
def test_a_replica_that_fails_after_start_is_fenced_and_the_others_commit(start_fleet: StartFleet, phase: str) -> None:
    fleet = start_fleet(3)
    fleet.sync.send_weights(make_module(), version="good")
    with Faults(fleet.sync) as faults:
        faults.inject("r1", phase, "raise")
        with pytest.raises(rws.ReplicasLost) as caught:
            fleet.sync.send_weights(make_module(), version="new")
    error = caught.value
    assert (error.replicas, error.phase) == (("r1",), phase)
    assert f"made to fail in {phase}" in str(error)
    assert error.report is not None
    assert error.report.committed == ("r0", "r2")
    assert fleet.paused() == [False, True, False]
    versions = fleet.versions()
    assert versions[0] == versions[2] == "new"
    assert versions[1].startswith("!rws:")
    assert [each.id for each in fleet.sync.serving()] == ["r0", "r2"]
    assert fleet.sync.status().version == "new"
    fleet.sync.send_weights(make_module(), version="whole again")
    assert fleet.versions() == ["whole again"] * 3
    assert fleet.paused() == [False] * 3
    assert len(fleet.sync.serving()) == 3


def test_an_engine_that_raises_by_itself_is_quoted_and_the_others_commit(start_fleet: StartFleet, engine_pool: list[Any]) -> None:
    raising = Raising.remote(make_module)
    fleet = start_fleet(2, engines=[engine_pool[0], raising])
    module = make_module()
    with pytest.raises(rws.ReplicasLost, match="MemoryError: the engine's own words") as caught:
        fleet.sync.send_weights(module, version=1)
    assert (caught.value.replicas, caught.value.phase) == (("r1",), "update")
    assert Fleet(fleet.engines[:1], fleet.sync).serve(module)
    assert fleet.paused() == [False, True]
    ray.kill(raising)


def test_a_fleet_that_may_lose_replicas_goes_on_without_an_exception(start_fleet: StartFleet) -> None:
    fleet = start_fleet(3, on_failure=rws.FailurePolicy(min_serving=2, auto_heal=False))
    with Faults(fleet.sync) as faults:
        faults.inject("r0", "update", "raise", times=2)
        report = fleet.sync.send_weights(make_module(), version=1)
        assert report.lost == ("r0",)
        faults.inject("r1", "update", "raise")
        with pytest.raises(rws.ReplicasLost):
            fleet.sync.send_weights(make_module(), version=2)


def test_when_every_replica_fails_no_version_is_committed_and_none_serves(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    with Faults(fleet.sync) as faults:
        for replica in ("r0", "r1"):
            faults.inject(replica, "update", "raise")
        with pytest.raises(rws.FleetTorn) as caught:
            fleet.sync.send_weights(make_module(), version=1)
    assert caught.value.replicas == ("r0", "r1")
    assert fleet.sync.serving() == ()
    assert fleet.sync.status().ordinal == 0
    assert all(version.startswith("!rws:") for version in fleet.versions())
    module = make_module()
    fleet.sync.send_weights(module, version=1)
    assert fleet.serve(module)


def test_an_engine_that_dies_in_an_update_is_named_and_the_others_commit(start_fleet: StartFleet) -> None:
    fleet = start_fleet(3, fresh=True)
    module = make_module()
    with Faults(fleet.sync) as faults:
        faults.inject("r2", "load", "kill", rank=0)
        with pytest.raises(rws.ReplicasLost) as caught:
            fleet.sync.send_weights(module, version=1)
    assert caught.value.replicas == ("r2",)
    survivors = Fleet(fleet.engines[:2], fleet.sync)
    assert survivors.serve(module)
    assert survivors.versions() == ["1", "1"]
    report = fleet.sync.send_weights(make_module(), version=2)
    assert report.committed == ("r0", "r1")
    assert any("r2" in note for note in report.notes)


def test_an_engine_that_dies_between_rounds_aborts_the_next_one_and_is_left_out_of_the_one_after(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2, fresh=True)
    fleet.sync.send_weights(make_module(), version=1)
    kill(fleet.engines[1])
    with pytest.raises(rws.RoundAborted) as caught:
        fleet.sync.send_weights(make_module(), version=2)
    assert caught.value.replicas == ("r1",)
    assert [each.id for each in fleet.sync.serving()] == ["r0"]
    assert fleet.sync.send_weights(make_module(), version=2).committed == ("r0",)


def test_a_replica_that_does_not_answer_costs_one_deadline_and_is_not_used_again_before_it_has(start_fleet: StartFleet) -> None:
    fleet = start_fleet(1, timeouts=rws.Timeouts(update_s=2, min_rate_bytes_per_s=1e12))
    with Faults(fleet.sync) as faults:
        fault = faults.inject("r0", "load", "hang", rank=0, carried_out=True)
        with pytest.raises(rws.FleetTorn) as caught:
            fleet.sync.send_weights(make_module(), version=1)
        assert "not answered" in str(caught.value)
        with pytest.raises(rws.FleetTorn, match="not answered an earlier call"):
            fleet.sync.send_weights(make_module(), version=2)
        fault.release()
    for status in fleet.sync.view().events(timeout_s=LIMIT_S):
        if status.phase == "idle":
            break
    module = make_module()
    attempts = 0
    while True:  # the late answer is on its way; each attempt is refused at once until it has arrived
        try:
            fleet.sync.send_weights(module, version=3)
            break
        except rws.FleetTorn:
            attempts += 1
            assert attempts < 1000
    assert fleet.serve(module)
