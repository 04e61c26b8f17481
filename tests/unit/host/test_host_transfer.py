"""From the writer's hands to the receiver's: sealed, private, leased, and behind the watermark."""

from __future__ import annotations

import gc
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_weightsync.errors import ConfigError
from ray_weightsync.transports.host.layout import HEADER_BYTES, FileState, SlotError
from ray_weightsync.transports.host.receiver import HostReceiver
from ray_weightsync.transports.host.store import SnapshotStore
from ray_weightsync.transports.host.writer import SlotWriter
from ray_weightsync.weights.digest import payload_digest
from ray_weightsync.weights.plan import ParamMeta, Plan
from ray_weightsync.worker.receiver import Received, Receiver

LIMIT_S = 30.0
ALL_DTYPES = ("bool", "uint8", "int64", "float8_e4m3fn", "bfloat16", "float32", "float64", "complex64", "complex128")


def new_id() -> str:
    return uuid.uuid4().hex


def opened(store: SnapshotStore, plan: Plan, *, overlap: bool = False) -> Mapping[str, Any]:
    return store.open_slot(new_id(), plan.digest, plan.num_bytes, overlap)


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
    address = opened(store, plan)
    packed = stage.writer.write(address, plan, iter(weights.items()), progress_bytes=1 << 20)
    store.seal(address["snapshot"], packed.digest)
    for name, tensor in stage.open(address, plan=plan):
        assert tensor.dtype == weights[name].dtype
        assert tensor.shape == weights[name].shape
        assert tensor.contiguous().view(-1).view(torch.uint8).tolist() == weights[name].contiguous().view(-1).view(torch.uint8).tolist()


def test_a_plan_of_empty_tensors_alone_is_delivered(store: SnapshotStore, stage: Any) -> None:
    plan = Plan.from_metadata([ParamMeta("none", torch.float32, (0, 3))])
    for overlap in (False, True):
        address = opened(store, plan, overlap=overlap)
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
    address = opened(store, stage.plan)
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
    assert store.open_slot(new_id(), stage.plan.digest, stage.plan.num_bytes, False)["name"] == address["name"]
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
    address = opened(store, stage.plan)
    stage.write(address, 0)
    with pytest.raises(SlotError, match=rf"is not sealed; {stage.plan.num_bytes} of {stage.plan.num_bytes} bytes"):
        stage.open(address)


def test_a_writer_refuses_a_slot_of_another_plan_or_state(store: SnapshotStore, stage: Any) -> None:
    address = opened(store, stage.plan)
    other = Plan.from_metadata([ParamMeta("w", torch.float32, (1,))])
    with pytest.raises(SlotError, match="was opened for plan"):
        stage.write(address, 0, plan=other)
    store.seal(address["snapshot"], stage.write(address, 0).digest)
    with pytest.raises(SlotError, match="it is SEALED"):
        stage.write(address, 1)
    discarded = opened(store, stage.plan)
    store.discard(discarded["snapshot"])
    with pytest.raises(SlotError, match="it is ABORTED"):
        stage.write(discarded, 1)
    with pytest.raises(SlotError, match="name must be"):
        stage.write({**address, "name": "../x"}, 0)


def test_a_source_that_disagrees_with_its_plan_is_not_sealed(store: SnapshotStore, stage: Any, is_held: Callable[..., bool]) -> None:
    address = opened(store, stage.plan)
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
        address = opened(store, stage.plan)
        writer.write(address, stage.plan, iter(stage.weights(0).items()), progress_bytes=64)
        store.discard(address["snapshot"])
        writer.close()
        address = opened(store, stage.plan)
        writer.write(address, stage.plan, iter(stage.weights(0).items()), progress_bytes=64)


# -- overlap ---------------------------------------------------------------------------------------------------------------------


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
    address = opened(store, stage.plan, overlap=True)
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
    address = opened(store, stage.plan, overlap=True)
    delivery = stage.open(address, limit_s=0.05)
    with pytest.raises(
        TimeoutError, match=rf"waited 0\.1 s for tensor 'embed', which ends at byte 660 .* got to byte 0 of {stage.plan.num_bytes}"
    ):
        next(iter(delivery))
    delivery.close()


def test_a_sender_that_stops_half_way_is_named_with_how_far_it_got(store: SnapshotStore, stage: Any) -> None:
    address = opened(store, stage.plan, overlap=True)

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
    address = opened(store, stage.plan, overlap=True)
    stage.write(address, 0)
    with pytest.raises(TimeoutError, match=f"for the seal of snapshot {address['snapshot']}"):
        list(stage.open(address, limit_s=0.05))


def test_a_discard_ends_a_waiting_receiver_at_once(store: SnapshotStore, stage: Any, aside: Any) -> None:
    address = opened(store, stage.plan, overlap=True)
    delivery = stage.open(address, limit_s=3600)
    waiting = aside(lambda: list(delivery))
    store.discard(address["snapshot"])
    with pytest.raises(SlotError, match="was given up while it was being read"):
        waiting.result()
    delivery.close()


def test_a_discard_also_stops_what_the_watermark_would_allow(store: SnapshotStore, stage: Any) -> None:
    address = opened(store, stage.plan, overlap=True)
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
    address = opened(store, stage.plan, overlap=True)
    delivery = stage.open(address, limit_s=3600)
    waiting = aside(lambda: list(delivery))
    store.close()
    with pytest.raises(SlotError, match=r"was given up|is gone"):
        waiting.result()
    delivery.close()


def test_a_store_that_died_ends_a_waiting_receiver_at_once(store: SnapshotStore, stage: Any, aside: Any, directory: str) -> None:
    address = opened(store, stage.plan, overlap=True)
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
    address = opened(store, stage.plan, overlap=True)
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
    address = opened(store, stage.plan, overlap=True)

    def state() -> int:
        return Path(f"{address['directory']}/{address['name']}").read_bytes()[12]

    assert state() == FileState.WRITING
    store.seal(address["snapshot"], stage.write(address, 0).digest)
    assert state() == FileState.SEALED
    store.discard(address["snapshot"])
    assert state() == FileState.ABORTED


# -- visibility ------------------------------------------------------------------------------------------------------------------


def test_a_worker_that_sees_the_stores_memory_and_locks_proves_it(store: SnapshotStore) -> None:
    fds = sorted(os.listdir("/proc/self/fd"))
    HostReceiver().see(store.probe())
    HostReceiver().see(store.probe())
    assert sorted(os.listdir("/proc/self/fd")) == fds


def test_a_worker_elsewhere_is_told_where_and_what_to_do(store: SnapshotStore, directory: str) -> None:
    os.mkdir(f"{directory}/other", 0o700)
    with pytest.raises(FileNotFoundError, match=rf"another node.*--ipc=host.*{directory}/other"):
        HostReceiver().see({**store.probe(), "directory": f"{directory}/other"})
    with pytest.raises(FileNotFoundError):
        HostReceiver().see({**store.probe(), "directory": f"{directory}/nowhere"})


def test_a_file_of_the_same_name_with_another_nonce_is_not_the_stores(store: SnapshotStore) -> None:
    with pytest.raises(SlotError, match="is another store's: the nonce"):
        HostReceiver().see({**store.probe(), "nonce": "0" * 32})


def test_a_nonce_without_its_stores_lock_is_no_proof(store: SnapshotStore, directory: str) -> None:
    probe = store.probe()
    path = Path(f"{directory}/{probe['name']}")
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(OSError, match="but not the lock that its store holds"):
        HostReceiver().see(probe)


@pytest.mark.parametrize("mode", [0o644, 0o666])
def test_a_probe_that_others_could_have_written_is_refused(store: SnapshotStore, directory: str, mode: int) -> None:
    probe = store.probe()
    os.chmod(f"{directory}/{probe['name']}", mode)
    with pytest.raises(SlotError, match="mode"):
        HostReceiver().see(probe)


def test_another_users_probe_says_so(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(SlotError, match="another user's file"):
        HostReceiver().see(store.probe())


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", "rws-abcd1234-7"), ("name", "../etc/passwd"), ("name", None), ("directory", "shm"), ("nonce", ""), ("nonce", 3)],
)
def test_a_malformed_probe_is_refused_before_anything_is_opened(store: SnapshotStore, field: str, value: Any) -> None:
    with pytest.raises(SlotError, match=r"name|directory|snapshot|nonce"):
        HostReceiver().see({**store.probe(), field: value})
    with pytest.raises(SlotError, match="a probe has the fields"):
        HostReceiver().see({key: each for key, each in store.probe().items() if key != field})
