"""The yardsticks of `cluster.py`: what a TCP stream between two nodes and a memcpy reach."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import ray
import torch
from cluster_report import rate, said
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray_weightsync as rws

LIMIT_S = 300.0
CHUNK_BYTES = 4 << 20
MEMCPY_BYTES = 256 << 20
TIMES = 5

logger = logging.getLogger(__name__)


@ray.remote(num_cpus=0, max_concurrency=2)
class Probe:
    """One end of a stream between two nodes."""

    def listen(self, address: str, streams: int) -> int:
        """Bind to a free port of that address, and return it."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=streams)
        self._listener.settimeout(LIMIT_S)
        return int(self._listener.getsockname()[1])

    def receive(self, num_bytes: int, streams: int, times: int) -> None:
        """Take ``num_bytes`` on each of as many connections, as often, and confirm each time."""
        with self._listener:
            connections = [self._listener.accept()[0] for _ in range(streams)]
        with ThreadPoolExecutor(streams) as pool:
            list(pool.map(lambda each: _drain(each, num_bytes, times), connections))

    def stream(self, address: str, port: int, num_bytes: int, streams: int, times: int) -> list[float]:
        """Send them, and return the seconds of each time until all was confirmed."""
        seconds = []
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(streams) as pool:
            connect = partial(socket.create_connection, (address, port), timeout=LIMIT_S)
            connections = [stack.enter_context(connect()) for _ in range(streams)]
            for _ in range(times):
                began = time.perf_counter()
                list(pool.map(lambda each: _send(each, num_bytes), connections))
                seconds.append(time.perf_counter() - began)
        return seconds

    def memcpy(self, num_bytes: int, times: int) -> list[float]:
        """Seconds of copying that much into touched memory, on one thread."""
        torch.set_num_threads(1)
        source, target = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2))
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            target.copy_(source)
            seconds.append(time.perf_counter() - began)
        return seconds


def _drain(connection: socket.socket, num_bytes: int, times: int) -> None:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with connection:
        connection.settimeout(LIMIT_S)
        for _ in range(times):
            left = num_bytes
            while left:
                taken = connection.recv_into(buffer[: min(left, CHUNK_BYTES)])
                if not taken:
                    raise ConnectionError(f"the stream ended {left} bytes before its end")
                left -= taken
            connection.sendall(b".")


def _send(connection: socket.socket, num_bytes: int) -> None:
    chunk = memoryview(bytes(CHUNK_BYTES))
    for start in range(0, num_bytes, CHUNK_BYTES):
        connection.sendall(chunk[: min(CHUNK_BYTES, num_bytes - start)])
    if connection.recv(1) != b".":
        raise ConnectionError("the other side went without confirming what was sent")


def on_node(node_id: str) -> Any:
    return Probe.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote()


def link_seconds(sender: Any, receiver: Any, *, num_bytes: int, streams: int, times: int) -> list[float]:
    """Seconds of ``num_bytes``, shared by ``streams`` TCP connections, from the node of one place to that of another; the first one, which
    opens the window, is left out.

    Raises:
        RayError, GetTimeoutError: if the nodes do not reach each other.
    """
    ends = [on_node(place.node_id) for place in (sender, receiver)]
    try:
        part = num_bytes // streams
        port = ray.get(ends[1].listen.remote(receiver.node_ip, streams), timeout=LIMIT_S)
        received = ends[1].receive.remote(part, streams, times + 1)
        seconds: list[float] = ray.get(ends[0].stream.remote(receiver.node_ip, port, part, streams, times + 1), timeout=LIMIT_S)
        ray.get(received, timeout=LIMIT_S)
        return seconds[1:]
    finally:
        for end in ends:
            ray.kill(end)


def memcpy_seconds(place: Any, *, num_bytes: int, times: int) -> list[float]:
    """Seconds of one memcpy of ``num_bytes`` on the node of a place."""
    probe = on_node(place.node_id)
    try:
        seconds: list[float] = ray.get(probe.memcpy.remote(num_bytes, times), timeout=LIMIT_S)
        return seconds
    finally:
        ray.kill(probe)


def yardsticks(placed: rws.placement.Placed, *, link_bytes: int, streams: int) -> dict[str, dict[str, Any]]:
    """The link from the sender's node to an engine's, on another node if there is one, and a memcpy on the sender's node."""
    sender = placed.trainer(0)
    receiver = next((place for place in placed.engines if place.node_id != sender.node_id), placed.engine(0))
    link, memcpy = partial(link_seconds, sender, receiver, streams=streams), partial(memcpy_seconds, sender)
    return {
        "link": {"from": sender.node_id, "to": receiver.node_id, "streams": streams, **_timed(link, link_bytes)},
        "memcpy": {"on": sender.node_id, **_timed(memcpy, MEMCPY_BYTES)},
    }


def _timed(act: Callable[..., list[float]], num_bytes: int) -> dict[str, Any]:
    try:
        seconds = act(num_bytes=num_bytes, times=TIMES)
    except Exception as error:  # the transports may do what the probe could not: they are measured, without a share of this
        logger.exception("a yardstick could not be measured")
        return {"error": said(error)}
    return {"num_bytes": num_bytes, "seconds": seconds, "gb_per_s": rate(num_bytes, seconds)}
