"""Fenced and restarted engines come back from the committed snapshot: on request, or by themselves."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import ray

import ray_weightsync as rws
from ray_weightsync.testing import Faults
from tests.ray.fleet_life.conftest import HEALS, QUICK, Restarting, states, until
from tests.ray.session.conftest import LIMIT_S, Fleet, make_module

StartFleet = Callable[..., Fleet]
NO_HEAL = rws.FailurePolicy(auto_heal=False)


def test_a_fenced_engine_is_healed_without_the_trainer_and_without_touching_the_others(start_fleet: StartFleet) -> None:
    fleet = start_fleet(3, on_failure=NO_HEAL)
    module = make_module()
    with pytest.raises(rws.RoundAborted, match="nothing to heal from"):
        fleet.sync.heal()
    with Faults(fleet.sync) as faults:
        faults.inject("r1", "load", "raise", rank=0)
        with pytest.raises(rws.ReplicasLost):
            fleet.sync.send_weights(module, version=1)
        bystander = faults.inject("r0", "pause", "raise")
        report = fleet.sync.heal()
        assert bystander.struck() == 0
    assert (report.version, report.committed, report.trainer_blocked_s) == (1, ("r1",), 0)
    assert fleet.versions() == ["1"] * 3
    assert fleet.paused() == [False] * 3
    assert fleet.serve(module)
    assert [each.id for each in fleet.sync.serving()] == ["r0", "r1", "r2"]
    with pytest.raises(rws.ConfigError, match="this session has r0, r1, r2"):
        fleet.sync.heal("r9")


def test_what_cannot_be_healed_is_said_by_the_error_and_its_report(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2, on_failure=NO_HEAL)
    fleet.sync.send_weights(make_module(), version=1)
    with Faults(fleet.sync) as faults:
        faults.inject("r1", "load", "raise", rank=0, times=2)
        with pytest.raises(rws.ReplicasLost):
            fleet.sync.send_weights(make_module(), version=2)
        with pytest.raises(rws.ReplicasLost) as caught:
            fleet.sync.heal("r1")
    assert caught.value.report is not None
    assert caught.value.report.lost == ("r1",)
    assert fleet.paused() == [False, True]
    assert fleet.versions()[1].startswith("!rws:")
    fleet.sync.heal()
    assert fleet.versions() == ["2", "2"]


def test_a_fenced_engine_heals_by_itself_and_subscribers_and_the_log_tell_of_it(
    start_fleet: StartFleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = start_fleet(2, timeouts=QUICK, on_failure=HEALS)
    heard: list[dict[str, str]] = []

    def fails(status: rws.FleetStatus) -> None:
        raise ValueError("a subscriber's own mistake")

    fleet.sync.subscribe(fails)
    unsubscribe = fleet.sync.subscribe(lambda status: heard.append(states(status)))
    module = make_module()
    with caplog.at_level(logging.INFO, logger="ray_weightsync.follower"), Faults(fleet.sync) as faults:
        faults.inject("r1", "load", "raise", rank=0)
        with pytest.raises(rws.ReplicasLost):
            fleet.sync.send_weights(module, version=1)
        assert [each.id for each in fleet.sync.wait_serving(2, timeout_s=LIMIT_S)] == ["r0", "r1"]
        until(fleet, lambda status: states(status)["r1"] == "SERVING" and status.phase == "idle")
    assert fleet.serve(module)
    assert {"r0": "SERVING", "r1": "SERVING"} in heard
    assert "a subscriber" in caplog.text
    lines = [record.getMessage() for record in caplog.records if "r1:" in record.getMessage()]
    assert not any("UPDATING" in line for line in lines)
    unsubscribe()
    heard.clear()
    fleet.sync.send_weights(make_module(), version=2)
    assert heard == []


@pytest.mark.parametrize("auto_heal", [False, True])
def test_an_engine_that_ray_restarted_behind_its_handle_does_not_serve_until_it_was_healed(
    start_fleet: StartFleet, auto_heal: bool
) -> None:
    policy = rws.FailurePolicy(auto_heal=auto_heal)
    fleet = start_fleet(2, engine_class=Restarting, timeouts=QUICK, on_failure=policy)
    module = make_module()
    fleet.sync.send_weights(module, version=1)
    view = fleet.sync.view()
    before = {each.id: each.incarnation for each in view.serving()}
    ray.kill(fleet.engines[1], no_restart=False)
    if auto_heal:
        until(fleet, lambda status: before | {each.id: each.incarnation for each in status.replicas if each.serving} != before)
        assert [each.id for each in fleet.sync.wait_serving(timeout_s=LIMIT_S)] == ["r0", "r1"]
        assert fleet.serve(module)
        assert fleet.versions() == ["1", "1"]
    else:
        status = until(fleet, lambda status: status.serving == ("r0",) and status.replicas[1].incarnation != before["r1"])
        assert "restarted" in str(status.replicas[1].error)
        assert states(status)["r1"] == "QUARANTINED"
        assert fleet.sync.heal().committed == ("r1",)
        assert fleet.serve(module)
    after = {each.id: each.incarnation for each in fleet.sync.serving()}
    assert after["r0"] == before["r0"]
    assert after["r1"] != before["r1"], "a router tells them apart by incarnation"
