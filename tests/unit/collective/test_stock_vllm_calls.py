"""What is around the calls of vLLM's communicator, with stand-ins for them. Its real rendezvous is met in tests/vllm/test_stock_nccl.py."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import DistError

from ray_weightsync.transports.collective import stock_nccl
from ray_weightsync.transports.collective.rendezvous import GroupError, listening
from ray_weightsync.transports.collective.stock_nccl import VllmCommunicator, new_unique_id

LIMIT_S = 30.0
GPU = torch.device("cuda", 3)


class Vllm:
    """vLLM's modules, and the CUDA that is asked of torch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.met: dict[str, Any] = {}
        self.error: Exception | None = None
        self.disabled = False
        self.done = threading.Event()
        self.asked = threading.Event()
        self.calls: list[Any] = []
        modules = {
            "vllm.distributed.utils": SimpleNamespace(StatelessProcessGroup=SimpleNamespace(create=self._create)),
            "vllm.distributed.device_communicators.pynccl": SimpleNamespace(PyNcclCommunicator=self._communicator),
            "vllm.distributed.weight_transfer.nccl_common": SimpleNamespace(
                unpinned_nccl_env=self._unpinned, uid_init_process_group=self._by_unique_id
            ),
            "vllm.distributed.device_communicators.pynccl_wrapper": SimpleNamespace(NCCLLibrary=self._library),
        }
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        cuda = SimpleNamespace(
            set_device=lambda device: self.calls.append(("device", device)),
            Stream=lambda device: SimpleNamespace(wait_stream=lambda other: self.calls.append(("after", other))),
            Event=lambda: SimpleNamespace(record=lambda stream: None, query=self._query),
            current_stream=lambda device: "current",
        )
        monkeypatch.setattr(stock_nccl.torch, "cuda", cuda)  # type: ignore[attr-defined]

    def _create(self, *, listen_socket: socket.socket, **met: Any) -> str:
        os.close(listen_socket.detach())
        self.met = met
        if self.error is not None:
            raise self.error
        return "group"

    @contextlib.contextmanager
    def _unpinned(self) -> Iterator[None]:
        self.calls.append("unpinned")
        yield
        self.calls.append("pinned again")

    def _communicator(self, group: str, *, device: torch.device) -> Any:
        self.calls.append((group, device))

        def broadcast(buffer: torch.Tensor, *, src: int, stream: Any) -> None:
            self.calls.append(("broadcast", buffer.numel(), src))

        return SimpleNamespace(disabled=self.disabled, broadcast=broadcast, destroy=lambda: self.calls.append("destroy"))

    def _by_unique_id(self, unique_id: bytes, rank: int, world_size: int, device: torch.device) -> Any:
        self.met = {"unique_id": unique_id, "rank": rank, "world_size": world_size}
        return self._communicator("by id", device=device)

    def _library(self) -> Any:
        if self.error is not None:
            raise self.error
        self.calls.append("library")
        made = SimpleNamespace(internal=(ctypes.c_byte * 128)(*range(-64, 64)))
        return SimpleNamespace(ncclGetUniqueId=lambda: made)

    def _query(self) -> bool:
        self.asked.set()
        return self.done.is_set()


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    return Vllm(monkeypatch)


def joined() -> tuple[VllmCommunicator, int]:
    bound = listening("127.0.0.1")
    port = bound.getsockname()[1]
    return VllmCommunicator(bound, 4, GPU, 7.5), port


def test_it_meets_the_workers_on_the_socket_that_listens_already_and_with_the_settings_that_they_have(vllm: Vllm) -> None:
    _, port = joined()
    assert vllm.met == {"host": "127.0.0.1", "port": port, "rank": 0, "world_size": 4, "store_timeout": 8}
    assert vllm.calls == [("device", GPU), "unpinned", ("group", GPU), "pinned again"]


def test_by_a_unique_id_it_joins_as_the_workers_do_at_once(vllm: Vllm) -> None:
    communicator = VllmCommunicator(b"id", 4, GPU, 7.5)
    assert vllm.met == {"unique_id": b"id", "rank": 0, "world_size": 4}
    assert vllm.calls == [("device", GPU), ("by id", GPU)]
    vllm.done.set()
    communicator.broadcast(torch.empty(5, dtype=torch.uint8), 0)
    assert vllm.calls[-1] == ("broadcast", 5, 0)


def test_a_unique_id_is_made_by_vllms_library_with_the_settings_that_the_workers_have(vllm: Vllm) -> None:
    assert new_unique_id() == bytes(number % 256 for number in range(-64, 64))
    assert vllm.calls == ["unpinned", "library", "pinned again"]


def test_a_machine_that_cannot_make_a_unique_id_is_told_in_the_librarys_words(vllm: Vllm) -> None:
    vllm.error = OSError("libnccl.so.2: cannot open shared object file")
    with pytest.raises(GroupError, match=r"cannot make a unique id here: libnccl\.so\.2"):
        new_unique_id()


def test_a_broadcast_comes_after_what_was_packed_and_is_complete_on_return(vllm: Vllm) -> None:
    communicator, _ = joined()
    vllm.calls.clear()
    vllm.done.set()
    communicator.broadcast(torch.empty(5, dtype=torch.uint8), 0)
    assert vllm.calls == [("after", "current"), ("broadcast", 5, 0)]
    communicator.close()
    communicator.close()
    assert vllm.calls[2:] == ["destroy"]
    with pytest.raises(GroupError, match="aborted"):
        communicator.broadcast(torch.empty(5, dtype=torch.uint8), 0)


def test_an_abort_ends_a_broadcast_that_hangs_by_destroying_the_communicator(vllm: Vllm) -> None:
    communicator, _ = joined()
    with ThreadPoolExecutor(1) as pool:
        broadcasting = pool.submit(communicator.broadcast, torch.empty(5, dtype=torch.uint8), 0)
        assert vllm.asked.wait(LIMIT_S)
        communicator.abort()
        with pytest.raises(GroupError, match="aborted"):
            broadcasting.result(LIMIT_S)
    assert vllm.calls[-1] == "destroy"


def test_workers_that_do_not_come_are_a_timeout(vllm: Vllm) -> None:
    vllm.error = DistError("3/4 clients joined")
    with pytest.raises(TimeoutError, match=r"within 7\.5 s: 3/4 clients"):
        joined()


def test_a_machine_without_nccl_is_an_error_and_not_a_silent_group(vllm: Vllm) -> None:
    vllm.disabled = True
    with pytest.raises(GroupError, match="no NCCL library"):
        joined()
