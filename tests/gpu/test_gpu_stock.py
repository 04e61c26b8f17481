"""The sender toward stock engines over real NCCL: `pip install vllm`, then `python -m pytest tests/gpu` on a machine with two GPUs.

The receiver is vLLM's own packed consumer, and its own group, in a process of its own. Not yet run: no GPU was at hand.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ray_weightsync.transports.collective.stock import StockSender
from ray_weightsync.transports.collective.stock_format import StockFormat, update_info
from ray_weightsync.transports.collective.stock_meeting import oldest_release, takes_unique_id
from ray_weightsync.weights.digest import weights_digest
from ray_weightsync.weights.plan import Plan
from ray_weightsync.weights.sources import StateDictSource

LIMIT_S = 180.0

pytestmark = [
    pytest.mark.gpu(last_run=None),
    pytest.mark.skipif(
        torch.cuda.device_count() < 2 or importlib.util.find_spec("vllm") is None,
        reason="needs two GPUs and vLLM; run by hand on a machine with them",
    ),
]

RECEIVER = """
import json, sys
from types import SimpleNamespace
import torch
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from ray_weightsync.weights.digest import weights_digest
from ray_weightsync.weights.sources import StateDictSource

torch.cuda.set_device(1)
init_info, update_info = json.loads(sys.argv[1])
held = {}
model = SimpleNamespace(load_weights=lambda pairs: held.update((name, tensor.clone()) for name, tensor in pairs))
parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
config = SimpleNamespace(parallel_config=parallel, model_config=None)
engine = NCCLWeightTransferEngine(WeightTransferConfig(backend="nccl"), config, torch.device("cuda", 1), model)
engine.init_transfer_engine(engine.parse_init_info(init_info))
for _ in range(2):
    held.clear()
    engine.receive_weights(engine.parse_update_info(update_info))
    torch.cuda.synchronize()
    print(weights_digest(StateDictSource({name: tensor.cpu() for name, tensor in held.items()})), flush=True)
"""


def this_vllm() -> tuple[int, int] | None:
    from importlib.metadata import version

    return oldest_release([version("vllm")])


@pytest.mark.parametrize("by_unique_id", [True, False], ids=["by_unique_id", "at_a_socket"])
@pytest.mark.parametrize("form", [StockFormat(packed_buffer_size_bytes=1 << 20), StockFormat(packed=False)], ids=["packed", "one_by_one"])
def test_vllms_own_receiver_holds_the_bytes_that_were_sent(form: StockFormat, by_unique_id: bool) -> None:
    vllm = this_vllm() if by_unique_id else None
    if by_unique_id and not takes_unique_id(vllm):
        pytest.skip(f"vLLM {vllm} joins at a socket only")
    generator = torch.Generator().manual_seed(0)
    shapes = [(300, 7), (0, 4), (5000,), (3_000_000,), (64, 64)]
    source = StateDictSource({f"t{n}": torch.randn(shape, generator=generator).cuda(0) for n, shape in enumerate(shapes)})
    plan = Plan.from_metadata(source.metadata())
    with StockSender(form, world_size=2, vllm=vllm) as sender, ThreadPoolExecutor(1) as pool:
        told = json.dumps([sender.init_info(rank_offset=1, world_size=2), update_info(plan)])
        receiving = pool.submit(
            subprocess.run,
            [sys.executable, "-c", RECEIVER, told],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            cwd=Path(__file__).parents[2],
            check=True,
        )
        sender.join(limit_s=LIMIT_S)
        digests = [sender.send(source, plan, limit_s=LIMIT_S).digest for _ in range(2)]
        received = receiving.result(LIMIT_S).stdout.split()
    assert digests == [weights_digest(source)] * 2
    assert received[-2:] == digests
