"""The writing end, a trainer's or a relay's: fills a slot that the store gave it, and says in the header how far it got.

It creates, seals and unlinks nothing. While it writes it holds the slot's lease, so that a slot whose writer is late is never given to
another snapshot under its hands.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch

from ray_weightsync.transports.host.files import lease, open_slot_file
from ray_weightsync.transports.host.layout import (
    HEADER_BYTES,
    FileState,
    HeaderPage,
    SlotAddress,
    SlotError,
    check_address,
)
from ray_weightsync.transports.host.pages import map_file, map_pages_in
from ray_weightsync.weights.packing import Packed, join, pack
from ray_weightsync.weights.plan import Plan

Fill = Callable[[torch.Tensor, Callable[[int], None]], Packed]
"""Writes a payload (flat uint8) from its start to its end, and tells the function it is given how many bytes are final."""


class _MappedSlot:
    """A slot's file, open and mapped for writing.

    Attributes:
        written: A thread is at it.
        wanted: It is to be kept when none is.
    """

    def __init__(self, fd: int, address: SlotAddress) -> None:
        mapped = map_file(fd, HEADER_BYTES + address["num_bytes"], private=False)
        map_pages_in(mapped)
        self.payload = torch.frombuffer(mapped, dtype=torch.uint8)[HEADER_BYTES:]
        self.header = HeaderPage(fd, writable=True)
        self.fd = fd
        self.written, self.wanted = False, True

    def close(self) -> None:
        del self.payload  # unmapped with the last reference: an error's traceback may still hold a view
        self.header.close()
        os.close(self.fd)


class SlotWriter:
    """Writes snapshots into slots. Keeps the maps of slots it knows, as mapping anew costs more than copying.

    A context manager. Thread-safe, as a thread that is late may still write to a slot that was taken from it while another one writes to
    the next: a slot is forgotten, by that or by `close`, only when nobody writes to it any more.
    """

    def __init__(self) -> None:
        self._mapped: dict[tuple[str, str], _MappedSlot] = {}
        self._lock = threading.Lock()

    def write(self, address: Mapping[str, Any], plan: Plan, pairs: Iterable[tuple[str, torch.Tensor]], *, progress_bytes: int) -> Packed:
        """Pack ``pairs`` into the slot.

        Args:
            address: The slot, as the store's ``open_slot`` named it.
            plan: What is written, in which order and where.
            pairs: ``(name, tensor)`` of the plan, in its order.
            progress_bytes: How often receivers that read behind the watermark see progress, in bytes. At least 1.

        Returns:
            What was packed; its digest is what the store seals the slot with.

        Raises:
            SlotError: if the address is not valid or not of this plan, or the slot is not, or no longer, this snapshot's.
            ConfigError: if ``pairs`` disagrees with the plan.
            OSError: if the slot cannot be opened or mapped.
            Exception: whatever ``pairs`` raises. The slot stays unsealed: the store is to discard it.
        """

        def fill(payload: torch.Tensor, progress: Callable[[int], None]) -> Packed:
            return pack(pairs, plan, payload, on_progress=progress, progress_bytes=progress_bytes)

        return self.fill(address, plan, fill)

    def copy(self, address: Mapping[str, Any], plan: Plan, pieces: Iterable[memoryview]) -> Packed:
        """Copy a packed payload of ``plan`` that comes in pieces into the slot, digesting what arrives.

        Raises:
            ConfigError: if there are fewer or more bytes than the plan has.
            SlotError, OSError, Exception: as of `write`.
        """

        def fill(payload: torch.Tensor, progress: Callable[[int], None]) -> Packed:
            return join(pieces, plan, payload, on_progress=progress)

        return self.fill(address, plan, fill)

    def fill(self, address: Mapping[str, Any], plan: Plan, fill: Fill) -> Packed:
        """Have ``fill`` write a packed payload of ``plan`` into the slot.

        Raises:
            SlotError, OSError, Exception: as of `write`.
        """
        at = check_address(address)
        if at["plan"] != plan.digest or at["num_bytes"] != plan.num_bytes:
            raise SlotError(f"slot {at['name']} was opened for plan {at['plan']}, not for {plan.digest} ({plan.num_bytes} bytes)")
        with self._leased(at) as slot:
            header = slot.header.read()
            header.check_against(at)
            if header.state is not FileState.WRITING or header.watermark:
                raise SlotError(
                    f"slot {at['name']} cannot be written: it is {header.state.name}, {header.watermark} bytes were written before"
                )

            def progress(num_bytes: int) -> None:
                if slot.header.state != FileState.WRITING:
                    raise SlotError(f"snapshot {at['snapshot']} was given up by its store while it was being written")
                slot.header.watermark = num_bytes

            return fill(slot.payload, progress)

    def close(self) -> None:
        """Unmap everything; what is being written to, when that has ended. Idempotent."""
        with self._lock:
            for slot in self._mapped.values():
                slot.wanted = False
            self._forget()

    def __enter__(self) -> SlotWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @contextlib.contextmanager
    def _leased(self, address: SlotAddress) -> Iterator[_MappedSlot]:
        key = (address["directory"], address["name"])
        with self._lock:
            self._forget()
            slot = self._mapped.get(key)
            if slot is not None and slot.written:  # the lease is the open file's: it would not keep the two apart
                raise SlotError(f"slot {address['name']} is still being written by another thread, which came too late")
            slot = self._open(slot, key, address)
            slot.written = True
        try:
            yield slot
        finally:
            with self._lock:
                slot.written = False
                fcntl.flock(slot.fd, fcntl.LOCK_UN)
                self._forget()

    def _open(self, slot: _MappedSlot | None, key: tuple[str, str], address: SlotAddress) -> _MappedSlot:
        if slot is not None:
            lease(slot.fd, address)
            return slot
        fd = open_slot_file(address, writable=True)
        try:
            self._mapped[key] = _MappedSlot(fd, address)
        except BaseException:
            os.close(fd)
            raise
        return self._mapped[key]

    def _forget(self) -> None:
        """Unmap the slots that nobody writes to, if they are unlinked or not wanted any more."""
        for key, slot in list(self._mapped.items()):
            # The names of unlinked ones never come back, and a map of ours would keep their memory.
            if not slot.written and (not slot.wanted or os.fstat(slot.fd).st_nlink == 0):
                del self._mapped[key]
                slot.close()
