"""Data-parallel engines of a mixture-of-experts model on CPU: the two collectives that vLLM's CPU communicator lacks are stood in for.

A worker extension. Where experts are, how the engines keep in step, pause and resume is vLLM's own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from tests.vllm import extension


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Each rank's rows, one after the other."""
    if isinstance(input_, list):
        return [_all_gatherv(self, each, dim, sizes) for each in input_]
    rows = sizes or [input_.shape[0]] * self.world_size
    padded = input_.new_zeros((max(rows), *input_.shape[1:]))
    padded[: input_.shape[0]] = input_
    gathered = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(gathered, padded, group=self.device_group)
    return torch.cat([each[:count] for each, count in zip(gathered, rows, strict=True)])


def _reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """This rank's rows of the sum."""
    total = input_.clone()
    dist.all_reduce(total, group=self.device_group)
    rows = sizes or [total.shape[0] // self.world_size] * self.world_size
    first = sum(rows[: self.rank_in_group])
    return total[first : first + rows[self.rank_in_group]].contiguous()


CpuCommunicator.all_gatherv = _all_gatherv
CpuCommunicator.reduce_scatterv = _reduce_scatterv


class Extension(extension.FaultyExtension):
    """Brings this module into an engine's workers."""

    @property
    def data_parallel_index(self) -> int:
        return int(self.parallel_config.data_parallel_index)

    def rws_test_fail_in(self, index: int, steps: list[str]) -> None:
        """`rws_test_fail` in the workers of one data-parallel engine."""
        self.rws_test_fail([self.rank] if self.data_parallel_index == index else [], steps)
