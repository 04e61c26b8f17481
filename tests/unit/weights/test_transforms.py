"""Transforms: the same callable over meta tensors and data, and the ready-made ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from ray_weightsync.errors import ConfigError
from ray_weightsync.weights.plan import ParamMeta
from ray_weightsync.weights.sources import StateDictSource
from ray_weightsync.weights.transforms import Transform, cast, compose, rename, split_experts


def both(tensors: dict[str, torch.Tensor], transform: Transform) -> dict[str, torch.Tensor]:
    """What arrives, after the check that metadata said so."""
    source = StateDictSource(tensors, transform=transform)
    declared = source.metadata()
    results = list(source)
    assert declared == [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in results]
    return dict(results)


def test_metadata_runs_the_transform_on_meta_tensors_only() -> None:
    devices = []

    def transform(name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        devices.append(tensor.device.type)
        return [(name, tensor * 2)]

    source = StateDictSource({"a": torch.ones(2), "b": torch.ones(3)}, transform=transform)
    assert source.metadata() == [ParamMeta("a", torch.float32, (2,)), ParamMeta("b", torch.float32, (3,))]
    assert devices == ["meta", "meta"]
    assert dict(source)["b"].tolist() == [2, 2, 2]
    assert devices == ["meta", "meta", "cpu", "cpu"]


def test_a_transform_may_drop_and_split() -> None:
    def transform(name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        if name != "dropped":
            yield from ((f"{name}.{i}", row) for i, row in enumerate(tensor))

    arrived = both({"dropped": torch.ones(2), "kept": torch.arange(6).view(2, 3)}, transform)
    assert {name: tensor.tolist() for name, tensor in arrived.items()} == {"kept.0": [0, 1, 2], "kept.1": [3, 4, 5]}


@pytest.mark.parametrize(
    "transform",
    [
        lambda name, tensor: [(name, tensor if tensor.sum() > 0 else -tensor)],
        lambda name, tensor: [(name, torch.tensor(tensor.tolist()))],
        lambda name, tensor: [(name, torch.from_numpy(tensor.numpy()))],
    ],
    ids=["decides by value", "reads values", "leaves torch"],
)
def test_one_that_cannot_run_on_meta_tensors_is_told_so(transform: Transform) -> None:
    with pytest.raises(ConfigError, match=r"(?s)failed for 'a' on a meta tensor.*also run over meta tensors"):
        StateDictSource({"a": torch.ones(2)}, transform=transform).metadata()


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda name, tensor: None, "returned NoneType for 'a'"),
        (lambda name, tensor: tensor, "returned Tensor for 'a'"),
        (lambda name, tensor: (name, tensor), "yielded str for 'a'"),
        (lambda name, tensor: [(name, tensor, 1)], r"yielded a tuple of \(str, Tensor, int\)"),
        (lambda name, tensor: [(name, [1.0])], r"yielded a tuple of \(str, list\)"),
        (lambda name, tensor: [(1, tensor)], r"yielded a tuple of \(int, Tensor\)"),
    ],
)
def test_one_that_returns_something_else_is_refused_in_both_channels(returned: Callable[..., Any], words: str) -> None:
    source = StateDictSource({"a": torch.ones(2)}, transform=returned)
    with pytest.raises(ConfigError, match=words):
        source.metadata()
    with pytest.raises(ConfigError, match=words):
        list(source)


def test_an_error_on_data_keeps_its_type_and_names_the_tensor() -> None:
    def transform(name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        if not tensor.is_meta:
            raise KeyError("lookup")
        return [(name, tensor)]

    with pytest.raises(KeyError) as caught:
        list(StateDictSource({"a": torch.ones(2)}, transform=transform))
    assert caught.value.__notes__ == ["while 'a' was transformed and sent"]


def test_compose_runs_from_left_to_right_over_all_that_was_yielded() -> None:
    def twice(name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        return [(name + "l", tensor), (name + "r", tensor + 1)]

    arrived = both({"a": torch.zeros(1)}, compose(twice, twice, cast(torch.float16), rename(str.upper)))
    assert {name: tensor.item() for name, tensor in arrived.items()} == {"ALL": 0, "ALR": 1, "ARL": 1, "ARR": 2}
    assert arrived["ALL"].dtype is torch.float16
    assert list(both({"a": torch.zeros(1)}, compose())) == ["a"]
    with pytest.raises(ConfigError, match="compose takes transforms"):
        compose("a")  # type: ignore[arg-type]


def test_rename_takes_whole_names_then_the_longest_prefix_then_patterns() -> None:
    tensors = {name: torch.zeros(1) for name in ("a.b", "a.b.c", "x.y.0.w", "x.1.w", "other")}
    transform = rename({"a.b": "x.y.9.w"}, prefixes={"x.": "p.", "x.y.": "q."}, patterns={r"\.(\d+)\.": r".layers.\1.", "w$": "weight"})
    assert list(both(tensors, transform)) == ["q.layers.9.weight", "a.b.c", "q.layers.0.weight", "p.layers.1.weight", "other"]


def test_rename_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ConfigError, match="needs names, prefixes or patterns"):
        rename()
    with pytest.raises(ConfigError, match=r"'\(' is not a regular expression"):
        rename(patterns={"(": ""})
    with pytest.raises(ConfigError, match="mapping or a function"):
        rename(["a"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="new name of 'a' must be a str"):
        both({"a": torch.zeros(1)}, rename(lambda name: None))  # type: ignore[arg-type,return-value]


def test_cast_changes_floats_and_keeps_what_it_is_told_to() -> None:
    tensors = {"w": torch.tensor([1.0, 1e-9]), "router.bias": torch.tensor([0.1]), "A_log": torch.tensor([0.2]), "ids": torch.tensor([3])}
    arrived = both(tensors, cast(torch.bfloat16, keep=["router.*", "A_log", "ids"]))
    assert {name: tensor.dtype for name, tensor in arrived.items()} == {
        "w": torch.bfloat16,
        "router.bias": torch.float32,
        "A_log": torch.float32,
        "ids": torch.int64,
    }
    assert torch.equal(arrived["w"], tensors["w"].bfloat16())
    assert both({"w": torch.ones(2)}, cast(torch.float8_e4m3fn, keep="nothing"))["w"].dtype is torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, torch.float4_e2m1fn_x2])
def test_cast_refuses_what_is_no_float_by_name_before_any_data(dtype: torch.dtype) -> None:
    tensors = {"fine": torch.ones(1), "wrong": torch.zeros(2, dtype=torch.uint8).to(torch.int8).view(torch.uint8).repeat(8).view(dtype)}
    source = StateDictSource(tensors, transform=cast(torch.bfloat16))
    with pytest.raises(ConfigError, match=r"(?s)'wrong' is .* not cast to bfloat16.*keep=\['wrong'\]"):
        source.metadata()
    with pytest.raises(ConfigError, match=r"floating-point torch.dtype"):
        cast(dtype)


def test_cast_takes_a_dtype_and_patterns_that_are_text() -> None:
    with pytest.raises(ConfigError, match=r"floating-point torch.dtype"):
        cast("bfloat16")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="keep must hold non-empty names"):
        cast(torch.bfloat16, keep=[""])


def test_stacked_experts_become_the_tensors_of_each_expert_without_a_copy() -> None:
    gate_up, down = torch.arange(2 * 6 * 4).view(2, 6, 4), torch.arange(2 * 4 * 3).view(2, 4, 3)
    arrived = both(
        {"l.3.mlp.experts.gate_up_proj": gate_up, "l.3.mlp.experts.down_proj": down, "l.3.mlp.gate.weight": down}, split_experts()
    )
    expected = {}
    for expert in range(2):
        expected[f"l.3.mlp.experts.{expert}.gate_proj.weight"] = gate_up[expert, :3]
        expected[f"l.3.mlp.experts.{expert}.up_proj.weight"] = gate_up[expert, 3:]
    expected |= {f"l.3.mlp.experts.{expert}.down_proj.weight": down[expert] for expert in range(2)}
    expected["l.3.mlp.gate.weight"] = down
    assert list(arrived) == list(expected)
    assert all(torch.equal(arrived[name], tensor) for name, tensor in expected.items())
    stored = {gate_up.untyped_storage().data_ptr(), down.untyped_storage().data_ptr()}
    assert all(tensor.untyped_storage().data_ptr() in stored for tensor in arrived.values())


def test_experts_stacked_transposed_and_interleaved_are_split_by_rows() -> None:
    stacked = torch.arange(2 * 4 * 6).view(2, 4, 6)
    layout = {"gate_up": ("{expert}.w1", "{expert}.w3")}
    arrived = both({"gate_up": stacked}, split_experts(layout, transpose=True, interleaved=True))
    assert list(arrived) == ["0.w1", "0.w3", "1.w1", "1.w3"]
    assert torch.equal(arrived["1.w1"], stacked[1, :, 0::2].t())
    assert torch.equal(arrived["1.w3"], stacked[1, :, 1::2].t())


def test_an_ending_counts_only_at_a_dot() -> None:
    tensors = {"my_experts.down_proj": torch.zeros(1, 2, 2), "experts.down_proj": torch.zeros(1, 2, 2)}
    assert list(both(tensors, split_experts())) == ["my_experts.down_proj", "experts.0.down_proj.weight"]


@pytest.mark.parametrize("shape", [(6, 4), (2, 5, 4), (2, 6, 4, 1)])
def test_experts_of_another_shape_are_refused_by_name(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"'experts.gate_up_proj' has shape .*expected \[experts, 2 \* rows, columns\]"):
        StateDictSource({"experts.gate_up_proj": torch.zeros(shape)}, transform=split_experts()).metadata()


def test_names_of_experts_must_say_which_expert() -> None:
    for layout in ({"a": ("b",)}, {"a": ()}, {"": ("{expert}",)}):
        with pytest.raises(ConfigError, match="split_experts"):
            split_experts(layout)
    assert list(both({"a": torch.zeros(2, 1, 1)}, split_experts({"a": "{expert}"}))) == ["0", "1"]  # type: ignore[dict-item]
