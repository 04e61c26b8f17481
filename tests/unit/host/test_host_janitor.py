"""Who may unlink what, and that it happens however a store ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_weightsync.transports.host import janitor
from ray_weightsync.transports.host.store import SnapshotStore

SESSION = "deadbeef1234"


@pytest.fixture
def fd(directory: str) -> Iterator[int]:
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    yield opened
    os.close(opened)


def put(directory: str, *names: str) -> None:
    for name in names:
        Path(f"{directory}/{name}").touch(0o600)


def files(directory: str) -> list[str]:
    return sorted(os.listdir(directory))


# -- sweeping --------------------------------------------------------------------------------------------------------------------


def test_a_dead_sessions_files_are_unlinked_and_nothing_else(directory: str, fd: int) -> None:
    dead = [f"rws-{SESSION}-owner", f"rws-{SESSION}-0", f"rws-{SESSION}-17"]
    foreign = [
        f"rws-{SESSION}-x",
        f"rws-{SESSION}-1.bak",
        f"rws-{SESSION}",
        f"xrws-{SESSION}-1",
        f"rws-{SESSION}x-1",  # another session's, without an owner: somebody else's business
        f"rws-{SESSION.upper()}-1",
        "psm_1234",
    ]
    put(directory, *dead, *foreign)
    os.mkdir(f"{directory}/rws-{SESSION}-5")
    os.symlink("psm_1234", f"{directory}/rws-{SESSION}-6")
    os.mkfifo(f"{directory}/rws-{SESSION}-7", 0o600)
    assert janitor.reap_dead(fd) == [SESSION]
    assert files(directory) == sorted([*foreign, *(f"rws-{SESSION}-{n}" for n in (5, 6, 7))])


def test_a_living_session_is_left_alone(directory: str, fd: int) -> None:
    owner = janitor.own(fd, SESSION, limit_s=5)
    put(directory, f"rws-{SESSION}-0")
    assert janitor.reap(fd, SESSION) is False
    assert janitor.reap_dead(fd) == []
    assert files(directory) == [f"rws-{SESSION}-0", f"rws-{SESSION}-owner"]
    os.close(owner)  # as the kernel does for a dead process
    assert janitor.reap_dead(fd) == [SESSION]
    assert files(directory) == []


def test_another_users_session_is_left_alone(directory: str, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    put(directory, f"rws-{SESSION}-owner", f"rws-{SESSION}-0")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert janitor.reap_dead(fd) == []
    assert len(files(directory)) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_another_users_slot_in_a_dead_session_is_left_alone(directory: str, fd: int) -> None:
    put(directory, f"rws-{SESSION}-owner", f"rws-{SESSION}-0", f"rws-{SESSION}-1")
    os.chown(f"{directory}/rws-{SESSION}-1", 12345, 12345)
    janitor.reap_dead(fd)
    assert files(directory) == [f"rws-{SESSION}-1"]


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "socket"])
def test_an_owner_that_is_no_regular_file_stops_nobody(directory: str, fd: int, session: str, kind: str) -> None:
    path = f"{directory}/rws-{SESSION}-owner"
    if kind == "link":
        put(directory, "elsewhere")
        os.symlink("elsewhere", path)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        os.mkdir(path)
    else:
        import socket

        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path)
    before = files(directory)
    with SnapshotStore(session, directory, 2):
        pass
    assert files(directory) == before
    with pytest.raises(FileExistsError, match="living store"):
        janitor.own(fd, SESSION, limit_s=0)


def test_slots_whose_owner_file_somebody_removed_are_left_alone(directory: str, fd: int) -> None:
    put(directory, f"rws-{SESSION}-0")
    assert janitor.reap(fd, SESSION) is True
    assert files(directory) == [f"rws-{SESSION}-0"]


def test_a_dead_sessions_memory_comes_back_though_somebody_idle_still_has_it_open(directory: str, fd: int) -> None:
    put(directory, f"rws-{SESSION}-owner", f"rws-{SESSION}-0", f"rws-{SESSION}-1")
    for number in (0, 1):
        os.truncate(f"{directory}/rws-{SESSION}-{number}", 1 << 20)
    idle, leased = (os.open(f"{directory}/rws-{SESSION}-{number}", os.O_RDONLY) for number in (0, 1))
    import fcntl

    fcntl.flock(leased, fcntl.LOCK_SH)
    janitor.reap(fd, SESSION)
    assert (os.fstat(idle).st_size, os.fstat(leased).st_size) == (0, 1 << 20)
    os.close(idle)
    os.close(leased)


# -- owning ----------------------------------------------------------------------------------------------------------------------


def test_a_restarted_store_takes_over_from_its_dead_predecessor(directory: str, fd: int) -> None:
    put(directory, f"rws-{SESSION}-owner", f"rws-{SESSION}-0")
    owner = janitor.own(fd, SESSION, limit_s=5)
    assert files(directory) == [f"rws-{SESSION}-owner"]
    os.close(owner)


def test_an_owner_file_unlinked_between_creation_and_lock_is_made_again(directory: str, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real, swept = janitor.try_lock, []

    def sweeper_is_quicker(lock_fd: int) -> bool:
        if not swept:
            swept.append(True)
            assert janitor.reap(fd, SESSION), "unlocked, it looks dead"
        return real(lock_fd)

    monkeypatch.setattr(janitor, "try_lock", sweeper_is_quicker)
    owner = janitor.own(fd, SESSION, limit_s=5)
    assert os.path.samestat(os.fstat(owner), os.stat(f"{directory}/rws-{SESSION}-owner"))
    assert janitor.reap(fd, SESSION) is False
    os.close(owner)


def test_a_sweeper_that_comes_late_does_not_unlink_a_successors_files(directory: str, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    put(directory, f"rws-{SESSION}-owner")
    real, owners = janitor.try_lock, []

    def successor_is_quicker(lock_fd: int) -> bool:
        monkeypatch.setattr(janitor, "try_lock", real)
        owners.append(janitor.own(fd, SESSION, limit_s=5))
        put(directory, f"rws-{SESSION}-0")
        return real(lock_fd)

    monkeypatch.setattr(janitor, "try_lock", successor_is_quicker)
    janitor.reap(fd, SESSION)
    assert files(directory) == [f"rws-{SESSION}-0", f"rws-{SESSION}-owner"]
    os.close(owners[0])


def test_there_is_one_owner_at_a_time_whoever_sweeps_meanwhile(directory: str, fd: int) -> None:
    owners, most, rounds, lock = 0, 0, 0, threading.Lock()
    errors: list[BaseException] = []

    def contend() -> None:
        nonlocal owners, most, rounds
        try:
            for _ in range(25):
                janitor.reap_dead(fd)
                owner = janitor.own(fd, SESSION, limit_s=120)
                with lock:
                    owners += 1
                    rounds += 1
                    most = max(most, owners)
                assert os.path.samestat(os.fstat(owner), os.stat(f"{directory}/rws-{SESSION}-owner"))
                with lock:
                    owners -= 1
                os.close(owner)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=contend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    assert most == 1
    assert rounds == 100


# -- the process -----------------------------------------------------------------------------------------------------------------

STORE = """
import sys
from ray_weightsync.transports.host.store import SnapshotStore
store = SnapshotStore(sys.argv[1], sys.argv[2], 2)
store.open_slot("a" * 32, "b" * 32, 1 << 20, False)
store.open_slot("c" * 32, "b" * 32, 1 << 20, True)
print(store.stats().janitor_pid, flush=True)
sys.stdin.read()
"""


def test_the_files_of_a_killed_store_go_at_once_and_its_janitor_with_them(
    directory: str, child: Callable[..., Any], wait_gone: Callable[[int], None]
) -> None:
    killed, other = child(STORE, SESSION, directory), child(STORE, "othersession", directory)
    pid, other_pid = int(killed.line()), int(other.line())
    assert len(files(directory)) == 6
    killed.kill()
    wait_gone(pid)
    assert files(directory) == ["rws-othersession-0", "rws-othersession-1", "rws-othersession-owner"]
    other.kill()
    wait_gone(other_pid)
    assert files(directory) == []


def test_should_the_janitor_be_killed_too_the_next_store_cleans_up(
    directory: str, session: str, child: Callable[..., Any], wait_gone: Callable[[int], None]
) -> None:
    killed = child(STORE, SESSION, directory)
    pid = int(killed.line())
    os.kill(pid, 9)
    wait_gone(pid)
    killed.kill()
    assert len(files(directory)) == 3
    with SnapshotStore(session, directory, 2):
        assert files(directory) == [f"rws-{session}-owner"]


def test_a_janitor_belongs_to_nobody_and_keeps_nothing_open(directory: str, session: str) -> None:
    inherited, other = os.pipe()
    os.set_inheritable(inherited, True)
    try:
        with SnapshotStore(session, directory, 2) as store:
            pid = store.stats().janitor_pid
            open_files = [os.readlink(f"/proc/{pid}/fd/{number}") for number in sorted(map(int, os.listdir(f"/proc/{pid}/fd")))]
            status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
            assert open_files[0].startswith("pipe:")
            assert open_files[1:] == [os.devnull, os.devnull, directory]
            assert os.readlink(f"/proc/{pid}/cwd") == "/"
            assert int(status["PPid"]) != os.getpid()
            assert os.getsid(pid) not in (os.getsid(0), os.getpid())
            assert int(status["VmRSS"].split()[0]) < 32 << 10, "kB; no torch, no ray"
    finally:
        os.close(inherited)
        os.close(other)


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_to_the_whole_job_does_not_send_the_janitor_home_early(
    directory: str, child: Callable[..., Any], wait_gone: Callable[[int], None], number: str
) -> None:
    import signal

    store = child(STORE, SESSION, directory)
    pid = int(store.line())
    os.kill(pid, getattr(signal, number))
    store.kill()
    wait_gone(pid)
    assert files(directory) == []


def test_a_janitor_that_cannot_start_says_why(directory: str) -> None:
    fds = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"(?s)did not start \(exit status 1\).*No such file"):
        janitor.start(f"{directory}/nowhere", SESSION)
    assert sorted(os.listdir("/proc/self/fd")) == fds


def test_the_janitors_program_needs_the_standard_library_alone() -> None:
    code = f"import runpy, sys; runpy.run_path({janitor.__file__!r}); print(any(name.startswith(('ray', 'torch')) for name in sys.modules))"
    told = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout == "False\n"
