"""The store of a group: what it keeps, whom it refuses, and how it ends."""

from __future__ import annotations

import errno
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ray_weightsync.transports.collective import store as store_module
from ray_weightsync.transports.collective.deadline import Deadline
from ray_weightsync.transports.collective.frames import MAX_FRAME_BYTES, framed
from ray_weightsync.transports.collective.group_store import GroupStore
from ray_weightsync.transports.collective.rendezvous import Rendezvous
from ray_weightsync.transports.collective.store import StoreServer
from ray_weightsync.transports.collective.store_client import StoreClient, StoreGone, StoreRefused

NONCE = "0123456789abcdef" * 2
LIMIT_S = 30.0
FOREVER_S = 3600.0


class Served:
    """A store on loopback, and as many clients as a test wants."""

    def __init__(self) -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = listening.getsockname()[1]
        self.server = StoreServer(listening, NONCE)
        self._clients: list[StoreClient] = []

    def client(self, nonce: str = NONCE) -> StoreClient:
        client = StoreClient("127.0.0.1", self.port, nonce, LIMIT_S)
        self._clients.append(client)
        return client

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), LIMIT_S)

    def end(self) -> None:
        for client in self._clients:
            client.close()
        self.server.close()


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.end()


def request(nonce: str = NONCE, **fields: Any) -> bytes:
    return framed({"id": 0, **fields}, nonce)


def until_closed(connection: socket.socket) -> bytes:
    """All that still comes until the other side closes."""
    told = b""
    while True:
        try:
            chunk = connection.recv(1 << 16)
        except ConnectionResetError:
            return told
        if not chunk:
            return told
        told += chunk


def values(client: StoreClient, *keys: str) -> dict[str, bytes]:
    return client.values(keys, limit_s=LIMIT_S)


def test_what_one_sets_all_read_and_the_last_value_counts(served: Served) -> None:
    one, other = served.client(), served.client()
    assert values(other, "a") == {}
    one.set("a", b"1", limit_s=LIMIT_S)
    one.set("a", bytes(range(256)), limit_s=LIMIT_S)
    one.set("", b"", limit_s=LIMIT_S)
    assert values(other, "a", "b", "") == {"a": bytes(range(256)), "": b""}


def test_many_threads_share_a_connection(served: Served, aside: Any) -> None:
    clients = [served.client(), served.client()]

    def work(number: int) -> None:
        for turn in range(50):
            mine, client = f"{number}/{turn}", clients[number % 2]
            client.set(mine, mine.encode(), limit_s=LIMIT_S)
            assert values(client, mine) == {mine: mine.encode()}

    for each in [aside(lambda number=number: work(number)) for number in range(8)]:
        each.result()
    assert len(values(clients[0], *(f"{number}/{turn}" for number in range(8) for turn in range(50)))) == 400


def test_of_those_that_compare_and_set_at_once_one_wins_and_all_learn_who(served: Served, aside: Any) -> None:
    clients = [served.client() for _ in range(8)]
    gate = threading.Barrier(8)

    def compete(number: int) -> bytes | None:
        gate.wait(LIMIT_S)
        return clients[number].compare_set("winner", None, str(number).encode(), limit_s=LIMIT_S)

    seen = {each.result() for each in [aside(lambda number=number: compete(number)) for number in range(8)]}
    assert seen == set(values(clients[0], "winner").values())
    (winner,) = seen
    assert clients[0].compare_set("winner", b"nobody", b"x", limit_s=LIMIT_S) == winner
    assert clients[0].compare_set("winner", winner, b"x", limit_s=LIMIT_S) == b"x"
    assert clients[0].compare_set("other", b"nobody", b"x", limit_s=LIMIT_S) is None


def test_a_wait_ends_with_the_last_of_its_keys_and_holds_up_nobody(served: Served) -> None:
    client, other = served.client(), served.client()
    waiting = client.wait(["a", "b"], FOREVER_S)
    client.set("a", b"1", limit_s=LIMIT_S)
    assert values(client, "a") == {"a": b"1"}
    assert not waiting.done()
    other.set("b", b"2", limit_s=LIMIT_S)
    assert client.answer(waiting, LIMIT_S) == {"a": b"1", "b": b"2"}
    assert client.answer(client.wait(["b", "a"], FOREVER_S), LIMIT_S) == {"a": b"1", "b": b"2"}


def test_a_wait_ends_at_its_limit_with_what_is_there(served: Served) -> None:
    client = served.client()
    client.set("a", b"1", limit_s=LIMIT_S)
    begun = time.monotonic()
    assert client.answer(client.wait(["a", "b"], 0.2), LIMIT_S) == {"a": b"1"}
    assert time.monotonic() - begun >= 0.2


def test_a_wait_ends_when_what_it_heeds_comes(served: Served) -> None:
    client = served.client()
    waiting = client.wait(["a"], FOREVER_S, unless="failed")
    client.set("failed", b"why", limit_s=LIMIT_S)
    assert client.answer(waiting, LIMIT_S) == {}
    assert client.answer(client.wait(["a"], FOREVER_S, unless="failed"), LIMIT_S) == {}


def test_a_wait_can_be_cancelled_and_its_answer_then_harms_nobody(served: Served) -> None:
    client = served.client()
    waiting = client.wait(["a"], FOREVER_S)
    waiting.cancel()
    with pytest.raises(CancelledError):
        client.answer(waiting, LIMIT_S)
    client.set("a", b"1", limit_s=LIMIT_S)
    assert values(client, "a") == {"a": b"1"}


def test_a_store_that_says_nothing_is_given_up_at_the_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = StoreClient("127.0.0.1", silent.getsockname()[1], NONCE, LIMIT_S)
        with pytest.raises(StoreGone, match=r"has not answered within 0\.1 s"):
            client.set("a", b"1", limit_s=0.1)
        client.close()


def test_a_server_that_closes_ends_every_wait_and_every_later_call_at_once(served: Served) -> None:
    clients = [served.client() for _ in range(3)]
    waits = [client.wait(["never"], FOREVER_S) for client in clients]
    assert values(clients[0]) == {}
    served.server.close()
    served.server.close()
    for client, waiting in zip(clients, waits, strict=True):
        with pytest.raises(StoreGone, match=r"closed the connection|broke"):
            client.answer(waiting, LIMIT_S)
        with pytest.raises(StoreGone, match=r"closed the connection|broke"):
            client.set("a", b"1", limit_s=LIMIT_S)
    with pytest.raises(StoreGone, match="refused"):
        served.client()


def test_nobody_reaches_a_closed_store_though_a_forked_process_has_its_socket_too() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    with listening.dup() as forked:
        server = StoreServer(listening, NONCE)
        server.close()
        with pytest.raises(StoreGone, match="refused"):
            StoreClient("127.0.0.1", forked.getsockname()[1], NONCE, LIMIT_S).close()


def test_a_client_that_closes_ends_its_own_waits_and_nobody_elses(served: Served) -> None:
    closing, staying = served.client(), served.client()
    waits = [client.wait(["a"], FOREVER_S) for client in (closing, staying)]
    closing.close()
    closing.close()
    with pytest.raises(StoreGone, match="was closed here"):
        closing.answer(waits[0], LIMIT_S)
    with pytest.raises(StoreGone, match="was closed here"):
        values(closing, "a")
    staying.set("a", b"1", limit_s=LIMIT_S)
    assert staying.answer(waits[1], LIMIT_S) == {"a": b"1"}


def test_who_does_not_know_the_nonce_is_refused_unread(served: Served) -> None:
    stranger = served.client("f" * 32)
    with pytest.raises(StoreRefused, match="does not know the group"):
        values(stranger, "a")
    friend = served.client()
    friend.set("a", b"secret", limit_s=LIMIT_S)
    for frame in (request("f" * 32, do="wait", keys=["a"], limit_s=0, unless=None), b"\0\0\0\x02{}", b"\0\0\0\x24" + b"f" * 32):
        with served.raw() as raw:
            raw.sendall(frame)
            told = until_closed(raw)
        assert b"secret" not in told
        assert b"refused" in told
    assert values(friend, "a") == {"a": b"secret"}
    with served.raw() as raw:
        raw.sendall(request(do="set", key="a", value="") + request("f" * 32, do="set", key="b", value=""))
        assert b"does not know the group" in until_closed(raw)
    assert values(friend, "a", "b") == {"a": b""}


MALFORMED = {
    "no JSON": framed({}, NONCE)[:4] + NONCE.encode() + b"{]",
    "no object": struct.pack("!I", 34) + NONCE.encode() + b"[]",
    "deep": struct.pack("!I", 32 + 100_000) + NONCE.encode() + b"[" * 100_000,
    "empty": b"\0\0\0\0",
    "larger than any": struct.pack("!I", MAX_FRAME_BYTES + 1) + NONCE.encode(),
    "for the web": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b" " * 40,
    "unknown": request(do="delete", key="a"),
    "no id": framed({"do": "wait", "keys": [], "limit_s": 0, "unless": None}, NONCE),
    "no base64": request(do="set", key="a", value="!"),
    "no value": request(do="set", key="a"),
    "a key that is none": request(do="set", key=1, value=""),
    "keys that are none": request(do="wait", keys=[1], limit_s=0, unless=None),
    "a limit that is none": request(do="wait", keys=["x"], limit_s=float("nan"), unless=None),
    "no limit": request(do="wait", keys=["x"], limit_s=float("inf"), unless=None),
    "a limit beyond all clocks": request(do="wait", keys=["x"], limit_s=10**300, unless=None),
    "a negative limit": request(do="wait", keys=["x"], limit_s=-1, unless=None),
}


@pytest.mark.parametrize("frame", MALFORMED.values(), ids=MALFORMED)
def test_what_no_client_sends_ends_that_connection_alone(served: Served, frame: bytes) -> None:
    friend = served.client()
    waiting = friend.wait(["a"], FOREVER_S)
    with served.raw() as raw:
        raw.sendall(frame)
        until_closed(raw)
    friend.set("a", b"1", limit_s=LIMIT_S)
    assert friend.answer(waiting, LIMIT_S) == {"a": b"1"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "id": JSON,
        "do": st.sampled_from(["set", "compare_set", "wait"]) | JSON,
        **dict.fromkeys(("key", "value", "expected", "keys", "unless"), JSON),
        "limit_s": st.floats() | st.integers(),
    },
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sent=st.lists(REQUESTS.map(lambda value: framed(value, NONCE)) | st.binary(max_size=60), max_size=4))
def test_no_bytes_hurt_the_others(served: Served, sent: list[bytes]) -> None:
    with served.raw() as raw:
        raw.sendall(b"".join(sent))
        raw.shutdown(socket.SHUT_WR)
        until_closed(raw)
    with StoreClient("127.0.0.1", served.port, NONCE, LIMIT_S) as friend:
        friend.set("still", b"here", limit_s=LIMIT_S)
        assert values(friend, "still") == {"still": b"here"}


def test_a_frame_may_come_byte_by_byte_and_two_at_once(served: Served) -> None:
    asked = request(do="wait", keys=[], limit_s=0, unless=None)
    with served.raw() as raw:
        for byte in asked:
            raw.sendall(bytes([byte]))
        raw.sendall(asked + asked)
        raw.shutdown(socket.SHUT_WR)
        assert until_closed(raw) == framed({"id": 0, "values": {}}) * 3


def test_a_value_too_large_for_a_frame_is_refused_before_it_is_sent(served: Served) -> None:
    client = served.client()
    with pytest.raises(StoreRefused, match=f"at most {MAX_FRAME_BYTES} are allowed"):
        client.set("a", bytes(MAX_FRAME_BYTES), limit_s=LIMIT_S)
    client.set("a", bytes(MAX_FRAME_BYTES // 2), limit_s=LIMIT_S)
    assert len(values(client, "a")["a"]) == MAX_FRAME_BYTES // 2


def test_a_store_that_is_full_refuses_and_keeps_what_it_has(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_STORE_BYTES", 100)
    client = served.client()
    for _ in range(3):
        client.set("a", bytes(90), limit_s=LIMIT_S)
    with pytest.raises(StoreRefused, match="of 100"):
        client.set("b", bytes(10), limit_s=LIMIT_S)
    assert values(served.client(), "a", "b") == {"a": bytes(90)}


def test_who_asks_and_does_not_read_is_dropped(served: Served) -> None:
    friend = served.client()
    friend.set("a", bytes(MAX_FRAME_BYTES // 2), limit_s=LIMIT_S)
    with served.raw() as raw:
        raw.sendall(request(do="wait", keys=["a"], limit_s=0, unless=None) * 100)
        for _ in range(2):  # the second is answered after all that was sent before the first
            assert len(values(friend, "a")["a"]) == MAX_FRAME_BYTES // 2
        until_closed(raw)


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", framed({}), framed({"id": 0, "values": {"a": 1}}), framed({"id": 0, "values": {"a": "!"}})],
)
def test_what_answers_unlike_a_store_is_none(answer: bytes, aside: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)
                until_closed(connection)

        serving = aside(serve)
        with StoreClient("127.0.0.1", other.getsockname()[1], NONCE, LIMIT_S) as client, pytest.raises(StoreRefused, match="is no store"):
            values(client, "a")
        serving.result()


def test_a_name_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreGone, match="localhost:1 is no address"):
        StoreClient("localhost", 1, NONCE, LIMIT_S)


def test_a_frame_is_its_length_the_nonce_and_json() -> None:
    frame = framed({"id": 7}, NONCE)
    assert struct.unpack("!I", frame[:4]) == (len(frame) - 4,)
    assert frame[4:36] == NONCE.encode()
    assert json.loads(frame[36:]) == {"id": 7}


def test_gloo_meets_through_it_as_bytes_and_within_gloos_own_limit(served: Served) -> None:
    rendezvous = Rendezvous(id=NONCE, backend="gloo", address="127.0.0.1", port=served.port, bucket_bytes=4096, num_buckets=2, world_size=2)
    ranks = [GroupStore(rendezvous, rank, Deadline(FOREVER_S)) for rank in range(2)]
    one, other = (rank.for_backend() for rank in ranks)
    one.set("0/0", b"\0an address\xff")  # type: ignore[arg-type]
    other.wait(["0/0"], timedelta(seconds=LIMIT_S))
    assert other.get("0/0") == b"\0an address\xff"
    with pytest.raises(TimeoutError, match=r"joining was not over after 0\.1 s: gloo waited for 0/1"):
        one.wait(["0/0", "0/1"], timedelta(seconds=0.1))
    for rank in ranks:
        rank.close()


def test_a_process_that_has_no_file_descriptor_left_serves_those_who_are_in_and_takes_the_others_in_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Full(socket.socket):
        """Refuses three times to take a connection in."""

        refusals = iter([OSError(errno.EMFILE, "Too many open files")] * 3)

        def accept(self) -> Any:
            if (refusal := next(self.refusals, None)) is not None:
                raise refusal
            return super().accept()

    listening = Full(fileno=socket.create_server(("127.0.0.1", 0)).detach())
    port = listening.getsockname()[1]
    server = StoreServer(listening, NONCE)
    try:
        with StoreClient("127.0.0.1", port, NONCE, LIMIT_S) as client:
            client.set("key", b"value", limit_s=LIMIT_S)
            assert client.values(["key"], limit_s=LIMIT_S) == {"key": b"value"}
        assert len(caplog.messages) == 1, "it is said once, and not ten times a second"
    finally:
        server.close()
