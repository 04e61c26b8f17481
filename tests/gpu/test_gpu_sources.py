"""Weights that live on a GPU go through the same staging as those on the CPU: `python -m pytest tests/gpu` on a machine with one.

Not yet run: no GPU was at hand.
"""

from __future__ import annotations

import pytest
import torch

from ray_weightsync.weights.digest import weights_digest
from ray_weightsync.weights.packing import pack, view
from ray_weightsync.weights.plan import Plan
from ray_weightsync.weights.sources import ModuleSource

pytestmark = [
    pytest.mark.gpu(last_run=None),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; run by hand on a machine with one"),
]


def make_module(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4096, 2048), torch.nn.Linear(2048, 17, bias=False))
    return module.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_digest_of_weights_does_not_depend_on_where_they_are(dtype: torch.dtype) -> None:
    module = make_module(dtype)
    assert weights_digest(module.cuda()) == weights_digest(module.cpu())


@pytest.mark.parametrize("transposed", [False, True])
def test_weights_on_a_gpu_are_packed_bit_for_bit(transposed: bool) -> None:
    module = make_module(torch.bfloat16).cuda()
    if transposed:
        module[0].weight.data = module[0].weight.data.t().contiguous().t()  # type: ignore[union-attr]
    source = ModuleSource(module)
    plan = Plan.from_metadata(source.metadata())
    out = torch.zeros(plan.num_bytes, dtype=torch.uint8)
    pack(source, plan, out)
    for spec, (name, tensor) in zip(plan.tensors, module.named_parameters(), strict=True):
        assert spec.name == name
        assert torch.equal(view(out, spec), tensor.detach().cpu())
