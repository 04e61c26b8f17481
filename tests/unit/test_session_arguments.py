"""What a session is asked with is refused by looking at it, before Ray is asked for anything."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import ray
import torch

import ray_weightsync as rws
from ray_weightsync.session_life import _id_of


def make_module() -> torch.nn.Module:
    return torch.nn.Linear(1, 1)


@ray.remote
class Trainer(rws.TrainerMixin):
    pass


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"timeouts": 60}, "timeouts must be a Timeouts, not 60"),
        ({"on_failure": "quarantine"}, "on_failure must be a FailurePolicy, not 'quarantine'"),
        ({"take_over": "yes"}, "take_over must be one of True, False, not 'yes'"),
        ({"trainers": [Trainer]}, r"trainers must hold actor handles \(Trainer.remote\(...\)\), not ActorClass"),
        ({"trainers": Trainer}, "trainers must be a list of actor handles"),
    ],
)
def test_a_wrong_option_is_named_with_what_was_given(options: dict[str, Any], said: str) -> None:
    with pytest.raises(rws.ConfigError, match=said):
        rws.WeightSync.attach(["engine"], **options)


def test_an_option_that_attach_would_refuse_does_not_cost_the_start_of_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # so that none could be started
    with pytest.raises(rws.ConfigError, match="take_over must be one of True, False, not 'yes'"):
        rws.WeightSync.spawn(rws.TorchEngineSpec(make_module), take_over="yes")


def test_a_session_that_is_given_to_another_process_says_what_to_give_instead() -> None:
    with pytest.raises(TypeError, match=r"stays in its process: give other processes sync.view\(\)"):
        pickle.dumps(object.__new__(rws.WeightSync))


def test_what_is_spawned_is_a_spec_and_not_its_class() -> None:
    with pytest.raises(rws.ConfigError, match="not the class TorchEngineSpec"):
        rws.WeightSync.spawn(rws.TorchEngineSpec)  # type: ignore[arg-type]


@pytest.mark.parametrize("named", [["r0"], 0, None, object()], ids=repr)
def test_a_replica_is_named_by_its_id_or_its_status(named: Any) -> None:
    with pytest.raises(rws.ConfigError, match="a replica is named by its id, such as 'r0'"):
        _id_of(named)


@pytest.mark.parametrize(
    "act",
    [
        lambda: rws.WeightSync.attach(["engine"]),
        lambda: rws.WeightSync.spawn(rws.TorchEngineSpec(make_module)),
        lambda: rws.WeightSender("session", make_module()),
        lambda: rws.placement.reserve(engines=1),
    ],
    ids=["attach", "spawn", "sender", "reserve"],
)
def test_without_ray_no_cluster_is_started_behind_ones_back(monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(rws.ConfigError, match=r"call ray.init\(\) first"):
        act()
