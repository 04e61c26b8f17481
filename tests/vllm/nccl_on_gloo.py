"""vLLM's own ``nccl`` weight transfer, unmodified, on CPU: what it asks of a GPU is stood in for where this module is imported.

A worker extension for engine workers (``worker_extension_cls``), and the trainer's end of the same. Only NCCL is replaced: where ranks
meet, how tensors are cut, packed, received and loaded is vLLM's. As with NCCL, whoever loses a peer inside a broadcast waits for ever.
"""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators import pynccl, pynccl_wrapper
from vllm.distributed.weight_transfer import packed_tensor

LIMIT = timedelta(seconds=600)


class Stream:
    """A stream on which everything is done already."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


class Event:
    """What is recorded has happened."""

    def record(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        return True


class GlooCommunicator:
    """The face of ``PyNcclCommunicator`` that weight transfer uses."""

    disabled = False

    def __init__(self, group: Any, device: Any, library_path: str | None = None) -> None:
        self._join(group.store, group.rank, group.world_size)

    @classmethod
    def from_unique_id_bytes(cls, unique_id_bytes: bytes, rank: int, world_size: int, device: Any) -> GlooCommunicator:
        """Meet in the store whose port the id is, and reduce one element, as vLLM's does as soon as it has joined."""
        self = cls.__new__(cls)
        self._join(MINTED.get(unique_id_bytes) or dist.TCPStore("127.0.0.1", port_in(unique_id_bytes), timeout=LIMIT), rank, world_size)
        ones = torch.ones(1)
        self._group.allreduce([ones], dist.AllreduceOptions()).wait()
        assert ones.item() == world_size
        return self

    def _join(self, store: Any, rank: int, world_size: int) -> None:
        backend: Any = dist.ProcessGroupGloo  # its options are not in torch's type stubs
        options = backend._Options()
        options._timeout = LIMIT
        options._threads = 1
        options._devices = [backend.create_device(hostname="127.0.0.1", lazy_init=False)]
        self._group = backend(dist.PrefixStore("gloo", store), rank, world_size, options)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        if tensor.numel() == 0:
            return
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        try:
            self._group.broadcast([tensor.view(-1).view(torch.uint8)], options).wait()
        except RuntimeError:
            threading.Event().wait()  # the kernel of a rank whose peer is gone never ends

    def destroy(self) -> None:
        self._group = None


MINTED: dict[bytes, dist.TCPStore] = {}
"""The stores of the ids that were made here. As with NCCL, whoever made an id has to live until all have joined."""


class GlooLibrary:
    """The face of ``NCCLLibrary`` that makes unique ids."""

    def ncclGetUniqueId(self) -> Any:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
        unique_id = b"port %d" % store.port
        MINTED[unique_id.ljust(128, b"\0")] = store
        made = pynccl_wrapper.ncclUniqueId()
        for place, byte in enumerate(unique_id):
            made.internal[place] = byte
        return made


def port_in(unique_id: bytes) -> int:
    return int(unique_id.rstrip(b"\0").removeprefix(b"port "))


def stand_in_for_workers() -> None:
    cuda: Any = torch.cuda
    accelerator: Any = torch.accelerator
    packing: Any = packed_tensor
    accelerator.current_device_index = lambda: 0
    accelerator.synchronize = lambda *args, **kwargs: None
    cuda.current_stream = lambda *args, **kwargs: Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    if hasattr(packing, "_get_streams"):
        packing._get_streams = lambda index, count: tuple(Stream() for _ in range(count))
    else:  # vLLM 0.28
        cuda.Stream = Stream
    pynccl.PyNcclCommunicator = GlooCommunicator


def stand_in_for_the_trainer() -> None:
    """In a process that has no engine."""
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event, cuda.set_device = Stream, Event, lambda device: None
    pynccl_wrapper.NCCLLibrary = GlooLibrary


stand_in_for_workers()


class Extension:
    """Brings this module into an engine's workers."""
