"""From the writer's hands to the receiver's: sealed, private, leased, and behind the watermark."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_weightsync.errors import ConfigError
from ray_weightsync.transports.host.layout import HEADER_BYTES, SlotError
from ray_weightsync.transports.host.receiver import HostReceiver
from ray_weightsync.transports.host.store import SnapshotStore
from ray_weightsync.transports.host.writer import SlotWriter
from ray_weightsync.weights.digest import payload_digest
from ray_weightsync.weights.plan import ParamMeta, Plan
from ray_weightsync.worker.receiver import Received, Receiver

LIMIT_S = 30.0
ALL_DTYPES = ("bool", "uint8", "int64", "float8_e4m3fn", "bfloat16", "float32", "float64", "complex64", "complex128")


def file_digest(address: Mapping[str, Any], plan: Plan) -> str:
    data = bytearray(Path(f"{address['directory']}/{address['name']}").read_bytes()[HEADER_BYTES:])
    return payload_digest(torch.frombuffer(data, dtype=torch.uint8), plan)


# -- sealed snapshots ------------------------------------------------------------------------------------------------------------


def test_what_was_written_is_received_with_its_digest(store: SnapshotStore, stage: Any, same: Callable[..., bool]) -> None:
    snapshot, digest = stage.sealed(store, 7)
    delivery = stage.open(store.address(snapshot))
    assert same(dict(delivery), stage.weights(7))
    plan = stage.plan
    assert delivery.received() == Received(snapshot=snapshot, digest=digest, num_bytes=plan.weight_bytes, num_tensors=len(plan.tensors))
    assert file_digest(store.address(snapshot), plan) == digest


def test_every_dtype_and_shape_arrives_bit_by_bit(store: SnapshotStore, stage: Any) -> None:
    plan = Plan.from_metadata(
        ParamMeta(f"{dtype}{shape}", getattr(torch, dtype), shape) for dtype in ALL_DTYPES for shape in ((), (0,), (3,), (2, 0, 5), (65, 3))
    )
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for spec in plan.tensors:
        raw = torch.randint(0, 2 if spec.dtype == "bool" else 256, (spec.nbytes,), generator=generator, dtype=torch.uint8)
        weights[spec.name] = raw.view(spec.torch_dtype).view(spec.shape)
    address = stage.opened(store, plan=plan)
    packed = stage.writer.write(address, plan, iter(weights.items()), progress_bytes=1 << 20)
    store.seal(address["snapshot"], packed.digest)
    for name, tensor in stage.open(address, plan=plan):
        assert tensor.dtype == weights[name].dtype
        assert tensor.shape == weights[name].shape
        assert tensor.contiguous().view(-1).view(torch.uint8).tolist() == weights[name].contiguous().view(-1).view(torch.uint8).tolist()


def test_a_plan_of_empty_tensors_alone_is_delivered(store: SnapshotStore, stage: Any) -> None:
    plan = Plan.from_metadata([ParamMeta("none", torch.float32, (0, 3))])
    for overlap in (False, True):
        address = stage.opened(store, plan=plan, overlap=overlap)
        packed = stage.writer.write(address, plan, iter([("none", torch.empty(0, 3))]), progress_bytes=1)
        store.seal(address["snapshot"], packed.digest)
        delivery = stage.open(address, plan=plan)
        assert [(name, tuple(tensor.shape)) for name, tensor in delivery] == [("none", (0, 3))]
        assert delivery.received().num_bytes == 0


def test_a_delivery_is_counted_as_far_as_it_was_taken(store: SnapshotStore, stage: Any) -> None:
    delivery = stage.open(store.address(stage.committed(store)))
    tensors = iter(delivery)
    next(tensors)
    next(tensors)
    received = delivery.received()
    assert (received.num_tensors, received.num_bytes) == (2, sum(spec.nbytes for spec in stage.plan.tensors[:2]))
    assert len(list(delivery)) == len(stage.plan.tensors), "a second pass starts anew"
    assert delivery.received().num_tensors == len(stage.plan.tensors)


def test_a_loader_that_writes_into_what_it_is_given_changes_nothing_for_others(
    store: SnapshotStore, stage: Any, same: Callable[..., bool]
) -> None:
    snapshot, digest = stage.sealed(store, 3)
    address = store.address(snapshot)
    before = dict(stage.open(address))
    careless = dict(stage.open(address))
    for tensor in careless.values():
        tensor.zero_()
    assert not careless["embed"].any()
    assert same(before, stage.weights(3))
    assert same(dict(stage.open(address)), stage.weights(3))
    assert file_digest(address, stage.plan) == digest


def test_the_receiver_is_one_by_the_protocol_of_the_worker_room(store: SnapshotStore) -> None:
    receiver: Receiver = HostReceiver()  # mypy checks the shapes; this, that it can be made without arguments
    receiver.see(store.probe())


# -- leases --------------------------------------------------------------------------------------------------------------------


def test_the_lease_lasts_exactly_as_long_as_somebody_keeps_a_view(
    store: SnapshotStore, stage: Any, is_held: Callable[[Mapping[str, Any]], bool]
) -> None:
    address = store.address(stage.committed(store))
    assert not is_held(address), "the writer is done with it"
    delivery = stage.open(address)
    tensors = iter(delivery)
    kept = [next(tensors)[1][3]]  # a row of the first tensor
    delivery.close()
    delivery.close()
    del delivery
    tensors.close()  # type: ignore[attr-defined]
    del tensors
    gc.collect()
    assert is_held(address)
    kept.append(kept.pop().view(torch.int32)[:1])  # a view of a view, in another dtype
    assert is_held(address)
    kept.clear()
    assert not is_held(address)


def test_a_refused_update_keeps_no_lease_and_no_file_open(
    store: SnapshotStore, stage: Any, is_held: Callable[[Mapping[str, Any]], bool]
) -> None:
    address = stage.opened(store)
    fds = sorted(os.listdir("/proc/self/fd"))
    for bad in ({}, {"snapshot": "0" * 32}, {"plan": "0" * 32}, {"num_bytes": 64}):
        with pytest.raises(SlotError):
            stage.open({**address, **bad})
    with pytest.raises(SlotError, match="limit_s must be a positive number"):
        HostReceiver().open(stage.plan, {"slot": {**address, "overlap": True}, "limit_s": 0})
    assert sorted(os.listdir("/proc/self/fd")) == fds
    assert not is_held(address)


READER = """
import json, sys
from ray_weightsync.transports.host.receiver import HostReceiver
from ray_weightsync.weights.plan import Plan
plan, address = (json.loads(text) for text in sys.argv[1:])
kept = dict(HostReceiver().open(Plan.from_wire(plan), {"slot": address}))
print(len(kept), flush=True)
sys.stdin.read()
"""


def test_a_killed_reader_gives_its_lease_back(
    store: SnapshotStore, stage: Any, child: Callable[..., Any], is_held: Callable[[Mapping[str, Any]], bool]
) -> None:
    import json

    address = store.address(stage.committed(store))
    reader = child(READER, json.dumps(stage.plan.to_wire()), json.dumps(address))
    assert reader.line() == str(len(stage.plan.tensors))
    assert is_held(address)
    reader.kill()
    assert not is_held(address)
    stage.committed(store, 1)
    assert stage.opened(store)["name"] == address["name"]
    assert store.stats().retired == 0


# -- the wrong bytes -------------------------------------------------------------------------------------------------------------


def test_a_slot_that_went_to_another_snapshot_is_refused(store: SnapshotStore, stage: Any) -> None:
    stale = store.address(stage.committed(store, 0))
    stage.committed(store, 1)
    current = store.address(stage.committed(store, 2))
    assert current["name"] == stale["name"]
    with pytest.raises(SlotError, match=f"holds snapshot {current['snapshot']}, not {stale['snapshot']}"):
        stage.open(stale)


def test_a_plan_that_is_not_the_updates_is_refused(store: SnapshotStore, stage: Any) -> None:
    address = store.address(stage.committed(store))
    other = Plan.from_metadata(ParamMeta(spec.name + "x", spec.torch_dtype, spec.shape) for spec in stage.plan.tensors)
    assert other.num_bytes == stage.plan.num_bytes
    with pytest.raises(SlotError, match="this update is of"):
        stage.open(address, plan=other)
    with pytest.raises(SlotError, match=f"holds plan {stage.plan.digest}, not {other.digest}"):
        stage.open({**address, "plan": other.digest}, plan=other)


def test_what_is_not_sealed_is_not_read_without_overlap(store: SnapshotStore, stage: Any) -> None:
    address = stage.opened(store)
    stage.write(address, 0)
    with pytest.raises(SlotError, match=rf"is not sealed; {stage.plan.num_bytes} of {stage.plan.num_bytes} bytes"):
        stage.open(address)


def test_a_writer_refuses_a_slot_of_another_plan_or_state(store: SnapshotStore, stage: Any) -> None:
    address = stage.opened(store)
    other = Plan.from_metadata([ParamMeta("w", torch.float32, (1,))])
    with pytest.raises(SlotError, match="was opened for plan"):
        stage.write(address, 0, plan=other)
    store.seal(address["snapshot"], stage.write(address, 0).digest)
    with pytest.raises(SlotError, match="it is SEALED"):
        stage.write(address, 1)
    discarded = stage.opened(store)
    store.discard(discarded["snapshot"])
    with pytest.raises(SlotError, match="it is ABORTED"):
        stage.write(discarded, 1)
    with pytest.raises(SlotError, match="name must be"):
        stage.write({**address, "name": "../x"}, 0)


def test_a_writer_that_refuses_a_slot_it_knows_keeps_no_lease(
    store: SnapshotStore, stage: Any, is_held: Callable[[Mapping[str, Any]], bool]
) -> None:
    store.discard(stage.sealed(store)[0])
    address = stage.opened(store)
    os.chmod(f"{address['directory']}/{address['name']}", 0o640)
    with pytest.raises(SlotError, match="mode 0640"):
        stage.write(address, 1)
    assert not is_held(address)


def test_a_source_that_disagrees_with_its_plan_is_not_sealed(store: SnapshotStore, stage: Any, is_held: Callable[..., bool]) -> None:
    address = stage.opened(store)
    with pytest.raises(ConfigError):
        stage.writer.write(address, stage.plan, iter([("other", torch.zeros(1))]), progress_bytes=64)
    assert not is_held(address)
    with pytest.raises(SlotError, match="cannot be sealed"):
        store.seal(address["snapshot"], "a" * 32)


# -- the writer's maps -------------------------------------------------------------------------------------------------------------


def test_a_writer_keeps_its_maps_and_lets_go_of_unlinked_ones(store: SnapshotStore, stage: Any, directory: str) -> None:
    def mapped() -> list[str]:
        with open("/proc/self/maps") as maps:
            return sorted(
                {
                    line.split(None, 5)[5].strip().removeprefix(f"{directory}/")
                    for line in maps
                    if f"{directory}/rws-" in line and "rw-s" in line
                }
            )

    fds = len(os.listdir("/proc/self/fd"))
    for seed in range(4):
        stage.committed(store, seed)
    assert len(os.listdir("/proc/self/fd")) == fds + 2 * 4  # two slots, for store and writer a file and its map's
    hung = dict(stage.open(store.address(store.stats().committed or "")))
    for seed in range(2):
        stage.committed(store, seed)
    assert store.stats().retired == 1
    assert len(hung) == len(stage.plan.tensors)
    assert not any("(deleted)" in name for name in mapped()), "only the private map of the hung reader is left of it"
    stage.writer.close()
    stage.writer.close()
    assert len(mapped()) == 2, "the store's own headers"


def test_a_closed_writer_can_be_used_again(store: SnapshotStore, stage: Any) -> None:
    with SlotWriter() as writer:
        address = stage.opened(store)
        writer.write(address, stage.plan, iter(stage.weights(0).items()), progress_bytes=64)
        store.discard(address["snapshot"])
        writer.close()
        address = stage.opened(store)
        writer.write(address, stage.plan, iter(stage.weights(0).items()), progress_bytes=64)


class Late:
    """A thread that writes, and is held between its first tensor and the others."""

    def __init__(self, stage: Any, address: Any) -> None:
        self.at_it, self.go_on = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self._stage, self._address = stage, address
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self.at_it.wait(30)

    def _pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._stage.weights(1).items():
            yield name, tensor
            self.at_it.set()
            assert self.go_on.wait(30)

    def _run(self) -> None:
        try:
            self._stage.writer.write(self._address, self._stage.plan, self._pairs(), progress_bytes=64)
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self.go_on.set()
        self._thread.join(30)
        assert not self._thread.is_alive()


def test_a_thread_that_is_late_keeps_its_file_until_it_ends_and_leaves_the_next_one_alone(
    store: SnapshotStore, stage: Any, is_held: Callable[..., bool]
) -> None:
    fds = len(os.listdir("/proc/self/fd"))
    address = stage.opened(store)
    late = Late(stage, address)
    store.discard(address["snapshot"])
    following = stage.opened(store)
    next_one = Late(stage, following)
    late.end()
    assert isinstance(late.error, SlotError), "and not that its file is closed, or somebody else's"
    assert is_held(following)
    next_one.end()
    assert next_one.error is None
    store.discard(following["snapshot"])
    stage.writer.close()
    stage.opened(store)
    assert len(os.listdir("/proc/self/fd")) == fds + 2, "what the store has of one slot"


def test_a_writer_that_is_closed_while_a_thread_is_late_lets_go_when_that_has_ended(store: SnapshotStore, stage: Any) -> None:
    fds = len(os.listdir("/proc/self/fd"))
    late = Late(stage, stage.opened(store))
    stage.writer.close()
    late.end()
    assert late.error is None
    assert len(os.listdir("/proc/self/fd")) == fds + 2, "what the store has of one slot"
