"""vLLM's own worker code, given our payloads, joins with the ranks that our group says. Its communicator alone is stood in for."""

from __future__ import annotations

import importlib.util
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from ray_weightsync.fleet.topology import Group, Shape, group_of
from ray_weightsync.transports.collective.stock_format import StockFormat

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")

ADDRESS, PORT = "10.0.0.7", 23456


@pytest.fixture(scope="module")
def nccl_common() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own imports
        from vllm.distributed.weight_transfer import nccl_common

    return nccl_common


def shapes(*, deployed: bool) -> list[Shape]:
    """TP 1, TP 2, PP 2 x TP 2, and two data-parallel engines of TP 2: inside one replica, or two replicas of a deployment."""
    alone = [(1, 1), (2, 1), (2, 2), (1, 1)]
    fleet = [
        Shape(id=f"r{number}", world_size=tp * pp, tensor_parallel_size=tp, pipeline_parallel_size=pp, data_parallel_index=0)
        for number, (tp, pp) in enumerate(alone)
    ]
    sizes: dict[str, Any] = {"world_size": 4, "tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 2}
    if deployed:
        parts = [Shape(id=f"d{index}", data_parallel_index=index, deployment="d", **sizes) for index in range(2)]
        return [parts[1], *fleet[:2], parts[0], *fleet[2:]]
    return [*fleet[:1], Shape(id="dp", data_parallel_index=0, **sizes), *fleet[1:]]


def joined(nccl_common: Any, group: Group, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What each worker of a replica asks its communicator for."""
    import torch

    asked: list[dict[str, Any]] = []

    def join(master_address: str, master_port: int, rank: int, world_size: int, device: int) -> None:
        asked.append({"master_address": master_address, "master_port": master_port, "rank": rank, "world_size": world_size})

    monkeypatch.setattr(nccl_common, "stateless_init_process_group", join)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    payload = StockFormat().init_info({"master_address": ADDRESS, "master_port": PORT}, **group.init_payload(shape.id))
    init_info = nccl_common.NCCLWeightTransferInitInfo(**payload)
    workers = (shape.tensor_parallel_size or 1) * (shape.pipeline_parallel_size or 1)
    indices = range(shape.data_parallel_size or 1) if shape.deployment is None else [shape.data_parallel_index]
    for index in indices:
        for rank in range(workers):
            parallel_config = SimpleNamespace(data_parallel_index=index, world_size=workers, rank=rank)
            nccl_common.worker_init_process_group(init_info, parallel_config)
    return asked


@pytest.mark.parametrize("deployed", [False, True], ids=["inside_one_replica", "replicas_of_one_deployment"])
def test_vllms_workers_join_with_our_ranks(nccl_common: Any, deployed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = shapes(deployed=deployed)
    group = group_of(fleet)
    everyone: list[int] = []
    for shape in fleet:
        asked = joined(nccl_common, group, shape, monkeypatch)
        assert [each["rank"] for each in asked] == list(group.member(shape.id).ranks)
        assert {(each["master_address"], each["master_port"], each["world_size"]) for each in asked} == {(ADDRESS, PORT, group.world_size)}
        everyone += [each["rank"] for each in asked]
    assert sorted(everyone) == list(range(1, group.world_size))
