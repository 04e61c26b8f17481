"""From the source's hands to every receiver's: whole, digested, bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ray_weightsync.transports.collective.receiver import CollectiveReceiver
from ray_weightsync.transports.collective.rendezvous import GroupError
from ray_weightsync.weights.digest import payload_digest, weights_digest
from ray_weightsync.weights.plan import ParamMeta, Plan
from ray_weightsync.weights.sources import StateDictSource
from ray_weightsync.worker.receiver import Received, Receiver

ALL_DTYPES = ("bool", "uint8", "int64", "float8_e4m3fn", "bfloat16", "float32", "float64", "complex64", "complex128")


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_receiver_gets_every_tensor_and_attests_the_sources_digest(group: Any, weights: Any, world_size: int) -> None:
    source, plan = weights()
    made = group(world_size)
    receivers = made.receive_all(plan)
    packed = made.sender.send(source, plan)
    assert packed.digest == weights_digest(source)
    assert (packed.num_bytes, packed.num_tensors) == (plan.weight_bytes, len(plan.tensors))
    attested = Received(snapshot=made.rendezvous.id, digest=packed.digest, num_bytes=packed.num_bytes, num_tensors=10)
    for receiver in receivers:
        tensors, received = receiver.result()
        assert received == attested
        assert list(tensors) == list(plan.names)
        assert all(torch.equal(tensors[name], tensor) for name, tensor in source)


def test_every_dtype_and_shape_arrives_bit_by_bit(group: Any, weights: Any) -> None:
    source, plan = weights(*[(dtype, shape) for dtype in ALL_DTYPES for shape in ((), (0,), (3,), (2, 0, 5), (65, 3))])
    made = group(2)
    (receiver,) = made.receive_all(plan)
    assert made.sender.send(source, plan).digest == weights_digest(source)
    tensors, _ = receiver.result()
    for name, tensor in source:
        assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(tensors[name]) == bits(tensor)


@pytest.mark.parametrize("first", ["bfloat16", "bool", "float8_e4m3fn"])
def test_tensors_that_end_at_odd_places_arrive_bit_by_bit(group: Any, weights: Any, first: str) -> None:
    source, plan = weights((first, (3,)), ("float32" if first == "bfloat16" else "bfloat16", (2,)))
    made = group(2)
    (receiver,) = made.receive_all(plan)
    assert made.sender.send(source, plan).digest == weights_digest(source)
    tensors, _ = receiver.result()
    assert {name: bits(tensor) for name, tensor in tensors.items()} == {name: bits(tensor) for name, tensor in source}


@pytest.mark.parametrize("numel", [4096, 4097, 9000, 12288])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_tensor_larger_than_a_bucket_comes_in_pieces_and_is_whole(group: Any, weights: Any, numel: int, transposed: bool) -> None:
    source, _ = weights(("int8", (7,)), ("uint8", (numel, 3)), ("float32", (5,)))
    tensors = dict(source)
    if transposed:
        tensors["t1"] = tensors["t1"].t()
    source = StateDictSource(tensors)
    plan = Plan.from_metadata(source.metadata())
    made = group(2)
    (receiver,) = made.receive_all(plan)
    assert made.sender.send(source, plan).digest == weights_digest(source)
    got, _ = receiver.result()
    assert all(torch.equal(got[name], tensor) for name, tensor in source)


def test_a_plan_of_empty_tensors_alone_is_delivered(group: Any, weights: Any) -> None:
    source, plan = weights(("float32", (0, 3)), ("int8", (0,)))
    made = group(2)
    (receiver,) = made.receive_all(plan)
    packed = made.sender.send(source, plan)
    tensors, received = receiver.result()
    assert [tuple(tensor.shape) for tensor in tensors.values()] == [(0, 3), (0,)]
    assert (received.digest, received.num_bytes) == (packed.digest, 0)


def test_a_receiver_has_a_bucket_while_the_next_one_is_still_being_made(group: Any, weights: Any, gated: Any, aside: Any) -> None:
    source, plan = weights()
    pairs = gated(source)
    made = group(2)
    sending = aside(lambda: made.sender.send(pairs, plan))
    delivery = made.open(1, plan)
    tensors = iter(delivery)
    for first in range(0, 10, 2):  # two tensors make a bucket
        pairs.let(2)
        assert [next(tensors)[0], next(tensors)[0]] == [f"t{first}", f"t{first + 1}"]
    assert list(tensors) == []
    sending.result()
    delivery.close()


def test_what_was_yielded_is_the_loaders_own(group: Any, weights: Any, aside: Any) -> None:
    source, plan = weights()
    made = group(3)
    careful = made.receive(2, plan)

    def careless() -> Iterator[torch.Tensor]:
        delivery = made.open(1, plan)
        for _, tensor in delivery:
            yield tensor
            tensor.zero_()
        assert delivery.received().digest == weights_digest(source)
        delivery.close()

    loading = aside(lambda: list(careless()))
    made.sender.send(source, plan)
    assert not any(tensor.any() for tensor in loading.result())
    tensors, received = careful.result()
    assert received.digest == weights_digest(source)
    made.close()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in source), "valid after the group is gone"


def test_a_callback_sees_the_whole_payload_before_it_is_sent(group: Any, weights: Any) -> None:
    source, plan = weights(("int8", (7,)), ("uint8", (9001,)), ("float32", (5,)), ("bfloat16", (0,)))
    made = group(2)
    (receiver,) = made.receive_all(plan)
    payload = torch.full((plan.num_bytes,), 255, dtype=torch.uint8)
    seen = []

    def keep(start: int, piece: torch.Tensor) -> None:
        seen.append((start, start + piece.numel()))
        payload[start : start + piece.numel()] = piece

    packed = made.sender.send(source, plan, on_packed=keep)
    receiver.result()
    assert [start for start, _ in seen] == [0, *(stop for _, stop in seen[:-1])]
    assert seen[-1][1] == plan.num_bytes
    assert payload_digest(payload, plan) == packed.digest
    assert not any(payload[spec.offset + spec.nbytes : spec.end].any() for spec in plan.tensors), "padding is zero"


def test_one_receiver_serves_one_group_after_the_other(group: Any, weights: Any, aside: Any) -> None:
    receiver: Receiver = CollectiveReceiver()
    for seed in range(3):
        source, plan = weights(seed=seed)
        made = group(2)
        sending = aside(lambda made=made, source=source, plan=plan: made.sender.send(source, plan))
        delivery = receiver.open(plan, made.update(1))
        tensors = dict(delivery)
        delivery.close()
        delivery.close()
        assert delivery.received().digest == sending.result().digest
        assert all(torch.equal(tensors[name], tensor) for name, tensor in source)
        made.close()


def test_a_receiver_that_is_to_join_another_group_leaves_the_one_that_it_waits_for(group: Any, weights: Any, aside: Any) -> None:
    source, plan = weights()
    receiver, given_up, made = CollectiveReceiver(), group(2), group(2)
    waiting = receiver.open(plan, given_up.update(1))
    loading = aside(lambda: list(waiting))
    delivery = receiver.open(plan, made.update(1))
    with pytest.raises(GroupError, match="told to stop"):
        loading.result()
    sending = aside(lambda: made.sender.send(source, plan))
    assert len(list(delivery)) == 10
    assert delivery.received().digest == sending.result().digest
    delivery.close()


def test_a_global_process_group_of_the_trainers_own_is_as_it_was(group: Any, weights: Any) -> None:
    source, plan = weights()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before = dist.group.WORLD
        made = group(3)
        receivers = made.receive_all(plan)
        made.sender.send(source, plan)
        assert all(receiver.result()[1].digest == weights_digest(source) for receiver in receivers)
        made.close()
        assert dist.group.WORLD is before
        assert (dist.get_world_size(), dist.get_rank()) == (1, 0)
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()


def test_a_workers_rank_is_its_replicas_offset_and_its_place_in_it(group: Any, weights: Any, aside: Any) -> None:
    source, plan = weights()
    made = group(3)
    update = made.update(1)
    workers = [CollectiveReceiver(lambda: 0), CollectiveReceiver(lambda: 1)]
    deliveries = [worker.open(plan, update) for worker in workers]
    loading = [aside(lambda each=each: len(list(each))) for each in deliveries]
    packed = made.sender.send(source, plan)
    assert [each.result() for each in loading] == [10, 10]
    assert {each.received().digest for each in deliveries} == {packed.digest}
    for worker in workers:
        worker.close()
    with pytest.raises(GroupError, match="a worker of rank 3"):
        CollectiveReceiver(lambda: 2).open(plan, update)
    with pytest.raises(ValueError, match="limit_s"):
        CollectiveReceiver().open(plan, {**update, "limit_s": 0})
    with pytest.raises(GroupError, match="a group has the fields"):
        CollectiveReceiver().open(plan, {"limit_s": 1})


def test_a_stream_is_received_once_and_attested_when_it_is_whole(group: Any, weights: Any, aside: Any) -> None:
    source, plan = weights()
    made = group(2)
    sending = aside(lambda: made.sender.send(source, plan))
    delivery = made.open(1, plan)
    tensors = iter(delivery)
    next(tensors)
    with pytest.raises(GroupError, match="not everything was handed over"):
        delivery.received()
    assert len(list(tensors)) == 9
    assert delivery.received().num_tensors == 10
    with pytest.raises(GroupError, match="only once"):
        list(delivery)
    sending.result()
    with pytest.raises(GroupError, match="was used before"):
        made.sender.send(source, plan)
    delivery.close()


def test_a_source_that_disagrees_with_its_plan_is_named(group: Any, weights: Any) -> None:
    source, _ = weights()
    plan = Plan.from_metadata([ParamMeta("t0", torch.float32, (500,)), ParamMeta("other", torch.float32, (500,))])
    made = group(2)
    (receiver,) = made.receive_all(plan)
    with pytest.raises(ValueError, match="'t1' where metadata"):
        made.sender.send(source, plan)
    with pytest.raises(GroupError, match=r"rank 0: ConfigError: .*'t1'"):
        receiver.result()
