"""A plan is judged in pieces, however large it is and whichever model judges it."""

from __future__ import annotations

import pytest
import torch

from ray_weightsync.engines.torch_loader import ModuleLoader
from ray_weightsync.weights.plan import ParamMeta, Plan
from ray_weightsync.worker import plans
from ray_weightsync.worker.plans import WorkerPlans
from ray_weightsync.worker.twin import check_on_twin

NUM_TENSORS = 2000


class Twinned:
    """A `ModelLoader` whose plans are judged on a meta twin."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def check(self, plan: Plan) -> list[str]:
        return check_on_twin(
            self._module, plan, restored=lambda each: (dict(each.named_parameters(recurse=False)), {}), world_size=1
        ).problems

    def unjudged(self) -> list[str]:
        return []

    def start(self) -> None:
        raise AssertionError("judging touches no live model")

    load = finish = start  # type: ignore[assignment]


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for index in range(NUM_TENSORS):
            layer = torch.nn.Module()
            layer.register_parameter("weight", torch.nn.Parameter(torch.zeros(2), requires_grad=False))
            self.register_module(f"layer{index}", layer)

    def load_weights(self, pairs: object) -> None:
        named = dict(self.named_parameters())
        for name, tensor in pairs:  # type: ignore[attr-defined]
            named[name].copy_(tensor)


@pytest.mark.parametrize("loader", [ModuleLoader, Twinned])
def test_a_plan_of_many_tensors_may_stand_still_after_each(loader: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "PIECE_S", 0.0)
    model = Layers()
    plan = Plan.from_metadata([ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in model.named_parameters()])
    judged_by = WorkerPlans(loader(model))
    judged_by.judge(plan.to_wire())
    pieces = 0
    while judged_by.advance() is not None:
        pieces += 1
    assert pieces >= 3 * NUM_TENSORS, "laid out, validated, and checked: a piece each"
    assert judged_by.judged(plan.to_wire()) == (plan, [])
