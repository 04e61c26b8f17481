"""Packing, broadcasting and loading go on at the same time, each a bucket further than the next; and no further than there is room."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ray_weightsync.transports.collective import member
from ray_weightsync.transports.collective.communicator import Communicator
from ray_weightsync.transports.collective.group_store import GroupStore
from ray_weightsync.weights.digest import weights_digest

GATE_S = 15.0
"""Longest that a step of one thread may take to follow from another's: a test whose gate stays shut fails."""


class Steps:
    """How many steps were taken, for other threads to wait for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.taken = 0

    def take(self) -> None:
        with self._changed:
            self.taken += 1
            self._changed.notify_all()

    def wait_for(self, num: int, why: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.taken >= num, GATE_S), f"{why}: {self.taken} of {num}"


@pytest.fixture
def around_broadcasts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have something called on a rank's own thread, before or after each of its broadcasts."""

    def make(rank: int, *, before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None) -> None:
        joins = member.join

        def joined(store: GroupStore, *args: Any) -> Communicator:
            communicator = joins(store, *args)
            if store.rank == rank:
                broadcasts = communicator.broadcast

                def broadcast(buffer: torch.Tensor, src: int) -> None:
                    before()
                    broadcasts(buffer, src)
                    after()

                monkeypatch.setattr(communicator, "broadcast", broadcast)
            return communicator

        monkeypatch.setattr(member, "join", joined)

    return make


def test_a_bucket_is_packed_while_the_one_before_is_broadcast(group: Any, weights: Any, around_broadcasts: Any) -> None:
    source, plan = weights()  # five buckets
    packed, begun = Steps(), Steps()

    def until_the_next_is_packed() -> None:
        begun.take()
        packed.wait_for(min(begun.taken + 1, 5), "buckets that are packed while the one before is broadcast")

    around_broadcasts(0, before=until_the_next_is_packed)
    made = group(2)
    (receiver,) = made.receive_all(plan)
    made.sender.send(source, plan, on_packed=lambda start, piece: packed.take())
    assert receiver.result()[1].digest == weights_digest(source)
    assert begun.taken == 5


def test_send_returns_when_the_last_broadcast_is_over(
    group: Any, weights: Any, around_broadcasts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, plan = weights()  # five buckets
    over, all_packed, made = Steps(), threading.Event(), group(2)
    finish = made.sender._pieces.finish
    monkeypatch.setattr(made.sender._pieces, "finish", lambda: (finish(), all_packed.set()))
    around_broadcasts(0, before=lambda: over.taken < 4 or all_packed.wait(GATE_S), after=over.take)
    (receiver,) = made.receive_all(plan)
    made.sender.send(source, plan)
    assert over.taken == 5
    receiver.result()


def test_a_bucket_is_received_while_the_one_before_is_loaded(group: Any, weights: Any, around_broadcasts: Any, aside: Any) -> None:
    source, plan = weights()
    received = Steps()
    around_broadcasts(1, after=received.take)
    made = group(2)
    sending = aside(lambda: made.sender.send(source, plan))
    delivery = made.open(1, plan)
    for number, _ in enumerate(delivery):
        received.wait_for(min(number // 2 + 2, 5), "buckets that are received while the one before is loaded")
    sending.result()
    delivery.close()


def test_a_slow_loader_holds_the_source_back_to_the_buckets_that_there_is_room_for(
    group: Any, weights: Any, around_broadcasts: Any, monkeypatch: pytest.MonkeyPatch, aside: Any
) -> None:
    source, plan = weights(*[("float32", (500,))] * 40)  # two tensors to a bucket
    sent, received, taken, held_back = Steps(), Steps(), Steps(), Steps()

    def once_it_is_received() -> None:  # sockets would hold some more
        sent.take()
        received.wait_for(sent.taken, "broadcasts that the receiver is in")

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for pair in source:
            taken.take()
            yield pair

    around_broadcasts(0, before=once_it_is_received)
    around_broadcasts(1, before=received.take)
    made = group(2)
    reserve = made.sender._pieces.reserve

    def reserved(limit_s: float) -> int | None:
        slot: int | None = reserve(limit_s)
        if slot is None and taken.taken >= 2 * 4 + 1:
            held_back.take()
        return slot

    monkeypatch.setattr(made.sender._pieces, "reserve", reserved)
    sending = aside(lambda: made.sender.send(pairs(), plan))
    delivery = made.open(1, plan)
    tensors = iter(delivery)
    next(tensors)
    held_back.wait_for(1, "waits of a source that is held back")
    # Two buckets with the loader and two with the sender, and a tensor that there is no room for.
    assert (received.taken, taken.taken) == (2, 2 * 4 + 1)
    assert len(list(tensors)) == 39
    sending.result()
    delivery.close()
