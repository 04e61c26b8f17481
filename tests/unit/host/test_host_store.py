"""The store: who gets which slot, what is sealed, what is left over."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ray_weightsync.transports.host import janitor
from ray_weightsync.transports.host.layout import HEADER_BYTES, SlotError
from ray_weightsync.transports.host.store import SnapshotStore
from ray_weightsync.weights.packing import Packed
from ray_weightsync.weights.plan import ParamMeta, Plan

PLAN = "f" * 32


def new_id() -> str:
    return uuid.uuid4().hex


def files(directory: str) -> list[str]:
    return sorted(os.listdir(directory))


def slot_files(directory: str) -> list[str]:
    return [name for name in files(directory) if not name.endswith("-owner")]


# -- opening -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0, 0o777])
def test_a_slot_is_a_private_fully_allocated_file_of_exactly_its_size(
    store: SnapshotStore, directory: str, session: str, umask: int
) -> None:
    before = os.umask(umask)  # the mode must not depend on it
    try:
        address = store.open_slot(new_id(), PLAN, 3 << 20, False)
    finally:
        os.umask(before)
    status = os.stat(f"{directory}/{address['name']}")
    assert address["name"] == f"rws-{session}-0"
    assert (status.st_mode & 0o7777, status.st_size, status.st_uid, status.st_nlink) == (0o600, HEADER_BYTES + (3 << 20), os.geteuid(), 1)
    assert status.st_blocks * 512 >= status.st_size, "memory that is not reserved now is a SIGBUS later"


@pytest.mark.parametrize(
    ("field", "value"),
    [("snapshot", "x"), ("snapshot", None), ("plan", "../x"), ("num_bytes", -64), ("num_bytes", 65), ("num_bytes", True), ("overlap", 1)],
)
def test_a_bad_argument_is_refused_before_a_file_is_made(store: SnapshotStore, directory: str, field: str, value: Any) -> None:
    arguments = {"snapshot": new_id(), "plan": PLAN, "num_bytes": 64, "overlap": False, field: value}
    with pytest.raises(SlotError, match=field):
        store.open_slot(*arguments.values())
    assert slot_files(directory) == []


def test_a_snapshot_has_one_slot(store: SnapshotStore) -> None:
    snapshot = new_id()
    store.open_slot(snapshot, PLAN, 64, False)
    with pytest.raises(SlotError, match="has a slot already"):
        store.open_slot(snapshot, PLAN, 64, False)


@pytest.mark.parametrize("num_slots", [1, 0, -1, True, 2.0, "2", None])
def test_fewer_than_two_slots_are_refused(directory: str, session: str, num_slots: Any) -> None:
    with pytest.raises(SlotError, match="num_slots must be an int of at least 2"):
        SnapshotStore(session, directory, num_slots)
    assert files(directory) == []


def test_rounds_go_back_and_forth_between_two_slots(store: SnapshotStore, stage: Any, directory: str) -> None:
    names = [store.address(stage.committed(store, seed))["name"] for seed in range(5)]
    assert names == [names[0], names[1], names[0], names[1], names[0]]
    assert len(set(names)) == 2
    assert slot_files(directory) == sorted(set(names))
    stats = store.stats()
    assert (stats.slots, stats.allocated, stats.reused, stats.retired, stats.dropped) == (2, 2, 3, 0, 0)


def test_the_committed_slot_is_never_a_target(store: SnapshotStore, stage: Any) -> None:
    committed = store.address(stage.committed(store))
    staged = [stage.opened(store)["name"] for _ in range(4)]
    assert committed["name"] not in staged
    assert len(set(staged)) == 4
    assert stage.open(committed).received().snapshot == committed["snapshot"]


def test_a_staging_takes_a_discarded_slot_before_the_former_one(directory: str, session: str, stage: Any) -> None:
    with SnapshotStore(session, directory, 3) as store:
        first = stage.committed(store, 1)
        stage.committed(store, 2)
        staged, _ = stage.sealed(store, 3, plan=Plan.from_metadata([ParamMeta("other", torch.int8, (1,))]))
        store.discard(staged)
        given_up, _ = stage.sealed(store, 4)  # takes the former slot: the free one has another size
        name = store.address(given_up)["name"]
        with pytest.raises(SlotError, match="has no slot"):
            store.address(first)
        store.discard(given_up)
        assert stage.opened(store)["name"] == name


def test_slots_of_another_size_make_room_for_a_new_plan(store: SnapshotStore, stage: Any, directory: str) -> None:
    larger = Plan.from_metadata([ParamMeta("w", torch.float32, (4096,))])
    for seed in range(3):
        stage.committed(store, seed)
    for seed in range(3):
        snapshot, _ = stage.sealed(store, seed, plan=larger)
        store.mark_committed(snapshot)
    assert {os.path.getsize(f"{directory}/{name}") for name in slot_files(directory)} == {HEADER_BYTES + larger.num_bytes}
    assert (store.stats().slots, store.stats().dropped, store.stats().retired) == (2, 2, 0)


def test_a_dropped_slot_gives_its_memory_back_though_its_writer_still_maps_it(store: SnapshotStore, stage: Any, directory: str) -> None:
    stage.committed(store, 0)
    former = stage.committed(store, 1)
    paths = [f"{directory}/{name}" for name in slot_files(directory)]
    pins = [os.open(path, os.O_RDONLY) for path in paths]
    store.open_slot(new_id(), PLAN, 1 << 20, False)  # another size: the former slot goes
    sizes = sorted(os.fstat(fd).st_size for fd in pins)
    for fd in pins:
        os.close(fd)
    assert sizes == [0, HEADER_BYTES + stage.plan.num_bytes]
    assert store.address(former)["snapshot"] == former
    stage.committed(store, 2)  # and the writer finds its way
    assert store.stats().committed is not None


# -- leases --------------------------------------------------------------------------------------------------------------------


def mapped(directory: str) -> set[str]:
    """The slots that this process maps, as the kernel names them."""
    with open("/proc/self/maps") as maps:
        return {line.split(None, 5)[5].strip() for line in maps if f"{directory}/rws-" in line}


def test_a_slot_under_lease_is_retired_and_its_memory_goes_with_its_last_view(
    store: SnapshotStore, stage: Any, directory: str, same: Callable[..., bool]
) -> None:
    first = stage.committed(store, 1)
    hung = dict(stage.open(store.address(first)))  # a replica that never lets go
    retired = store.address(first)["name"]
    stage.committed(store, 2)
    third = stage.committed(store, 3)
    assert store.stats().retired == 1
    assert store.stats().slots == 2
    assert retired not in files(directory)
    assert same(hung, stage.weights(1)), "a retired slot keeps serving whoever maps it"
    assert same(dict(stage.open(store.address(third))), stage.weights(3))
    gone = f"{directory}/{retired} (deleted)"
    stage.write(stage.opened(store), 4)  # the writer lets go of it as well
    assert gone in mapped(directory)
    hung.clear()
    gc.collect()
    assert gone not in mapped(directory)


def test_a_lease_that_ended_in_time_costs_nothing(store: SnapshotStore, stage: Any) -> None:
    for seed in range(4):
        snapshot = stage.committed(store, seed)
        tensors = dict(stage.open(store.address(snapshot)))
        del tensors
    assert (store.stats().retired, store.stats().allocated) == (0, 2)


@pytest.mark.parametrize("knows_the_slot", [False, True])
def test_a_slot_whose_writer_is_late_goes_to_nobody_else(
    store: SnapshotStore, stage: Any, aside: Any, same: Callable[..., bool], knows_the_slot: bool
) -> None:
    if knows_the_slot:  # and has it mapped from a round before
        store.discard(stage.sealed(store, 0)[0])
    writing, gate = threading.Event(), threading.Event()

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stage.weights(1).items():
            yield name, tensor
            writing.set()
            assert gate.wait(30)

    late = stage.opened(store)
    writer = aside(lambda: stage.writer.write(late, stage.plan, slow(), progress_bytes=64))
    assert writing.wait(30)
    store.discard(late["snapshot"])
    again = stage.opened(store)
    assert again["name"] != late["name"]
    assert store.stats().retired == 1
    gate.set()
    with pytest.raises(SlotError, match="was given up by its store while it was being written"):
        writer.result()
    store.seal(again["snapshot"], stage.write(again, 2).digest)
    assert same(dict(stage.open(again)), stage.weights(2))


def test_a_late_writer_that_has_not_begun_finds_the_slot_taken(store: SnapshotStore, stage: Any) -> None:
    late = stage.opened(store)
    store.discard(late["snapshot"])
    again = stage.opened(store)
    assert again["name"] == late["name"]
    with pytest.raises(SlotError, match="another snapshot's slot by now"):
        stage.write(late, 1)
    store.seal(again["snapshot"], stage.write(again, 2).digest)


# -- sealing and committing --------------------------------------------------------------------------------------------------


def test_half_a_snapshot_is_not_sealed(store: SnapshotStore, stage: Any) -> None:
    address = stage.opened(store)

    def breaks() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(stage.weights(0).items()))
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        stage.writer.write(address, stage.plan, breaks(), progress_bytes=64)
    with pytest.raises(SlotError, match=rf"cannot be sealed: 704 of {stage.plan.num_bytes} bytes"):
        store.seal(address["snapshot"], "a" * 32)
    with pytest.raises(SlotError, match="704 bytes were written before"):
        stage.write(address, 1)
    assert store.discard(address["snapshot"])


def test_a_seal_is_repeated_only_with_the_same_digest(store: SnapshotStore, stage: Any) -> None:
    snapshot, digest = stage.sealed(store)
    store.seal(snapshot, digest)
    with pytest.raises(SlotError, match="is sealed with digest"):
        store.seal(snapshot, "0" * 32)
    store.mark_committed(snapshot)
    store.seal(snapshot, digest)
    assert stage.open(store.address(snapshot)).received().digest == digest


def test_a_slot_whose_header_was_changed_is_not_sealed(store: SnapshotStore, stage: Any, directory: str) -> None:
    address = stage.opened(store)
    packed: Packed = stage.write(address, 0)
    fd = os.open(f"{directory}/{address['name']}", os.O_RDWR)
    os.pwrite(fd, b"0" * 32, 24)
    os.close(fd)
    with pytest.raises(SlotError, match="holds snapshot 0000"):
        store.seal(address["snapshot"], packed.digest)


def test_what_is_not_sealed_is_not_committed(store: SnapshotStore, stage: Any) -> None:
    committed = stage.committed(store)
    half = stage.opened(store)["snapshot"]
    with pytest.raises(SlotError, match="is writing; it cannot become committed"):
        store.mark_committed(half)
    with pytest.raises(SlotError, match="has no slot"):
        store.mark_committed(new_id())
    assert store.stats().committed == committed


def test_the_former_snapshot_can_be_committed_again_until_a_staging_needs_its_slot(
    store: SnapshotStore, stage: Any, same: Callable[..., bool]
) -> None:
    first, second = stage.committed(store, 1), stage.committed(store, 2)
    store.mark_committed(first)
    store.mark_committed(first)
    assert store.stats().committed == first
    assert same(dict(stage.open(store.address(first))), stage.weights(1))
    stage.sealed(store, 3)
    with pytest.raises(SlotError, match="its slot went to another one"):
        store.mark_committed(second)
    assert store.stats().committed == first


def test_the_committed_snapshot_cannot_be_discarded(store: SnapshotStore, stage: Any) -> None:
    snapshot = stage.committed(store)
    with pytest.raises(SlotError, match="is committed; it cannot become free"):
        store.discard(snapshot)
    assert stage.open(store.address(snapshot)).received().snapshot == snapshot


@pytest.mark.parametrize("seal", [False, True])
def test_what_was_discarded_is_read_by_nobody(store: SnapshotStore, stage: Any, seal: bool) -> None:
    address = stage.opened(store, overlap=True)
    if seal:
        store.seal(address["snapshot"], stage.write(address, 0).digest)
    assert store.discard(address["snapshot"]) is True
    assert store.discard(address["snapshot"]) is False
    with pytest.raises(SlotError, match="was given up by its store"):
        stage.open(address)
    with pytest.raises(SlotError, match="was given up"):
        store.address(address["snapshot"])
    assert store.discard(new_id()) is False


def test_more_slots_than_kept_for_reuse_go_when_they_are_free(store: SnapshotStore, stage: Any, directory: str) -> None:
    committed = stage.committed(store, 0)
    staged = [stage.sealed(store, seed)[0] for seed in range(1, 4)]
    assert len(slot_files(directory)) == 4
    for snapshot in staged[:2]:
        store.discard(snapshot)
    assert len(slot_files(directory)) == 2
    store.mark_committed(staged[2])
    store.mark_committed(committed)  # the former one is kept
    assert store.stats().dropped == 2


# -- over time -----------------------------------------------------------------------------------------------------------------


def test_a_hundred_cycles_leave_no_more_than_two(store: SnapshotStore, stage: Any, directory: str) -> None:
    def cycle(seed: int) -> None:
        dict(stage.open(store.address(stage.committed(store, seed))))
        half = stage.opened(store, overlap=True)
        store.discard(half["snapshot"])

    def footprint() -> tuple[object, ...]:
        gc.collect()
        with open("/proc/self/maps") as maps:
            num_maps = sum(f"{directory}/rws-" in line for line in maps)
        size = sum(os.stat(f"{directory}/{name}").st_blocks for name in files(directory))
        return files(directory), size, len(os.listdir("/proc/self/fd")), num_maps

    for seed in range(2):
        cycle(seed)
    after_two = footprint()
    for seed in range(2, 100):
        cycle(seed)
    assert footprint() == after_two
    assert (store.stats().allocated, store.stats().retired) == (2, 0)


def test_two_sessions_in_one_directory_do_not_touch_each_other(
    directory: str, stage: Any, same: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor, "OWN_LIMIT_S", 0.0)
    with SnapshotStore("sessionone", directory, 2) as one:
        first = stage.committed(one, 1)
        with SnapshotStore("sessiontwo", directory, 2) as two:
            for seed in range(4):
                stage.committed(two, seed)
            assert {name.split("-")[1] for name in files(directory)} == {"sessionone", "sessiontwo"}
        assert {name.split("-")[1] for name in files(directory)} == {"sessionone"}
        assert same(dict(stage.open(one.address(first))), stage.weights(1))
        with pytest.raises(FileExistsError, match="living store"):
            SnapshotStore("sessionone", directory, 2)
        assert same(dict(stage.open(one.address(first))), stage.weights(1))
    assert files(directory) == []


def test_close_leaves_nothing_and_may_be_repeated(directory: str, session: str, stage: Any, wait_gone: Callable[[int], None]) -> None:
    fds = sorted(os.listdir("/proc/self/fd"))
    store = SnapshotStore(session, directory, 2)
    snapshot = stage.committed(store, 1)
    kept = dict(stage.open(store.address(snapshot)))
    stage.sealed(store, 2)
    janitor_pid = store.stats().janitor_pid
    store.close()
    store.close()
    assert files(directory) == []
    wait_gone(janitor_pid)
    assert torch.equal(kept["embed"], stage.weights(1)["embed"]), "maps outlive the store"
    kept.clear()
    stage.writer.close()
    assert sorted(os.listdir("/proc/self/fd")) == fds
    for call in (lambda: stage.sealed(store), lambda: store.address(snapshot), store.probe, lambda: store.discard(snapshot)):
        with pytest.raises(SlotError, match="is closed"):
            call()
    assert store.stats().slots == 0


def test_a_store_that_does_not_come_up_leaves_nothing(directory: str, session: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fds = sorted(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("sys.executable", "")
    with pytest.raises(OSError, match=r"sys\.executable is not set"):
        SnapshotStore(session, directory, 2)
    assert files(directory) == []
    assert sorted(os.listdir("/proc/self/fd")) == fds


def test_an_emptied_directory_is_no_reason_to_fail(directory: str, session: str, stage: Any) -> None:
    store = SnapshotStore(session, directory, 2)
    stage.committed(store)
    for name in files(directory):
        os.unlink(f"{directory}/{name}")
    store.close()
    assert files(directory) == []


def test_names_are_never_used_twice(store: SnapshotStore) -> None:
    sizes = itertools.cycle([64, 128])
    names = []
    for _ in range(6):
        address = store.open_slot(new_id(), PLAN, next(sizes), False)
        names.append(address["name"])
        store.discard(address["snapshot"])
    assert store.stats().allocated == len(set(names)) == store.stats().slots + store.stats().dropped


# -- another coordinator -------------------------------------------------------------------------------------------------------


def test_a_successor_keeps_the_sealed_snapshots_that_it_knows_and_no_other(store: SnapshotStore, stage: Any) -> None:
    (committed, digest), (sealed, other), (unknown, _) = (stage.sealed(store, seed) for seed in range(3))
    store.mark_committed(committed)
    writing = stage.opened(store)
    kept = store.keep_only([committed, sealed, writing["snapshot"]])
    assert kept == {committed: (store.address(committed), digest), sealed: (store.address(sealed), other)}
    for gone in (unknown, writing["snapshot"]):
        with pytest.raises(SlotError, match="has no slot"):
            store.address(gone)
    with pytest.raises((SlotError, FileNotFoundError)):
        stage.write(writing, 4)  # its writer finds out
    assert list(store.keep_only([committed])) == [committed]
    assert store.stats().committed == committed
    assert store.stats().in_use == 1
