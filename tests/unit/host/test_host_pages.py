"""Memory by the page: what a map keeps, what it gives back, and that a slot works with huge pages and without."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_weightsync.transports.host import pages
from ray_weightsync.transports.host.store import SnapshotStore
from ray_weightsync.weights.plan import ParamMeta, Plan

MIB = 1 << 20


@pytest.fixture
def fd(directory: str) -> Iterator[int]:
    opened = os.open(f"{directory}/file", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    yield opened
    os.close(opened)


@pytest.fixture
def huge(fd: int) -> int:
    """The size of huge pages, where the kernel gives them to shared memory."""
    size = pages.huge_page_bytes()
    if size is None or size > 64 * MIB:
        pytest.skip("no huge pages of a size to test with")
    os.posix_fallocate(fd, 0, size)
    mapped = pages.map_file(fd, size, private=False)
    if not pages._advise(ctypes.addressof(mapped), size, pages._MADV_COLLAPSE):
        pytest.skip("this kernel backs no file with huge pages on request")
    os.ftruncate(fd, 0)
    return size


def maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def in_huge_pages(path: str) -> int:
    """Bytes of ``path`` that this process has mapped in huge pages."""
    sections = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    return sum(1024 * int(count) for section in sections if path in section for count in re.findall(r"ShmemPmdMapped:\s+(\d+)", section))


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 4097, 2 * MIB, 5 * MIB + 123])
@pytest.mark.parametrize("private", [False, True])
def test_a_map_shows_the_file_and_leaves_nothing_when_it_goes(fd: int, num_bytes: int, private: bool) -> None:
    os.pwrite(fd, b"x" * num_bytes, 0)
    before = maps()
    mapped = pages.map_file(fd, num_bytes, private=private)
    assert ctypes.sizeof(mapped) == num_bytes
    assert bytes(mapped) == b"x" * num_bytes
    mapped[num_bytes - 1] = ord("y")
    assert os.pread(fd, 1, num_bytes - 1) == (b"x" if private else b"y")
    del mapped
    assert len(maps()) <= len(before)


def test_a_large_map_begins_where_a_huge_page_fits(fd: int) -> None:
    align = pages.huge_page_bytes() or 4096
    os.ftruncate(fd, 3 * align)  # sparse
    kept = [pages.map_file(fd, 3 * align - 5, private=True) for _ in range(5)]
    assert [ctypes.addressof(mapped) % align for mapped in kept] == [0] * 5


def test_a_map_that_the_kernel_refuses_leaves_no_reservation(fd: int) -> None:
    before = len(maps())
    with pytest.raises(OSError, match="could not be mapped") as caught:
        pages.map_file(-1, 4096, private=False)
    assert caught.value.errno == errno.EBADF
    read_only = os.open("/proc/self/exe", os.O_RDONLY)
    with pytest.raises(PermissionError):
        pages.map_file(read_only, 4096, private=False)
    os.close(read_only)
    assert len(maps()) == before


def test_a_lock_lasts_as_long_as_a_tensor_of_the_map(fd: int, directory: str) -> None:
    os.ftruncate(fd, 1 << 16)
    reader = os.open(f"{directory}/file", os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    kept = torch.frombuffer(pages.map_file(reader, 1 << 16, private=True), dtype=torch.uint8)[4096:].view(torch.int32)[7:8]
    os.close(reader)
    with pytest.raises(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert kept.item() == 0
    del kept
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("num_bytes", [4096, MIB + 1, 5 * MIB + 4096])
@pytest.mark.parametrize("refused", [False, True])
def test_reserved_memory_is_there_and_zero_whatever_the_kernel_grants(
    fd: int, num_bytes: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched, real = [], os.pwrite

    def pwrite(file: int, data: memoryview, offset: int) -> int:
        touched.append((offset, len(data)))
        return real(file, data, offset)

    if refused:
        monkeypatch.setattr(pages, "_advise", lambda address, size, advice: False)
    monkeypatch.setattr(os, "pwrite", pwrite)
    pages.reserve(fd, num_bytes)
    if refused:
        assert sum(size for _, size in touched) == num_bytes
        assert [offset for offset, _ in touched] == list(range(0, num_bytes, MIB))
    status = os.fstat(fd)
    assert status.st_size == num_bytes
    assert status.st_blocks * 512 >= num_bytes
    assert os.pread(fd, num_bytes, 0) == bytes(num_bytes)


def test_a_slot_is_read_and_written_through_huge_pages_where_there_are_some(
    huge: int, store: SnapshotStore, stage: Any, same: Callable[..., bool]
) -> None:
    plan = Plan.from_metadata([ParamMeta("w", torch.float32, (huge, 2)), ParamMeta("b", torch.float32, (3,))])  # eight huge pages and a bit
    address = store.address(stage.sealed(store, 1, plan=plan)[0])
    path = f"{address['directory']}/{address['name']}"
    before = in_huge_pages(path)
    assert before >= 8 * huge, "the writer's map"
    tensors = dict(stage.open(address, plan=plan))
    assert same(tensors, stage.weights(1, plan))
    assert in_huge_pages(path) - before >= 8 * huge
    tensors["w"][5] = 3.0  # one small page of a huge one becomes this reader's own
    assert same(dict(stage.open(address, plan=plan)), stage.weights(1, plan))


def test_a_slot_works_without_huge_pages(
    store: SnapshotStore, stage: Any, same: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_advise", lambda address, size, advice: False)
    monkeypatch.setattr(pages, "huge_page_bytes", lambda: None)
    plan = Plan.from_metadata([ParamMeta("w", torch.float32, (MIB, 3))])
    address = store.address(stage.sealed(store, 2, plan=plan)[0])
    assert same(dict(stage.open(address, plan=plan)), stage.weights(2, plan))
