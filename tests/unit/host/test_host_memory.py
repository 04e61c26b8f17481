"""What may still be had, by the file system, the machine and the container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_weightsync.transports.host.memory import available_bytes

MEMINFO = "MemTotal:       1000 kB\nMemFree:        10 kB\nMemAvailable:   300 kB\nSwapFree:       50 kB\n"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def put(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / {"meminfo": "proc/meminfo"}.get(name, f"sys/fs/cgroup/memory.{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_without_other_limits_the_file_system_decides(tmp_path: Path, here: int) -> None:
    status = os.fstatvfs(here)
    available = available_bytes(here, root=tmp_path / "nowhere")
    assert available == pytest.approx(status.f_bavail * status.f_frsize, rel=0.05)  # others write to that disk as well


def test_the_machines_memory_limits_a_larger_file_system(tmp_path: Path, here: int) -> None:
    put(tmp_path, meminfo=MEMINFO)
    assert available_bytes(here, root=tmp_path) == 350 << 10


def test_the_containers_limit_counts_with_the_cache_it_could_drop(tmp_path: Path, here: int) -> None:
    put(tmp_path, meminfo=MEMINFO, max="200000\n", current="150000\n", stat="anon 140000\ninactive_file 4000\n")
    assert available_bytes(here, root=tmp_path) == 54000


def test_a_container_without_a_limit_has_the_machines(tmp_path: Path, here: int) -> None:
    put(tmp_path, meminfo=MEMINFO, max="max\n", current="150000\n")
    assert available_bytes(here, root=tmp_path) == 350 << 10


def test_a_container_over_its_limit_has_nothing(tmp_path: Path, here: int) -> None:
    put(tmp_path, max="1000\n", current="4000\n", stat="")
    assert available_bytes(here, root=tmp_path) == 0


def test_the_real_machine_answers() -> None:
    fd = os.open("/dev/shm", os.O_RDONLY | os.O_DIRECTORY)
    status = os.fstatvfs(fd)
    assert 0 < available_bytes(fd) <= status.f_blocks * status.f_frsize
    os.close(fd)
