"""The NCCL body and device buffers: `pip install '.[nccl]'`, then `python -m pytest tests/gpu` on a machine with two GPUs.

Not yet run: no GPU was at hand.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_weightsync.config import Collective
from ray_weightsync.transports.collective.rendezvous import GroupError, RendezvousServer
from ray_weightsync.transports.collective.sender import BroadcastSender
from ray_weightsync.weights.copying import copy_hashed_in_pieces, hash_only
from ray_weightsync.weights.digest import weights_digest
from ray_weightsync.weights.plan import Plan
from ray_weightsync.weights.sources import StateDictSource

pytestmark = [
    pytest.mark.gpu(last_run=None),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; run by hand on a machine with one"),
]

needs_two = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or importlib.util.find_spec("nccl") is None, reason="needs two GPUs and nccl4py; NCCL has one rank a GPU"
)
LIMIT_S = 120.0

RECEIVER = """
import json, sys
import torch, torch.distributed as dist
from ray_weightsync.transports.collective.receiver import CollectiveReceiver
from ray_weightsync.weights.plan import Plan

torch.cuda.set_device(1)
for line in sys.stdin:
    plan, update = json.loads(line)
    delivery = CollectiveReceiver().open(Plan.from_wire(plan), update)
    try:
        for name, tensor in delivery:
            print(name, tensor.device, flush=True)
        print("attested", delivery.received().digest, dist.is_initialized(), flush=True)
    except Exception as error:
        print("failed", type(error).__name__, error, flush=True)
    finally:
        delivery.close()
"""


@pytest.fixture
def receiver() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", RECEIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    with process:
        yield process
        process.kill()


def source_on_gpu() -> StateDictSource:
    generator = torch.Generator().manual_seed(0)
    shapes = [(300, 7), (0, 4), (5000,), (), (3_000_000,), (64, 64)]
    return StateDictSource({f"t{n}": torch.randn(shape, generator=generator).cuda(0) for n, shape in enumerate(shapes)})


def tell(process: subprocess.Popen[str], plan: Plan, server: RendezvousServer, limit_s: float) -> None:
    assert process.stdin is not None
    update: dict[str, Any] = {"group": server.meeting.of(2).payload(1), "limit_s": limit_s}
    process.stdin.write(json.dumps([plan.to_wire(), update]) + "\n")
    process.stdin.flush()


def until(process: subprocess.Popen[str], start: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if line.startswith(start):
            return lines
    raise AssertionError(f"the receiver ended without {start!r}: {lines}")


@pytest.mark.parametrize("transposed", [False, True])
def test_pieces_on_a_gpu_hold_the_tensors_bytes_and_its_digest(transposed: bool) -> None:
    tensor = torch.randn(1000, 333).cuda()
    tensor = tensor.t() if transposed else tensor
    num_bytes = tensor.numel() * 4
    out = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    digest = copy_hashed_in_pieces(tensor, out.split(65536))  # type: ignore[no-untyped-call]
    assert digest == hash_only(tensor.cpu())
    assert torch.equal(out.view(torch.float32).view(tensor.shape), tensor)


@needs_two
def test_weights_go_from_gpu_to_gpu_and_are_attested(receiver: subprocess.Popen[str]) -> None:
    source = source_on_gpu()
    plan = Plan.from_metadata(source.metadata())
    for _ in range(2):
        with (
            RendezvousServer(backend="nccl", options=Collective(bucket_bytes=1 << 20)) as server,
            BroadcastSender(server.meeting.of(2), limit_s=LIMIT_S) as sender,
        ):
            tell(receiver, plan, server, LIMIT_S)
            packed = sender.send(source, plan)
            lines = until(receiver, "attested")
        assert lines == [*(f"{name} cuda:1" for name in plan.names), f"attested {packed.digest} False"]
        assert packed.digest == weights_digest(source)


@needs_two
def test_a_source_that_stands_still_is_a_timeout_and_the_next_group_works(receiver: subprocess.Popen[str]) -> None:
    source = source_on_gpu()
    plan = Plan.from_metadata(source.metadata())
    over = threading.Event()

    def stands_still() -> Iterator[tuple[str, torch.Tensor]]:
        pairs = iter(source)
        yield from (next(pairs) for _ in range(5))
        assert over.wait(LIMIT_S)

    with (
        RendezvousServer(backend="nccl", options=Collective(bucket_bytes=1 << 20)) as server,
        BroadcastSender(server.meeting.of(2), limit_s=LIMIT_S) as sender,
    ):
        tell(receiver, plan, server, 20.0)
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(sender.send, stands_still(), plan)
            assert "20.0 s" in until(receiver, "failed")[-1]
            over.set()
            with pytest.raises(GroupError, match=r"20\.0 s"):
                sending.result(LIMIT_S)
    test_weights_go_from_gpu_to_gpu_and_are_attested(receiver)
