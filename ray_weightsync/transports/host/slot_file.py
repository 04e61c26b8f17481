"""One slot's file in its owner's hands: how it gets its memory, and how it ends. Which slot is given to whom is the store's business."""

from __future__ import annotations

import contextlib
import errno
import os

from ray_weightsync.transports.host import janitor
from ray_weightsync.transports.host.layout import HEADER_BYTES, FileState, HeaderPage, NoRoomError, SlotError
from ray_weightsync.transports.host.memory import available_bytes
from ray_weightsync.transports.host.pages import reserve
from ray_weightsync.transports.host.slots import Slot

_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)


class SlotFile:
    """A slot, its open file and its mapped header.

    Attributes:
        slot: What the store uses it for; replaced with every move.
    """

    def __init__(self, slot: Slot, fd: int) -> None:
        self.slot = slot
        self.fd = fd
        self.header = HeaderPage(fd, writable=True)

    @classmethod
    def allocated(cls, directory_fd: int, directory: str, name: str, num_bytes: int) -> SlotFile:
        """A new file with all its memory, locked by us.

        Raises:
            NoRoomError: if there is no memory for it; nothing is left of it then.
            SlotError: if somebody else locks whatever appears in the directory.
        """
        needed = HEADER_BYTES + num_bytes
        if (available := available_bytes(directory_fd)) < needed:
            raise NoRoomError(needed, available, directory)
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | janitor.SAFE_OPEN, 0o600, dir_fd=directory_fd)
        try:
            os.fchmod(fd, 0o600)  # whatever the umask is
            if not janitor.try_lock(fd):
                raise SlotError(f"{directory}/{name} was locked by somebody else as soon as it was there")
            reserve(fd, needed)
            return cls(Slot(name=name, num_bytes=num_bytes), fd)
        except BaseException as error:
            unlink(directory_fd, name)
            os.close(fd)
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                raise NoRoomError(needed, available_bytes(directory_fd), directory) from error
            raise

    def end(self, directory_fd: int) -> bool:
        """Unlink it and let go of it. True if its memory is free now, False if it goes with somebody's last map."""
        unlink(directory_fd, self.slot.name)
        try:
            if self.header.state == FileState.WRITING:
                self.header.state = FileState.ABORTED  # receivers that wait behind the watermark fail at once
            return janitor.free(self.fd)
        finally:
            self.header.close()
            os.close(self.fd)


def unlink(directory_fd: int, name: str) -> None:
    """Unlink a file that may be gone already."""
    with contextlib.suppress(FileNotFoundError):  # somebody emptied the directory; that it is gone is all that is wanted
        os.unlink(name, dir_fd=directory_fd)
