"""A plan goes in a form of vLLM's that its engines can read, or is refused before one is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ray_weightsync.errors import ConfigError
from ray_weightsync.transports.native.forms import fitting
from ray_weightsync.weights.plan import ParamMeta, Plan


def plan_of(*tensors: tuple[torch.dtype, tuple[int, ...]]) -> Plan:
    return Plan.from_metadata(ParamMeta(f"t{number}", *tensor) for number, tensor in enumerate(tensors))


EVEN = plan_of((torch.bfloat16, (4,)), (torch.float32, (1,)))
ODD = plan_of((torch.bfloat16, (3,)), (torch.float32, (1,)))
BOOLS = plan_of((torch.bool, (3,)))


@pytest.mark.parametrize(("plan", "packed"), [(EVEN, True), (ODD, False), (BOOLS, True), (plan_of((torch.float32, ())), False)])
def test_nccl_packs_what_every_engine_can_view_and_sends_the_rest_one_by_one(plan: Plan, packed: bool) -> None:
    options = {"packed_num_buffers": 3, "master_address": "here"}
    assert fitting("nccl", options, plan) == {**options, "packed": packed}


@pytest.mark.parametrize(
    ("backend", "options", "plan", "why"),
    [
        ("nccl", {"packed": True}, ODD, r"(?s)'t1'.* no multiple of its dtype's 4 bytes.*packed=False"),
        ("nccl", {"packed": False}, BOOLS, "(?s)'t0': NCCL has no type for bool.*packed=True"),
        ("nccl", {"packed": True}, plan_of((torch.float32, ())), r"'t0': the packed receiver of vLLM 0\.28"),
        ("nccl", {"packed": "yes"}, EVEN, "packed must be a bool"),
        ("nccl", {"packed_buffer_size_bytes": "1GB"}, EVEN, "packed_buffer_size_bytes must be an int"),
        ("ipc", {"packed": True}, ODD, r"(?s)'t1'.* no multiple of its dtype's 4 bytes.*packed=False"),
        ("ipc", {"packed": True, "packed_buffer_size_bytes": 7}, EVEN, r"(?s)'t0' has 8 bytes.* a buffer of 7.*of 8 or more"),
        ("ipc", {"packed_buffer_size_bytes": 0}, EVEN, "packed_buffer_size_bytes must be an int of at least 1"),
    ],
)
def test_a_form_that_was_asked_for_and_cannot_carry_the_plan_is_refused(
    backend: str, options: dict[str, Any], plan: Plan, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        fitting(backend, options, plan)


@pytest.mark.parametrize("options", [{"packed": True}, {}], ids=repr)
def test_what_new_engines_can_read_is_sent_packed(options: dict[str, Any]) -> None:
    plan = plan_of((torch.float32, ()))
    assert fitting("nccl", options, plan, vllm=(0, 32)) == {"packed": True}


def test_ipc_begins_its_buffer_anew_with_what_does_not_fit() -> None:
    options = {"packed": True, "packed_buffer_size_bytes": 6}
    assert fitting("ipc", options, ODD) == options, "t1 is the first one in the buffer"
    assert fitting("ipc", {}, ODD) == {}, "one by one, any place is right"


def test_others_have_no_form_to_choose() -> None:
    assert fitting("nccl_m2n", {"max_cta": 4}, ODD) == {"max_cta": 4}
