"""Whose files may be unlinked, and the process that unlinks them when their store no longer can.

A session's files are named ``rws-<session>-<n>`` (a slot) and ``rws-<session>-owner``. The store holds an exclusive flock on the
owner file for its whole life, and the kernel takes the lock back however that life ends; so whoever gets the lock knows that the
store is dead, and only such files are ever unlinked. Three parties ask: a store that starts (for every session in its directory), a
store that closes, and the janitor of a store that was killed.

This file is also that janitor's program. It is run by path, in isolated mode, by an interpreter that imports nothing else of
this package (no torch, no ray: it lives as long as the store and should cost next to nothing), hence the standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
import stat
import subprocess
import sys
import time

SESSION_PATTERN = r"[a-z0-9]{8,32}"
SLOT_NAME = re.compile(rf"rws-({SESSION_PATTERN})-([0-9]{{1,12}})")
OWNER_NAME = re.compile(rf"rws-({SESSION_PATTERN})-owner")

SAFE_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Flags of every open of ours: no symbolic link is followed, no child inherits, and no fifo somebody put there blocks us."""

RETRY_S = 0.02
OWN_LIMIT_S = 5.0
"""Seconds a starting store waits for the janitor of its own former life."""
REAP_LIMIT_S = 10.0
"""Seconds a janitor waits for the lock after its store's end of the pipe closed; the kernel closes a dead process's files one by one."""
START_LIMIT_S = 100.0


def slot_name(session: str, number: int) -> str:
    """The base name of the ``number``-th slot of ``session``."""
    return f"rws-{session}-{number}"


def owner_name(session: str) -> str:
    """The base name of the file whose lock says that the store of ``session`` lives."""
    return f"rws-{session}-owner"


def try_lock(fd: int) -> bool:
    """Take the exclusive lock of an open file if nobody else holds it. True if it is held now."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_ours(status: os.stat_result) -> bool:
    """Whether a file is one that this user's stores could have made."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def free(fd: int) -> bool:
    """Give an unlinked slot's memory back now, if nobody holds a lease on it. Keeps the lock: close ``fd`` next.

    Idle maps that a writer keeps would otherwise pin the memory until it writes again. They are not touched before
    the writer holds the shared lock and has looked at the size again, so nobody meets the missing pages.
    """
    if not try_lock(fd):
        return False
    os.ftruncate(fd, 0)
    return True


def own(directory_fd: int, session: str, *, limit_s: float) -> int:
    """Become the owner of ``session``: create and lock its owner file, unlinking what a dead owner left.

    Returns:
        The open, locked file; the session is owned until it is closed.

    Raises:
        FileExistsError: if a living store has the session, or the name is another user's, for ``limit_s`` seconds.
    """
    name = owner_name(session)
    deadline = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(FileExistsError):
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | SAFE_OPEN, 0o600, dir_fd=directory_fd)
            try:
                os.fchmod(fd, 0o600)  # whatever the umask is
                # Between the creation and the lock the file looks like a dead store's, and a sweeper may unlink it. Only the lock
                # on the file that still has the name counts.
                if try_lock(fd) and _leads_to(directory_fd, name, fd):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
        if reap(directory_fd, session):
            continue
        if time.monotonic() > deadline:
            raise FileExistsError(errno.EEXIST, f"session {session!r} has a living store already, or the file is another user's", name)
        time.sleep(RETRY_S)


def reap(directory_fd: int, session: str) -> bool:
    """Unlink the files of ``session`` if its store is dead.

    Slots without an owner file are left alone: stores unlink the owner file last, so somebody else removed it, and the store may live.

    Returns:
        True if no owner file is left; False if its owner lives or the file is not ours.
    """
    name = owner_name(session)
    try:
        fd = os.open(name, os.O_RDWR | SAFE_OPEN, dir_fd=directory_fd)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV):
            return False  # another user's, a link, a socket, a folder: nothing that a store of ours made
        raise
    try:
        if not is_ours(os.fstat(fd)) or not try_lock(fd):
            return False
        if _leads_to(directory_fd, name, fd):  # else it was unlinked meanwhile, and the name may be a living store's by now
            for entry in os.listdir(directory_fd):
                match = SLOT_NAME.fullmatch(entry)
                if match and match[1] == session:
                    _unlink_slot(directory_fd, entry)
            os.unlink(name, dir_fd=directory_fd)
        return True
    finally:
        os.close(fd)


def reap_dead(directory_fd: int) -> list[str]:
    """Unlink the files of every session in the directory whose store is dead.

    Returns:
        The sessions that were cleaned up.
    """
    sessions = [match[1] for match in map(OWNER_NAME.fullmatch, os.listdir(directory_fd)) if match]
    return [session for session in sessions if reap(directory_fd, session)]


def _unlink_slot(directory_fd: int, name: str) -> None:
    try:
        fd = os.open(name, os.O_RDWR | SAFE_OPEN, dir_fd=directory_fd)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV):
            return
        raise
    try:
        if is_ours(os.fstat(fd)):
            os.unlink(name, dir_fd=directory_fd)
            free(fd)
    finally:
        os.close(fd)


def _leads_to(directory_fd: int, name: str, fd: int) -> bool:
    try:
        there = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(fd))


def start(directory: str, session: str) -> tuple[int, int]:
    """Start the janitor of ``session``, whose store is this process.

    It is told of the store's end by the kernel: the pipe that it reads closes with this process, SIGKILL included. It is no child
    of this process (Ray kills the children of a worker that exits) and keeps none of its files open.

    Returns:
        The janitor's pid, and the pipe's end to keep; closing it sends the janitor home.

    Raises:
        OSError: if it does not start, with its own words.
    """
    if not sys.executable:
        raise OSError("the janitor of shared memory cannot be started: sys.executable is not set in this process")
    reader, lifeline = os.pipe()
    try:
        command = [sys.executable, "-I", "-S", os.path.abspath(__file__), directory, session]
        with subprocess.Popen(
            command, stdin=reader, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/", start_new_session=True, text=True
        ) as process:
            try:
                said, complaint = process.communicate(timeout=START_LIMIT_S)
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0 or not said.strip().isdigit():
            raise OSError(f"the janitor of shared memory did not start (exit status {process.returncode}): {complaint.strip()[-500:]}")
        return int(said), lifeline
    except BaseException:
        os.close(lifeline)
        raise
    finally:
        os.close(reader)


def main(directory: str, session: str) -> None:
    """Wait until standard input ends, then unlink the files of ``session`` in ``directory``."""
    directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # sent to whole jobs; the store may still need us while it ends
    if os.fork():
        os._exit(0)  # the store waits for this one; the other belongs to init
    starter = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    os.close(nothing)
    os.write(starter, b"%d\n" % os.getpid())
    os.close(starter)  # the store has been waiting for this end of file: the janitor stands on its own
    while os.read(0, 4096):
        pass  # nobody writes; only the end matters
    deadline = time.monotonic() + REAP_LIMIT_S
    while not reap(directory_fd, session) and time.monotonic() < deadline:
        time.sleep(RETRY_S)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
