"""What happens when there is not enough shared memory."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ray_weightsync.transports.host import slot_file
from ray_weightsync.transports.host.layout import HEADER_BYTES, NoRoomError
from ray_weightsync.transports.host.store import SnapshotStore

PLAN = "f" * 32


def new_id() -> str:
    return uuid.uuid4().hex


def files(directory: str) -> list[str]:
    return sorted(os.listdir(directory))


def slot_files(directory: str) -> list[str]:
    return [name for name in files(directory) if not name.endswith("-owner")]


def assert_refused_and_whole(store: SnapshotStore, stage: Any, num_bytes: int, directory: str) -> NoRoomError:
    committed = store.stats().committed
    before, fds = files(directory), sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(NoRoomError) as caught:
        store.open_slot(new_id(), PLAN, num_bytes, False)
    assert files(directory) == before
    assert sorted(os.listdir("/proc/self/fd")) == fds
    assert stage.open(store.address(committed)).received().snapshot == committed
    assert caught.value.needed_bytes == HEADER_BYTES + num_bytes
    assert caught.value.directory == directory
    return caught.value


def test_more_than_there_is_is_refused_before_the_kernel_is_asked(store: SnapshotStore, stage: Any, directory: str) -> None:
    stage.committed(store)
    error = assert_refused_and_whole(store, stage, 1 << 50, directory)
    assert 0 < error.available_bytes < 1 << 50


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM, errno.EDQUOT])
def test_a_refusal_by_the_kernel_leaves_no_file(
    store: SnapshotStore, stage: Any, directory: str, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    stage.committed(store)

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert_refused_and_whole(store, stage, 1 << 16, directory)


def test_another_error_of_the_kernel_stays_what_it_is(store: SnapshotStore, directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="broken"):
        store.open_slot(new_id(), PLAN, 1 << 16, False)
    assert slot_files(directory) == []


@contextlib.contextmanager
def small_tmpfs(directory: str, size: str) -> Iterator[str]:
    path = f"{directory}/small"
    os.mkdir(path)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "rws-tests", path], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def test_a_small_container_gets_a_clear_refusal_from_a_real_file_system(
    directory: str, session: str, stage: Any, monkeypatch: pytest.MonkeyPatch, wait_gone: Callable[[int], None]
) -> None:
    with small_tmpfs(directory, "8m") as small, contextlib.ExitStack() as ends:
        store = SnapshotStore(session, small, 2)
        ends.callback(wait_gone, store.stats().janitor_pid)  # it keeps the directory open, and the file system busy
        ends.callback(store.close)
        stage.committed(store)
        error = assert_refused_and_whole(store, stage, 16 << 20, small)
        assert 0 < error.available_bytes <= 8 << 20
        # the memory vanishes between the question and the allocation
        monkeypatch.setattr(slot_file, "available_bytes", lambda fd: 1 << 40)
        assert_refused_and_whole(store, stage, 16 << 20, small)
        stage.writer.close()
        store.open_slot(new_id(), PLAN, 7 << 20, False)  # what the failed attempt took is free again


def test_questions_are_answered_while_a_slot_is_being_allocated(store: SnapshotStore, aside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real, allocating, gate = os.posix_fallocate, threading.Event(), threading.Event()

    def slow(fd: int, offset: int, length: int) -> None:
        allocating.set()
        assert gate.wait(30)
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    opening = aside(lambda: store.open_slot(new_id(), PLAN, 64, False))
    assert allocating.wait(30)
    assert store.stats().slots == 0
    assert store.probe()["name"].endswith("-owner")
    gate.set()
    assert opening.result()["num_bytes"] == 64
    assert store.stats().slots == 1
