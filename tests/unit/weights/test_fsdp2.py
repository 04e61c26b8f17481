"""A module that FSDP2 has sharded over several processes: every rank's source yields the whole, exact tensors, all in one order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from ray_weightsync.weights.module_source import ModuleSource
from ray_weightsync.weights.plan import Plan

LIMIT_S = 100.0


class Uneven(nn.Module):
    """Rows that do not divide: 5, 1 and 0 of them, a tensor cut along its second dimension, and one that nobody shards."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"five": (5, 4), "one": (1, 4), "none": (0, 4), "columns": (3, 5), "plain": (4,), "scalars": (7,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))


def _rank(rank: int, world_size: int, port: int, results: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    module: Any = Uneven()
    module.columns = nn.Parameter(distribute_tensor(module.columns.detach(), mesh, [Shard(1)]))
    fully_shard(module, mesh=mesh, ignored_params={module.plain, module.columns})
    kinds = {name: isinstance(parameter, DTensor) for name, parameter in module.named_parameters()}
    source = ModuleSource(module)
    arrived = [(name, tensor.tolist()) for name, tensor in source]
    results.put((rank, kinds, Plan.from_metadata(source.metadata()).digest, arrived))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3])
def test_shards_of_uneven_size_arrive_whole_and_in_the_same_order_on_every_rank(world_size: int) -> None:
    results = mp.get_context("spawn").SimpleQueue()
    listening = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    arguments = (world_size, listening.port, results)
    spawned = mp.start_processes(_rank, arguments, nprocs=world_size, join=False, start_method="spawn")
    assert spawned is not None
    deadline = time.monotonic() + LIMIT_S
    while not spawned.join(max(0.1, deadline - time.monotonic())):  # returns at the first process that ends
        assert time.monotonic() < deadline
    whole = ModuleSource(Uneven())
    expected = [(name, tensor.tolist()) for name, tensor in whole]
    told = list(_drain(results))
    assert sorted(rank for rank, *_ in told) == list(range(world_size))
    for _, kinds, plan, arrived in told:
        assert [name for name, sharded in kinds.items() if not sharded] == ["plain"]
        assert plan == Plan.from_metadata(whole.metadata()).digest
        assert arrived == expected


def _drain(queue: Any) -> Iterator[Any]:
    while not queue.empty():
        yield queue.get()
