"""What a plain module accepts, and what loading it does."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from ray_weightsync.engines import torch_loader
from ray_weightsync.engines.torch_loader import ModuleLoader, tensors_by_name
from ray_weightsync.weights.plan import ParamMeta, Plan


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def plan_of(metadata: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], target: str = "main") -> Plan:
    return Plan.from_metadata([ParamMeta(*each) for each in metadata], target=target)


def metadata_of(module: torch.nn.Module) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors_by_name(module).items()]


def two_layers() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))


class TestNames:
    def test_parameters_and_persistent_buffers_under_every_name(self) -> None:
        module = torch.nn.Sequential(torch.nn.BatchNorm1d(3), Tied())
        module.register_buffer("scratch", torch.zeros(2), persistent=False)
        names = tensors_by_name(module).keys()
        assert {"0.weight", "0.running_mean", "0.num_batches_tracked", "1.embed.weight", "1.head.weight"} <= names
        assert "scratch" not in names

    @pytest.mark.parametrize(
        ("module", "what"),
        [
            (torch.nn.Linear(2, 2, device="meta"), "weight is a meta tensor"),
            (torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.eye(2).to_sparse())}), "w is a sparse tensor"),
        ],
    )
    def test_a_module_that_weights_cannot_be_copied_into_is_refused(self, module: torch.nn.Module, what: str) -> None:
        with pytest.raises(ValueError, match=what):
            ModuleLoader(module)


class TestCheck:
    def test_the_whole_module_in_any_order_is_accepted(self) -> None:
        module = two_layers()
        assert ModuleLoader(module).check(plan_of(reversed(metadata_of(module)))) == []

    def test_each_wrong_tensor_is_named(self) -> None:
        module = two_layers()
        metadata = metadata_of(module)
        metadata[0] = ("0.weight", torch.float32, (4, 3))
        metadata[1] = ("0.bias", torch.bfloat16, (3,))
        metadata[3] = ("1.gain", torch.float32, (2,))
        assert ModuleLoader(module).check(plan_of(metadata)) == [
            "0.weight has shape [4, 3], the engine's has [3, 4]",
            "0.bias has dtype bfloat16, the engine's has float32",
            "1.gain is unknown to the engine's model",
            "1.bias is missing from the plan",
        ]

    def test_a_subset_is_refused_and_a_left_out_buffer_says_how_it_is_sent(self) -> None:
        module = torch.nn.BatchNorm1d(2)
        problems = ModuleLoader(module).check(plan_of(metadata_of(module)[:2]))
        assert problems == [
            f"{name} is missing from the plan, a buffer: ModuleSource(..., buffers=...) sends it"
            for name in ("running_mean", "running_var", "num_batches_tracked")
        ]

    def test_one_of_two_tied_names_is_enough_and_none_is_not(self) -> None:
        loader = ModuleLoader(Tied())
        for name in ("embed.weight", "head.weight"):
            assert loader.check(plan_of([(name, torch.float32, (6, 4))])) == []
        (unknown, missing) = loader.check(plan_of([("other", torch.float32, (6, 4))]))
        assert unknown == "other is unknown to the engine's model"
        assert missing == "embed.weight or head.weight is missing from the plan"

    def test_a_draft_model_is_not_there(self) -> None:
        module = two_layers()
        assert ModuleLoader(module).check(plan_of(metadata_of(module), target="draft")) == ["the engine has no 'draft' model, only 'main'"]

    def test_a_plan_of_another_model_does_not_make_a_wall_of_text(self) -> None:
        problems = ModuleLoader(two_layers()).check(plan_of((f"layer.{each}", torch.float32, (1,)) for each in range(500)))
        assert len(problems) == 21
        assert problems[-1] == "and 484 more problems"

    def test_checking_changes_nothing(self) -> None:
        module = two_layers()
        before = {name: tensor.clone() for name, tensor in tensors_by_name(module).items()}
        ModuleLoader(module).check(plan_of(metadata_of(two_layers())))
        assert all(torch.equal(before[name], tensor) for name, tensor in tensors_by_name(module).items())


class TestLoad:
    def test_the_modules_own_tensors_get_the_exact_bytes(self) -> None:
        module, other = two_layers(), two_layers()
        with torch.no_grad():
            other[0].bias.fill_(float("nan"))
        held = module[0].weight
        loader = ModuleLoader(module)
        loader.start()
        loader.load(iter(tensors_by_name(other).items()))
        loader.finish()
        assert module[0].weight is held
        for name, tensor in tensors_by_name(other).items():
            assert torch.equal(tensors_by_name(module)[name].view(torch.uint8), tensor.view(torch.uint8)), name

    def test_a_module_with_transposed_and_scalar_parameters(self) -> None:
        module = torch.nn.ParameterDict({"t": torch.nn.Parameter(torch.zeros(3, 2).t()), "s": torch.nn.Parameter(torch.tensor(0.0))})
        loader = ModuleLoader(module)
        loader.start()
        loader.load(iter({"t": torch.arange(6.0).reshape(2, 3), "s": torch.tensor(7.0)}.items()))
        loader.finish()
        assert torch.equal(module["t"], torch.arange(6.0).reshape(2, 3))
        assert module["s"].item() == 7.0

    @pytest.mark.parametrize("tensor", [torch.zeros(4), torch.zeros(3, dtype=torch.bfloat16)])
    def test_a_tensor_that_does_not_fit_is_refused_by_name(self, tensor: torch.Tensor) -> None:
        loader = ModuleLoader(two_layers())
        loader.start()
        with pytest.raises(ValueError, match=r"0\.bias, .* does not fit"):
            loader.load(iter([("0.bias", tensor)]))

    def test_half_an_update_is_told_by_finish_and_the_next_one_starts_clean(self) -> None:
        module, other = two_layers(), two_layers()
        pairs = list(tensors_by_name(other).items())
        loader = ModuleLoader(module)
        loader.start()
        loader.load(iter(pairs[:2]))
        with pytest.raises(ValueError, match="only 2 of 4 tensors"):
            loader.finish()
        loader.start()
        loader.load(iter(pairs))
        loader.finish()
        assert torch.equal(module[1].weight, other[1].weight)

    def test_tied_names_with_equal_values_are_one_tensor_with_different_ones_an_error(self) -> None:
        module = Tied()
        loader = ModuleLoader(module)
        new = torch.full((6, 4), float("nan"))
        loader.start()
        loader.load(iter([("embed.weight", new), ("head.weight", new.clone())]))
        loader.finish()
        loader.start()
        with pytest.raises(ValueError, match=r"embed\.weight and head\.weight are one tensor"):
            loader.load(iter([("embed.weight", new), ("head.weight", torch.zeros(6, 4))]))

    def test_an_engine_that_sleeps_takes_no_weights(self) -> None:
        loader = ModuleLoader(two_layers())
        loader.awake = False
        with pytest.raises(RuntimeError, match="wake the engine up"):
            loader.start()

    def test_dropped_weights_are_not_the_old_ones(self) -> None:
        module = two_layers()
        ModuleLoader(module).drop()
        assert not any(tensor.any() for tensor in tensors_by_name(module).values())

    def test_tied_values_are_compared_where_the_module_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        there = torch.device("meta")  # stands for a GPU: a second device that is on every machine
        compared: list[tuple[torch.device, torch.device]] = []
        monkeypatch.setattr(torch, "equal", lambda a, b: compared.append((a.device, b.device)) or True)
        assert torch_loader._same_bytes(torch.ones(2, device=there), torch.ones(2))
        assert compared == [(there, there)]
