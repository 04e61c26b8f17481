"""Groups over loopback, with receivers on threads or in processes of their own, and a look at what they leave behind."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ray_weightsync.config import Collective
from ray_weightsync.transports.collective.receiver import CollectiveDelivery, CollectiveReceiver
from ray_weightsync.transports.collective.rendezvous import RendezvousServer
from ray_weightsync.transports.collective.sender import BroadcastSender
from ray_weightsync.weights.plan import Plan
from ray_weightsync.weights.sources import StateDictSource
from tests.unit.aside import Aside

LIMIT_S = 30.0
BUCKET_BYTES = 4096


def sockets() -> set[str]:
    """The sockets that this process has open, each by its inode."""
    links = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            links.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {link for link in links if link.startswith("socket:")}


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """Whatever happened: no thread, no socket, no global process group is left by the test; what others left may go meanwhile."""
    threads, before = set(threading.enumerate()), sockets()
    yield
    for thread in set(threading.enumerate()) - threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), thread.name
    if sockets() - before:
        gc.collect()  # an exception's frames may hold a store
    assert not sockets() - before
    assert not dist.is_initialized()


class Gated:
    """Pairs that a sender takes one by one, each when it is let through."""

    def __init__(self, source: StateDictSource) -> None:
        self._source = source
        self._gates = threading.Semaphore(0)
        self.taken = 0

    def let(self, num: int) -> None:
        self._gates.release(num)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in self._source:
            assert self._gates.acquire(timeout=LIMIT_S), "nobody opened the gate"
            self.taken += 1
            yield pair


class Group:
    """The sender's side of one group, and receivers for its ranks."""

    def __init__(self, world_size: int, *, limit_s: float = LIMIT_S, bucket_bytes: int = BUCKET_BYTES, num_buckets: int = 2) -> None:
        options = Collective(bucket_bytes=bucket_bytes, num_buckets=num_buckets)
        self.server = RendezvousServer(options=options, address="127.0.0.1")
        self.rendezvous = self.server.meeting.of(world_size)
        self.sender = BroadcastSender(self.rendezvous, limit_s=limit_s)
        self.world_size = world_size

    def update(self, rank: int, *, limit_s: float = LIMIT_S) -> dict[str, Any]:
        return {"group": self.rendezvous.payload(rank), "limit_s": limit_s}

    def open(self, rank: int, plan: Plan, *, limit_s: float = LIMIT_S) -> CollectiveDelivery:
        return CollectiveReceiver().open(plan, self.update(rank, limit_s=limit_s))

    def receive(self, rank: int, plan: Plan, *, limit_s: float = LIMIT_S) -> Aside:
        """Receive everything on a thread; its result is the tensors by name and what is attested."""

        def work() -> Any:
            delivery = self.open(rank, plan, limit_s=limit_s)
            try:
                return dict(delivery), delivery.received()
            finally:
                delivery.close()

        return Aside(work)

    def receive_all(self, plan: Plan, *, limit_s: float = LIMIT_S) -> list[Aside]:
        return [self.receive(rank, plan, limit_s=limit_s) for rank in range(1, self.world_size)]

    def close(self) -> None:
        self.sender.close()
        self.server.close()


@pytest.fixture
def group() -> Iterator[Callable[..., Group]]:
    with contextlib.ExitStack() as ends:

        def make(world_size: int, **fields: Any) -> Group:
            made = Group(world_size, **fields)
            ends.callback(made.close)
            return made

        yield make


@pytest.fixture
def gated() -> type[Gated]:
    return Gated


@pytest.fixture
def weights() -> Callable[..., tuple[StateDictSource, Plan]]:
    """Random values of the given (dtype, shape)s, or of ten tensors of 2000 bytes (two to a bucket), and their plan."""

    def make(*layout: tuple[str, tuple[int, ...]], seed: int = 0) -> tuple[StateDictSource, Plan]:
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for number, (dtype_name, shape) in enumerate(layout or [("float32", (500,))] * 10):
            tensors[f"t{number}"] = torch.randint(-100, 100, shape, generator=generator).to(getattr(torch, dtype_name))
        source = StateDictSource(tensors)
        return source, Plan.from_metadata(source.metadata())

    return make
