"""What a slot's address and its file's header look like, and what is checked before either is believed.

A file is one header page and the payload. The header's fixed part names what the payload is; the state word and the watermark
change while it is written and are read by other processes at that time, so they are only touched as single aligned words. The
file never leaves its machine: integers have the machine's byte order, which those words have anyway.

    0    magic      8 bytes
    8    format     uint32
    12   state      uint32    written last, whenever something becomes true by it
    16   num_bytes  uint64    payload, padding included; the file has exactly 4096 more
    24   snapshot   32 bytes  hex id
    56   plan       64 bytes  hex digest, NUL padded
    120  digest     64 bytes  hex digest of the weights, NUL padded; empty until sealed
    192  watermark  uint64    payload bytes that are final; on a cache line of its own
    4096 payload

This module opens no file (`files`) and copies no weights (`writer`, `receiver`).
"""

from __future__ import annotations

import enum
import mmap
import os
import re
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from ray_weightsync.transports.host.janitor import SESSION_PATTERN, SLOT_NAME

HEADER_BYTES = 4096
MAGIC = b"RWSSLOT\0"
FORMAT = 1
PAYLOAD_ALIGN = 64
MAX_NUM_BYTES = 1 << 62

_FIXED = struct.Struct("=8sIIQ32s64s64s")
_STATE_WORD = 3  # of 4 bytes
_WATERMARK_WORD = 24  # of 8 bytes
_DIGEST_AT = slice(120, 184)
_SESSION = re.compile(SESSION_PATTERN)
_SNAPSHOT = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"[0-9a-f]{16,64}")


class SlotError(ValueError):
    """A slot is not what it should be: another snapshot's, not sealed, given up, tampered with, or asked for in the wrong state."""


class NoRoomError(Exception):
    """There is no shared memory left for a slot. Nothing was kept of the attempt.

    Attributes:
        needed_bytes: What the slot needs.
        available_bytes: What was to be had.
        directory: Where.
    """

    def __init__(self, needed_bytes: int, available_bytes: int, directory: str) -> None:
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.directory = directory
        super().__init__(
            f"no shared memory left in {directory}: a slot of {needed_bytes} bytes ({needed_bytes / 1e9:.3g} GB) is needed,"
            f" {available_bytes} bytes ({available_bytes / 1e9:.3g} GB) are available. Make it larger (docker run --shm-size=...,"
            " a Kubernetes emptyDir with medium: Memory, mount -o remount,size=...), or name a larger memory-backed directory with"
            " Host(directory=...)."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.needed_bytes, self.available_bytes, self.directory))


class FileState(enum.IntEnum):
    """What a slot's header says of its payload."""

    WRITING = 1
    SEALED = 2
    ABORTED = 3


class SlotAddress(TypedDict):
    """Where a snapshot lies, as it travels to trainers and engines: plain JSON types.

    ``num_bytes`` is the payload with padding; ``overlap`` says whether it may be read while it is written.
    """

    directory: str
    name: str
    snapshot: str
    plan: str
    num_bytes: int
    overlap: bool


def check_session(session: object) -> str:
    """``session``, if it can be part of a file name.

    Raises:
        SlotError: if not.
    """
    return _matching("session", session, _SESSION, "8 to 32 lower-case letters and digits")


def check_snapshot(snapshot: object) -> str:
    """``snapshot``, if it is a snapshot id. Raises `SlotError` if not."""
    return _matching("snapshot", snapshot, _SNAPSHOT, "32 hex digits")


def check_digest(what: str, digest: object) -> str:
    """``digest``, if it is the hex digest of a plan or of weights. Raises `SlotError` if not."""
    return _matching(what, digest, _DIGEST, "16 to 64 hex digits")


def check_num_bytes(num_bytes: object) -> int:
    """``num_bytes``, if a payload can have that size. Raises `SlotError` if not."""
    if isinstance(num_bytes, bool) or not isinstance(num_bytes, int) or not 0 <= num_bytes <= MAX_NUM_BYTES or num_bytes % PAYLOAD_ALIGN:
        raise SlotError(f"num_bytes must be a multiple of {PAYLOAD_ALIGN} from 0 to {MAX_NUM_BYTES}, not {num_bytes!r}")
    return num_bytes


def check_directory_name(directory: object) -> str:
    """``directory``, if it is an absolute path in its plainest form. Raises `SlotError` if not."""
    plain = isinstance(directory, str) and re.fullmatch(r"(/[^/\0]+)+", directory) and os.path.normpath(directory) == directory
    if not isinstance(directory, str) or not plain:
        raise SlotError(f"directory must be an absolute path without '..', '//' or a '/' at its end, not {directory!r}")
    return directory


def check_address(value: object) -> SlotAddress:
    """A slot address that came over a wire, with every field validated. Nothing is opened.

    Raises:
        SlotError: naming the field.
    """
    if not isinstance(value, Mapping):
        raise SlotError(f"a slot address must be a mapping, not {type(value).__name__}")
    if set(value) != set(SlotAddress.__annotations__):
        raise SlotError(f"a slot address has the fields {sorted(SlotAddress.__annotations__)}, not {sorted(map(str, value))}")
    overlap = value["overlap"]
    if not isinstance(overlap, bool):
        raise SlotError(f"overlap must be True or False, not {overlap!r}")
    return SlotAddress(
        directory=check_directory_name(value["directory"]),
        name=_matching("name", value["name"], SLOT_NAME, "rws-<session>-<number>"),
        snapshot=check_snapshot(value["snapshot"]),
        plan=check_digest("plan", value["plan"]),
        num_bytes=check_num_bytes(value["num_bytes"]),
        overlap=overlap,
    )


def _matching(what: str, value: object, pattern: re.Pattern[str], wanted: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise SlotError(f"{what} must be {wanted}, not {value!r}")
    return value


@dataclass(frozen=True, kw_only=True)
class Header:
    """One reading of a header page.

    Attributes:
        state: What it says of the payload.
        num_bytes: Payload bytes, padding included.
        snapshot: Whose bytes these are.
        plan: Digest of the plan by which they are laid out.
        digest: Digest of the weights; empty until sealed.
        watermark: Payload bytes that are final.
    """

    state: FileState
    num_bytes: int
    snapshot: str
    plan: str
    digest: str = ""
    watermark: int = 0

    @classmethod
    def parse(cls, page: bytes, *, state: int, watermark: int) -> Header:
        """The header of which ``page`` is a copy made after its words ``state`` and ``watermark`` were loaded, in that order.

        Raises:
            SlotError: naming the field that is wrong, or wrong beside the others.
        """
        magic, version, _, num_bytes, snapshot, plan, digest = _FIXED.unpack_from(page)
        if magic != MAGIC:
            raise SlotError(f"not a slot of ours: its header begins with {magic!r}")
        if version != FORMAT:
            raise SlotError(f"the slot has format {version}, this version reads {FORMAT}; install the same ray_weightsync on both sides")
        if state not in FileState.__members__.values():
            raise SlotError(f"the header's state {state} is none that we know")
        sealed = state == FileState.SEALED
        check_num_bytes(num_bytes)
        if watermark > num_bytes or (sealed and watermark != num_bytes):
            raise SlotError(f"the header's watermark is {watermark} of {num_bytes} bytes in state {FileState(state).name}")
        return cls(
            state=FileState(state),
            num_bytes=num_bytes,
            snapshot=check_snapshot(_text("snapshot", snapshot)),
            plan=check_digest("plan", _text("plan", plan)),
            digest=check_digest("digest", _text("digest", digest)) if sealed else "",  # before, the store may be writing it just now
            watermark=watermark,
        )

    def check_against(self, address: SlotAddress) -> None:
        """Raise `SlotError` unless this is the header of the snapshot that ``address`` names."""
        for field in ("snapshot", "plan", "num_bytes"):
            found, wanted = getattr(self, field), address[field]
            if found != wanted:
                raise SlotError(f"{address['name']} holds {field} {found}, not {wanted}: it is another snapshot's slot by now")


def _text(what: str, raw: bytes) -> str:
    text = raw.rstrip(b"\0")
    if not text.isascii():
        raise SlotError(f"the header's {what} is not text: {raw!r}")
    return text.decode("ascii")


class HeaderPage:
    """A slot's header page, mapped. The state word and the watermark are loaded and stored as single words, in order with the payload.

    Args:
        fd: The slot's open file. It may be closed afterwards.
        writable: Whether this process may change the header.
    """

    def __init__(self, fd: int, *, writable: bool) -> None:
        self._map = mmap.mmap(fd, HEADER_BYTES, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        self._page = memoryview(self._map)
        # cast views copy a whole word at a time; struct's "=" and "<" forms may go byte by byte, and a reader would see half of one
        self._words = self._page.cast("I")
        self._longs = self._page.cast("Q")
        self._lock = threading.Lock()

    def read(self) -> Header:
        """All of the header, checked. Raises `SlotError` if it is not a valid one."""
        state = self.state
        watermark = self.watermark
        return Header.parse(bytes(self._page), state=state, watermark=watermark)

    @property
    def state(self) -> int:
        """The state word as it is now."""
        state = self._words[_STATE_WORD]
        self._fence()
        return state

    @state.setter
    def state(self, state: FileState) -> None:
        self._fence()
        self._words[_STATE_WORD] = state

    @property
    def watermark(self) -> int:
        """Payload bytes that are final. They may be read after this returned."""
        watermark = self._longs[_WATERMARK_WORD]
        self._fence()
        return watermark

    @watermark.setter
    def watermark(self, num_bytes: int) -> None:
        self._fence()
        self._longs[_WATERMARK_WORD] = num_bytes

    def begin(self, *, num_bytes: int, snapshot: str, plan: str) -> None:
        """Make it the header of a snapshot that is about to be written. The caller holds the exclusive lock, so nobody reads meanwhile."""
        _FIXED.pack_into(self._page, 0, MAGIC, FORMAT, FileState.ABORTED, num_bytes, snapshot.encode(), plan.encode(), b"")
        self._longs[_WATERMARK_WORD] = 0
        self.state = FileState.WRITING

    def seal(self, digest: str) -> None:
        """Write the weights digest, then the sealed state."""
        self._page[_DIGEST_AT] = digest.encode().ljust(64, b"\0")
        self.state = FileState.SEALED

    def close(self) -> None:
        """Unmap it. Idempotent."""
        for view in (self._words, self._longs, self._page):
            view.release()
        self._map.close()

    def _fence(self) -> None:
        # x86 keeps stores in order, and loads; Arm does not. A release followed by an acquire is a full barrier on both.
        with self._lock:
            pass
        with self._lock:
            pass
