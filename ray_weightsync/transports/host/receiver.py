"""An engine worker's end: maps a snapshot and hands out its tensors, without a copy.

The map is private and writable: some loaders write into what they are given, which would kill the worker on a read-only map and
change everybody's snapshot on a shared one. The map is also the lease: the kernel counts the slot as held for as long as any view of
it is alive in this process, and however the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ray_weightsync.transports.host.files import NOT_SEEN, check_file, open_file, open_slot_file
from ray_weightsync.transports.host.janitor import OWNER_NAME
from ray_weightsync.transports.host.layout import (
    HEADER_BYTES,
    FileState,
    HeaderPage,
    SlotAddress,
    SlotError,
    check_address,
    check_directory_name,
    check_snapshot,
)
from ray_weightsync.transports.host.pages import map_file
from ray_weightsync.weights.packing import view
from ray_weightsync.weights.plan import Plan
from ray_weightsync.worker.receiver import Received

_MIN_POLL_S = 0.0002
_MAX_POLL_S = 0.002


class HostReceiver:
    """The `Receiver` of the host transport. Holds nothing between updates."""

    def see(self, probe: Mapping[str, Any]) -> None:
        """Prove that this process sees the store's memory, by reading its nonce, and its locks, by failing to take one.

        Args:
            probe: What the store's ``probe`` returned.

        Raises:
            OSError: if the file is not there, is another user's, or a lock that the store holds does not hold here.
            SlotError: if the probe is malformed, or the file is not the store's.
        """
        if not isinstance(probe, Mapping) or set(probe) != {"directory", "name", "nonce"}:
            found = sorted(map(str, probe)) if isinstance(probe, Mapping) else type(probe).__name__
            raise SlotError(f"a probe has the fields directory, name and nonce, not {found}")
        directory, name, nonce = check_directory_name(probe["directory"]), probe["name"], check_snapshot(probe["nonce"])
        if not isinstance(name, str) or not OWNER_NAME.fullmatch(name):
            raise SlotError(f"a probe's name must be rws-<session>-owner, not {name!r}")
        path = f"{directory}/{name}"
        fd = open_file(directory, name, writable=False)
        try:
            check_file(os.fstat(fd), path)
            if os.pread(fd, 1 + len(nonce), 0) != nonce.encode():
                raise SlotError(f"{path} is another store's: the nonce in it is not the one asked for. The store's own file is {NOT_SEEN}")
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            raise OSError(
                f"{path} is seen, but not the lock that its store holds on it: either the store has just died, or this sandbox or file"
                " system keeps file locks apart, and then leases cannot work; name a memory-backed directory that shares them with"
                " Host(directory=...)"
            )
        finally:
            os.close(fd)

    def open(self, plan: Plan, update: Mapping[str, Any]) -> HostDelivery:
        """Map the snapshot that ``update["slot"]`` names, under a lease.

        Args:
            plan: The plan that the worker keeps for this update.
            update: An ``update_weights`` payload: ``slot``, and ``limit_s`` if the slot may be read before it is sealed.

        Raises:
            OSError: if the file is not there or is another user's.
            SlotError: if it is not a slot of ours, not this snapshot's or plan's, not sealed, or given up.
        """
        address = check_address(update.get("slot"))
        if address["plan"] != plan.digest or address["num_bytes"] != plan.num_bytes:
            raise SlotError(
                f"slot {address['name']} holds {address['num_bytes']} bytes of plan {address['plan']},"
                f" this update is of {plan.digest} ({plan.num_bytes} bytes)"
            )
        with contextlib.ExitStack() as undo:
            watch = _Watch(open_slot_file(address, writable=False), address)
            undo.callback(watch.close)
            header = watch.header.read()
            header.check_against(address)
            if header.state is FileState.ABORTED:
                raise SlotError(f"snapshot {address['snapshot']} was given up by its store")
            if header.state is FileState.WRITING and not address["overlap"]:
                raise SlotError(
                    f"snapshot {address['snapshot']} is not sealed; {header.watermark} of {header.num_bytes} bytes were written"
                )
            payload = watch.map_payload()
            if header.state is FileState.SEALED:
                return HostDelivery(plan, address["snapshot"], payload, digest=header.digest)
            watch.limit(_limit_s(update))
            undo.pop_all()
            return HostDelivery(plan, address["snapshot"], payload, watch=watch)


class HostDelivery:
    """One mapped snapshot, sealed (``digest``) or still being written (``watch``). Every tensor is a view of the map.

    What was yielded stays valid, and keeps the lease, as long as anybody keeps it.
    """

    def __init__(self, plan: Plan, snapshot: str, payload: torch.Tensor, *, digest: str | None = None, watch: _Watch | None = None) -> None:
        self._plan = plan
        self._snapshot = snapshot
        self._payload: torch.Tensor | None = payload
        self._digest = digest
        self._watch = watch
        self._num_bytes = 0
        self._num_tensors = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(name, tensor)`` in plan order, each as soon as it is final; at the end wait for the seal.

        Raises:
            TimeoutError: if the sender is not there in time.
            SlotError: if the snapshot was given up meanwhile, or the delivery is closed.
        """
        payload, watch = self._payload, self._watch
        if payload is None:
            raise SlotError(f"the delivery of snapshot {self._snapshot} is closed")
        self._num_bytes = self._num_tensors = 0
        for spec in self._plan.tensors:
            if watch is not None:
                watch.wait_for(spec.offset + spec.nbytes, spec.name)
            tensor = view(payload, spec)
            self._num_bytes += spec.nbytes
            self._num_tensors += 1
            yield spec.name, tensor
        if watch is not None:
            self._digest = watch.wait_sealed()

    def received(self) -> Received:
        """What was handed over.

        Raises:
            SlotError: if the snapshot was not sealed by the end of the iteration, or there was none.
        """
        if self._digest is None:
            raise SlotError(f"snapshot {self._snapshot} was not seen sealed; iterate to the end first")
        return Received(snapshot=self._snapshot, digest=self._digest, num_bytes=self._num_bytes, num_tensors=self._num_tensors)

    def close(self) -> None:
        """Let go of everything that no yielded tensor needs. Idempotent."""
        self._payload = None
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()


class _Watch:
    """The shared view of a slot's header, in which its writer and its store can be followed. Owns ``fd``."""

    def __init__(self, fd: int, address: SlotAddress) -> None:
        self._fd = fd
        self._address = address
        self._limit_s = 0.0
        self._deadline = 0.0
        try:
            self.header = HeaderPage(fd, writable=False)
        except BaseException:
            os.close(fd)
            raise

    def map_payload(self) -> torch.Tensor:
        """The payload as uint8, in a private map of its own that keeps the lease."""
        mapped = map_file(self._fd, HEADER_BYTES + self._address["num_bytes"], private=True)
        return torch.frombuffer(mapped, dtype=torch.uint8)[HEADER_BYTES:]

    def limit(self, limit_s: float) -> None:
        """Set the deadline of all waits together, in seconds from now."""
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s

    def wait_for(self, num_bytes: int, name: str) -> None:
        """Wait until the first ``num_bytes`` of the payload are final."""
        pause_s = _MIN_POLL_S
        while self.header.watermark < num_bytes:
            pause_s = self._wait(pause_s, f"tensor {name!r}, which ends at byte {num_bytes}")
        # not known to be good by the watermark alone: it may stand where a sender left it that was given up
        if self.header.state == FileState.ABORTED:
            raise self._given_up()

    def wait_sealed(self) -> str:
        """Wait until the store sealed the snapshot, and return its digest."""
        pause_s = _MIN_POLL_S
        while self.header.state != FileState.SEALED:
            pause_s = self._wait(pause_s, "the seal")
        header = self.header.read()
        header.check_against(self._address)
        return header.digest

    def close(self) -> None:
        self.header.close()
        os.close(self._fd)

    def _wait(self, pause_s: float, what: str) -> float:
        if self.header.state == FileState.ABORTED:
            raise self._given_up()
        if os.fstat(self._fd).st_nlink == 0:
            raise SlotError(f"the store of snapshot {self._address['snapshot']} is gone; {self._progress()}")
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"waited {self._limit_s:.1f} s for {what} of snapshot {self._address['snapshot']}; {self._progress()}")
        time.sleep(min(pause_s, left_s))
        return min(2 * pause_s, _MAX_POLL_S)

    def _given_up(self) -> SlotError:
        return SlotError(f"snapshot {self._address['snapshot']} was given up while it was being read; {self._progress()}")

    def _progress(self) -> str:
        return f"the sender got to byte {self.header.watermark} of {self._address['num_bytes']}"


def _limit_s(update: Mapping[str, Any]) -> float:
    limit_s = update.get("limit_s")
    if isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not 0 < limit_s < float("inf"):
        raise SlotError(f"limit_s must be a positive number of seconds, not {limit_s!r}")
    return float(limit_s)
