"""What many rounds leave behind: no more than two did. Looked at from outside, in ``/proc`` and ``/dev/shm``."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections import Counter
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
WARM_UP_BYTES, DRIFT_BYTES = 24 << 20, 16 << 20
"""What a process may take more after the first hundred rounds, and after each later hundred: Ray's own buffers, which fill up with
its first thousand calls (10 MB seen, then 0.3 MB a hundred rounds, 6 MB in the process that runs all tests), and fragmentation.
A payload kept per round would be 100 MB."""

RAYS_SOCKETS = 8
"""How many connections Ray may have more: it dials some of them late. One left per round would be 100."""

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
    """What one process holds.

    Attributes:
        files: Its open files and pipes.
        sockets: Its sockets and event descriptors, which are all Ray's.
        threads: By name, without the timers and pollers that gRPC starts and ends as it likes.
    """

    rss_bytes: int
    files: int
    sockets: int
    threads: Counter[str]
    children: int

    @classmethod
    def by(cls, pid: int) -> Held:
        status = Path(f"/proc/{pid}/status").read_text()
        rss_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
        targets = [target for each in Path(f"/proc/{pid}/fd").iterdir() if (target := _target(each)) is not None]
        sockets = sum(target.startswith(("socket:", "anon_inode:")) for target in targets)
        names = [name for each in Path(f"/proc/{pid}/task").iterdir() if (name := _comm(each)) is not None]
        threads = Counter(name for name in names if not name.startswith(("grpc", "event_engine")))
        return cls(rss_kb << 10, len(targets) - sockets, sockets, threads, len(psutil.Process(pid).children(recursive=True)))

    def more_than(self, before: Held, allowance_bytes: int) -> str | None:
        """What it holds more of than before, in words."""
        if self.rss_bytes > before.rss_bytes + allowance_bytes:
            return f"{self.rss_bytes - before.rss_bytes} bytes"
        if self.files > before.files or self.sockets > before.sockets + RAYS_SOCKETS:
            return f"{self.files - before.files} files, {self.sockets - before.sockets} sockets"
        if self.threads - before.threads:
            return f"threads {dict(self.threads - before.threads)}"
        return f"{self.children - before.children} children" if self.children > before.children else None


def _target(fd: Path) -> str | None:
    with contextlib.suppress(FileNotFoundError):  # closed meanwhile
        return str(fd.readlink())
    return None


def _comm(task: Path) -> str | None:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
        return (task / "comm").read_text().strip()
    return None


@dataclass(frozen=True)
class Session:
    """The processes of one session, and its files."""

    pids: dict[str, int]
    janitor: int
    token: str

    @classmethod
    def of(cls, sync: rws.WeightSync, engines: list[Any]) -> Session:
        """To be called after its first round: before, there is no store."""
        told = ray.get(_in(sync.coordinator, _coordinator_and_store), timeout=LIMIT_S)
        pids = {"driver": os.getpid(), "coordinator": told["coordinator"], "store": told["store"]}
        for number, engine in enumerate(engines):
            pids[f"engine {number}"] = ray.get(_in(engine, lambda actor: os.getpid()), timeout=LIMIT_S)
        return cls(pids, told["janitor"], told["session"])

    def files(self) -> list[str]:
        return [each.name for each in SHM.glob(f"rws-{self.token}*")]

    def sizes(self) -> list[int]:
        """Of its files; their names count on, as no name is used twice."""
        return sorted((SHM / name).stat().st_size for name in self.files())

    def held(self) -> dict[str, Held]:
        gc.collect()
        return {name: Held.by(pid) for name, pid in self.pids.items()}


def _coordinator_and_store(actor: Any) -> dict[str, Any]:
    """Run in the coordinator: the test's own process must not hold a connection to the store."""
    (store,) = actor._coordinator._parts.staging.copies.stores._actors.values()
    name = ray.get(store.probe.remote())["name"]
    return {
        "coordinator": os.getpid(),
        "store": ray.get(store.__ray_call__.remote(lambda actor: os.getpid())),
        "janitor": ray.get(store.stats.remote()).janitor_pid,
        "session": name.split("-")[1],
    }


def _in(actor: Any, function: Callable[[Any], Any]) -> Any:
    return actor.__ray_call__.remote(function)


def more(before: dict[str, Held], now: dict[str, Held], allowance_bytes: int) -> dict[str, str]:
    """What each process holds more of than before."""
    return {name: words for name, held in now.items() if (words := held.more_than(before[name], allowance_bytes)) is not None}


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether it holds before long: connections and processes end a moment after the call that ended them."""
    deadline = time.monotonic() + LIMIT_S / 2
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def watch_their_owners(held: dict[str, Held]) -> bool:
    """Whether coordinator and store have asked after their owners once: Ray keeps a connection and two threads for that."""
    return all("global.accessor" in held[name].threads for name in ("coordinator", "store"))


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
def test_a_hundred_rounds_leave_no_more_than_two_did(engines: list[Any], overlap: bool, caplog: pytest.LogCaptureFixture) -> None:
    with rws.WeightSync.attach(engines, transport=rws.Host(overlap=overlap, bucket_bytes=1 << 16)) as sync:
        some_rounds(sync, range(2))
        session = Session.of(sync, engines)
        assert eventually(lambda: watch_their_owners(session.held()))
        sizes, held = session.sizes(), session.held()
        for rounds, allowance_bytes in ((range(2, ROUNDS), WARM_UP_BYTES), (range(ROUNDS, 2 * ROUNDS), DRIFT_BYTES)):
            some_rounds(sync, rounds)
            assert session.sizes() == sizes
            assert eventually(lambda held=held, limit=allowance_bytes: not more(held, session.held(), limit)), more(
                held, session.held(), allowance_bytes
            )
            held = session.held()
        last = make_large()
        sync.send_weights(last, version="last")
        inputs = torch.ones(1, 512)
        with torch.no_grad():
            assert all(torch.equal(each, last(inputs)) for each in ray.get([engine.forward.remote(inputs) for engine in engines]))
    assert "Unhandled error" not in caplog.text, "Ray logs every error that nobody has fetched"


def test_sessions_that_come_and_go_leave_no_process_no_file_and_nothing_in_engines_and_driver(engines: list[Any]) -> None:
    sessions: list[Session] = []
    for cycle in range(CYCLES):
        with rws.WeightSync.attach(engines) as sync:
            some_rounds(sync, range(2))
            sessions.append(Session.of(sync, engines))
            assert sessions[-1].files() != []
            assert psutil.pid_exists(sessions[-1].janitor)
        assert sessions[-1].files() == []
        if cycle == 1:
            before = _lasting(sessions[-1]).held()
    ended = {pid for session in sessions for pid in (session.pids["coordinator"], session.pids["store"], session.janitor)}
    assert len(ended) == 3 * CYCLES
    assert eventually(lambda: not any(psutil.pid_exists(pid) for pid in ended)), [pid for pid in ended if psutil.pid_exists(pid)]
    lasting = _lasting(sessions[-1])
    assert eventually(lambda: not more(before, lasting.held(), WARM_UP_BYTES)), more(before, lasting.held(), WARM_UP_BYTES)


def _lasting(session: Session) -> Session:
    """The session without the processes that end with it."""
    return Session({name: pid for name, pid in session.pids.items() if name not in ("coordinator", "store")}, 0, session.token)
