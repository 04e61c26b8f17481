"""Failures before start put everything back; failures after start fence the replica and let the others commit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

import ray_weightsync as rws
from ray_weightsync.engines.facts import CONTROL_GROUP
from ray_weightsync.engines.torch_engine import TorchEngineActor
from tests.ray.session.conftest import LIMIT_S, Fleet, make_module

StartFleet = Callable[..., Fleet]


class _Faulty(TorchEngineActor):
    """An engine that fails a verb as often as it is told to."""

    def __init__(self, make: Any) -> None:
        super().__init__(make)
        self._faults: dict[str, tuple[str, int]] = {}

    @ray.method(concurrency_group=CONTROL_GROUP)
    def arm(self, verb: str, how: str, times: int = 1) -> None:
        self._faults[verb] = (how, times)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def make_as_new(self) -> None:
        self._faults.clear()
        if self._gate.update_open:
            super().finish_weight_update()
        super().update_weight_version("default")
        super().resume_generation()

    def _fault(self, verb: str) -> None:
        how, times = self._faults.get(verb, ("", 0))
        if times:
            self._faults[verb] = (how, times - 1)
            if how == "die":
                os._exit(1)
            raise RuntimeError(f"made to fail in {verb}")

    @ray.method(concurrency_group=CONTROL_GROUP)
    def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        self._fault("pause_generation")
        super().pause_generation(mode=mode, clear_cache=clear_cache)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def start_weight_update(self) -> None:
        self._fault("start_weight_update")
        super().start_weight_update()

    @ray.method(concurrency_group=CONTROL_GROUP)
    def update_weights(self, request: Any) -> None:
        self._fault("update_weights")
        super().update_weights(request)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._fault("finish_weight_update")
        super().finish_weight_update(weight_version)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def update_weight_version(self, new_version: str) -> None:
        self._fault("mark" if new_version.startswith("!rws:") else "commit")
        super().update_weight_version(new_version)


Faulty: Any = ray.remote(concurrency_groups={CONTROL_GROUP: 6}, num_cpus=0, max_concurrency=4)(_Faulty)


@pytest.fixture(scope="module")
def faulty() -> Iterator[list[Any]]:
    """Three engines for all tests here that do not end one."""
    engines = [Faulty.remote(make_module) for _ in range(3)]
    yield engines
    for engine in engines:
        ray.kill(engine)


@pytest.fixture(autouse=True)
def as_new(faulty: list[Any]) -> Iterator[None]:
    yield
    ray.get([engine.make_as_new.remote() for engine in faulty], timeout=LIMIT_S)


def arm(engine: Any, verb: str, how: str = "raise", times: int = 1) -> None:
    ray.get(engine.arm.remote(verb, how, times), timeout=LIMIT_S)


@pytest.mark.parametrize(("verb", "phase"), [("pause_generation", "pause"), ("mark", "mark")])
def test_a_replica_that_cannot_be_paused_or_marked_aborts_the_round(
    start_fleet: StartFleet, faulty: list[Any], verb: str, phase: str
) -> None:
    fleet = start_fleet(3, engines=faulty)
    served = make_module()
    fleet.sync.send_weights(served, version="good")
    arm(fleet.engines[1], verb)
    with pytest.raises(rws.RoundAborted, match=f"made to fail in {verb}") as caught:
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


@pytest.mark.parametrize(
    ("verb", "phase"),
    [
        ("start_weight_update", "start"),
        ("update_weights", "update"),
        ("finish_weight_update", "finish"),
        ("commit", "commit"),
    ],
)
def test_a_replica_that_fails_after_start_is_fenced_and_the_others_commit(
    start_fleet: StartFleet, faulty: list[Any], verb: str, phase: str
) -> None:
    fleet = start_fleet(3, engines=faulty)
    fleet.sync.send_weights(make_module(), version="good")
    arm(fleet.engines[1], verb)
    module = make_module()
    with pytest.raises(rws.ReplicasLost) as caught:
        fleet.sync.send_weights(module, version="new")
    error = caught.value
    assert (error.replicas, error.phase) == (("r1",), phase)
    assert error.report is not None
    assert error.report.committed == ("r0", "r2")
    assert fleet.paused() == [False, True, False]
    versions = fleet.versions()
    assert versions[0] == versions[2] == "new"
    assert versions[1].startswith("!rws:")
    assert [each.id for each in fleet.sync.serving()] == ["r0", "r2"]
    assert fleet.sync.status().version == "new"
    arm(fleet.engines[1], verb, times=0)
    fleet.sync.send_weights(make_module(), version="whole again")
    assert fleet.versions() == ["whole again"] * 3
    assert fleet.paused() == [False] * 3
    assert len(fleet.sync.serving()) == 3


def test_a_fleet_that_may_lose_replicas_goes_on_without_an_exception(start_fleet: StartFleet, faulty: list[Any]) -> None:
    fleet = start_fleet(3, engines=faulty, on_failure=rws.FailurePolicy(min_serving=2))
    arm(fleet.engines[0], "update_weights")
    report = fleet.sync.send_weights(make_module(), version=1)
    assert report.lost == ("r0",)
    arm(fleet.engines[0], "update_weights")
    arm(fleet.engines[1], "update_weights")
    with pytest.raises(rws.ReplicasLost):
        fleet.sync.send_weights(make_module(), version=2)


def test_when_every_replica_fails_no_version_is_committed_and_none_serves(start_fleet: StartFleet, faulty: list[Any]) -> None:
    fleet = start_fleet(2, engines=faulty)
    for engine in fleet.engines:
        arm(engine, "update_weights")
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
    fleet = start_fleet(3, engine_class=Faulty)
    arm(fleet.engines[2], "update_weights", how="die")
    module = make_module()
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
    ray.kill(fleet.engines[1])
    with pytest.raises(rws.RoundAborted) as caught:
        fleet.sync.send_weights(make_module(), version=2)
    assert caught.value.replicas == ("r1",)
    assert [each.id for each in fleet.sync.serving()] == ["r0"]
    assert fleet.sync.send_weights(make_module(), version=2).committed == ("r0",)


def test_a_replica_that_does_not_answer_costs_one_deadline_and_is_not_used_again_before_it_has(start_fleet: StartFleet) -> None:
    from tests.ray.session.test_looking import Gated

    timeouts = rws.Timeouts(update_s=2, min_rate_bytes_per_s=1e12)
    fleet = start_fleet(1, engine_class=Gated, timeouts=timeouts)
    with pytest.raises(rws.FleetTorn) as caught:
        fleet.sync.send_weights(make_module(), version=1)
    assert "not answered" in str(caught.value)
    with pytest.raises(rws.FleetTorn, match="not answered an earlier call"):
        fleet.sync.send_weights(make_module(), version=2)
    ray.get(fleet.engines[0].open_gate.remote(), timeout=LIMIT_S)
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
