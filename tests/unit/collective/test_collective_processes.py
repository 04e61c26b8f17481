"""Receivers, or the sender, in processes of their own, one of which is killed in the middle of a broadcast."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_weightsync.transports.collective.rendezvous import GroupError
from ray_weightsync.weights.digest import weights_digest
from ray_weightsync.weights.plan import Plan

LIMIT_S = 60.0
FOREVER_S = 3600.0

RECEIVER = """
import json, sys
import torch.distributed as dist
from ray_weightsync.transports.collective.receiver import CollectiveReceiver
from ray_weightsync.weights.plan import Plan

print("ready", flush=True)
receiver = CollectiveReceiver()
for line in sys.stdin:
    plan, update = json.loads(line)
    delivery = receiver.open(Plan.from_wire(plan), update)
    try:
        for name, _ in delivery:
            print(name, flush=True)
        print("attested", delivery.received().digest, dist.is_initialized(), flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    finally:
        delivery.close()
"""

SENDER = """
import sys, torch
from ray_weightsync.config import Collective
from ray_weightsync.transports.collective.rendezvous import RendezvousServer
from ray_weightsync.transports.collective.sender import BroadcastSender
from ray_weightsync.weights.plan import ParamMeta, Plan
import json

def pairs():
    yield "t0", torch.zeros(1024)
    print("half", flush=True)
    sys.stdin.read()

plan = Plan.from_metadata([ParamMeta("t0", torch.float32, (1024,)), ParamMeta("t1", torch.float32, (1024,))])
server = RendezvousServer(options=Collective(bucket_bytes=4096), address="127.0.0.1")
print(json.dumps([plan.to_wire(), [server.meeting.of(3).payload(rank) for rank in (1, 2)]]), flush=True)
BroadcastSender(server.meeting.of(3), limit_s=3600).send(pairs(), plan)
"""


class Child:
    """Another process; it says when it got somewhere, and is killed where it stands."""

    def __init__(self, code: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # torch tells there of every connection that broke
            text=True,
            cwd=Path(__file__).parents[3],
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())
        self._lines.put("")

    def tell(self, *values: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(values) + "\n")
        self.process.stdin.flush()

    def line(self) -> str:
        """The next line it says; empty when it has ended."""
        return self._lines.get(timeout=LIMIT_S)

    def until(self, start: str) -> str:
        """Read on to the line that starts so."""
        while not (line := self.line()).startswith(start):
            assert line, f"the child ended without {start!r}"
        return line

    def kill(self) -> None:
        """SIGKILL. On return the kernel has closed all that it had open."""
        self.process.kill()
        self.process.wait(LIMIT_S)
        self._reading.join(LIMIT_S)

    def end(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@pytest.fixture(scope="module")
def children() -> Iterator[list[Child]]:
    """Three receivers. Importing torch takes seconds, so all tests here share them; who kills one removes it."""
    made = [Child(RECEIVER) for _ in range(3)]
    alive = list(made)
    yield alive
    for child in made:
        child.end()


@pytest.fixture
def child() -> Iterator[Callable[[str], Child]]:
    with contextlib.ExitStack() as ends:

        def start(code: str) -> Child:
            made = Child(code)
            ends.callback(made.end)
            return made

        yield start


def test_three_processes_receive_what_one_sends(children: list[Child], group: Any, weights: Any) -> None:
    source, plan = weights(("bfloat16", (33, 5)), ("float32", (0,)), ("uint8", (9001,)), ("float32", ()), ("int64", (700,)))
    for _ in range(2):
        made = group(4)
        for rank, each in enumerate(children, 1):
            each.tell(plan.to_wire(), made.update(rank))
        packed = made.sender.send(source, plan)
        assert packed.digest == weights_digest(source)
        for each in children:
            assert each.until("attested") == f"attested {packed.digest} False"
        made.close()


def test_a_receiver_killed_in_the_middle_ends_the_broadcast_for_all_at_once_and_the_next_group_works(
    children: list[Child], group: Any, weights: Any, gated: Any, aside: Any
) -> None:
    source, plan = weights()
    pairs = gated(source)
    pairs.let(2)
    made = group(4, limit_s=FOREVER_S)
    for rank, each in enumerate(children, 1):
        each.tell(plan.to_wire(), made.update(rank, limit_s=FOREVER_S))
    sending = aside(lambda: made.sender.send(pairs, plan))
    for each in children:
        each.until("t1")
    children.pop(1).kill()
    killed_at = time.monotonic()
    pairs.let(8)
    with pytest.raises(GroupError, match=rf"of {plan.num_bytes} bytes were sent; nothing more was heard of rank 2"):
        sending.result()
    for each in children:
        assert f"of {plan.num_bytes} bytes were received" in each.until("GroupError")
    assert time.monotonic() - killed_at < LIMIT_S
    made.close()

    made = group(3)
    for rank, each in enumerate(children, 1):
        each.tell(plan.to_wire(), made.update(rank))
    packed = made.sender.send(source, plan)
    for each in children:
        assert each.until("attested") == f"attested {packed.digest} False"


def test_a_receiver_killed_before_it_joined_is_named_at_the_limit(children: list[Child], group: Any, weights: Any) -> None:
    source, plan = weights()
    made = group(3, limit_s=0.5)
    children[0].tell(plan.to_wire(), made.update(1, limit_s=FOREVER_S))
    with pytest.raises(TimeoutError, match="ranks that did not join: 2"):
        made.sender.send(source, plan)
    assert "did not join: 2" in children[0].until("GroupError")


def test_a_killed_sender_ends_every_receiver_at_once(child: Callable[[str], Child], group: Any, aside: Any) -> None:
    from ray_weightsync.transports.collective.receiver import CollectiveReceiver

    sender = child(SENDER)
    plan, groups = json.loads(sender.line())
    deliveries = [CollectiveReceiver().open(Plan.from_wire(plan), {"group": each, "limit_s": FOREVER_S}) for each in groups]
    tensors = [iter(delivery) for delivery in deliveries]
    assert [next(each)[0] for each in tensors] == ["t0", "t0"]
    waiting = [aside(lambda each=each: next(each)) for each in tensors]
    sender.until("half")
    sender.kill()
    for each in waiting:
        with pytest.raises(GroupError, match=r"(is gone|failed: ).*4096 of 8192 bytes were received, waiting for bucket 2 of 2"):
            each.result()
    for delivery in deliveries:
        delivery.close()
