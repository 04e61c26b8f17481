"""The store of one group: a few keys with small values, served over TCP by one thread of the sender's process.

Why not torch's ``TCPStore``: it looks up the name of every address it connects to, so where reverse DNS is bad every connection stalls
for the resolver's timeout (5 s a lost packet; seen on torch 2.13, over loopback too). Here no name is ever looked up.

What travels is `frames`. A request's begins with the group's nonce; nothing of a stranger's, who lacks it, is parsed.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray_weightsync.transports.collective.frames import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    MalformedFrame,
    decoded,
    encoded,
    framed,
    parsed,
    take_frame,
)

logger = logging.getLogger(__name__)

MAX_STORE_BYTES = 64 << 20
"""Most bytes of keys and values together. gloo's meeting takes some 60 for each pair of ranks."""

_CHUNK_BYTES = 1 << 16
_END_S = 10.0
_FULL_S = 0.1
_MAX_WAIT_S = 1e9
_MAX_SELECT_S = 3600.0


class StoreServer:
    """Serves until it is closed. Then every connection ends at once, and thread and sockets are gone.

    Args:
        listening: A bound socket that listens. It is the server's from here on.
        nonce: What every request has to begin with: 32 characters that nobody can guess.
    """

    def __init__(self, listening: socket.socket, nonce: str) -> None:
        self._wake, woken = socket.socketpair()
        self._thread = threading.Thread(
            target=_Serving(listening, woken, nonce).run, name=f"rws-store-{listening.getsockname()[1]}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End it. Idempotent.

        Raises:
            TimeoutError: if its thread does not end, which only one that gets no processor time can do.
        """
        self._wake.close()
        self._thread.join(_END_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the thread {self._thread.name} of the group's store has not ended within {_END_S:.0f} s")


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


@dataclass(eq=False)
class _Wait:
    connection: _Connection
    id: int
    keys: list[str]
    missing: set[str]
    unless: str | None
    until: float


class _Serving:
    """All that the thread has. One connection's errors end that connection alone."""

    def __init__(self, listening: socket.socket, woken: socket.socket, nonce: str) -> None:
        self._listening = listening
        self._woken = woken
        self._nonce = nonce.encode()
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0
        self._waits: list[_Wait] = []
        self._connections: set[_Connection] = set()
        self._full = False
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        listening, woken = self._listening, self._woken
        try:
            listening.setblocking(False)
            self._selector.register(listening, selectors.EVENT_READ)
            self._selector.register(woken, selectors.EVENT_READ)
            while True:
                soonest = min((wait.until - time.monotonic() for wait in self._waits), default=_MAX_SELECT_S)
                for key, events in self._selector.select(max(0.0, min(soonest, _MAX_SELECT_S))):
                    if key.fileobj is woken:
                        return
                    if key.fileobj is listening:
                        self._accept()
                    elif key.data in self._connections:
                        with self._guarding(key.data):
                            self._serve(key.data, events)
                now = time.monotonic()
                self._end_waits([wait for wait in self._waits if wait.until <= now])
        finally:
            for connection in list(self._connections):
                self._drop(connection)
            self._selector.close()
            _end(listening)
            woken.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listening.accept()
        except (BlockingIOError, ConnectionError):  # it has gone away meanwhile
            return
        except OSError as error:  # such as no file descriptor left: whoever is in already is served on, and this one is taken in later
            if not self._full:
                logger.warning("the store of a group cannot take a connection in yet: %s", error)
            self._full = True
            time.sleep(_FULL_S)
            return
        self._full = False
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(accepted)
        self._connections.add(connection)
        self._selector.register(accepted, selectors.EVENT_READ, connection)

    @contextlib.contextmanager
    def _guarding(self, connection: _Connection) -> Iterator[None]:
        try:
            yield
        except MalformedFrame as error:
            logger.warning("the store of a group refused a client: %s", error)
            connection.unsent += framed({"refused": str(error)})
            with contextlib.suppress(OSError):  # it is not here any more to be told
                self._flush(connection)
            self._drop(connection)
        except OSError:  # it is gone: whoever it was has no use for an answer
            self._drop(connection)

    def _serve(self, connection: _Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(connection)
        if not events & selectors.EVENT_READ:
            return
        chunk = connection.socket.recv(_CHUNK_BYTES)
        if not chunk:
            self._drop(connection)
            return
        connection.received += chunk
        while connection in self._connections:
            nonce = bytes(connection.received[LENGTH_BYTES : LENGTH_BYTES + len(self._nonce)])
            if len(nonce) == len(self._nonce) and not hmac.compare_digest(nonce, self._nonce):
                raise MalformedFrame("it does not know the group")
            frame = take_frame(connection.received)
            if frame is None:
                return
            self.obey(connection, parsed(frame[len(self._nonce) :]))

    def obey(self, connection: _Connection, request: dict[str, Any]) -> None:
        """Do what a request asks for.

        ``set`` a ``key`` to a ``value``. ``compare_set`` it only if it has the value ``expected`` (null: if it is not there), and
        answer what it has then. ``wait`` for at most ``limit_s`` seconds until all ``keys`` are there, or the key ``unless`` is, and
        answer the values of those that are.

        Raises:
            MalformedFrame: for anything else.
        """
        match request:
            case {"id": int(id_), "do": "set", "key": str(key), "value": str(value)}:
                self._set(key, decoded(value))
                self._answer(connection, id_, ())
            case {"id": int(id_), "do": "compare_set", "key": str(key), "value": str(value), "expected": str() | None as expected}:
                if self._values.get(key) == (None if expected is None else decoded(expected)):
                    self._set(key, decoded(value))
                self._answer(connection, id_, (key,))
            case {"id": int(id_), "do": "wait", "keys": [*keys], "limit_s": int() | float() as limit_s, "unless": str() | None as unless}:
                if not all(isinstance(key, str) for key in keys) or not 0 <= limit_s <= _MAX_WAIT_S:
                    raise MalformedFrame("a wait for keys that are no strings, or with no limit")
                missing = {key for key in keys if key not in self._values}
                if missing and limit_s > 0 and unless not in self._values:
                    self._waits.append(_Wait(connection, id_, keys, missing, unless, time.monotonic() + limit_s))
                else:
                    self._answer(connection, id_, keys)
            case _:
                raise MalformedFrame("a request for what no store does")

    def _set(self, key: str, value: bytes) -> None:
        before = len(key) + len(self._values[key]) if key in self._values else 0
        num_bytes = self._num_bytes - before + len(key) + len(value)
        if num_bytes > MAX_STORE_BYTES:
            raise MalformedFrame(f"a value that does not fit: the store would have {num_bytes} bytes, of {MAX_STORE_BYTES}")
        self._values[key] = value
        self._num_bytes = num_bytes
        for wait in self._waits:
            wait.missing.discard(key)
        self._end_waits([wait for wait in self._waits if not wait.missing or wait.unless == key])

    def _end_waits(self, ended: Sequence[_Wait]) -> None:
        for wait in ended:
            if wait in self._waits:  # no more, if an answer to the same connection failed
                self._waits.remove(wait)
                with self._guarding(wait.connection):
                    self._answer(wait.connection, wait.id, wait.keys)

    def _answer(self, connection: _Connection, id_: int, keys: Iterable[str]) -> None:
        values = {key: encoded(self._values[key]) for key in keys if key in self._values}
        connection.unsent += framed({"id": id_, "values": values})
        self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        try:
            sent = connection.socket.send(connection.unsent) if connection.unsent else 0
        except BlockingIOError:
            sent = 0
        del connection.unsent[:sent]
        if len(connection.unsent) > MAX_FRAME_BYTES:
            self._drop(connection)  # it asks, and does not read
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.socket, events, connection)

    def _drop(self, connection: _Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        self._waits = [wait for wait in self._waits if wait.connection is not connection]
        self._selector.unregister(connection.socket)
        _end(connection.socket)


def _end(opened: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side was first
        opened.shutdown(socket.SHUT_RDWR)  # close() alone ends nothing while a forked process has it open too
    opened.close()
