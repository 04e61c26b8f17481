"""The weights digest: equal exactly when names, dtypes, shapes, order and every byte are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_weightsync.errors import ConfigError
from ray_weightsync.weights.digest import WeightsDigest, payload_digest, weights_digest
from ray_weightsync.weights.packing import pack
from ray_weightsync.weights.plan import ParamMeta, Plan
from ray_weightsync.weights.sources import StateDictSource

QUICK = settings(deadline=None, print_blob=True, max_examples=60)


def state() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(12, dtype=torch.int16).view(3, 4), "b": torch.tensor(1.5), "c": torch.arange(100_000, dtype=torch.uint8)}


def plan_of(tensors: dict[str, torch.Tensor]) -> Plan:
    return Plan.from_metadata(StateDictSource(tensors).metadata())


@QUICK
@given(st.data())
def test_any_flipped_bit_changes_it(data: st.DataObject) -> None:
    tensors = state()
    before = weights_digest(tensors)
    raw = tensors[data.draw(st.sampled_from(sorted(tensors)))].view(-1).view(torch.uint8)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert weights_digest(tensors) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda t: {"A": t["a"], "b": t["b"], "c": t["c"]},
        lambda t: {"b": t["b"], "a": t["a"], "c": t["c"]},
        lambda t: t | {"a": t["a"].view(torch.bfloat16)},
        lambda t: t | {"a": t["a"].view(4, 3)},
        lambda t: t | {"b": t["b"].view(1)},
        lambda t: {"a": t["a"], "b": t["b"]},
        lambda t: t | {"d": torch.empty(0)},
        lambda t: {"a": t["b"], "b": t["a"], "c": t["c"]},
    ],
    ids=["name", "order", "dtype", "shape", "rank", "fewer", "empty tensor more", "swapped"],
)
def test_it_changes_with(change: object) -> None:
    assert weights_digest(change(state())) != weights_digest(state())  # type: ignore[operator]


def test_it_does_not_depend_on_layout_in_memory_payload_or_target() -> None:
    tensors = state()
    digest = weights_digest(tensors)
    assert weights_digest(tensors | {"a": tensors["a"].t().contiguous().t()}) == digest
    assert weights_digest([*tensors.items()]) == digest
    plan = Plan.from_metadata(StateDictSource(tensors).metadata(), target="draft")
    out = torch.empty(plan.num_bytes, dtype=torch.uint8)
    assert pack(tensors.items(), plan, out).digest == digest
    assert payload_digest(out, plan) == digest


def test_its_value_is_the_same_everywhere() -> None:
    # Peers with other versions compare it: a change of this value is a change of the format.
    assert weights_digest(state()) == "bf39652860d197e7874738e9d8560c78"


def test_a_payload_changed_in_a_byte_is_found_and_padding_is_not_looked_at() -> None:
    tensors = state()
    plan = plan_of(tensors)
    out = torch.empty(plan.num_bytes, dtype=torch.uint8)
    sealed = pack(tensors.items(), plan, out).digest
    out[plan.tensors[1].offset + plan.tensors[1].nbytes] ^= 1
    assert payload_digest(out, plan) == sealed
    out[plan.tensors[2].offset + 70_000] ^= 1
    assert payload_digest(out, plan) != sealed
    with pytest.raises(ConfigError, match="no room"):
        payload_digest(out[:-1], plan)


def test_a_digest_of_fewer_or_more_tensors_than_the_plan_has_is_not_given() -> None:
    digest = WeightsDigest(Plan.from_metadata([ParamMeta("a", torch.float32, ()), ParamMeta("b", torch.float32, ())]))
    digest.add(bytes(16))
    with pytest.raises(ValueError, match="1 tensors are missing"):
        digest.hexdigest()
    with pytest.raises(ValueError, match="16 bytes, not 8"):
        digest.add(bytes(8))
    digest.add(bytes(16))
    assert len(digest.hexdigest()) == 32
    with pytest.raises(ValueError, match="added already"):
        digest.add(bytes(16))
