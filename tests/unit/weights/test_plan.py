"""The plan: layout, digest, wire form, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_weightsync.errors import ConfigError
from ray_weightsync.weights.dtype_names import ITEMSIZES, itemsize
from ray_weightsync.weights.dtypes import DTYPES, dtype_name
from ray_weightsync.weights.plan import ALIGN, ParamMeta, Plan, Segment

QUICK = settings(deadline=None, print_blob=True, max_examples=60)

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
metadata = st.lists(
    st.builds(ParamMeta, names, st.sampled_from(sorted(DTYPES.values(), key=str)), shapes),
    min_size=1,
    max_size=12,
    unique_by=lambda meta: meta.name,
)

TWO = [ParamMeta("a", torch.bfloat16, (3, 5)), ParamMeta("b", torch.float32, ())]


@QUICK
@given(metadata)
def test_tensors_are_aligned_and_follow_each_other_without_overlap(declared: list[ParamMeta]) -> None:
    plan = Plan.from_metadata(declared)
    position = 0
    for meta, spec in zip(declared, plan.tensors, strict=True):
        assert (spec.name, spec.torch_dtype, spec.shape) == (meta.name, meta.dtype, meta.shape)
        assert spec.nbytes == spec.numel * meta.dtype.itemsize
        assert spec.offset % ALIGN == 0
        assert position <= spec.offset < position + ALIGN
        position = spec.offset + spec.nbytes
    assert position <= plan.num_bytes < position + ALIGN
    assert plan.num_bytes % ALIGN == 0
    assert plan.weight_bytes == sum(spec.nbytes for spec in plan.tensors)
    assert plan.segments == (Segment(0, 0, plan.num_bytes),)


@QUICK
@given(metadata, names)
def test_a_plan_comes_back_from_the_wire_as_it_was(declared: list[ParamMeta], target: str) -> None:
    plan = Plan.from_metadata(declared, target=target)
    received = Plan.from_wire(json.loads(json.dumps(plan.to_wire())))
    assert received == plan
    assert received.digest == plan.digest
    assert pickle.loads(pickle.dumps(plan)) == plan


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in _leaves(item, (*path, key))]
    if isinstance(value, list):
        return [path] + [leaf for i, item in enumerate(value) for leaf in _leaves(item, (*path, i))]
    return [path]


@settings(QUICK, max_examples=300)
@given(metadata, st.data())
def test_a_wire_plan_changed_in_any_one_place_is_refused(declared: list[ParamMeta], data: st.DataObject) -> None:
    plan = Plan.from_metadata(declared)
    wire = plan.to_wire()
    path = data.draw(st.sampled_from(_leaves(wire)))
    junk = st.one_of(
        st.none(), st.booleans(), st.integers(-3, 1 << 70), st.floats(allow_nan=False), st.text(max_size=5), st.just([]), st.just({})
    )
    value = data.draw(junk)
    changed = copy.deepcopy(wire)
    inside: Any = changed
    for key in path[:-1]:
        inside = inside[key]
    if inside[path[-1]] == value and type(inside[path[-1]]) is type(value):
        return
    inside[path[-1]] = value
    if path[0] == "segments" and len(path) == 3 and path[2] == 0 and type(value) is int and value >= 0:
        return  # another writer rank is another, valid plan with the same bytes
    with pytest.raises(ConfigError):
        Plan.from_wire(changed)


@pytest.mark.parametrize("key", ["format", "target", "names", "layouts", "layout_of", "segments", "num_bytes", "digest"])
def test_a_wire_plan_without_one_of_its_fields_is_refused(key: str) -> None:
    wire = Plan.from_metadata(TWO).to_wire()
    del wire[key]
    with pytest.raises(ConfigError, match="not a wire plan"):
        Plan.from_wire(wire)


def test_a_wire_plan_with_an_unknown_field_or_of_another_format_is_refused() -> None:
    wire = Plan.from_metadata(TWO).to_wire()
    with pytest.raises(ConfigError, match="not a wire plan"):
        Plan.from_wire(wire | {"extra": 1})
    with pytest.raises(ConfigError, match="format"):
        Plan.from_wire(wire | {"format": 2})
    with pytest.raises(ConfigError, match="not a wire plan"):
        Plan.from_wire([])  # type: ignore[arg-type]


def test_segments_of_several_writers_travel_and_must_tile_the_payload() -> None:
    one = Plan.from_metadata(TWO)
    two = dataclasses.replace(one, segments=(Segment(0, 0, 64), Segment(3, 64, one.num_bytes)))
    assert Plan.from_wire(two.to_wire()) == two
    assert two.digest == one.digest
    for segments in ((), (Segment(0, 0, 64),), (Segment(0, 64, 128),), (Segment(0, 0, 64), Segment(1, 32, 128)), (Segment(0, 0, 4096),)):
        with pytest.raises(ConfigError, match="segment"):
            dataclasses.replace(one, segments=segments)


DIFFERENT = {
    "name": [ParamMeta("A", torch.bfloat16, (3, 5)), TWO[1]],
    "order": TWO[::-1],
    "dtype": [ParamMeta("a", torch.float16, (3, 5)), TWO[1]],
    "shape": [ParamMeta("a", torch.bfloat16, (5, 3)), TWO[1]],
    "fewer": TWO[:1],
}


@pytest.mark.parametrize("what", sorted(DIFFERENT))
def test_the_digest_changes_with(what: str) -> None:
    assert Plan.from_metadata(DIFFERENT[what]).digest != Plan.from_metadata(TWO).digest


def test_the_digest_covers_the_target_and_does_not_depend_on_the_process() -> None:
    assert Plan.from_metadata(TWO).digest != Plan.from_metadata(TWO, target="draft").digest
    assert Plan.from_metadata(TWO).structure_digest == Plan.from_metadata(TWO, target="draft").structure_digest
    # Peers compare digests: a change of this value is a change of the wire format.
    assert Plan.from_metadata(TWO).digest == "fb9bb7359b7442a2b33e58db52e835bb"


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ([], "nothing to send"),
        ([TWO[0], TWO[0]], "'a' is there twice"),
        ([TWO[0], ParamMeta("", torch.float32, ())], "tensor 1 must have a non-empty str"),
        ([ParamMeta(7, torch.float32, ())], "non-empty str"),  # type: ignore[arg-type]
        ([ParamMeta("a\ud800", torch.float32, ())], "unpaired surrogate"),
        ([ParamMeta("a", torch.float32, (2, -1))], "'a'.*at least 0"),
        ([ParamMeta("a", torch.float32, (2.0,))], "'a'.*at least 0"),  # type: ignore[arg-type]
        ([ParamMeta("a", torch.float32, (True,))], "'a'.*at least 0"),
        ([ParamMeta("a", torch.float32, 3)], "'a'.*tuple or list"),  # type: ignore[arg-type]
        ([ParamMeta("a", torch.float32, (1,) * 65)], "'a'.*65 dimensions"),
        ([ParamMeta("a", torch.float32, (1 << 40, 1 << 40))], "'a'.*memory"),
        ([ParamMeta("a", torch.float32, (1 << 40, 1 << 40, 0))], "'a'.*memory"),
        ([ParamMeta("a", torch.qint8, (2,))], "'a'.*quantised"),
        ([ParamMeta("a", "float31", (2,))], "'a'.*float31"),  # type: ignore[arg-type]
        ([ParamMeta("a", "nn", (2,))], "'a'.*no dtype 'nn'"),  # type: ignore[arg-type]
        ([ParamMeta("a", float, (2,))], "'a'.*torch.dtype"),  # type: ignore[arg-type]
        ([("a", torch.float32, (2,))], "entry 0.*attributes"),
        (7, "iterable"),
        ("ab", "iterable"),
    ],
)
def test_refused_by_name_before_anything_is_sent(declared: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Plan.from_metadata(declared)


def test_a_partial_plan_is_another_plan_and_stays_partial_on_the_wire() -> None:
    whole, some = Plan.from_metadata(TWO), Plan.from_metadata(TWO, partial=True)
    assert "partial" not in whole.to_wire()
    assert some.to_wire()["partial"] is True
    assert whole.digest != some.digest
    assert Plan.from_wire(json.loads(json.dumps(some.to_wire()))) == some
    for wire in (whole.to_wire() | {"partial": True}, {key: value for key, value in some.to_wire().items() if key != "partial"}):
        with pytest.raises(ConfigError, match="it was changed on the way"):
            Plan.from_wire(wire)
    with pytest.raises(ConfigError, match="partial must be a bool, not 1"):
        Plan.from_wire(some.to_wire() | {"partial": 1})


def test_an_empty_target_is_refused() -> None:
    for target in ("", None, 3):
        with pytest.raises(ConfigError, match="target"):
            Plan.from_metadata(TWO, target=target)  # type: ignore[arg-type]


def test_shapes_as_lists_and_dtypes_as_names_are_normalised() -> None:
    declared = [
        SimpleNamespace(name="a", dtype="torch.bfloat16", shape=[3, 5]),
        SimpleNamespace(name="b", dtype="float", shape=torch.Size([])),
    ]
    plan = Plan.from_metadata(declared)
    assert plan == Plan.from_metadata(TWO)
    assert type(plan.tensors[1].shape) is tuple


def test_a_plan_made_by_hand_must_obey_the_layout_rule() -> None:
    plan = Plan.from_metadata(TWO)
    for changes in ({"offset": 128}, {"nbytes": 8}, {"dtype": "float64"}, {"dtype": "qint8"}):
        broken = (plan.tensors[0], dataclasses.replace(plan.tensors[1], **changes))
        with pytest.raises(ConfigError, match="'b'"):
            dataclasses.replace(plan, tensors=broken)
    with pytest.raises(ConfigError, match="bytes"):
        dataclasses.replace(plan, num_bytes=plan.num_bytes + 64)


def test_every_dtype_of_this_torch_but_the_quantised_has_a_name() -> None:
    everything = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    refused = {dtype for dtype in everything if "qint" in str(dtype) or "quint" in str(dtype)}
    assert set(DTYPES.values()) == everything - refused
    assert {"bool", "complex32", "float8_e8m0fnu", "uint64"} <= set(DTYPES)
    assert dtype_name(torch.half) == "float16"


def test_what_is_told_of_dtypes_without_torch_is_torchs() -> None:
    assert {name: DTYPES[name].itemsize for name in ITEMSIZES} == ITEMSIZES
    assert {itemsize(name) for name in ("float8_e8m0fnu", "bits16", "qint8", "nothing")} == {1, 2, None}


def test_37000_tensors_travel_in_a_few_columns() -> None:
    declared = [
        ParamMeta(f"model.layers.{i // 400}.mlp.experts.{i % 400}.gate_proj.weight", torch.bfloat16, (4, 8 + i % 3)) for i in range(37_000)
    ]
    plan = Plan.from_metadata(declared)
    wire = plan.to_wire()
    assert len(wire["layouts"]) == 3
    assert len(json.dumps(wire)) < 60 * len(declared)
    assert Plan.from_wire(wire) == plan
