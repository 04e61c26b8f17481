"""`probe=`: the user's own look at the outputs, after resume; what it refuses is taken back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ray
import torch

import ray_weightsync as rws
from ray_weightsync.testing import Faults
from tests.ray.session.conftest import LIMIT_S, Fleet, make_module

StartFleet = Callable[..., Fleet]
INPUTS = torch.arange(32, dtype=torch.float32).reshape(2, 16) / 7


def answers_like(module: torch.nn.Module) -> Callable[[Any], bool]:
    """A probe that asks an engine for its output."""
    with torch.no_grad():
        expected = module(INPUTS)
    return lambda engine: torch.equal(ray.get(engine.forward.remote(INPUTS), timeout=LIMIT_S), expected)


def test_engines_that_answer_as_they_should_are_left_alone(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    module = make_module()
    report = fleet.sync.send_weights(module, version=1, probe=answers_like(module))
    assert report.committed == ("r0", "r1")
    staged = fleet.sync.stage_weights(module, version=2)
    assert fleet.sync.commit_weights(staged, probe=answers_like(module)).committed == ("r0", "r1")


def test_the_version_is_taken_back_from_an_engine_that_the_probe_refuses(start_fleet: StartFleet) -> None:
    """One byte is flipped behind every check of ours: only the outputs can tell."""
    fleet = start_fleet(3)
    fleet.sync.send_weights(make_module(), version=1)
    module = make_module()
    with Faults(fleet.sync, limit_s=LIMIT_S) as faults:
        faults.inject("r1", "load", "corrupt", rank=0, silent=True)
        with pytest.raises(rws.ReplicasLost, match="the probe answered False") as caught:
            fleet.sync.send_weights(module, version=2, probe=answers_like(module))
    assert (caught.value.replicas, caught.value.phase) == (("r1",), "probe")
    assert [replica.id for replica in fleet.sync.serving()] == ["r0", "r2"]
    versions = fleet.versions()
    assert (versions[0], versions[2], versions[1][:5]) == ("2", "2", "!rws:")
    assert fleet.paused() == [False, True, False]
    assert fleet.sync.heal("r1").committed == ("r1",)
    assert fleet.serve(module)


def test_a_probe_that_raises_everywhere_leaves_no_replica_serving(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)

    def probe(engine: Any) -> bool:
        raise RuntimeError("the verifier is down")

    with pytest.raises(rws.FleetTorn, match="the verifier is down"):
        fleet.sync.send_weights(make_module(), version=1, probe=probe)
    assert fleet.sync.serving() == ()


def test_a_probe_that_is_no_function_is_refused_before_anything_is_sent(start_fleet: StartFleet) -> None:
    fleet = start_fleet(1)
    wrong: Any = "probe"
    with pytest.raises(rws.ConfigError, match="probe must be a function"):
        fleet.sync.send_weights(make_module(), version=1, probe=wrong)
    assert fleet.versions() == ["default"]
