"""A sealed snapshot's bytes, read in pieces from one store and written into another's slot."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from ray_weightsync.errors import ConfigError
from ray_weightsync.transports.host.actor import directory_here
from ray_weightsync.transports.host.layout import SlotError
from ray_weightsync.transports.host.relay import read_piece
from ray_weightsync.transports.host.store import SnapshotStore
from ray_weightsync.transports.host.writer import SlotWriter
from ray_weightsync.weights.plan import Plan


@pytest.fixture
def far() -> Iterator[SnapshotStore]:
    """The store of another node, which has a directory of its own."""
    path = tempfile.mkdtemp(prefix="rws-tests-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    with SnapshotStore(uuid.uuid4().hex[:12], path, 2) as made:
        yield made
    assert os.listdir(path) == []
    shutil.rmtree(path)


def pieces_of(store: SnapshotStore, snapshot: str, size: int) -> list[memoryview]:
    address = store.address(snapshot)
    return [memoryview(read_piece(address, at, min(at + size, address["num_bytes"]))) for at in range(0, address["num_bytes"], size)]


@pytest.mark.parametrize("size", [1, 7, 64, 100, 1 << 20])
def test_cut_anywhere_the_same_bytes_arrive_under_the_same_digest(
    store: SnapshotStore, far: SnapshotStore, stage: Any, plan: Plan, size: int
) -> None:
    snapshot, digest = stage.sealed(store, 3)
    address = far.open_slot(snapshot, plan.digest, plan.num_bytes, False)
    with SlotWriter() as writer:
        assert writer.copy(address, plan, pieces_of(store, snapshot, size)).digest == digest
    far.seal(snapshot, digest)
    there = b"".join(pieces_of(far, snapshot, plan.num_bytes))
    assert there == b"".join(pieces_of(store, snapshot, plan.num_bytes))


@pytest.mark.parametrize("place", [0, 659, 704])
def test_a_byte_that_changed_on_the_way_changes_the_digest(
    store: SnapshotStore, far: SnapshotStore, stage: Any, plan: Plan, place: int
) -> None:
    snapshot, digest = stage.sealed(store, 3)
    payload = bytearray(b"".join(pieces_of(store, snapshot, plan.num_bytes)))
    payload[place] ^= 1
    address = far.open_slot(snapshot, plan.digest, plan.num_bytes, False)
    with SlotWriter() as writer:
        assert writer.copy(address, plan, [memoryview(payload)]).digest != digest


@pytest.mark.parametrize("missing", [-64, 64])
def test_fewer_or_more_bytes_than_the_plan_has_are_refused_and_the_slot_cannot_be_sealed(
    far: SnapshotStore, plan: Plan, missing: int
) -> None:
    snapshot = uuid.uuid4().hex
    address = far.open_slot(snapshot, plan.digest, plan.num_bytes, False)
    with SlotWriter() as writer, pytest.raises(ConfigError, match="the payload"):
        writer.copy(address, plan, [memoryview(bytes(plan.num_bytes + missing))])
    far.discard(snapshot)


def test_only_a_sealed_snapshot_is_read(store: SnapshotStore, stage: Any) -> None:
    writing = stage.opened(store)
    with pytest.raises(SlotError, match="only a sealed one"):
        read_piece(writing, 0, 64)


def test_a_piece_under_way_keeps_its_slot_from_being_given_away(store: SnapshotStore, stage: Any, plan: Plan) -> None:
    snapshot, _ = stage.sealed(store, 1)
    piece = read_piece(store.address(snapshot), 0, 64)
    before = bytes(piece)
    store.discard(snapshot)
    stage.sealed(store, 2)
    assert bytes(piece) == before
    assert store.stats().retired == 1


def test_a_relay_whose_snapshot_was_given_up_meanwhile_ends_at_the_next_piece(far: SnapshotStore, plan: Plan) -> None:
    snapshot = uuid.uuid4().hex
    address = far.open_slot(snapshot, plan.digest, plan.num_bytes, False)

    def arriving() -> Iterator[memoryview]:
        yield memoryview(bytes(64))
        far.discard(snapshot)
        yield memoryview(bytes(64))
        raise AssertionError("it goes on for nobody")

    with SlotWriter() as writer, pytest.raises(SlotError, match="given up"):
        writer.copy(address, plan, arriving())


class TestDirectories:
    def test_each_node_fills_in_its_own_variables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RWS_SHM", "/mnt/shm")
        assert directory_here("$RWS_SHM") == "/mnt/shm"
        assert directory_here("${RWS_SHM}/weights") == "/mnt/shm/weights"
        assert directory_here("/dev/shm") == "/dev/shm"

    def test_one_that_is_not_set_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("RWS_SHM", raising=False)
        with pytest.raises(SlotError, match="environment variable RWS_SHM, which Ray on this node does not have"):
            directory_here("$RWS_SHM")
