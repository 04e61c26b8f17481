"""What many rounds leave behind: no more than two did. Looked at from outside, in ``/proc`` and ``/dev/shm``."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch

import ray_weightsync as rws
from tests.ray.session.conftest import LIMIT_S

ROUNDS = 100
CYCLES = 10
RSS_ALLOWANCE_BYTES = 12 << 20
"""For fragmentation and Ray's own bookkeeping of 1,000 calls. One payload kept per round would be 100 MB, one per ten rounds 10 MB."""

SHM = Path("/dev/shm")


def make_large() -> torch.nn.Module:
    """1 MB of weights."""
    return torch.nn.Sequential(torch.nn.Linear(512, 256), torch.nn.Tanh(), torch.nn.Linear(256, 512))


def make_wrong() -> torch.nn.Module:
    """1.2 MB that no engine here can load."""
    return torch.nn.Sequential(torch.nn.Linear(600, 256), torch.nn.Tanh(), torch.nn.Linear(256, 600))


@pytest.fixture(scope="module")
def engines(ray_cluster: str) -> Iterator[list[Any]]:
    engines = [rws.TorchEngine.remote(make_large) for _ in range(2)]
    yield engines
    for engine in engines:
        ray.kill(engine)


@dataclass(frozen=True)
class Held:
    """What one process holds."""

    rss_bytes: int
    fds: int
    threads: int
    children: int

    @classmethod
    def by(cls, pid: int) -> Held:
        status = Path(f"/proc/{pid}/status").read_text()
        rss_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
        count = {each: len(os.listdir(f"/proc/{pid}/{each}")) for each in ("fd", "task")}
        return cls(rss_kb << 10, count["fd"], count["task"], len(psutil.Process(pid).children(recursive=True)))


@dataclass(frozen=True)
class Session:
    """The processes of one session, and its files."""

    pids: dict[str, int]
    janitor: int
    token: str

    @classmethod
    def of(cls, sync: rws.WeightSync, engines: list[Any]) -> Session:
        """To be called after its first round: before, there is no store."""
        pid: Callable[[Any], int] = lambda actor: os.getpid()  # noqa: E731  # a named function would have to be importable there
        (store,) = ray.get(_in(sync.coordinator, lambda actor: list(actor._coordinator._staging._stores._actors.values())), timeout=LIMIT_S)
        pids = {"driver": os.getpid(), "coordinator": ray.get(_in(sync.coordinator, pid), timeout=LIMIT_S)}
        pids["store"] = ray.get(_in(store, pid), timeout=LIMIT_S)
        for number, engine in enumerate(engines):
            pids[f"engine {number}"] = ray.get(_in(engine, pid), timeout=LIMIT_S)
        owner = ray.get(store.probe.remote(), timeout=LIMIT_S)["name"]
        janitor = ray.get(store.stats.remote(), timeout=LIMIT_S).janitor_pid
        return cls(pids, janitor, max(owner.split("-"), key=len).partition(".")[0])

    def files(self) -> list[str]:
        return sorted(each.name for each in SHM.glob(f"rws-*{self.token}*"))

    def held(self) -> dict[str, Held]:
        gc.collect()
        return {name: Held.by(pid) for name, pid in self.pids.items()}


def _in(actor: Any, function: Callable[[Any], Any]) -> Any:
    return actor.__ray_call__.remote(function)


def more(before: dict[str, Held], now: dict[str, Held]) -> dict[str, tuple[Held, Held]]:
    """The processes that hold more than before: memory beyond the allowance, or one descriptor, thread or child."""
    return {
        name: (before[name], held)
        for name, held in now.items()
        if held.rss_bytes > before[name].rss_bytes + RSS_ALLOWANCE_BYTES
        or held.fds > before[name].fds
        or held.threads > before[name].threads
        or held.children > before[name].children
    }


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether it holds before long: connections and processes end a moment after the call that ended them."""
    deadline = time.monotonic() + LIMIT_S / 2
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def some_rounds(sync: rws.WeightSync, numbers: range, *, refuse_every: int = 10) -> None:
    """A round for each number; every tenth is staged and committed apart, and every tenth is one that the engines refuse."""
    module = make_large()
    for number in numbers:
        with torch.no_grad():
            module[0].bias.fill_(number)
        if number % refuse_every == 3:
            sync.commit_weights(sync.stage_weights(module, version=number))
        elif number % refuse_every == 6:
            with pytest.raises(rws.RoundAborted, match=r"0\.weight"):
                sync.send_weights(make_wrong(), version=number)
        else:
            sync.send_weights(module, version=number)


@pytest.mark.parametrize("overlap", [False, True], ids=["staged", "overlap"])
def test_a_hundred_rounds_leave_no_more_than_two_did(engines: list[Any], overlap: bool) -> None:
    with rws.WeightSync.attach(engines, transport=rws.Host(overlap=overlap, bucket_bytes=1 << 16)) as sync:
        some_rounds(sync, range(2))
        session = Session.of(sync, engines)
        before, files = session.held(), session.files()
        print(files, before)
        t=time.monotonic()
        some_rounds(sync, range(2, ROUNDS))
        print(time.monotonic()-t, session.files(), session.held())
        assert session.files() == files
        assert eventually(lambda: not more(before, session.held())), more(before, session.held())
        last = make_large()
        sync.send_weights(last, version="last")
        inputs = torch.ones(1, 512)
        with torch.no_grad():
            assert all(torch.equal(each, last(inputs)) for each in ray.get([engine.forward.remote(inputs) for engine in engines]))


def test_sessions_that_come_and_go_leave_no_process_no_file_and_nothing_in_engines_and_driver(engines: list[Any]) -> None:
    before: dict[str, Held] = {}
    for cycle in range(CYCLES):
        t=time.monotonic()
        with rws.WeightSync.attach(engines) as sync:
            some_rounds(sync, range(2))
            session = Session.of(sync, engines)
            assert session.files() != []
        ended = {session.pids["coordinator"], session.pids["store"], session.janitor}
        assert eventually(lambda: not any(psutil.pid_exists(pid) for pid in ended)), ended
        assert eventually(lambda: session.files() == []), session.files()
        lasting = Session({name: pid for name, pid in session.pids.items() if pid not in ended}, 0, session.token)
        print(cycle, time.monotonic()-t, lasting.held())
        if cycle == 1:
            before = lasting.held()
    assert eventually(lambda: not more(before, lasting.held())), more(before, lasting.held())
