"""The meta twin on toy models that load as vLLM's do: fused and sharded parameters, padding, experts, loaders of every habit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from ray_weightsync.weights.plan import ParamMeta, Plan
from ray_weightsync.worker.ledger import MAX_PROBLEMS, aliases_of, is_optional
from ray_weightsync.worker.twin import Verdict, check_on_twin

BF16 = torch.bfloat16


def parameter(*shape: int, dtype: torch.dtype = BF16, loader: Callable[..., None] | None = None, **attributes: Any) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
    if loader is not None:
        made.weight_loader = loader  # type: ignore[attr-defined]
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def exactly(param: torch.Tensor, loaded: torch.Tensor) -> None:
    if param.shape != loaded.shape:
        raise AssertionError  # without a word, as vLLM's own
    param.data.copy_(loaded)


class Fused(nn.Module):
    """Two projections in one parameter, each loaded on its own."""

    def __init__(self, rows: int = 4, tp_size: int = 1, tp_rank: int = 0) -> None:
        super().__init__()
        self.rows, self.tp_size, self.tp_rank = rows // tp_size, tp_size, tp_rank
        self.weight = parameter(2 * self.rows, 8, loader=self.weight_loader)

    def weight_loader(self, param: torch.Tensor, loaded: torch.Tensor, shard: int) -> None:
        place = param.data.narrow(0, shard * self.rows, self.rows)
        exactly(place, loaded.narrow(0, self.tp_rank * self.rows, self.rows))


class Padded(nn.Module):
    """An embedding of 5 rows, padded to 8 with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(8, 8, loader=self.weight_loader)

    def weight_loader(self, param: torch.Tensor, loaded: torch.Tensor) -> None:
        assert loaded.shape[0] == 5
        param[:5].data.copy_(loaded)
        param[5:].data.fill_(0)


class Model(nn.Module):
    """Loads as vLLM's models do: by name, through each parameter's loader."""

    def __init__(self, **extra: nn.Module) -> None:
        super().__init__()
        self.embed = Padded()
        self.fused = Fused()
        self.norm = nn.Module()
        self.norm.weight = parameter(8)
        for name, module in extra.items():
            self.add_module(name, module)

    def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters(remove_duplicate=False))
        for name, tensor in pairs:
            for shard, projection in enumerate(("gate", "up")):
                if name == f"{projection}.weight":
                    target = parameters["fused.weight"]
                    target.weight_loader(target, tensor, shard)  # type: ignore[attr-defined]
                    break
            else:
                target = parameters[name]
                getattr(target, "weight_loader", exactly)(target, tensor)


PAIRS: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "embed.weight": (BF16, (5, 8)),
    "gate.weight": (BF16, (4, 8)),
    "up.weight": (BF16, (4, 8)),
    "norm.weight": (BF16, (8,)),
}


def as_restored(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What vLLM restores: meta tensors with the attributes of the live ones."""

    def meta(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.data.to("meta")
        made.__class__ = tensor.__class__
        made.__dict__ = tensor.__dict__.copy()
        return made

    return {name: meta(tensor) for name, tensor in module._parameters.items() if tensor is not None and name != "bias"}, {}


def check(
    model: nn.Module,
    pairs: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    world_size: int = 1,
    aliases: dict[str, frozenset[str]] | None = None,
    shared: dict[str, frozenset[str]] | None = None,
    *,
    partial: bool = False,
) -> Verdict:
    plan = Plan.from_metadata([ParamMeta(name, dtype, shape) for name, (dtype, shape) in pairs.items()], partial=partial)
    return check_on_twin(model, plan, restored=as_restored, world_size=world_size, aliases=aliases or {}, shared=shared or {})


def refusal(model: nn.Module, pairs: dict[str, tuple[torch.dtype, tuple[int, ...]]], world_size: int = 1) -> str:
    verdict = check(model, pairs, world_size)
    assert verdict.unjudged == []
    return "; ".join(verdict.problems)


def holding(**parameters: nn.Parameter) -> nn.Module:
    module = nn.Module()
    for name, each in parameters.items():
        module.register_parameter(name, each)
    return module


class TestCoverage:
    @pytest.mark.parametrize("names", [list(PAIRS), list(PAIRS)[::-1]])
    def test_a_complete_plan_has_no_problems_in_any_order(self, names: list[str]) -> None:
        assert check(Model(), {name: PAIRS[name] for name in names}) == Verdict()

    @pytest.mark.parametrize("missing", ["embed.weight", "norm.weight"])
    def test_a_missing_tensor_is_named(self, missing: str) -> None:
        pairs = {name: pair for name, pair in PAIRS.items() if name != missing}
        assert refusal(Model(), pairs).startswith(f"{missing} would be given nothing: it is missing from the plan")

    def test_half_a_fused_parameter_is_named_with_the_half_that_is_there(self) -> None:
        pairs = {name: pair for name, pair in PAIRS.items() if name != "up.weight"}
        assert refusal(Model(), pairs) == (
            "fused.weight would be given 32 of 64 elements, from 'gate.weight': the rest is missing from the plan"
        )

    @pytest.mark.parametrize("name", PAIRS)
    def test_a_partial_plan_may_have_any_of_the_models_tensors(self, name: str) -> None:
        model = Model(attn=holding(k_scale=parameter(1, dtype=torch.float32)))
        assert check(model, {name: PAIRS[name]}, partial=True) == Verdict()

    @pytest.mark.parametrize(
        ("name", "pair", "words"),
        [
            ("nobody.weight", (BF16, (8,)), "at tensor 'nobody.weight' (bfloat16, shape [8]): KeyError: 'nobody.weight'"),
            ("gate.weight", (BF16, (3, 8)), "at tensor 'gate.weight' (bfloat16, shape [3, 8]): "),
            ("gate.weight", (BF16, (6, 8)), "'gate.weight' of shape [6, 8] is larger than its place in fused.weight: 32 of 48"),
            ("norm.weight", (torch.float32, (8,)), "norm.weight is bfloat16 in this engine and would be given float32"),
        ],
    )
    def test_but_names_shapes_and_dtypes_of_a_partial_plan_are_judged(
        self, name: str, pair: tuple[torch.dtype, tuple[int, ...]], words: str
    ) -> None:
        (problem,) = check(Model(), {name: pair}, partial=True).problems
        assert problem.startswith(words)

    def test_a_tensor_of_a_partial_plan_that_does_not_fill_its_parameter_is_named(self) -> None:
        def part(param: torch.Tensor, loaded: torch.Tensor) -> None:
            param.data[: len(loaded)].copy_(loaded)

        model = Model(odd=holding(weight=parameter(8, loader=part)))
        (problem,) = check(model, {"odd.weight": (BF16, (6,))}, partial=True).problems
        assert problem.startswith("odd.weight would be given 6 of 8 elements")

    def test_two_names_for_one_place_are_both_named(self) -> None:
        class Aliasing(Model):
            def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
                super().load_weights((name.removeprefix("old_"), tensor) for name, tensor in pairs)

        words = refusal(Aliasing(), {**PAIRS, "old_norm.weight": (BF16, (8,))})
        assert words == "norm.weight would be given the same place twice, by 'norm.weight' and 'old_norm.weight'"

    def test_more_elements_than_there_are_is_a_problem(self) -> None:
        def twice(param: torch.Tensor, loaded: torch.Tensor) -> None:
            param.data.copy_(loaded)
            param.data[:4].copy_(loaded[:4])

        model = Model(odd=holding(weight=parameter(8, loader=twice)))
        assert refusal(model, {**PAIRS, "odd.weight": (BF16, (8,))}) == "odd.weight has 8 elements and would be given 12"

    def test_a_loader_that_transforms_in_place_is_no_duplicate(self) -> None:
        def transforming(param: torch.Tensor, loaded: torch.Tensor) -> None:
            param.data.copy_(loaded)
            param.data.copy_(-torch.exp(param.data))

        model = Model(odd=holding(weight=parameter(8, loader=transforming)))
        assert check(model, {**PAIRS, "odd.weight": (BF16, (8,))}) == Verdict()

    def test_padding_that_vllm_declares_is_not_missing(self) -> None:
        def part(param: torch.Tensor, loaded: torch.Tensor) -> None:
            param.data[: len(loaded)].copy_(loaded)

        model = Model(odd=holding(weight=parameter(8, loader=part, weight_loader_numel=6)))
        assert check(model, {**PAIRS, "odd.weight": (BF16, (6,))}) == Verdict()
        assert "5 of 6 elements" in refusal(model, {**PAIRS, "odd.weight": (BF16, (5,))})

    def test_a_loader_that_zeroes_all_before_it_copies_a_part_cannot_be_judged(self) -> None:
        def zeroing(param: torch.Tensor, loaded: torch.Tensor) -> None:
            param.data.zero_()
            param.data[: len(loaded)].copy_(loaded)

        verdict = check(Model(odd=holding(weight=parameter(8, loader=zeroing))), {**PAIRS, "odd.weight": (BF16, (3,))})
        assert verdict.problems == []
        assert verdict.unjudged == ["odd.weight: its loader overwrites zeros of its own, so a missing part cannot be told from padding"]

    def test_a_bias_that_no_reload_restores_is_judged_all_the_same(self) -> None:
        model = Model(odd=holding(bias=parameter(8)))
        assert check(model, {**PAIRS, "odd.bias": (BF16, (8,))}) == Verdict()
        assert "odd.bias would be given nothing" in refusal(model, PAIRS)

    def test_scales_with_a_default_may_be_missing_and_are_reported(self) -> None:
        model = Model(attn=holding(k_scale=parameter(1, dtype=torch.float32)))
        verdict = check(model, PAIRS)
        assert verdict.problems == []
        assert verdict.unjudged == ["attn.k_scale is not in the plan; the engine keeps the value it has"]

    @pytest.mark.parametrize(
        ("name", "optional"), [("a.k_scale", True), ("input_scale", True), ("a.weight_scale", False), ("k_proj", False)]
    )
    def test_which_scales_have_a_default(self, name: str, optional: bool) -> None:
        assert is_optional(name) is optional

    def test_a_tensor_that_the_models_own_loader_skips_is_not_called_missing_from_the_plan(self) -> None:
        class Skipping(Model):
            def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
                super().load_weights((name, tensor) for name, tensor in pairs if name != "norm.weight")

        assert refusal(Skipping(), PAIRS) == (
            "norm.weight would be given nothing and stay as it is: the model's own loader skips the plan's tensor of that name"
        )

    def test_a_weight_in_the_memory_of_another_has_what_the_other_is_given(self) -> None:
        model = Model(head=holding(weight=parameter(8, 8)))
        assert refusal(model, PAIRS).startswith("head.weight would be given nothing")
        model.head.weight = model.embed.weight
        aliases = aliases_of(model.named_parameters(remove_duplicate=False))
        assert aliases == {"embed.weight": frozenset({"head.weight"}), "head.weight": frozenset({"embed.weight"})}
        assert check(model, PAIRS, aliases=aliases) == Verdict()
        without = {name: pair for name, pair in PAIRS.items() if name != "embed.weight"}
        assert len(check(model, without, aliases=aliases).problems) == 2

    def test_views_of_one_memory_that_are_not_the_same_are_no_aliases(self) -> None:
        whole = torch.zeros(8, 8)
        named = [("whole", whole), ("rows", whole[:4]), ("again", whole.view(8, 8)), ("empty", whole[:0]), ("none", whole[8:])]
        assert set(aliases_of(named)) == {"whole", "again"}

    def test_many_problems_are_cut_with_their_number(self) -> None:
        model = Model(**{f"extra{index}": holding(weight=parameter(2)) for index in range(20)})
        problems = check(model, PAIRS).problems
        assert len(problems) == MAX_PROBLEMS + 1
        assert problems[-1] == f"and {20 - MAX_PROBLEMS} more"


class TestTies:
    def tied(self, **extra: nn.Module) -> tuple[Model, dict[str, frozenset[str]]]:
        model = Model(head=Padded(), **extra)
        model.head.weight = model.embed.weight
        return model, aliases_of(model.named_parameters(remove_duplicate=False))

    def test_names_that_go_to_one_memory_are_told(self) -> None:
        model, shared = self.tied()
        verdict = check(model, {**PAIRS, "head.weight": (BF16, (5, 8))}, shared=shared)
        assert verdict == Verdict(ties={"embed.weight": frozenset({"head.weight"}), "head.weight": frozenset({"embed.weight"})})

    def test_one_of_the_names_alone_is_tied_to_nothing(self) -> None:
        model, shared = self.tied()
        assert check(model, PAIRS, aliases=shared, shared=shared) == Verdict()

    def test_they_are_told_by_their_names_on_the_wire(self) -> None:
        class Renaming(Model):
            def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
                super().load_weights((name.removeprefix("language_model."), tensor) for name, tensor in pairs)

        model = Renaming(head=Padded())
        model.head.weight = model.embed.weight
        shared = aliases_of(model.named_parameters(remove_duplicate=False))
        sent = {f"language_model.{name}": pair for name, pair in {**PAIRS, "head.weight": PAIRS["embed.weight"]}.items()}
        assert check(model, sent, shared=shared).ties["language_model.head.weight"] == {"language_model.embed.weight"}

    def test_parts_of_a_fused_parameter_are_tied_each_to_its_own(self) -> None:
        class TwoFused(Model):
            def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
                parameters = dict(self.named_parameters(remove_duplicate=False))
                for name, tensor in pairs:
                    layer, _, part = name.rpartition(".")
                    if part in ("gate", "up"):
                        target = parameters[f"{layer}.weight"]
                        target.weight_loader(target, tensor, ("gate", "up").index(part))  # type: ignore[attr-defined]
                    else:
                        super().load_weights([(name, tensor)])

        model = TwoFused(again=Fused())
        model.again.weight = model.fused.weight
        shared = aliases_of(model.named_parameters(remove_duplicate=False))
        plain = {name: pair for name, pair in PAIRS.items() if name not in ("gate.weight", "up.weight")}
        halves = {f"{layer}.{part}": (BF16, (4, 8)) for layer in ("fused", "again") for part in ("gate", "up")}
        verdict = check(model, plain | halves, shared=shared)
        assert verdict.problems == []
        assert verdict.ties == {
            f"{layer}.{part}": frozenset({f"{other}.{part}"})
            for layer, other in (("fused", "again"), ("again", "fused"))
            for part in ("gate", "up")
        }

    def test_they_are_told_also_when_the_check_cannot_go_on(self) -> None:
        def looks_at_values(param: torch.Tensor, loaded: torch.Tensor) -> None:
            if bool((loaded > 0).any()):
                param.data.copy_(loaded)

        model, shared = self.tied(odd=holding(weight=parameter(8, loader=looks_at_values)))
        verdict = check(model, {**PAIRS, "head.weight": (BF16, (5, 8)), "odd.weight": (BF16, (8,))}, shared=shared)
        assert verdict.problems == []
        assert "head.weight" in verdict.ties


class TestShapes:
    @pytest.mark.parametrize("shape", [(7,), (8, 1), (1,), ()])
    def test_a_wrong_shape_is_named_with_tensor_dtype_and_shape(self, shape: tuple[int, ...]) -> None:
        assert refusal(Model(), {**PAIRS, "norm.weight": (BF16, shape)}).startswith(
            f"at tensor 'norm.weight' (bfloat16, shape {list(shape)}; the parameter here has shape [8]): AssertionError"
        )

    def test_padded_rows_of_the_vocabulary_are_refused(self) -> None:
        assert "at tensor 'embed.weight' (bfloat16, shape [8, 8]; the parameter here has shape [8, 8])" in refusal(
            Model(), {**PAIRS, "embed.weight": (BF16, (8, 8))}
        )

    def test_an_unknown_name_is_named(self) -> None:
        assert "at tensor 'nobody' (bfloat16, shape [2]): KeyError: 'nobody'" in refusal(Model(), {**PAIRS, "nobody": (BF16, (2,))})

    def test_a_tensor_of_which_a_loader_would_use_a_part_is_refused(self) -> None:
        words = refusal(Model(), {**PAIRS, "gate.weight": (BF16, (8, 8))})
        assert words == "'gate.weight' of shape [8, 8] is larger than its place in fused.weight: 32 of 64 elements would be used here"

    def test_a_shard_of_a_tensor_is_no_part_too_few(self) -> None:
        model = Model()
        model.fused = Fused(rows=4, tp_size=2, tp_rank=1)
        assert check(model, PAIRS, world_size=2) == Verdict()
        assert "32 elements" not in refusal(model, PAIRS, world_size=2)

    def test_a_broadcast_is_refused(self) -> None:
        def careless(param: torch.Tensor, loaded: torch.Tensor) -> None:
            param.data.copy_(loaded)

        words = refusal(Model(odd=holding(weight=parameter(4, 8, loader=careless))), {**PAIRS, "odd.weight": (BF16, (8,))})
        assert words == "odd.weight: shape [8] does not fill the place of shape [4, 8]"


class TestDtypes:
    @pytest.mark.parametrize("sent", [torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn, torch.float64, torch.bool])
    def test_another_dtype_is_refused_with_both(self, sent: torch.dtype) -> None:
        words = refusal(Model(), {**PAIRS, "norm.weight": (sent, (8,))})
        name = str(sent).removeprefix("torch.")
        # What cast(...) refuses itself is not to be cast.
        remedy = "cast on the sender with cast(...)" if sent.is_floating_point else "send bfloat16"
        assert words == f"norm.weight is bfloat16 in this engine and would be given {name}: {remedy}"

    def test_an_engine_of_8_bit_floats_wants_more_than_a_cast(self) -> None:
        model = Model(proj=holding(weight=parameter(8, dtype=torch.float8_e4m3fn)))
        words = refusal(model, {**PAIRS, "proj.weight": (BF16, (8,))})
        assert words.endswith("would be given bfloat16: quantise on the sender as its checkpoint is, and send the scales too")

    def test_the_tensor_is_named_where_the_parameter_is_called_otherwise(self) -> None:
        assert "fused.weight is bfloat16 in this engine and would be given float32 (tensor 'up.weight')" in refusal(
            Model(), {**PAIRS, "up.weight": (torch.float32, (4, 8))}
        )

    @pytest.mark.parametrize(
        ("sent", "kept"),
        [(BF16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float64), (torch.int32, torch.int32)],
    )
    def test_a_cast_that_keeps_every_value_is_accepted(self, sent: torch.dtype, kept: torch.dtype) -> None:
        model = Model(gate_bias=holding(weight=parameter(8, dtype=kept)))
        assert check(model, {**PAIRS, "gate_bias.weight": (sent, (8,))}) == Verdict()

    @pytest.mark.parametrize("sent", [torch.int8, torch.float8_e4m3fn, torch.float64])
    def test_a_cast_into_float32_that_does_not_is_refused(self, sent: torch.dtype) -> None:
        model = Model(gate_bias=holding(weight=parameter(8, dtype=torch.float32)))
        assert "gate_bias.weight is float32" in refusal(model, {**PAIRS, "gate_bias.weight": (sent, (8,))})

    def test_a_cast_of_the_models_own_is_its_own_business(self) -> None:
        def own(param: torch.Tensor, loaded: torch.Tensor) -> None:
            param.data.copy_(loaded.float().exp().to(param.dtype))

        model = Model(a_log=holding(weight=parameter(8, loader=own)))
        assert check(model, {**PAIRS, "a_log.weight": (torch.float32, (8,))}) == Verdict()

    def test_a_loader_that_collects_everything_first_is_judged_without_naming_a_tensor(self) -> None:
        class Collecting(Model):
            def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
                super().load_weights(list(pairs))

        words = refusal(Collecting(), {**PAIRS, "up.weight": (torch.float32, (4, 8))})
        assert words == "fused.weight is bfloat16 in this engine and would be given float32: cast on the sender with cast(...)"


class TestLoadersOfEveryHabit:
    def test_a_scalar_that_is_filled_with_the_value_of_its_tensor_is_judged(self) -> None:
        def filling(param: torch.Tensor, loaded: torch.Tensor) -> None:
            param.data.fill_(loaded.item())

        model = Model(odd=holding(weight_scale=parameter(1, dtype=torch.float32, loader=filling)))
        assert check(model, {**PAIRS, "odd.weight_scale": (torch.float32, ())}) == Verdict()

    def test_a_loader_that_looks_at_values_is_a_missing_guarantee_not_a_refusal(self) -> None:
        def looking(param: torch.Tensor, loaded: torch.Tensor) -> None:
            if loaded.tolist():
                param.data.copy_(loaded)

        verdict = check(Model(odd=holding(weight=parameter(8, loader=looking))), {"odd.weight": (BF16, (8,)), **PAIRS})
        assert verdict.problems == []
        assert "the check could not go on at tensor 'odd.weight'" in verdict.unjudged[0]

    def test_a_loader_that_would_write_to_the_live_model_is_stopped_before_it_does(self) -> None:
        model = Model()
        live = model.norm.weight

        def escaping(param: torch.Tensor, loaded: torch.Tensor) -> None:
            live.data.copy_(loaded)

        model.norm.weight.weight_loader = escaping  # type: ignore[union-attr]
        live.data.fill_(7)
        verdict = check(model, PAIRS)
        assert verdict.problems == []
        assert "a loader writes to memory that is not a parameter of the model's own" in verdict.unjudged[0]
        assert live.tolist() == [7.0] * 8

    @pytest.mark.parametrize("method", ["add_", "mul_"])
    def test_arithmetic_in_place_on_real_memory_is_stopped_too(self, method: str) -> None:
        real = torch.full((8,), 3.0)

        def escaping(param: torch.Tensor, loaded: torch.Tensor) -> None:
            getattr(real, method)(2)

        check(Model(odd=holding(weight=parameter(8, loader=escaping))), {"odd.weight": (BF16, (8,)), **PAIRS})
        assert real.tolist() == [3.0] * 8

    def test_a_loader_that_reads_which_experts_are_here_works_on_a_copy_of_the_table(self) -> None:
        class Experts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w13_weight = parameter(1, 4, loader=self.weight_loader)
                self.register_buffer("_expert_map", torch.tensor([-1, 0]))

            def weight_loader(self, param: torch.Tensor, loaded: torch.Tensor) -> None:
                for expert in range(2):
                    here = int(self._expert_map[expert].item())
                    if here >= 0:
                        param.data[here].copy_(loaded[expert])

        model = Model(experts=Experts())
        verdict = check(model, {**PAIRS, "experts.w13_weight": (BF16, (1, 4))})
        assert "IndexError" in verdict.problems[0]
        table = model.experts._expert_map
        assert "2 elements" not in str(verdict)
        assert table.tolist() == [-1, 0]  # type: ignore[union-attr,operator]

    @pytest.mark.parametrize("wrapped", [False, True])
    def test_partial_and_wrapped_loaders_load_into_the_twin(self, wrapped: bool) -> None:
        model = Model()
        loader: Any = functools.partial(model.fused.weight_loader)
        if wrapped:  # what an earlier reload of vLLM's leaves on its metadata
            inner = loader

            def online_process_loader(*args: Any) -> None:
                raise AssertionError("the wrapper of an earlier reload was called")

            online_process_loader.__wrapped__ = inner  # type: ignore[attr-defined]
            loader = online_process_loader
        model.fused.weight.weight_loader = loader  # type: ignore[attr-defined]
        assert check(model, PAIRS) == Verdict()

    def test_a_loader_bound_to_a_placeholder_for_its_layer_is_bound_to_the_twins(self) -> None:
        model = Model()
        sentinel = object()
        model.fused.weight.weight_loader = Fused.weight_loader.__get__(sentinel)  # type: ignore[attr-defined]
        assert check(model, PAIRS) == Verdict()

    def test_a_model_that_cannot_be_cloned_is_a_missing_guarantee(self) -> None:
        def broken(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
            raise KeyError("no metadata")

        plan = Plan.from_metadata([ParamMeta("a", BF16, (1,))])
        verdict = check_on_twin(Model(), plan, restored=broken, world_size=1)
        assert verdict.problems == []
        assert "nothing of the plan is checked: KeyError: 'no metadata'" in verdict.unjudged[0]


class TestTheLiveModel:
    def test_it_is_left_as_it_was(self) -> None:
        model = Model()
        for each in model.parameters():
            each.data.fill_(7)
        before = {name: (id(each), each.data_ptr(), id(each.__dict__.get("weight_loader"))) for name, each in model.named_parameters()}
        modules = {name: dict(module.__dict__) for name, module in model.named_modules()}
        check(model, PAIRS)
        check(model, {"norm.weight": (BF16, (9,))})
        assert {name: (id(e), e.data_ptr(), id(e.__dict__.get("weight_loader"))) for name, e in model.named_parameters()} == before
        assert {name: dict(module.__dict__) for name, module in model.named_modules()} == modules
        assert all(bool((each == 7).all()) for each in model.parameters())

    def test_shared_modules_stay_shared(self) -> None:
        model = Model()
        model.add_module("again", model.norm)
        assert check(model, PAIRS) == Verdict()
