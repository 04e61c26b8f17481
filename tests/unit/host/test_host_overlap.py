"""Reading behind the watermark, while the sender writes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_weightsync.transports.host.layout import FileState, SlotError
from ray_weightsync.transports.host.receiver import HostReceiver
from ray_weightsync.transports.host.store import SnapshotStore

LIMIT_S = 30.0


class Gated:
    """Weights that a writer takes one by one, each when it is let through."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights
        self._gates = threading.Semaphore(0)

    def let(self, num: int) -> None:
        self._gates.release(num)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in self._weights.items():
            assert self._gates.acquire(timeout=LIMIT_S), "nobody opened the gate"
            yield pair


def test_a_tensor_is_read_while_the_next_one_is_still_being_made(store: SnapshotStore, stage: Any, aside: Any) -> None:
    weights = stage.weights(5)
    source = Gated(weights)
    address = stage.opened(store, overlap=True)
    writer = aside(lambda: stage.writer.write(address, stage.plan, source, progress_bytes=1))
    delivery = stage.open(address)
    tensors = iter(delivery)
    for name, expected in weights.items():
        source.let(1)  # a receiver that waited for more than this one tensor would wait in vain
        got, tensor = next(tensors)
        assert got == name
        assert torch.equal(tensor, expected)
    with pytest.raises(SlotError, match="not seen sealed"):
        delivery.received()
    packed = writer.result()
    end = aside(lambda: next(tensors, "end"))
    store.seal(address["snapshot"], packed.digest)
    assert end.result() == "end"
    assert delivery.received().digest == packed.digest
    assert delivery.received().num_tensors == len(weights)
    delivery.close()


def test_nothing_is_yielded_that_the_watermark_does_not_cover(store: SnapshotStore, stage: Any) -> None:
    address = stage.opened(store, overlap=True)
    delivery = stage.open(address, limit_s=0.05)
    with pytest.raises(
        TimeoutError, match=rf"waited 0\.1 s for tensor 'embed', which ends at byte 660 .* got to byte 0 of {stage.plan.num_bytes}"
    ):
        next(iter(delivery))
    delivery.close()


def test_a_sender_that_stops_half_way_is_named_with_how_far_it_got(store: SnapshotStore, stage: Any) -> None:
    address = stage.opened(store, overlap=True)

    def stops() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(stage.weights(0).items()))
        raise RuntimeError("the trainer broke")

    with pytest.raises(RuntimeError, match="the trainer broke"):
        stage.writer.write(address, stage.plan, stops(), progress_bytes=1)
    tensors = iter(stage.open(address, limit_s=0.05))
    next(tensors)
    with pytest.raises(TimeoutError, match=r"for tensor 'norm'.* got to byte 704 of"):
        next(tensors)


def test_a_seal_that_does_not_come_is_a_timeout(store: SnapshotStore, stage: Any) -> None:
    address = stage.opened(store, overlap=True)
    stage.write(address, 0)
    with pytest.raises(TimeoutError, match=f"for the seal of snapshot {address['snapshot']}"):
        list(stage.open(address, limit_s=0.05))


def test_a_discard_ends_a_waiting_receiver_at_once(store: SnapshotStore, stage: Any, aside: Any) -> None:
    address = stage.opened(store, overlap=True)
    delivery = stage.open(address, limit_s=3600)
    waiting = aside(lambda: list(delivery))
    store.discard(address["snapshot"])
    with pytest.raises(SlotError, match="was given up while it was being read"):
        waiting.result()
    delivery.close()


def test_a_discard_also_stops_what_the_watermark_would_allow(store: SnapshotStore, stage: Any) -> None:
    address = stage.opened(store, overlap=True)
    stage.write(address, 0)
    delivery = stage.open(address, limit_s=3600)
    tensors = iter(delivery)
    next(tensors)
    store.discard(address["snapshot"])
    with pytest.raises(SlotError, match="was given up"):
        next(tensors)
    delivery.close()


def test_a_closing_store_ends_a_waiting_receiver_at_once(directory: str, session: str, stage: Any, aside: Any) -> None:
    store = SnapshotStore(session, directory, 2)
    address = stage.opened(store, overlap=True)
    delivery = stage.open(address, limit_s=3600)
    waiting = aside(lambda: list(delivery))
    store.close()
    with pytest.raises(SlotError, match=r"was given up|is gone"):
        waiting.result()
    delivery.close()


def test_a_store_that_died_ends_a_waiting_receiver_at_once(store: SnapshotStore, stage: Any, aside: Any, directory: str) -> None:
    address = stage.opened(store, overlap=True)
    delivery = stage.open(address, limit_s=3600)
    waiting = aside(lambda: list(delivery))
    os.unlink(f"{directory}/{address['name']}")  # what the janitor of a killed store does; nobody is left to write a state
    with pytest.raises(SlotError, match=r"the store of snapshot .* is gone"):
        waiting.result()
    delivery.close()


def test_a_receiver_that_comes_after_the_seal_does_not_wait(store: SnapshotStore, stage: Any, same: Callable[..., bool]) -> None:
    snapshot, digest = stage.sealed(store, 2, overlap=True)
    delivery = HostReceiver().open(stage.plan, {"slot": store.address(snapshot)})
    assert delivery.received().digest == digest
    assert same(dict(delivery), stage.weights(2))


def test_a_closed_delivery_yields_nothing_more_and_keeps_no_file(store: SnapshotStore, stage: Any) -> None:
    fds = sorted(os.listdir("/proc/self/fd"))
    address = stage.opened(store, overlap=True)
    opened_fds = len(os.listdir("/proc/self/fd"))
    delivery = stage.open(address)
    delivery.close()
    delivery.close()
    with pytest.raises(SlotError, match="is closed"):
        list(delivery)
    assert len(os.listdir("/proc/self/fd")) == opened_fds
    store.discard(address["snapshot"])
    assert len(fds) + 2 == opened_fds, "the store's own file and header"


def test_an_overlapping_snapshot_carries_the_state_from_writing_to_sealed(store: SnapshotStore, stage: Any) -> None:
    address = stage.opened(store, overlap=True)

    def state() -> int:
        return Path(f"{address['directory']}/{address['name']}").read_bytes()[12]

    assert state() == FileState.WRITING
    store.seal(address["snapshot"], stage.write(address, 0).digest)
    assert state() == FileState.SEALED
    store.discard(address["snapshot"])
    assert state() == FileState.ABORTED
