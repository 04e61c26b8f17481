"""A sealed snapshot's bytes, read in pieces from one store and written into another's slot."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError

from ray_weightsync.errors import ConfigError
from ray_weightsync.transports.host.actor import directory_here
from ray_weightsync.transports.host.layout import SlotError
from ray_weightsync.transports.host.relay import IN_FLIGHT, pieces, read_piece
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


class Ref:
    """A reference to an object in an object store."""

    def __init__(self, start: int, piece: Any) -> None:
        self.start = start
        self.piece = piece


class Carried:
    """Stands for `ray.get` and `ray.wait`, and for the handle of ``store``'s actor, whose process dies at byte ``dies_at``.

    Attributes:
        most: How many pieces were asked for and not freed at once, at most. One that is still read is not freed.
        events: Where each piece starts that was asked for, wanted and had, in order.
        late_at: Where the piece starts that does not arrive.
    """

    def __init__(self, store: SnapshotStore, *, dies_at: int | None = None, late_at: int | None = None) -> None:
        self._store = store
        self._dies_at = dies_at
        self._late_at = late_at
        self._refs: weakref.WeakValueDictionary[int, Ref] = weakref.WeakValueDictionary()
        self._objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.most = 0
        self.events: list[tuple[str, int]] = []

    @property
    def held(self) -> set[int]:
        """Where the pieces start that are asked for and not freed."""
        return {*self._refs, *self._objects}

    @property
    def read(self) -> Carried:
        return self

    def remote(self, snapshot: str, start: int, stop: int) -> Ref:
        piece = numpy.array(read_piece(self._store.address(snapshot), start, stop))
        self._objects[start] = piece
        self._refs[start] = ref = Ref(start, piece)
        self.most = max(self.most, len(self.held))
        self.events.append(("asked", start))
        return ref

    def get(self, ref: Ref, *, timeout: float) -> Any:
        if ref.start == self._late_at:
            raise GetTimeoutError
        if self._dies_at is not None and ref.start >= self._dies_at:
            raise ActorDiedError
        self.events.append(("had", ref.start))
        return ref.piece

    def wait(self, refs: Sequence[Ref], *, num_returns: int, timeout: float, fetch_local: bool) -> None:
        assert num_returns == len(refs)
        assert timeout == 0
        assert fetch_local
        self.events.extend(("wanted", ref.start) for ref in refs)


class TestPieces:
    @pytest.fixture
    def carried(self, store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> Any:
        def carry(**how: Any) -> Carried:
            made = Carried(store, **how)
            monkeypatch.setattr("ray_weightsync.transports.host.relay.ray", made)
            return made

        return carry

    def test_no_more_than_a_few_are_ever_asked_for_and_not_freed_by_the_one_who_copies(
        self, carried: Any, store: SnapshotStore, far: SnapshotStore, stage: Any, plan: Plan
    ) -> None:
        snapshot, digest = stage.sealed(store, 3)
        address, source = far.open_slot(snapshot, plan.digest, plan.num_bytes, False), carried()
        with SlotWriter() as writer:
            arriving = pieces(source, snapshot, plan.num_bytes, piece_bytes=7, limit_s=30)
            assert writer.copy(address, plan, arriving).digest == digest
        assert (source.most, len(source.held)) == (IN_FLIGHT, 0)
        far.discard(snapshot)

    def test_while_one_is_copied_those_after_it_are_on_their_way(self, carried: Any, store: SnapshotStore, stage: Any) -> None:
        snapshot, _ = stage.sealed(store, 3)
        source = carried()
        arriving = pieces(source, snapshot, 500, piece_bytes=100, limit_s=30)
        for start in range(0, 500, 100):
            next(arriving)  # and it is being copied now
            on_their_way = {at for what, at in source.events if what == "wanted"} - {at for what, at in source.events if what == "had"}
            assert on_their_way == set(range(start + 100, min(start + 100 * IN_FLIGHT, 500), 100))
        assert next(arriving, None) is None

    def test_one_that_is_late_ends_the_relay_and_is_named(self, carried: Any, store: SnapshotStore, stage: Any) -> None:
        snapshot, _ = stage.sealed(store, 3)
        source = carried(late_at=200)
        arriving = pieces(source, snapshot, 500, piece_bytes=100, limit_s=30)
        with pytest.raises(TimeoutError, match=f"byte 200 of 500 of snapshot {snapshot} did not arrive within 30.0 s"):
            list(arriving)

    def test_a_source_that_dies_on_the_way_leaves_a_slot_that_is_given_up_and_had_again(
        self, carried: Any, store: SnapshotStore, far: SnapshotStore, stage: Any, plan: Plan
    ) -> None:
        snapshot, digest = stage.sealed(store, 3)
        address, source = far.open_slot(snapshot, plan.digest, plan.num_bytes, False), carried(dies_at=70)
        with SlotWriter() as writer:
            with pytest.raises(ActorDiedError):
                writer.copy(address, plan, pieces(source, snapshot, plan.num_bytes, piece_bytes=7, limit_s=30))
            with pytest.raises(SlotError, match=f"70 of {plan.num_bytes} bytes were written"):
                far.seal(snapshot, digest)
            far.discard(snapshot)
            again = far.open_slot(snapshot, plan.digest, plan.num_bytes, False)
            arriving = pieces(carried(), snapshot, plan.num_bytes, piece_bytes=7, limit_s=30)
            assert writer.copy(again, plan, arriving).digest == digest
        far.seal(snapshot, digest)


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
