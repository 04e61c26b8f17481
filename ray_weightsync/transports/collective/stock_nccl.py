"""vLLM's own communicator as the sender's: only its calls are here. Not yet run on a GPU: see ``tests/gpu/test_gpu_stock.py``."""

from __future__ import annotations

import importlib
import math
import socket
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed import DistError

from ray_weightsync.transports.collective.communicator import until_done
from ray_weightsync.transports.collective.rendezvous import SENDER, GroupError
from ray_weightsync.transports.collective.stock_meeting import Means

_COMMON = "vllm.distributed.weight_transfer.nccl_common"


class VllmCommunicator:
    """A `Communicator` through vLLM's ``PyNcclCommunicator`` (0.28 to 0.32), made as its receivers make theirs.

    Nothing here has a deadline once all ranks have met at a socket, and nothing at all by a unique id: ``ncclCommInitRank`` blocks.
    Whoever waits for this one leaves it behind. vLLM's code follows it with the all-reduce of one element that its receivers wait for.

    Args:
        means: A socket that listens where the workers have been told, taken over; or the unique id that they have been told (since 0.30).
        world_size: Ranks, this one included.
        device: Where buffers are.
        limit_s: Seconds for all ranks to come.

    Raises:
        ModuleNotFoundError: without vLLM.
        TimeoutError: if not all ranks came.
        GroupError: if vLLM finds no NCCL.
    """

    rank = SENDER
    passes_on = True

    def __init__(self, means: Means, world_size: int, device: torch.device, limit_s: float) -> None:
        self.world_size = world_size
        self.device = device
        self._cuda: Any = torch.cuda  # partly untyped
        self._cuda.set_device(device)  # of this thread: a new one begins with GPU 0
        self._aborted = False
        if isinstance(means, socket.socket):
            self._comm: Any = _met_at(means, world_size, device, limit_s)
        else:
            self._comm = importlib.import_module(_COMMON).uid_init_process_group(means, SENDER, world_size, device)
        if self._comm.disabled:
            raise GroupError("vLLM finds no NCCL library here, or is told not to use it (VLLM_DISABLE_PYNCCL)")
        self._stream = self._cuda.Stream(device)

    def broadcast(self, buffer: torch.Tensor, src: int) -> None:
        """See `Communicator`. Receivers may have asked for another dtype: NCCL counts broadcasts in bytes."""
        if self._comm is None or self._aborted:
            raise GroupError("the group was aborted")
        self._stream.wait_stream(self._cuda.current_stream(self.device))
        self._comm.broadcast(buffer, src=src, stream=self._stream)
        until_done(self._stream, self._check)
        self._check()  # an aborted kernel ends like one that is complete

    def _check(self) -> None:
        if self._aborted:
            self.close()
            raise GroupError("the group was aborted")

    def abort(self) -> None:
        """See `Communicator`: the thread that waits for the pending broadcast sees the mark and ends it."""
        self._aborted = True

    def close(self) -> None:
        """See `Communicator`. Aborts: to leave properly is a collective, and would wait for a rank that is gone."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.destroy()


def new_unique_id() -> bytes:
    """NCCL's unique id of a new group, from the library that vLLM joins with. This process must live until all ranks have joined.

    Raises:
        ModuleNotFoundError: without vLLM.
        GroupError: if vLLM finds no NCCL.
    """
    wrapper = importlib.import_module("vllm.distributed.device_communicators.pynccl_wrapper")
    with _unpinned():
        try:
            return bytes(wrapper.NCCLLibrary().ncclGetUniqueId().internal)
        except Exception as error:  # whatever loading a library or calling into it raises
            raise GroupError(f"vLLM's NCCL cannot make a unique id here: {error}") from error


def _met_at(bound: socket.socket, world_size: int, device: torch.device, limit_s: float) -> Any:
    meeting = importlib.import_module("vllm.distributed.utils").StatelessProcessGroup
    pynccl = importlib.import_module("vllm.distributed.device_communicators.pynccl")
    host, port = bound.getsockname()[:2]
    try:
        group = meeting.create(
            host=host, port=port, rank=SENDER, world_size=world_size, store_timeout=math.ceil(limit_s), listen_socket=bound
        )
    except DistError as error:
        raise TimeoutError(f"not all workers came within {limit_s:.1f} s: {error}") from error
    with _unpinned():
        return pynccl.PyNcclCommunicator(group, device=device)


def _unpinned() -> AbstractContextManager[Any]:
    """Since 0.30 the receivers join without the NCCL settings that vLLM pins for itself; both ends must have the same."""
    unpinned = getattr(importlib.import_module(_COMMON), "unpinned_nccl_env", nullcontext)
    context: AbstractContextManager[Any] = unpinned()
    return context
