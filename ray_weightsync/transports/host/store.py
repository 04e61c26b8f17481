"""The owner of one node's slots: it alone creates, seals, reuses and unlinks them.

A slot is created and touched once, since fresh memory costs far more than a copy into it, and then reused, but only under an
exclusive lock: as long as anybody, a hung engine or a late writer, holds a lease, the slot is retired instead (unlinked; its memory goes
with the last map) and a fresh one takes its place. Whatever way this process ends, its files go: by `close`, by the janitor it
starts, or by the next store in the same directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import threading
import uuid
from collections import Counter
from collections.abc import Collection, Iterator
from types import TracebackType

from ray_weightsync.transports.host import janitor
from ray_weightsync.transports.host.files import open_directory
from ray_weightsync.transports.host.layout import (
    HEADER_BYTES,
    FileState,
    SlotAddress,
    SlotError,
    check_digest,
    check_num_bytes,
    check_session,
    check_snapshot,
)
from ray_weightsync.transports.host.slot_file import SlotFile, unlink
from ray_weightsync.transports.host.slots import Slot, SlotState, StoreStats, fitting, surplus

logger = logging.getLogger(__name__)


class SnapshotStore:
    """One session's slots on one node. A context manager; its methods may be called from several threads.

    Args:
        session: Part of the file names: 8 to 32 lower-case letters and digits, unique among the living sessions of the directory.
        directory: Absolute path of a memory-backed directory that trainer and engines on this node share.
        num_slots: Slots kept for reuse, at least 2. More exist for a while when more snapshots are staged or leases hang.

    Raises:
        SlotError: if an argument is not valid.
        FileExistsError: if a living store has the session.
        OSError: if the directory cannot be used or the janitor does not start.
    """

    def __init__(self, session: str, directory: str, num_slots: int) -> None:
        self.session = check_session(session)
        self.directory = directory
        if isinstance(num_slots, bool) or not isinstance(num_slots, int) or num_slots < 2:
            raise SlotError(f"num_slots must be an int of at least 2 (one committed, one being staged), not {num_slots!r}")
        self._num_slots = num_slots
        self._nonce = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._slots: dict[str, SlotFile] = {}
        self._numbers = itertools.count()
        self._turns = itertools.count(1)
        self._counts: Counter[str] = Counter()
        with contextlib.ExitStack() as undo:
            self._directory_fd = open_directory(directory)
            undo.callback(os.close, self._directory_fd)
            for dead in janitor.reap_dead(self._directory_fd):
                logger.info("unlinked what the dead session %s left in %s", dead, directory)
            owner_fd = janitor.own(self._directory_fd, session, limit_s=janitor.OWN_LIMIT_S)
            undo.callback(os.close, owner_fd)
            # Unlinked while it is locked, as unlocked files are anybody's to sweep, a successor's slots included.
            undo.callback(unlink, self._directory_fd, janitor.owner_name(session))
            os.write(owner_fd, self._nonce.encode())
            self._janitor_pid, lifeline = janitor.start(directory, session)
            undo.callback(os.close, lifeline)
            self._undo: contextlib.ExitStack | None = undo.pop_all()

    def open_slot(self, snapshot: str, plan_digest: str, num_bytes: int, overlap: bool) -> SlotAddress:
        """Give a slot to the writer of a new snapshot. The committed slot and those under lease are never taken.

        Args:
            snapshot: A fresh id, 32 hex digits.
            plan_digest: Digest of the plan that lays the payload out.
            num_bytes: The plan's payload bytes, padding included.
            overlap: Whether receivers may read behind the watermark before the slot is sealed.

        Raises:
            NoRoomError: if there is no memory for it. The store is as it was, but for spare slots of other sizes, which were given up.
            SlotError: if an argument is not valid or the snapshot has a slot already.
        """
        check_snapshot(snapshot)
        check_digest("plan", plan_digest)
        check_num_bytes(num_bytes)
        if not isinstance(overlap, bool):
            raise SlotError(f"overlap must be True or False, not {overlap!r}")
        with self._held():
            if any(held.slot.snapshot == snapshot for held in self._slots.values()):
                raise SlotError(f"snapshot {snapshot} has a slot already")
            held = self._reused(num_bytes) or self._allocated(num_bytes)
            held.slot = held.slot.given(snapshot=snapshot, plan=plan_digest, overlap=overlap, turn=next(self._turns))
            held.header.begin(num_bytes=num_bytes, snapshot=snapshot, plan=plan_digest)
            fcntl.flock(held.fd, fcntl.LOCK_UN)  # not before the header says whose it is now: a late writer must find that out
            return self._address(held.slot)

    def seal(self, snapshot: str, digest: str) -> None:
        """Declare a snapshot complete, with the digest of its weights. Repeating it with the same digest does nothing.

        Raises:
            SlotError: if the writer did not get to the end, the header was tampered with, or it is sealed with another digest.
        """
        check_digest("digest", digest)
        with self._held():
            held = self._of(snapshot)
            header = held.header.read()
            header.check_against(self._address(held.slot))
            if held.slot.state is not SlotState.WRITING:
                if header.digest != digest:
                    raise SlotError(f"snapshot {snapshot} is sealed with digest {header.digest}, not {digest}")
                return
            if header.watermark != header.num_bytes:
                raise SlotError(f"snapshot {snapshot} cannot be sealed: {header.watermark} of {header.num_bytes} bytes were written")
            held.slot = held.slot.moved(SlotState.SEALED, next(self._turns))
            held.header.seal(digest)

    def mark_committed(self, snapshot: str) -> None:
        """Make a sealed or formerly committed snapshot the committed one. The one before stays, until a staging needs its slot.

        Raises:
            SlotError: if it is unknown or not sealed.
        """
        with self._held():
            held = self._of(snapshot)
            if held.slot.state is SlotState.COMMITTED:
                return
            committed = held.slot.moved(SlotState.COMMITTED, next(self._turns))
            for other in self._slots.values():
                if other.slot.state is SlotState.COMMITTED:
                    other.slot = other.slot.moved(SlotState.FORMER, next(self._turns))
            held.slot = committed
            self._drop(surplus(self._known(), self._num_slots))

    def discard(self, snapshot: str) -> bool:
        """Give a snapshot up that is half written, sealed or formerly committed. Receivers that wait for its writer fail at once.

        Returns:
            False if there is no such snapshot (any more).

        Raises:
            SlotError: if it is the committed one.
        """
        check_snapshot(snapshot)
        with self._held():
            held = self._find(snapshot)
            if held is None:
                return False
            held.slot = held.slot.moved(SlotState.FREE, next(self._turns))
            held.header.state = FileState.ABORTED
            self._drop(surplus(self._known(), self._num_slots))
            return True

    def keep_only(self, snapshots: Collection[str]) -> dict[str, tuple[SlotAddress, str]]:
        """Give up every snapshot but these, and of these the ones that are not sealed: whoever wrote them writes for nobody any more.

        Returns:
            Where those that are kept lie and their digests, by snapshot.
        """
        with self._held():
            kept = {}
            for held in self._slots.values():
                slot = held.slot
                if slot.snapshot in snapshots and slot.state is not SlotState.WRITING:
                    kept[slot.snapshot] = (self._address(slot), held.header.read().digest)
                elif slot.state in (SlotState.WRITING, SlotState.SEALED, SlotState.FORMER):
                    held.slot = slot.moved(SlotState.FREE, next(self._turns))
                    held.header.state = FileState.ABORTED
            self._drop(surplus(self._known(), self._num_slots))
            return kept

    def address(self, snapshot: str) -> SlotAddress:
        """Where ``snapshot`` lies.

        Raises:
            SlotError: if the store does not have it (any more).
        """
        with self._held():
            return self._address(self._of(snapshot).slot)

    def probe(self) -> dict[str, str]:
        """What a receiver's ``see`` needs to prove that it sees this store's memory and its locks. Answers also during an allocation."""
        self._check_open()
        return {"directory": self.directory, "name": janitor.owner_name(self.session), "nonce": self._nonce}

    def stats(self) -> StoreStats:
        """What the store holds now. Answers also while a slot is being allocated, and after `close`."""
        slots = self._known()
        committed = [slot.snapshot for slot in slots if slot.state is SlotState.COMMITTED]
        return StoreStats(
            slots=len(slots),
            num_bytes=sum(HEADER_BYTES + slot.num_bytes for slot in slots),
            in_use=sum(slot.state in (SlotState.WRITING, SlotState.SEALED, SlotState.COMMITTED) for slot in slots),
            committed=committed[0] if committed else None,
            allocated=self._counts["allocated"],
            reused=self._counts["reused"],
            retired=self._counts["retired"],
            dropped=self._counts["dropped"],
            janitor_pid=self._janitor_pid,
        )

    def close(self) -> None:
        """Unlink everything and send the janitor home. Maps that others hold keep serving. Idempotent."""
        with self._lock:
            undo, self._undo = self._undo, None
            if undo is None:
                return
            with undo:
                for held in self._slots.values():
                    undo.callback(held.end, self._directory_fd)
                self._slots.clear()

    def __enter__(self) -> SnapshotStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        with self._lock:
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self._undo is None:
            raise SlotError(f"the snapshot store of session {self.session} is closed")

    def _known(self) -> list[Slot]:
        return [held.slot for held in list(self._slots.values())]

    def _find(self, snapshot: str) -> SlotFile | None:
        return next((held for held in self._slots.values() if held.slot.snapshot == snapshot), None)

    def _of(self, snapshot: str) -> SlotFile:
        held = self._find(check_snapshot(snapshot))
        if held is None:
            raise SlotError(f"snapshot {snapshot} has no slot: it was never opened here, was given up, or its slot went to another one")
        return held

    def _address(self, slot: Slot) -> SlotAddress:
        return SlotAddress(
            directory=self.directory, name=slot.name, snapshot=slot.snapshot, plan=slot.plan, num_bytes=slot.num_bytes, overlap=slot.overlap
        )

    def _reused(self, num_bytes: int) -> SlotFile | None:
        """A spare slot of the right size, locked by us; those that somebody holds are retired on the way."""
        for slot in fitting(self._known(), num_bytes):
            held = self._slots[slot.name]
            if janitor.try_lock(held.fd):
                self._counts["reused"] += 1
                return held
            logger.warning("slot %s (%d bytes) is still held by an engine or a writer; a fresh one takes its place", slot.name, num_bytes)
            self._drop([slot])
        return None

    def _allocated(self, num_bytes: int) -> SlotFile:
        self._drop(surplus(self._known(), self._num_slots - 1))  # one more is about to come
        name = janitor.slot_name(self.session, next(self._numbers))
        held = SlotFile.allocated(self._directory_fd, self.directory, name, num_bytes)
        self._slots[name] = held
        self._counts["allocated"] += 1
        return held

    def _drop(self, slots: list[Slot]) -> None:
        for slot in slots:
            held = self._slots.pop(slot.name)
            held.slot = held.slot.moved(SlotState.RETIRED, next(self._turns))
            self._counts["dropped" if held.end(self._directory_fd) else "retired"] += 1
