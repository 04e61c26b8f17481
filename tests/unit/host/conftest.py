"""A store in a memory-backed directory of its own, and the hands that stage, read and look at what the kernel says."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_weightsync.transports.host.receiver import HostDelivery, HostReceiver
from ray_weightsync.transports.host.store import SnapshotStore
from ray_weightsync.transports.host.writer import SlotWriter
from ray_weightsync.weights.packing import Packed
from ray_weightsync.weights.plan import ParamMeta, Plan

LIMIT_S = 30.0
TENSORS = (("embed", torch.float32, (33, 5)), ("norm", torch.bfloat16, (7,)), ("scale", torch.float16, ()), ("none", torch.int8, (0, 4)))


@pytest.fixture
def directory() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="rws-tests-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def session() -> str:
    return uuid.uuid4().hex[:12]


@pytest.fixture
def store(session: str, directory: str) -> Iterator[SnapshotStore]:
    with SnapshotStore(session, directory, 2) as made:
        yield made


@pytest.fixture
def plan() -> Plan:
    return Plan.from_metadata(ParamMeta(*each) for each in TENSORS)


class Stage:
    """Stages snapshots the way a trainer and a coordinator do, and keeps the writer's maps between them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.writer = SlotWriter()

    def weights(self, seed: int, plan: Plan | None = None) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            spec.name: torch.randint(-100, 100, spec.shape, generator=generator).to(spec.torch_dtype)
            for spec in (plan or self.plan).tensors
        }

    def write(self, address: Mapping[str, Any], seed: int, plan: Plan | None = None) -> Packed:
        plan = plan or self.plan
        return self.writer.write(address, plan, iter(self.weights(seed, plan).items()), progress_bytes=64)

    def opened(self, store: SnapshotStore, *, plan: Plan | None = None, overlap: bool = False) -> Mapping[str, Any]:
        """The address of a new snapshot's slot."""
        plan = plan or self.plan
        return store.open_slot(uuid.uuid4().hex, plan.digest, plan.num_bytes, overlap)

    def sealed(self, store: SnapshotStore, seed: int = 0, *, plan: Plan | None = None, overlap: bool = False) -> tuple[str, str]:
        """Open, write and seal a snapshot: its id and its weights digest."""
        plan = plan or self.plan
        address = self.opened(store, plan=plan, overlap=overlap)
        digest = self.write(address, seed, plan).digest
        store.seal(address["snapshot"], digest)
        return address["snapshot"], digest

    def committed(self, store: SnapshotStore, seed: int = 0) -> str:
        snapshot, _ = self.sealed(store, seed)
        store.mark_committed(snapshot)
        return snapshot

    def open(self, address: Mapping[str, Any], *, limit_s: float = LIMIT_S, plan: Plan | None = None) -> HostDelivery:
        return HostReceiver().open(plan or self.plan, {"slot": dict(address), "limit_s": limit_s})


@pytest.fixture
def stage(plan: Plan) -> Iterator[Stage]:
    made = Stage(plan)
    yield made
    made.writer.close()


@pytest.fixture
def same() -> Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], bool]:
    """Whether two sets of tensors are equal, names and order included."""

    def compare(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
        return list(left) == list(right) and all(torch.equal(a, b) for a, b in zip(left.values(), right.values(), strict=True))

    return compare


@pytest.fixture
def is_held() -> Callable[[Mapping[str, Any]], bool]:
    """Whether the kernel counts a slot as leased by anybody."""

    def ask(address: Mapping[str, Any]) -> bool:
        fd = os.open(f"{address['directory']}/{address['name']}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    return ask


@pytest.fixture
def wait_gone() -> Callable[[int], None]:
    """Wait until a process, anybody's, has ended."""

    def wait(pid: int) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            ready, _, _ = select.select([pidfd], [], [], LIMIT_S)
            assert ready, f"process {pid} is still there after {LIMIT_S} s"
        finally:
            os.close(pidfd)

    return wait


class Child:
    """Another process, running ``code``; it says when it got somewhere, and is killed where it stands."""

    def __init__(self, code: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 2 * LIMIT_S)
        assert ready, "the child said nothing"
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        """SIGKILL. On return the kernel has closed all that it had open."""
        self.process.kill()
        self.process.wait(LIMIT_S)

    def end(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    with contextlib.ExitStack() as ends:

        def start(code: str, *arguments: str) -> Child:
            made = Child(code, *arguments)
            ends.callback(made.end)
            return made

        yield start
