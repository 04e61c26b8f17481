"""A process's connection to a group's store; see `frames` for what is said there."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Sequence
from concurrent import futures
from typing import Any

from ray_weightsync.transports.collective.frames import MalformedFrame, decoded, encoded, framed, parsed, take_frame

_CHUNK_BYTES = 1 << 16
_STALL_S = 5.0
_PROBE_S = 5
_LOST_MS = 20_000

Values = dict[str, bytes]


class StoreGone(ConnectionError):
    """The store closed the connection, cannot be reached, or does not answer."""


class StoreRefused(StoreGone):
    """The store is another group's, or none at all."""


class StoreClient:
    """One TCP connection. Safe for several threads: a wait of one does not hold up the others.

    When the connection ends, every call that waits for an answer, and every later one, raises at once. A host that is gone without
    a word is noticed within 20 s.

    Args:
        address: The store's, an IPv4 or IPv6 address; names are not looked up.
        port: Its port.
        nonce: The group's.
        limit_s: Seconds to reach it.

    Raises:
        StoreGone: if it cannot be reached in time.
    """

    def __init__(self, address: str, port: int, nonce: str, limit_s: float) -> None:
        self._nonce = nonce
        self._where = f"{address}:{port}"
        self._socket = _connected(address, port, limit_s)
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._asked: dict[int, futures.Future[Values]] = {}
        self._end: StoreGone | None = None
        self._thread = threading.Thread(target=self._read, name=f"rws-store-client-{port}", daemon=True)
        self._thread.start()

    def set(self, key: str, value: bytes, *, limit_s: float) -> None:
        """Give ``key`` a value.

        Raises:
            StoreGone: if the store is gone, or has not answered within ``limit_s`` seconds.
            StoreRefused: if it is another one, or the value is too large.
        """
        self.answer(self._ask(do="set", key=key, value=encoded(value)), limit_s)

    def compare_set(self, key: str, expected: bytes | None, value: bytes, *, limit_s: float) -> bytes | None:
        """Give ``key`` a value only if it has the ``expected`` one (None: only if it is not there). Returns what it has then.

        Raises:
            StoreGone: as for `set`.
        """
        before = None if expected is None else encoded(expected)
        return self.answer(self._ask(do="compare_set", key=key, value=encoded(value), expected=before), limit_s).get(key)

    def values(self, keys: Sequence[str], *, limit_s: float) -> Values:
        """The values of those keys that are there now.

        Raises:
            StoreGone: as for `set`.
        """
        return self.answer(self.wait(keys, 0.0), limit_s)

    def wait(self, keys: Sequence[str], limit_s: float, *, unless: str | None = None) -> futures.Future[Values]:
        """Begin to wait, in the store, until all ``keys`` are there, or ``unless`` is, or ``limit_s`` seconds are over.

        Returns:
            A future of the values of those keys that are there then, for `answer`. It may be cancelled.

        Raises:
            StoreGone: as for `set`.
        """
        return self._ask(do="wait", keys=list(keys), limit_s=limit_s, unless=unless)

    def answer(self, asked: futures.Future[Values], limit_s: float) -> Values:
        """The answer to a question, for which at most ``limit_s`` seconds are waited.

        Raises:
            StoreGone: as for `set`.
            concurrent.futures.CancelledError: if the question was cancelled.
        """
        try:
            return asked.result(limit_s)
        except futures.TimeoutError as error:
            raise StoreGone(f"the store at {self._where} has not answered within {limit_s:.1f} s") from error

    def close(self) -> None:
        """End the connection and its thread. Idempotent."""
        self._stop(StoreGone(f"the connection to the store at {self._where} was closed here"))
        self._thread.join(_STALL_S)

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, **request: Any) -> futures.Future[Values]:
        asked: futures.Future[Values] = futures.Future()
        with self._lock:
            id_ = next(self._ids)
            try:
                frame = framed({"id": id_, **request}, self._nonce)
            except MalformedFrame as error:
                raise StoreRefused(f"the store at {self._where} does not take {error}") from error
            if self._end is not None:
                raise type(self._end)(*self._end.args)
            self._asked[id_] = asked
            try:
                self._socket.sendall(frame)
            except OSError:  # half a frame may be out
                self._hang_up()  # the reading thread tells, also what it was told before
        return asked

    def _read(self) -> None:
        received = bytearray()
        end = StoreGone(f"the store at {self._where} closed the connection")
        try:
            while True:
                try:
                    chunk = self._socket.recv(_CHUNK_BYTES)
                except TimeoutError:
                    continue
                if not chunk:
                    return
                received += chunk
                while (frame := take_frame(received)) is not None:
                    self._told(parsed(frame))
        except StoreRefused as error:
            end = error
        except MalformedFrame as error:
            end = StoreRefused(f"at {self._where} is no store of a group: it sent {error}")
        except OSError as error:
            end = StoreGone(f"the connection to the store at {self._where} broke: {error}")
        finally:
            self._stop(end)
            self._socket.close()

    def _told(self, told: dict[str, Any]) -> None:
        match told:
            case {"id": int(id_), "values": dict(values)} if all(isinstance(value, str) for value in values.values()):
                result = {key: decoded(value) for key, value in values.items()}
                with self._lock:
                    asked = self._asked.pop(id_, None)
                if asked is not None and asked.set_running_or_notify_cancel():
                    asked.set_result(result)
            case {"refused": str(why)}:
                raise StoreRefused(f"the store at {self._where} refused this client: {why:.200}")
            case _:
                raise MalformedFrame("an answer that no store gives")

    def _stop(self, end: StoreGone) -> None:
        with self._lock:
            if self._end is None:
                self._end = end
            asked, self._asked = self._asked, {}
            self._hang_up()
        for each in asked.values():
            if each.set_running_or_notify_cancel():
                each.set_exception(type(self._end)(*self._end.args))

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):  # the other side was first
            self._socket.shutdown(socket.SHUT_RDWR)


def _connected(address: str, port: int, limit_s: float) -> socket.socket:
    where = f"{address}:{port}"
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
        connected = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StoreGone(f"{where} is no address: {error}") from error
    try:
        connected.settimeout(max(0.001, limit_s))
        connected.connect(target)
        connected.settimeout(_STALL_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_MS)
    except OSError as error:
        connected.close()
        raise StoreGone(str(error)) from error
    return connected
