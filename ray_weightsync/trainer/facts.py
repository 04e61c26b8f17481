"""What a sender's process is, as far as it decides how its weights travel."""

from __future__ import annotations

from typing import Any

import ray
import torch
import torch.distributed as dist

from ray_weightsync.engines.facts import DeviceFacts
from ray_weightsync.fleet.choosing import GPU, SenderFacts
from ray_weightsync.weights.placed import device_of
from ray_weightsync.weights.sources import WeightSource
from ray_weightsync.worker.device import has_nccl, told_device
from ray_weightsync.worker.identity import is_installed

CPU = DeviceFacts("cpu")


def sender_facts(source: WeightSource) -> SenderFacts:
    """What decides of this process and of ``source``, which is read nowhere but in its first tensor's device; see `device_of`.

    Where the source does not say, weights are taken to be on the current GPU, if there is one: a trainer that computes on a GPU keeps them
    there. Should they be elsewhere, a transport that sends from the GPU copies them there first.
    """
    cuda: Any = torch.cuda  # partly untyped
    current = DeviceFacts.from_wire(told_device(torch.device(GPU, cuda.current_device()))) if cuda.is_available() else None
    device = device_of(source)
    return SenderFacts(
        node_id=ray.get_runtime_context().get_node_id(),
        device=(current or CPU) if device is None else DeviceFacts.from_wire(told_device(device)) or CPU,
        current=current,
        nccl=current is not None and has_nccl(),
        vllm=current is not None and is_installed("vllm"),
        num_ranks=dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
    )
