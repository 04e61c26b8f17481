"""Opening what others made: no link is followed, and nothing is believed that another user could have put there.

Both ends open slots here, under the lease that keeps the store from giving the slot away. Creating and unlinking is the store's.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat

from ray_weightsync.transports.host.janitor import SAFE_OPEN
from ray_weightsync.transports.host.layout import HEADER_BYTES, SlotAddress, SlotError, check_directory_name

NOT_SEEN = (
    "not seen from here; this process is on another node, or in a container with a shared memory of its own (share it: docker run"
    " --ipc=host, or one volume for both)"
)
OTHER_USER = "it is another user's file; trainer, engines and store must run as one user on a node"


def open_directory(directory: str) -> int:
    """Open the directory of the slots. Others may write to it: what keeps us safe is what `check_file` asks of each file.

    Raises:
        OSError: if it is not there.
        SlotError: if it is a link or no directory, or the name is not a plain absolute one or leads through a link.
    """
    check_directory_name(directory)
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | SAFE_OPEN)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise SlotError(f"{directory} is a link or no directory; name the memory-backed directory itself, such as /dev/shm") from error
        raise
    try:
        real = os.path.realpath(directory)
        if real != directory:
            raise SlotError(f"{directory} leads through a symbolic link; name {real} instead")
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_file(directory: str, name: str, *, writable: bool) -> int:
    """Open one of our files. Nothing is known of it yet but that it is no link and lies in that directory.

    Raises:
        OSError: of the same type, saying what to look at.
        SlotError: if it is a link, or see `open_directory`.
    """
    path = f"{directory}/{name}"
    directory_fd = open_directory(directory)
    try:
        return os.open(name, (os.O_RDWR if writable else os.O_RDONLY) | SAFE_OPEN, dir_fd=directory_fd)
    except FileNotFoundError as error:
        raise FileNotFoundError(error.errno, f"{NOT_SEEN}, or the store that made the file is gone", path) from error
    except PermissionError as error:
        raise PermissionError(error.errno, f"{OTHER_USER}; this process runs as user {os.geteuid()}", path) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise SlotError(f"{path} is a symbolic link, none of our files is") from error
        raise
    finally:
        os.close(directory_fd)


def check_file(status: os.stat_result, path: str) -> None:
    """Raise `SlotError` unless a file is regular, this user's, of mode 0600 and has one name."""
    if not stat.S_ISREG(status.st_mode):
        raise SlotError(f"{path} is not a regular file")
    if status.st_uid != os.geteuid():
        raise SlotError(f"{path}: {OTHER_USER}; it is user {status.st_uid}'s, this process runs as {os.geteuid()}")
    if stat.S_IMODE(status.st_mode) != 0o600:
        raise SlotError(f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, our files have 0600")
    if status.st_nlink == 0:
        raise SlotError(f"{path} was removed: its store gave it up or is gone")
    if status.st_nlink != 1:
        raise SlotError(f"{path} has {status.st_nlink} names, our files have one")


def open_slot_file(address: SlotAddress, *, writable: bool) -> int:
    """Open the slot at ``address`` under a lease. The caller closes it.

    Raises:
        OSError, SlotError: see `open_file` and `lease`.
    """
    fd = open_file(address["directory"], address["name"], writable=writable)
    try:
        lease(fd, address)
    except BaseException:
        os.close(fd)
        raise
    return fd


def lease(fd: int, address: SlotAddress) -> None:
    """Take the shared lock on an open slot, then check that the file is one of ours and has the size that ``address`` says.

    The lock belongs to the open file, and a map keeps the open file: the lease lasts until ``fd`` and all maps made of it are gone,
    or until it is unlocked. While it lasts the store gives the slot to nobody else and takes no page from it.

    Raises:
        SlotError: if the slot is being given away just now, or the file is not what it should be; it is not held then.
    """
    path = f"{address['directory']}/{address['name']}"
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise SlotError(f"{path} is being given to another snapshot, or was given up") from error
    try:
        status = os.fstat(fd)  # after the lock: from here on the store does not change it
        check_file(status, path)
        wanted = HEADER_BYTES + address["num_bytes"]
        if status.st_size != wanted:
            raise SlotError(f"{path} has {status.st_size} bytes; the header and a payload of {address['num_bytes']} have {wanted}")
    except BaseException:
        fcntl.flock(fd, fcntl.LOCK_UN)
        raise
