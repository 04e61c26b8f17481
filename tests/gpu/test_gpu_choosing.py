"""What processes say of the GPU that they are on, and what `auto` makes of it: `python -m pytest tests/gpu` on a machine with one.

Not yet run: no GPU was at hand.
"""

from __future__ import annotations

from typing import Any

import pytest
import ray
import torch

import ray_weightsync as rws
from ray_weightsync.engines.facts import DeviceFacts
from ray_weightsync.fleet.choosing import not_from_gpu
from ray_weightsync.trainer.facts import sender_facts

pytestmark = [pytest.mark.gpu(last_run=None), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LIMIT_S = 120.0


def make_module() -> torch.nn.Module:
    """Two layers that share one weight."""
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    module[1].weight = module[0].weight
    return module.cuda()


def test_a_module_on_the_gpu_may_go_from_there_and_one_that_was_put_aside_may_not(own_ray: None) -> None:
    module = make_module()
    facts = sender_facts(rws.ModuleSource(module))
    assert facts.device == facts.current
    assert facts.device.uuid is not None
    assert not_from_gpu(facts) is None
    module.cpu()
    assert "a GPU, which they are not on" in str(not_from_gpu(sender_facts(rws.ModuleSource(module))))


def test_an_engine_on_the_same_gpu_says_so_and_one_that_cannot_be_lent_memory_goes_by_host(own_ray: None) -> None:
    module = make_module()
    engine: Any = rws.TorchEngine.options(num_gpus=0.1).remote(make_module)  # type: ignore[attr-defined]
    try:
        told = ray.get(engine.rws_inspect.remote("nonce"), timeout=LIMIT_S)["workers"][0]["device"]
        assert DeviceFacts.from_wire(told) == sender_facts(rws.ModuleSource(module)).device
        with rws.WeightSync.attach([engine], transport="auto") as sync:
            report = sync.send_weights(module, version=1)
        assert (report.transport, report.committed) == ("host", ("r0",))
        assert "shares the sender's GPU and is a torch engine" in report.transport_reason
    finally:
        ray.kill(engine)


def test_the_management_library_names_the_same_gpu_as_torch() -> None:
    platforms = pytest.importorskip("vllm.platforms")
    by_library = DeviceFacts.from_wire({"type": "cuda", "uuid": platforms.current_platform.get_device_uuid(0)})
    by_torch = DeviceFacts.from_wire({"type": "cuda", "uuid": str(torch.cuda.get_device_properties(0).uuid)})
    assert by_library == by_torch
