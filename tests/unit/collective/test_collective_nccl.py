"""What is around NCCL's calls, with stand-ins for them: nothing is waited for that a deadline, an abort or a lost peer cannot end."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ray_weightsync.config import Collective, Timeouts
from ray_weightsync.errors import ConfigError
from ray_weightsync.trainer import broadcasting
from ray_weightsync.trainer.broadcasting import Broadcasting
from ray_weightsync.transports.collective import communicator
from ray_weightsync.transports.collective.communicator import NcclCommunicator, join
from ray_weightsync.transports.collective.deadline import Deadline
from ray_weightsync.transports.collective.group_store import GroupStore
from ray_weightsync.transports.collective.receiver import CollectiveDelivery, CollectiveReceiver
from ray_weightsync.transports.collective.rendezvous import SENDER, GroupError, Rendezvous, RendezvousServer

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

    def get_async_error(self) -> int:
        """A plain int, as nccl4py 0.6 answers (its annotation says `Result`)."""
        return int(self.states.pop(0) if len(self.states) > 1 else self.states[0])

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
        self.minted: list[bytes] = []
        self.initialized = threading.Event()
        self.devices: list[torch.device] = []
        self.complete = True
        self._numbers = itertools.count()
        core: Any = ModuleType("nccl.core")
        core.UniqueId = SimpleNamespace(from_bytes=lambda raw: raw)
        core.NCCLConfig = lambda *, blocking: ("blocking", blocking)
        core.Communicator = SimpleNamespace(init=self._init)
        core.get_unique_id = self._mint
        bindings: Any = ModuleType("nccl.bindings.nccl")
        bindings.Result = Result
        monkeypatch.setitem(sys.modules, "nccl.core", core)
        monkeypatch.setitem(sys.modules, "nccl.bindings.nccl", bindings)
        cuda = SimpleNamespace(
            set_device=self.devices.append,
            Stream=lambda device: SimpleNamespace(cuda_stream=77, wait_stream=lambda other: None),
            Event=lambda: SimpleNamespace(record=lambda stream: None, query=lambda: self.complete),
            current_stream=lambda device: None,
            current_device=lambda: 3,
            is_available=lambda: True,
        )
        monkeypatch.setattr(communicator.torch, "cuda", cuda)  # type: ignore[attr-defined]

    def _init(self, *args: Any) -> Comm:
        self.made.append(args)
        self.initialized.set()
        return self.comm

    def _mint(self) -> bytes:
        self.minted.append(f"unique {next(self._numbers)}".encode())
        return self.minted[-1]


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    return Nccl(monkeypatch)


def joined(limit_s: float = LIMIT_S) -> NcclCommunicator:
    rendezvous: Any = SimpleNamespace(world_size=5, backend="nccl")
    store: Any = SimpleNamespace(
        rank=2, rendezvous=rendezvous, halted=False, await_values=lambda keys, deadline: dict.fromkeys(keys, b"unique")
    )
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


@pytest.fixture
def pair() -> Iterator[Rendezvous]:
    """A group of the sender and one worker."""
    with RendezvousServer(backend="nccl", options=Collective(bucket_bytes=4096), address="127.0.0.1") as server:
        yield server.meeting.of(2)


def test_a_place_to_meet_costs_no_unique_id_nor_does_a_group_that_is_not_complete(nccl: Nccl, pair: Rendezvous) -> None:
    deadline = Deadline(0.2)
    with closing(GroupStore(pair, SENDER, deadline)) as store, pytest.raises(TimeoutError, match="did not join: 1"):
        join(store, GPU, deadline)
    assert nccl.minted == []


def test_the_sender_makes_one_unique_id_by_which_all_join(nccl: Nccl, pair: Rendezvous, aside: Any) -> None:
    def joins(rank: int) -> None:
        deadline = Deadline(LIMIT_S)
        with closing(GroupStore(pair, rank, deadline)) as store:
            join(store, GPU, deadline).close()

    for each in [aside(lambda rank=rank: joins(rank)) for rank in range(2)]:
        each.result()
    assert len(nccl.minted) == 1
    assert sorted(rank for _, rank, *_ in nccl.made) == [0, 1]
    assert {unique_id for _, _, unique_id, _ in nccl.made} == set(nccl.minted)


class TestGivenUpWhileNcclJoins:
    """The group's ranks are all there, and NCCL does not come to an end with them."""

    @pytest.fixture
    def sender(self, pair: Rendezvous) -> Iterator[GroupStore]:
        with closing(GroupStore(pair, SENDER, Deadline(LIMIT_S))) as store:
            yield store

    @pytest.fixture
    def delivery(self, nccl: Nccl, pair: Rendezvous, sender: GroupStore, weights: Any) -> CollectiveDelivery:
        nccl.comm.states = [Result.InProgress]
        delivery = CollectiveReceiver().open(weights()[1], {"group": pair.payload(1), "limit_s": LIMIT_S})
        sender.join(Deadline(LIMIT_S))
        sender.set_value("nccl", b"unique")
        assert nccl.initialized.wait(LIMIT_S)
        return delivery

    def test_a_receiver_that_is_halted_ends(self, nccl: Nccl, delivery: CollectiveDelivery) -> None:
        delivery.halt()
        assert not delivery._thread.is_alive()
        assert nccl.comm.aborted == 1

    def test_a_receiver_whose_group_fails_ends_in_its_words(self, nccl: Nccl, sender: GroupStore, delivery: CollectiveDelivery) -> None:
        sender.fail("the source broke")
        with pytest.raises(GroupError, match="rank 0: the source broke"):
            list(delivery)
        delivery.close()
        assert not delivery._thread.is_alive()
        assert nccl.comm.aborted == 1


def test_a_trainer_on_a_gpu_without_nccl_is_told_so_before_it_offers_a_place_to_meet(nccl: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcasting, "has_nccl", lambda: False)
    link: Any = None
    with pytest.raises(ConfigError, match=r"nccl4py is missing in the trainer,.*pip install 'ray_weightsync\[nccl\]'"):
        Broadcasting(link, Collective(), Timeouts())
