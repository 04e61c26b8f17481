"""Whoever fails: the others know it at once, in its words, and nobody waits beyond the limit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ray_weightsync.transports.collective import member
from ray_weightsync.transports.collective.group_store import GroupStore
from ray_weightsync.transports.collective.receiver import CollectiveReceiver
from ray_weightsync.transports.collective.rendezvous import GroupError
from ray_weightsync.weights.digest import weights_digest
from ray_weightsync.worker.receiver import Grouped
from tests.unit.collective.conftest import BUCKET_BYTES, LIMIT_S

FOREVER_S = 3600.0
"""A limit that a test cannot reach: what ends before it has ended at once."""

BUSY_S = 3.0
"""A limit that is reached, but not before a group could form on a busy machine."""


def breaks_after(source: Any, num: int) -> Iterator[tuple[str, torch.Tensor]]:
    for position, pair in enumerate(source):
        if position == num:
            raise RuntimeError("the trainer broke")
        yield pair


@pytest.mark.parametrize("num", [0, 1, 5, 9])
def test_a_source_that_raises_ends_every_receiver_at_once_in_its_words(group: Any, weights: Any, num: int) -> None:
    source, plan = weights()
    made = group(3, limit_s=FOREVER_S)
    receivers = made.receive_all(plan, limit_s=FOREVER_S)
    with pytest.raises(RuntimeError, match="the trainer broke"):
        made.sender.send(breaks_after(source, num), plan)
    for receiver in receivers:
        with pytest.raises(GroupError, match=rf"rank 0: RuntimeError: the trainer broke; \d+ of {plan.num_bytes} bytes were received"):
            receiver.result()


def test_a_source_that_raises_before_anybody_joined_ends_those_that_come_later(group: Any, weights: Any) -> None:
    source, plan = weights()
    made = group(3, limit_s=FOREVER_S)
    first = made.receive(1, plan, limit_s=FOREVER_S)
    with pytest.raises(RuntimeError, match="the trainer broke"):
        made.sender.send(breaks_after(source, 0), plan)
    late = made.receive(2, plan, limit_s=FOREVER_S)
    for receiver in (first, late):
        with pytest.raises(GroupError, match="the trainer broke"):
            receiver.result()


def test_a_loader_that_raises_does_not_take_the_others_with_it(group: Any, weights: Any, aside: Any) -> None:
    source, plan = weights(*[("float32", (500,))] * 40)
    made = group(3)

    def broken() -> None:
        delivery = made.open(1, plan)
        try:
            for name, _ in delivery:
                if name == "t3":
                    raise RuntimeError("cannot load t3")
        finally:
            delivery.close()

    loading, whole = aside(broken), made.receive(2, plan)
    assert made.sender.send(source, plan).digest == weights_digest(source)
    with pytest.raises(RuntimeError, match="cannot load t3"):
        loading.result()
    assert whole.result()[1].digest == weights_digest(source)


def test_a_worker_that_cannot_begin_to_load_receives_for_the_others_sake(group: Any, weights: Any, aside: Any) -> None:
    source, plan = weights(*[("float32", (500,))] * 40)
    made = group(3)
    worker = CollectiveReceiver()
    assert isinstance(worker, Grouped)
    draining, whole = aside(lambda: worker.drain(plan, made.update(1))), made.receive(2, plan)
    assert made.sender.send(source, plan).digest == weights_digest(source)
    draining.result()
    assert whole.result()[1].digest == weights_digest(source)


def test_what_a_loader_that_failed_does_not_want_takes_no_more_memory_than_its_largest_piece(
    group: Any, weights: Any, aside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, plan = weights(("int8", (BUCKET_BYTES,)), ("int8", (BUCKET_BYTES,)), ("int8", (64,)), ("int8", (100,)))
    made, empty, taken, both = group(2), torch.empty, [], threading.Event()

    def counted(num_bytes: int, **options: Any) -> torch.Tensor:
        if threading.current_thread().name.startswith("rws-rank-1-"):
            taken.append(num_bytes)
            if len(taken) == 2:
                both.set()
        return empty(num_bytes, **options)

    def broken() -> None:
        delivery = made.open(1, plan)
        try:
            for _ in delivery:
                assert both.wait(LIMIT_S)  # the one in its second place has been begun
                raise RuntimeError("cannot load")
        finally:
            delivery.close()

    monkeypatch.setattr(torch, "empty", counted)
    loading = aside(broken)
    made.sender.send(source, plan)
    with pytest.raises(RuntimeError, match="cannot load"):
        loading.result()
    assert taken == [BUCKET_BYTES, BUCKET_BYTES, 192], "a bucket in each of its two places, and what is left"


def test_a_slow_source_is_a_timeout_that_says_how_far_it_came(group: Any, weights: Any, gated: Any, aside: Any) -> None:
    source, plan = weights()
    pairs = gated(source)
    pairs.let(2)
    made = group(2, limit_s=FOREVER_S)
    sending = aside(lambda: made.sender.send(pairs, plan))
    delivery = made.open(1, plan, limit_s=BUSY_S)
    tensors = iter(delivery)
    next(tensors)
    next(tensors)
    with pytest.raises(TimeoutError, match=rf"3\.0 s.*; 4096 of {plan.num_bytes} bytes were received, waiting for bucket 2 of 5"):
        next(tensors)
    delivery.close()
    pairs.let(8)
    with pytest.raises(GroupError, match=r"3\.0 s.*4096 of \d+ bytes were sent"):
        sending.result()


def test_the_senders_limit_bounds_a_slow_source_too(group: Any, weights: Any, gated: Any, aside: Any) -> None:
    source, plan = weights()
    pairs = gated(source)
    pairs.let(2)
    made = group(2, limit_s=BUSY_S)
    sending = aside(lambda: made.sender.send(pairs, plan))
    receiver = made.receive(1, plan, limit_s=FOREVER_S)
    with pytest.raises(GroupError, match=r"rank 0: waited 3\.0 s for the source"):
        receiver.result()
    pairs.let(8)
    with pytest.raises(TimeoutError, match=r"waited 3\.0 s for the source; 4096 of \d+ bytes were sent"):
        sending.result()


def test_a_loader_that_stands_still_is_a_timeout_for_all(group: Any, weights: Any, aside: Any) -> None:
    source, plan = weights(*[("uint8", (1 << 20,))] * 40)
    made = group(2, limit_s=BUSY_S, bucket_bytes=1 << 20)
    delivery = made.open(1, plan, limit_s=BUSY_S)
    tensors = iter(delivery)
    sending = aside(lambda: made.sender.send(source, plan))
    next(tensors)
    with pytest.raises((TimeoutError, GroupError), match=rf"3\.0 s.* of {plan.num_bytes} bytes were sent"):
        sending.result()
    with pytest.raises((TimeoutError, GroupError), match=r"3\.0 s"):
        list(tensors)
    delivery.close()


def test_ranks_that_do_not_join_are_named(group: Any, weights: Any) -> None:
    source, plan = weights()
    made = group(4, limit_s=0.5)
    receiver = made.receive(2, plan, limit_s=FOREVER_S)
    with pytest.raises(TimeoutError, match=r"waited 0\.5 s for ranks that did not join: 1, 3 .*of 4 ranks"):
        made.sender.send(source, plan)
    with pytest.raises(GroupError, match=r"ranks that did not join: 1, 3.*waiting for the group to be complete"):
        receiver.result()


def test_a_sender_that_does_not_come_is_a_timeout(group: Any, weights: Any) -> None:
    _, plan = weights()
    made = group(2)
    receiver = made.receive(1, plan, limit_s=0.3)
    with pytest.raises(TimeoutError, match=rf"0\.3 s.*; 0 of {plan.num_bytes} bytes were received, waiting for the group to be complete"):
        receiver.result()


def test_a_closed_store_ends_receivers_that_wait_to_join_at_once(group: Any, weights: Any, aside: Any) -> None:
    _, plan = weights()
    made = group(2)
    delivery = made.open(1, plan, limit_s=FOREVER_S)
    while delivery._thread.store is None:
        delivery._thread.join(0.01)
    waiting = aside(lambda: list(delivery))
    made.server.close()
    with pytest.raises(GroupError, match=r"the sender of group .* is gone"):
        waiting.result()
    delivery.close()


def test_a_receiver_that_began_to_wait_before_it_reached_the_store_learns_of_the_failure_while_its_backend_hangs(
    group: Any, weights: Any, aside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach, hang = threading.Event(), threading.Event()

    def reached_late(*args: Any) -> GroupStore:
        assert reach.wait(BUSY_S)
        return GroupStore(*args)

    def hanging(*_: Any) -> None:
        hang.wait()
        raise GroupError("nobody is left")

    monkeypatch.setattr(member, "GroupStore", reached_late)
    monkeypatch.setattr(member, "join", hanging)
    _, plan = weights()
    made = group(2)
    delivery = made.open(1, plan, limit_s=FOREVER_S)
    waiting = aside(lambda: list(delivery))
    while not delivery._iterated:
        threading.Event().wait(0.005)
    reach.set()
    while delivery._thread.store is None:
        delivery._thread.join(0.005)
    made.server.close()
    with pytest.raises(GroupError, match=r"the sender of group .* is gone"):
        waiting.result()
    hang.set()
    delivery.close()


def test_an_abort_from_another_thread_ends_everybody_and_says_why(group: Any, weights: Any, gated: Any, aside: Any) -> None:
    source, plan = weights()
    pairs = gated(source)
    pairs.let(3)
    made = group(3, limit_s=FOREVER_S)
    sending = aside(lambda: made.sender.send(pairs, plan))
    receivers = made.receive_all(plan, limit_s=FOREVER_S)
    while pairs.taken < 3:
        threading.Event().wait(0.005)
    made.sender.abort("replica r1 failed in start")
    for receiver in receivers:
        with pytest.raises(GroupError, match="replica r1 failed in start"):
            receiver.result()
    pairs.let(7)
    with pytest.raises(GroupError, match="replica r1 failed in start"):
        sending.result()


def test_an_abort_after_everything_was_sent_changes_nothing(group: Any, weights: Any) -> None:
    source, plan = weights()
    made = group(2)
    (receiver,) = made.receive_all(plan)
    packed = made.sender.send(source, plan)
    made.sender.abort("too late")
    assert receiver.result()[1].digest == packed.digest


def test_a_receiver_that_is_closed_in_the_middle_tells_the_group(group: Any, weights: Any, gated: Any, aside: Any) -> None:
    source, plan = weights()
    pairs = gated(source)
    pairs.let(2)
    made = group(3, limit_s=FOREVER_S)
    sending = aside(lambda: made.sender.send(pairs, plan))
    delivery, other = made.open(1, plan, limit_s=FOREVER_S), made.receive(2, plan, limit_s=FOREVER_S)
    next(iter(delivery))
    halting = aside(delivery.halt)  # what shutting the engine's transport down does
    pairs.let(8)
    halting.result()
    with pytest.raises(GroupError):
        other.result()
    with pytest.raises(GroupError):
        sending.result()
