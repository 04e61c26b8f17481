"""Sources: what is accepted, what is refused by name, and the check of iteration against metadata."""

from __future__ import annotations

import ast
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_weightsync.errors import ConfigError
from ray_weightsync.weights.plan import ParamMeta, Plan
from ray_weightsync.weights.source_base import layer_groups
from ray_weightsync.weights.sources import ModuleSource, StateDictSource, WeightSource, as_source, checked

QUICK = settings(deadline=None, print_blob=True, max_examples=100)


class OwnSource:
    """A user's source: no class of ours, no optional method."""

    def __init__(self, declared: list[ParamMeta], pairs: list[Any]) -> None:
        self.declared = declared
        self.pairs = pairs

    def metadata(self) -> list[ParamMeta]:
        return self.declared

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pairs)


class Wrapper(torch.Tensor):
    """A subclass whose values only it can read, as DTensor and quantised tensors are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, inner: torch.Tensor) -> None:
        self.hidden = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapper(args[0].hidden)
        raise NotImplementedError(str(func))


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates making them; existing models have them
        return torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.qint8)  # type: ignore[attr-defined,no-any-return]


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])


DECLARED = [ParamMeta("a", torch.float32, (2,)), ParamMeta("b", torch.int64, ())]
PAIRS = [("a", torch.ones(2)), ("b", torch.tensor(3))]


def test_a_source_that_agrees_is_passed_on_with_its_places() -> None:
    plan = Plan.from_metadata(DECLARED)
    results = list(checked(OwnSource(DECLARED, PAIRS), plan))
    assert [spec for spec, _ in results] == list(plan.tensors)
    assert [tensor for _, tensor in results] == [tensor for _, tensor in PAIRS]


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (PAIRS[::-1], "yields 'b' where metadata\\(\\) declared 'a'"),
        ([("A", PAIRS[0][1]), PAIRS[1]], "yields 'A' where metadata\\(\\) declared 'a'"),
        ([("a", torch.ones(2, dtype=torch.float64)), PAIRS[1]], r"'a' as torch.float64 \(2,\), metadata\(\) declared torch.float32 \(2,\)"),
        ([("a", torch.ones(1, 2)), PAIRS[1]], r"'a' as torch.float32 \(1, 2\)"),
        ([("a", torch.ones(3)), PAIRS[1]], r"'a' as torch.float32 \(3,\)"),
        ([PAIRS[0], ("b", torch.tensor([3]))], r"'b' as torch.int64 \(1,\)"),
        (PAIRS[:1], "ends after 1 of 2 tensors; the next one declared is 'b'"),
        ([], "ends after 0 of 2"),
        ([*PAIRS, ("c", torch.ones(1))], "yields 'c' after all 2"),
        ([("a", None), PAIRS[1]], "None for 'a'"),
        ([("a", [1.0, 1.0]), PAIRS[1]], "'a' is a list, not a tensor"),
        ([PAIRS[0], "bx"], "after 1 of them came str"),
        ([PAIRS[0], ("b", PAIRS[1][1], 1)], "after 1 of them came tuple"),
        ([("a", torch.ones(2, device="meta")), PAIRS[1]], "'a' is on the meta device"),
        ([("a", torch.ones(2).to_sparse()), PAIRS[1]], "'a' has the layout torch.sparse_coo"),
        ([("a", Wrapper(torch.ones(2))), PAIRS[1]], "'a' is a Wrapper"),
    ],
)
def test_iteration_that_disagrees_with_metadata_is_an_error_naming_the_tensor(pairs: list[Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        list(checked(OwnSource(DECLARED, pairs), Plan.from_metadata(DECLARED)))


def test_what_came_before_the_disagreement_was_passed_on() -> None:
    stream = checked(PAIRS[:1], Plan.from_metadata(DECLARED))
    assert next(stream)[0].name == "a"
    with pytest.raises(ConfigError, match="'b'"):
        next(stream)


UNSENDABLE = {
    "meta": torch.ones(2, device="meta"),
    "sparse": torch.eye(2).to_sparse(),
    "quantised": quantised(),
    "a subclass": Wrapper(torch.ones(2)),
    "a lazy parameter": torch.nn.parameter.UninitializedParameter(),
    "nested": nested(),
    "a number": 3,
    "None": None,
}


@pytest.mark.parametrize("what", UNSENDABLE)
def test_a_state_dict_with_something_unsendable_is_refused_by_name_when_made(what: str) -> None:
    with pytest.raises(ConfigError, match="'wrong'"):
        StateDictSource({"fine": torch.ones(1), "wrong": UNSENDABLE[what]})  # type: ignore[dict-item]
    assert [name for name, _ in StateDictSource({"fine": torch.ones(1), "wrong": UNSENDABLE[what]}, skip="wrong")] == ["fine"]  # type: ignore[dict-item]


def test_a_state_dict_that_becomes_unsendable_is_refused_before_its_first_tensor() -> None:
    state: dict[str, Any] = {"fine": torch.ones(1), "wrong": torch.ones(1)}
    source = StateDictSource(state)
    state["wrong"] = UNSENDABLE["meta"]
    with pytest.raises(ConfigError, match="'wrong'"):
        source.metadata()
    with pytest.raises(ConfigError, match="'wrong'"):
        next(iter(source))


def test_a_transform_may_make_a_subclass_plain() -> None:
    source = StateDictSource(
        {"a": Wrapper(torch.ones(2))}, transform=lambda name, tensor: [(name, getattr(tensor, "hidden", torch.empty(2, device="meta")))]
    )
    assert next(iter(checked(source, Plan.from_metadata(source.metadata()))))[1].tolist() == [1, 1]


def test_later_rounds_send_what_the_mapping_holds_then() -> None:
    state = {"a": torch.ones(1)}
    source = StateDictSource(state)
    state["a"] = torch.full((1,), 2.0)
    state["b"] = torch.zeros(1)
    assert [(name, tensor.item()) for name, tensor in source] == [("a", 2), ("b", 0)]
    assert [meta.name for meta in source.metadata()] == ["a", "b"]


def test_skip_takes_names_and_patterns_and_one_that_fits_nothing_is_an_error() -> None:
    state = {"a.x": torch.ones(1), "a.y": torch.ones(1), "b[0]": torch.ones(1), "c": torch.ones(1)}
    assert [meta.name for meta in StateDictSource(state, skip=["a.*", "b[0]"]).metadata()] == ["c"]
    with pytest.raises(ConfigError, match=r"skip: 'a.z' fits none of the 4 names"):
        StateDictSource(state, skip=["a.z"])
    with pytest.raises(ConfigError, match="skip must hold non-empty"):
        StateDictSource(state, skip=[3])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="skip must be a name"):
        StateDictSource(state, skip=3)  # type: ignore[arg-type]


NONFINITE = [torch.tensor([1.0, float("nan")]), torch.tensor([float("-inf")]), torch.tensor([complex(0, float("nan"))])]
NONFINITE += [tensor.to(torch.float8_e5m2) for tensor in NONFINITE[:2]] + [
    torch.tensor([0xFF], dtype=torch.uint8).view(torch.float8_e8m0fnu)
]


@pytest.mark.parametrize("tensor", NONFINITE, ids=str)
def test_nan_is_sent_as_it_is_unless_it_is_to_be_rejected(tensor: torch.Tensor) -> None:
    state = {"fine": torch.ones(2), "wrong": tensor}
    assert dict(StateDictSource(state))["wrong"].view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()
    with pytest.raises(ConfigError, match="'wrong' holds NaN or infinite"):
        list(StateDictSource(state, reject_nonfinite=True))


def test_rejecting_nan_looks_at_what_is_sent_and_lets_everything_finite_through() -> None:
    everything = {
        str(dtype): torch.zeros(16, dtype=torch.uint8).view(dtype)
        for dtype in (torch.bool, torch.uint64, torch.float8_e4m3fn, torch.complex64)
    }
    everything["float4"] = torch.full((2,), 0xFF, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    everything["empty"] = torch.empty(0)
    assert len(list(StateDictSource(everything, reject_nonfinite=True))) == len(everything)
    overflow = StateDictSource({"big": torch.tensor([1e30])}, transform=lambda name, tensor: [(name, tensor.half())], reject_nonfinite=True)
    with pytest.raises(ConfigError, match="'big'"):
        list(overflow)
    with pytest.raises(ConfigError, match="reject_nonfinite must be a bool"):
        StateDictSource({}, reject_nonfinite=1)  # type: ignore[arg-type]


def test_as_source_tells_what_it_is_given_apart() -> None:
    own = OwnSource(DECLARED, PAIRS)
    assert as_source(own) is own
    assert isinstance(as_source(torch.nn.Linear(2, 2)), ModuleSource)
    assert isinstance(as_source(torch.nn.Sequential(torch.nn.Linear(2, 2))), ModuleSource)
    assert isinstance(as_source({"a": torch.ones(1)}), StateDictSource)
    for pairs in (PAIRS, tuple(PAIRS), [list(pair) for pair in PAIRS]):
        assert [(name, tensor.tolist()) for name, tensor in as_source(pairs)] == [("a", [1, 1]), ("b", 3)]  # type: ignore[arg-type]
    assert isinstance(as_source(PAIRS), WeightSource)


class OneShot(OwnSource):
    def __next__(self) -> Any:
        return next(iter(self.pairs))


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ((pair for pair in PAIRS), "(?s)generator can be iterated only once.*fresh pass"),
        (iter(PAIRS), "list_iterator can be iterated only once"),
        (OneShot(DECLARED, PAIRS), "OneShot can be iterated only once"),
        (zip(["a"], [torch.ones(1)], strict=True), "zip can be iterated only once"),
        ([PAIRS[0], PAIRS[0]], "'a' is there twice"),
        ([PAIRS[0], ("b",)], "entry 1 of the list"),
        ([PAIRS[0], (1, torch.ones(1))], "entry 1 of the list"),
        ([("a", 3)], "'a' is a int"),
        ({1: torch.ones(1)}, "key 1"),
        (None, "torch.nn.Module, a mapping.*not NoneType"),
        (torch.ones(2), "not Tensor"),
        ("model.safetensors", "(?s)not str.*SafetensorsSource"),
        (torch.nn.Linear, "not the class Linear itself"),
        (OwnSource, "not the class OwnSource itself"),
    ],
)
def test_as_source_refuses_the_rest_saying_what_was_given(given_: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        as_source(given_)


def test_a_generator_is_refused_by_a_state_dict_source_too() -> None:
    with pytest.raises(ConfigError, match=r"(?s)not generator.*fresh pass"):
        StateDictSource(pair for pair in PAIRS)  # type: ignore[arg-type]


def test_an_empty_source_has_no_plan() -> None:
    with pytest.raises(ConfigError, match="nothing to send"):
        Plan.from_metadata(StateDictSource({}).metadata())


def test_a_transform_that_is_not_callable_is_refused() -> None:
    with pytest.raises(ConfigError, match="transform must be a callable"):
        StateDictSource({}, transform="cast")  # type: ignore[arg-type]


def test_groups_are_layers_and_iterating_by_groups_yields_every_tensor_once_whatever_the_order() -> None:
    names = ["embed", "layers.1.a", "head", "layers.0.a", "layers.1.b", "visual.0.w", "norm"]
    state = {name: torch.full((1,), float(i)) for i, name in enumerate(names)}
    source = StateDictSource(state)
    assert source.held_names() is None
    assert source.groups() == [["embed"], ["layers.0.a"], ["layers.1.a", "layers.1.b"], ["visual.0.w"], ["head", "norm"]]
    batches = list(source.iter_groups())
    assert [group for group, _ in batches] == source.groups()
    assert {name: tensor for group, tensors in batches for name, tensor in zip(group, tensors, strict=True)} == state


def _vllms_grouping() -> Any:
    """vLLM's own function, read out of its file: importing vLLM takes 17 s."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("compares with vLLM's own grouping; vllm is not installed")
    text = (Path(found.origin).parent / "distributed/weight_transfer/base.py").read_text()
    functions = [
        node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name in ("_stack_key", "layerwise_groups")
    ]
    if len(functions) != 2:
        pytest.skip("this vLLM has no layerwise_groups")
    space: dict[str, Any] = {}
    exec(compile(ast.Module(functions, []), "base.py", "exec"), space)
    return space["layerwise_groups"]


def test_groups_are_those_of_vllm() -> None:
    theirs = _vllms_grouping()
    part = st.sampled_from(["model", "layers", "visual", "w", "0", "1", "2", "10", "x1"])

    @QUICK
    @given(st.lists(st.lists(part, min_size=1, max_size=4).map(".".join), max_size=15, unique=True))
    def same(names: list[str]) -> None:
        assert layer_groups(names) == theirs(names)

    same()
