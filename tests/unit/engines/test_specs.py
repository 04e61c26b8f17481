"""What a vLLM spec refuses of a placement, and how many GPUs it asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import ray
import torch

import ray_weightsync as rws
from ray_weightsync.engines import specs


@dataclass(frozen=True)
class Spot:
    """A place with room for so many workers."""

    num_workers: int
    engine_args: Mapping[str, object] = field(default_factory=lambda: {"distributed_executor_backend": "uni"})

    def options(self, *, env: Mapping[str, str] | None = None) -> dict[str, Any]:
        return {"num_cpus": 1}


@dataclass(frozen=True)
class Spots:
    engines: Sequence[Spot]

    def engine(self, index: int) -> Spot:
        return self.engines[index]

    def vacant_engine(self) -> Spot:
        return self.engines[0]


@pytest.mark.parametrize(
    ("tensor", "engine_args", "workers"),
    [
        (1, {}, 1),
        (2, {}, 2),
        (2, {"pipeline_parallel_size": 2}, 4),
        (1, {"data_parallel_size": 3}, 3),
    ],
)
def test_an_engine_has_to_be_as_large_as_its_place(tensor: int, engine_args: dict[str, Any], workers: int) -> None:
    options: dict[str, Any] = {"tensor_parallel_size": tensor, "engine_args": engine_args}
    rws.VLLMEngineSpec("a-model", placement=Spots([Spot(workers)]), **options)
    said = rf"{workers} workers for each engine .* reserved with tensor_parallel_size={workers + 1}: the two must be equal"
    with pytest.raises(rws.ConfigError, match=said):
        rws.VLLMEngineSpec("a-model", placement=Spots([Spot(workers + 1)]), **options)


def test_a_module_is_not_taken_for_the_function_that_makes_one() -> None:
    with pytest.raises(rws.ConfigError, match="must be a function that makes a module"):
        rws.TorchEngineSpec(torch.nn.Linear(1, 1))
    assert rws.TorchEngineSpec(torch.nn.Identity).make_module is torch.nn.Identity, "a class makes one"


def test_rays_executor_is_refused_in_a_place_of_one_bundle() -> None:
    ray_workers: dict[str, Any] = {"distributed_executor_backend": "ray"}
    rws.VLLMEngineSpec("a-model", engine_args=ray_workers)
    with pytest.raises(rws.ConfigError, match="a bundle for each worker: leave out placement"):
        rws.VLLMEngineSpec("a-model", engine_args=ray_workers, placement=Spots([Spot(1)]))


def test_a_size_that_is_no_number_is_named() -> None:
    with pytest.raises(rws.ConfigError, match=r"engine_args\['pipeline_parallel_size'\] must be an int of at least 1, not '2'"):
        rws.VLLMEngineSpec("a-model", engine_args={"pipeline_parallel_size": "2"})


@pytest.mark.parametrize(("gpus_there", "asked", "hinted"), [(8.0, 4.0, False), (0.0, 0.0, True)])
def test_an_engine_asks_for_a_gpu_for_each_worker_and_without_any_says_so(
    monkeypatch: pytest.MonkeyPatch, gpus_there: float, asked: float, hinted: bool
) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": gpus_there})
    monkeypatch.setattr(specs, "spawn_all", lambda create, count, **options: told.update(options) or [])
    rws.VLLMEngineSpec("a-model", tensor_parallel_size=2, engine_args={"pipeline_parallel_size": 2}).spawn()
    assert told["needs"] == {"CPU": 1.0, "GPU": asked}
    assert ("say num_gpus where the cluster adds nodes on demand" in told["hint"]) == hinted


def test_a_number_of_gpus_that_is_said_is_asked_for_even_where_no_node_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(ray, "cluster_resources", dict)
    monkeypatch.setattr(specs, "spawn_all", lambda create, count, **options: told.update(options) or [])
    rws.VLLMEngineSpec("a-model", num_gpus=2).spawn()
    assert told["needs"]["GPU"] == 2
    assert "num_gpus" not in told["hint"]
