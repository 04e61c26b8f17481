"""What is checked before a byte of a file, or a field of an address, is believed."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ray_weightsync.transports.host import layout
from ray_weightsync.transports.host.layout import HEADER_BYTES, NoRoomError, SlotError, check_address
from ray_weightsync.transports.host.receiver import HostReceiver
from ray_weightsync.transports.host.store import SnapshotStore

GOOD = {
    "directory": "/dev/shm",
    "name": "rws-abcd1234-7",
    "snapshot": "0123456789abcdef" * 2,
    "plan": "f" * 32,
    "num_bytes": 128,
    "overlap": False,
}


def test_a_good_address_passes_unchanged() -> None:
    assert check_address(GOOD) == GOOD


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            ("directory", bad)
            for bad in ("dev/shm", "", "/dev/../dev/shm", "/dev/shm/", "//dev/shm", "/dev//shm", "/dev/shm\0", b"/dev/shm", None)
        ),
        *(
            ("name", bad)
            for bad in (
                "rws-abcd1234-owner",
                "../rws-abcd1234-7",
                "rws-abcd1234-7\n",
                "rws-ABCD1234-7",
                "rws-abc-7",
                "rws-abcd1234-",
                "",
                7,
                None,
            )
        ),
        *(("snapshot", bad) for bad in ("", "0" * 31, "0" * 33, "G" * 32, "F" * 32, "0" * 32 + "\n", 0, None, ["0" * 32])),
        *(("plan", bad) for bad in ("", "f" * 15, "f" * 65, "xyz", None, 3)),
        *(("num_bytes", bad) for bad in (-64, 1, 63, 1 << 63, True, 64.0, "64", None)),
        *(("overlap", bad) for bad in (0, 1, "False", None)),
    ],
)
def test_each_bad_field_of_an_address_is_named(field: str, value: object) -> None:
    with pytest.raises(SlotError, match=field):
        check_address({**GOOD, field: value})


@pytest.mark.parametrize("bad", [None, "x", [], {}, {**GOOD, "mode": 1}, {key: value for key, value in GOOD.items() if key != "plan"}])
def test_an_address_has_exactly_its_fields(bad: object) -> None:
    with pytest.raises(SlotError, match="a slot address"):
        check_address(bad)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(field=st.sampled_from(sorted(GOOD)), value=json_values)
def test_whatever_json_stands_in_a_field_it_is_refused_or_unchanged(field: str, value: Any) -> None:
    try:
        passed = check_address({**GOOD, field: value})
    except SlotError as refused:
        words = str(refused)
        assert field in words
    else:
        assert passed == {**GOOD, field: value}


@pytest.mark.parametrize("session", ["", "short", "x" * 33, "UPPER123", "with-dash", "with/slash", "12345678\n", None, 12345678])
def test_a_session_that_cannot_be_part_of_a_file_name_is_refused(session: Any, directory: str) -> None:
    with pytest.raises(SlotError, match="session"):
        SnapshotStore(session, directory, 2)
    assert os.listdir(directory) == []


def test_no_room_tells_the_numbers_and_survives_pickling() -> None:
    error = NoRoomError(5_000_004_096, 67_108_864, "/dev/shm")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is NoRoomError
    assert (again.needed_bytes, again.available_bytes, again.directory) == (5_000_004_096, 67_108_864, "/dev/shm")
    assert str(again) == str(error)
    for words in ("5000004096 bytes (5 GB)", "67108864 bytes", "/dev/shm", "--shm-size"):
        assert words in str(error)


# -- the header ----------------------------------------------------------------------------------------------------------------

FIELDS = {
    "magic": (0, 8),
    "format": (8, 4),
    "state": (12, 4),
    "num_bytes": (16, 8),
    "snapshot": (24, 32),
    "plan": (56, 64),
    "digest": (120, 64),
    "watermark": (192, 8),
}


def patched(path: str, offset: int, data: bytes) -> Callable[[], None]:
    """Overwrite a part of a file; the answer puts it back."""
    fd = os.open(path, os.O_RDWR)
    before = os.pread(fd, len(data), offset)
    os.pwrite(fd, data, offset)

    def undo() -> None:
        os.pwrite(fd, before, offset)
        os.close(fd)

    return undo


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None)
@example(field="state", data=(1).to_bytes(4, sys.byteorder))
@example(field="state", data=(3).to_bytes(4, sys.byteorder))
@example(field="state", data=(0).to_bytes(4, sys.byteorder))
@example(field="watermark", data=(0).to_bytes(8, sys.byteorder))
@example(field="snapshot", data=b"0" * 32)
@example(field="plan", data=b"0" * 32 + b"\0" * 32)
@example(field="digest", data=b"0" * 32 + b"\0" * 32)
@example(field="digest", data=b"\0" * 64)
@example(field="digest", data=b"\xff" * 64)
@given(field=st.sampled_from(sorted(FIELDS)), data=st.binary(min_size=64, max_size=64))
def test_a_tampered_header_is_refused_or_shows_in_the_digest(store: SnapshotStore, stage: Any, field: str, data: bytes) -> None:
    if store.stats().committed is None:
        stage.committed(store)
    address = store.address(store.stats().committed or "")
    digest = stage.open(address).received().digest
    offset, size = FIELDS[field]
    path = f"{address['directory']}/{address['name']}"
    undo = patched(path, offset, data[:size])
    try:
        found = stage.open(address).received()
        assert field == "digest", f"{field} was changed and nobody noticed"
        assert found.digest != digest
    except SlotError:
        pass
    finally:
        undo()
    assert stage.open(address).received().digest == digest


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
@given(offset=st.integers(0, 119), bit=st.integers(0, 7))
def test_a_single_flipped_bit_in_a_header_is_refused(store: SnapshotStore, stage: Any, offset: int, bit: int) -> None:
    if store.stats().committed is None:
        stage.committed(store)
    address = store.address(store.stats().committed or "")
    path = f"{address['directory']}/{address['name']}"
    byte = Path(path).read_bytes()[offset]
    undo = patched(path, offset, bytes([byte ^ (1 << bit)]))
    try:
        with pytest.raises(SlotError):
            stage.open(address)
    finally:
        undo()


def test_a_header_of_another_version_of_this_package_says_what_to_do(store: SnapshotStore, stage: Any) -> None:
    address = store.address(stage.committed(store))
    undo = patched(f"{address['directory']}/{address['name']}", 8, (2).to_bytes(4, sys.byteorder))
    with pytest.raises(SlotError, match="format 2, this version reads 1; install the same"):
        stage.open(address)
    undo()


def test_a_digest_that_is_just_being_written_is_not_read(store: SnapshotStore, stage: Any) -> None:
    snapshot = "c" * 32
    address = store.open_slot(snapshot, stage.plan.digest, stage.plan.num_bytes, True)
    undo = patched(f"{address['directory']}/{address['name']}", 120, b"abc")  # the seal has got this far
    delivery = stage.open(address)
    undo()
    with pytest.raises(SlotError, match="not seen sealed"):
        delivery.received()
    delivery.close()


def test_the_layout_is_the_documented_one(store: SnapshotStore, stage: Any) -> None:
    snapshot, digest = stage.sealed(store)
    address = store.address(snapshot)
    page = Path(f"{address['directory']}/{address['name']}").read_bytes()[:HEADER_BYTES]
    field = {name: page[offset : offset + size] for name, (offset, size) in FIELDS.items()}
    assert field["magic"] == b"RWSSLOT\0"
    assert [int.from_bytes(field[name], sys.byteorder) for name in ("format", "state", "num_bytes", "watermark")] == [
        layout.FORMAT,
        layout.FileState.SEALED,
        stage.plan.num_bytes,
        stage.plan.num_bytes,
    ]
    assert [field[name].rstrip(b"\0").decode() for name in ("snapshot", "plan", "digest")] == [snapshot, stage.plan.digest, digest]


def test_a_receiver_needs_an_address_at_all(plan: Any) -> None:
    with pytest.raises(SlotError, match="must be a mapping, not NoneType"):
        HostReceiver().open(plan, {"limit_s": 1.0})
