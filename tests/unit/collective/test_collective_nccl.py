"""What is around NCCL's calls, with stand-ins for them: nothing is waited for that a deadline, an abort or a lost peer cannot end."""

from __future__ import annotations

import base64
import sys
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ray_weightsync.transports.collective import communicator
from ray_weightsync.transports.collective.communicator import NcclCommunicator
from ray_weightsync.transports.collective.deadline import Deadline
from ray_weightsync.transports.collective.rendezvous import GroupError

LIMIT_S = 30.0
GPU = torch.device("cuda", 3)


class Result(IntEnum):
    Success = 0
    RemoteError = 6
    InProgress = 7


class Comm:
    """NCCL's communicator, whose states a test sets."""

    def __init__(self) -> None:
        self.states = [Result.InProgress, Result.InProgress, Result.Success]
        self.sent: list[tuple[int, int]] = []
        self.aborted = 0

    def get_async_error(self) -> Result:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def get_last_error(self) -> str:
        return "peer is gone"

    def broadcast(self, sent: torch.Tensor, received: torch.Tensor, root: int, *, stream: int) -> None:
        assert sent is received
        self.sent.append((root, stream))

    def abort(self) -> None:
        self.aborted += 1


class Nccl:
    """Stands in for nccl4py and for the CUDA that is asked of torch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.comm = Comm()
        self.made: list[Any] = []
        self.devices: list[torch.device] = []
        self.complete = True
        core: Any = ModuleType("nccl.core")
        core.UniqueId = SimpleNamespace(from_bytes=lambda raw: raw)
        core.NCCLConfig = lambda *, blocking: ("blocking", blocking)
        core.Communicator = SimpleNamespace(init=self._init)
        core.get_unique_id = lambda: b"unique"
        bindings: Any = ModuleType("nccl.bindings.nccl")
        bindings.Result = Result
        monkeypatch.setitem(sys.modules, "nccl.core", core)
        monkeypatch.setitem(sys.modules, "nccl.bindings.nccl", bindings)
        cuda = SimpleNamespace(
            set_device=self.devices.append,
            Stream=lambda device: SimpleNamespace(cuda_stream=77, wait_stream=lambda other: None),
            Event=lambda: SimpleNamespace(record=lambda stream: None, query=lambda: self.complete),
            current_stream=lambda device: None,
        )
        monkeypatch.setattr(communicator.torch, "cuda", cuda)  # type: ignore[attr-defined]

    def _init(self, *args: Any) -> Comm:
        self.made.append(args)
        return self.comm


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    return Nccl(monkeypatch)


def joined(limit_s: float = LIMIT_S) -> NcclCommunicator:
    rendezvous: Any = SimpleNamespace(world_size=5, unique_id=base64.b64encode(b"unique").decode(), backend="nccl")
    store: Any = SimpleNamespace(rank=2, rendezvous=rendezvous)
    return NcclCommunicator(store, GPU, Deadline(limit_s))


def test_it_joins_without_blocking_on_its_own_device_and_broadcasts_on_its_own_stream(nccl: Nccl) -> None:
    member = joined()
    assert nccl.made == [(5, 2, b"unique", ("blocking", False))]
    assert nccl.devices == [GPU]
    member.broadcast(torch.empty(4, dtype=torch.uint8), 0)
    assert nccl.comm.sent == [(0, 77)]
    member.close()
    member.close()
    assert nccl.comm.aborted == 1
    with pytest.raises(GroupError, match="was aborted"):
        member.broadcast(torch.empty(4, dtype=torch.uint8), 0)


def test_ranks_that_never_come_end_the_join_at_the_deadline(nccl: Nccl) -> None:
    nccl.comm.states = [Result.InProgress]
    with pytest.raises(TimeoutError, match=r"joining was not over after 0\.1 s"):
        joined(limit_s=0.1)
    assert nccl.comm.aborted == 1


def test_a_broadcast_that_hangs_is_aborted_at_the_deadline(nccl: Nccl) -> None:
    member = joined(limit_s=0.1)
    nccl.complete = False
    with pytest.raises(TimeoutError, match=r"a broadcast was not over after 0\.1 s"):
        member.broadcast(torch.empty(4, dtype=torch.uint8), 0)
    assert nccl.comm.aborted == 1


def test_a_lost_peer_is_an_error_in_nccls_words(nccl: Nccl) -> None:
    member = joined()
    nccl.complete = False
    nccl.comm.states = [Result.Success, Result.Success, Result.RemoteError]
    with pytest.raises(GroupError, match="a broadcast failed: NCCL says RemoteError: peer is gone"):
        member.broadcast(torch.empty(4, dtype=torch.uint8), 0)
    assert nccl.comm.aborted == 1


def test_an_abort_from_another_thread_ends_a_broadcast_that_hangs(nccl: Nccl, aside: Any) -> None:
    member = joined()
    nccl.complete = False
    hanging = aside(lambda: member.broadcast(torch.empty(4, dtype=torch.uint8), 0))
    member.abort()
    with pytest.raises(GroupError, match="was aborted"):
        hanging.result()
    member.close()
    assert nccl.comm.aborted <= 1


def test_a_unique_id_is_bytes(nccl: Nccl) -> None:
    assert communicator.new_unique_id() == b"unique"
