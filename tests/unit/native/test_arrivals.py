"""What of a plan has come: every tensor once, as the plan has it, in whatever order and parts."""

from __future__ import annotations

import itertools

import pytest
import torch

from ray_weightsync.transports.native.arrivals import Arrivals
from ray_weightsync.weights.digest import weights_digest
from ray_weightsync.weights.plan import ParamMeta, Plan

PAIRS = {"a": torch.arange(4.0), "b": torch.ones(2, 3, dtype=torch.bfloat16), "c": torch.zeros(0)}
PLAN = Plan.from_metadata([ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in PAIRS.items()])


def some(*names: str) -> list[tuple[str, torch.Tensor]]:
    return [(name, PAIRS[name]) for name in names]


@pytest.mark.parametrize("order", list(itertools.permutations("abc")), ids="".join)
def test_the_digest_is_the_senders_whatever_the_order_and_the_parts(order: tuple[str, ...]) -> None:
    arrivals = Arrivals(PLAN)
    for name in order:
        assert arrivals.received() is None
        assert [each for each, _ in arrivals.noted(some(name))] == [name]
    received = arrivals.received()
    assert received is not None
    assert (received.digest, received.num_bytes, received.num_tensors) == (weights_digest(PAIRS), PLAN.weight_bytes, 3)
    assert received.snapshot is None
    assert arrivals.missing() is None


def test_one_other_bit_is_another_digest() -> None:
    arrivals = Arrivals(PLAN)
    list(arrivals.noted([*some("b", "c"), ("a", torch.tensor([0.0, 1.0, 2.0, 3.0000002]))]))
    received = arrivals.received()
    assert received is not None
    assert received.digest != weights_digest(PAIRS)


def test_a_tensor_is_digested_before_its_loader_writes_into_it() -> None:
    arrivals = Arrivals(PLAN)
    for _, tensor in arrivals.noted([(name, tensor.clone()) for name, tensor in PAIRS.items()]):
        tensor.zero_()
    received = arrivals.received()
    assert received is not None
    assert received.digest == weights_digest(PAIRS)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("d", torch.zeros(1), f"'d' came, which is not in plan {PLAN.digest}"),
        ("a", torch.arange(5.0), r"'a' came as float32 \[5\], in the plan it is float32 \[4\]"),
        ("a", torch.arange(4), r"'a' came as int64 \[4\], in the plan it is float32 \[4\]"),
        ("b", PAIRS["b"], "'b' came twice"),
    ],
    ids=["unknown", "shape", "dtype", "twice"],
)
def test_what_is_not_the_plans_is_refused_in_its_place(name: str, tensor: torch.Tensor, words: str) -> None:
    arrivals = Arrivals(PLAN)
    noted = arrivals.noted([*some("b"), (name, tensor)])
    assert next(noted)[0] == "b"
    with pytest.raises(ValueError, match=words):
        next(noted)


def test_what_did_not_come_is_named_and_counted() -> None:
    plan = Plan.from_metadata([ParamMeta(f"t{index}", torch.float32, (1,)) for index in range(6)])
    arrivals = Arrivals(plan)
    list(arrivals.noted([("t2", torch.zeros(1))]))
    assert arrivals.missing() == "5 of 6 tensors of the plan did not come: t0, t1, t3 and 2 more"
