"""A sealed snapshot's way from one node to another: read out of the map in pieces, which Ray's object store carries.

Each piece is an object of its own, made when it is asked for and freed when it was copied, so that a relay takes a few pieces of object
store on either node and not a model. While one is copied the next ones cross the network: what an actor returned stays where it was made
until somebody wants it, and `ray.get` wants one only when it is called, so they are wanted before the copy begins. Nothing that arrives is
believed: the relay digests it while it copies.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy
import ray
from ray.exceptions import GetTimeoutError

from ray_weightsync.transports.host.files import open_slot_file
from ray_weightsync.transports.host.layout import HEADER_BYTES, FileState, HeaderPage, SlotAddress, SlotError
from ray_weightsync.transports.host.pages import map_file

PIECE_BYTES = 64 << 20
"""The largest piece, in bytes. Larger ones are no faster, and the object stores of both nodes have to hold `IN_FLIGHT` of them."""

IN_FLIGHT = 3
"""Pieces under way at once: one is copied, and meanwhile one crosses the network and one is made, or crosses as well."""


def read_piece(address: SlotAddress, start: int, stop: int) -> Any:
    """Bytes ``[start, stop)`` of a sealed snapshot, as a uint8 array over a map of their own that keeps the lease.

    Raises:
        OSError: if the file is not there.
        SlotError: if the slot is another snapshot's by now, or this one is not sealed.
    """
    fd = open_slot_file(address, writable=False)
    try:
        page = HeaderPage(fd, writable=False)
        try:
            header = page.read()
        finally:
            page.close()
        header.check_against(address)
        if header.state is not FileState.SEALED:
            raise SlotError(f"snapshot {address['snapshot']} is {header.state.name}; only a sealed one is relayed")
        mapped = map_file(fd, HEADER_BYTES + stop, private=True)
    finally:
        os.close(fd)
    return numpy.frombuffer(memoryview(mapped), dtype=numpy.uint8)[HEADER_BYTES + start :]


def pieces(source: Any, snapshot: str, num_bytes: int, *, piece_bytes: int, limit_s: float) -> Iterator[memoryview]:
    """The payload of ``snapshot`` in order, pulled from the store actor ``source``. Whoever takes a piece lets the one before go first.

    Args:
        source: Handle of the store that has it sealed.
        snapshot: Its id.
        num_bytes: Size of the payload.
        piece_bytes: Size of a piece.
        limit_s: Seconds that all of it may take.

    Raises:
        TimeoutError: if a piece does not arrive in time.
        ray.exceptions.RayError: if the source dies, or what it raised.
    """
    deadline = time.monotonic() + limit_s
    asked: deque[tuple[int, Any]] = deque()
    starts = iter(range(0, num_bytes, piece_bytes))
    while True:
        while len(asked) < IN_FLIGHT and (start := next(starts, None)) is not None:
            asked.append((start, source.read.remote(snapshot, start, min(start + piece_bytes, num_bytes))))
        if not asked:
            return
        start, ref = asked.popleft()
        try:
            piece = ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
        except GetTimeoutError as error:
            raise TimeoutError(f"byte {start} of {num_bytes} of snapshot {snapshot} did not arrive within {limit_s:.1f} s") from error
        if asked:
            # Returns at once, and has those that are made already on their way here from now on.
            ray.wait([each for _, each in asked], num_returns=len(asked), timeout=0, fetch_local=True)
        yield memoryview(piece)
        del ref, piece
