"""What stock engines are told, and which plans they are spared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ray_weightsync.errors import ConfigError
from ray_weightsync.transports.collective.stock_format import StockFormat, check, largest_cut, update_info
from ray_weightsync.weights.plan import ParamMeta, Plan

PACKED, UNPACKED = StockFormat(packed_buffer_size_bytes=10), StockFormat(packed=False)


def plan_of(*tensors: tuple[torch.dtype, tuple[int, ...]]) -> Plan:
    return Plan.from_metadata(ParamMeta(f"t{number}", *tensor) for number, tensor in enumerate(tensors))


def test_an_update_names_every_tensor_in_plan_order_as_plain_data() -> None:
    plan = plan_of((torch.bfloat16, (2, 3)), (torch.float32, ()))
    assert update_info(plan) == {"names": ["t0", "t1"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], []]}


def test_how_transfers_are_cut_is_part_of_what_makes_the_group() -> None:
    assert StockFormat(packed_buffer_size_bytes=7).init_info({"nccl_unique_id_b64": "x"}, rank_offset=2, world_size=3) == {
        "nccl_unique_id_b64": "x",
        "rank_offset": 2,
        "world_size": 3,
        "packed": True,
        "packed_buffer_size_bytes": 7,
        "packed_num_buffers": 2,
    }


def test_packed_tensors_share_a_broadcast_and_others_have_their_own() -> None:
    plan = plan_of(*[(torch.bfloat16, (3,))] * 3)
    assert [[spec.name for spec in cut] for cut in PACKED.cuts(plan)] == [["t0", "t1"], ["t2"]]
    assert [[spec.name for spec in cut] for cut in UNPACKED.cuts(plan)] == [["t0"], ["t1"], ["t2"]]
    assert (largest_cut(plan, PACKED), largest_cut(plan, UNPACKED)) == (12, 6)


def test_a_tensor_that_would_start_at_an_odd_place_is_refused_with_two_ways_out() -> None:
    plan = plan_of((torch.bfloat16, (3,)), (torch.float32, (1,)))
    with pytest.raises(ConfigError, match=r"(?s)'t1': .* no multiple of its dtype's 4 bytes.*cast all .* or .*packed=False"):
        check(plan, PACKED)
    check(plan, UNPACKED)


def test_a_dtype_that_nccl_has_no_type_for_is_refused_by_itself_and_travels_packed() -> None:
    plan = plan_of((torch.int16, (3,)))
    with pytest.raises(ConfigError, match=r"(?s)'t0': NCCL has no type for int16.*packed=True"):
        check(plan, UNPACKED)
    check(plan, PACKED)


def test_a_tensor_without_dimensions_is_refused_for_an_old_vllm_alone() -> None:
    plan = plan_of((torch.float32, ()))
    with pytest.raises(ConfigError, match=r"(?s)'t0': the packed receiver of vLLM 0\.28 fails.*packed=False"):
        check(plan, PACKED, vllm=(0, 28))
    check(plan, PACKED)
    check(plan, UNPACKED, vllm=(0, 28))


@pytest.mark.parametrize("wrong", [{"packed": 1}, {"packed_buffer_size_bytes": 0}, {"packed_num_buffers": True}])
def test_a_format_that_cannot_be_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        StockFormat(**wrong)
