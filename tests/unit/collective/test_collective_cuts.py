"""Where payloads are cut: our own buckets, and those of vLLM's packed format."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_weightsync.transports.collective.buckets import cut
from ray_weightsync.transports.collective.packed import misaligned, packed_cuts
from ray_weightsync.weights.plan import ALIGN, ParamMeta, Plan

DTYPES = (torch.bool, torch.bfloat16, torch.float32, torch.float64)
plans = st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 40), max_size=3)), min_size=1, max_size=30).map(
    lambda layout: Plan.from_metadata(ParamMeta(f"t{number}", dtype, tuple(shape)) for number, (dtype, shape) in enumerate(layout))
)
sizes = st.integers(ALIGN, 20_000)
QUICK = settings(deadline=None, print_blob=True, max_examples=60)


def plan_of(*layout: tuple[torch.dtype, int]) -> Plan:
    return Plan.from_metadata(ParamMeta(f"t{number}", dtype, (numel,)) for number, (dtype, numel) in enumerate(layout))


@QUICK
@given(plans, sizes)
def test_buckets_hold_every_tensor_once_and_in_order_and_tile_the_payload(plan: Plan, bucket_bytes: int) -> None:
    buckets = cut(plan, bucket_bytes)
    assert tuple(spec for bucket in buckets for spec in bucket.tensors) == plan.tensors
    assert [bucket.start for bucket in buckets] == [0, *(bucket.stop for bucket in buckets[:-1])]
    assert buckets[-1].stop == plan.num_bytes


@QUICK
@given(plans, sizes)
def test_a_bucket_is_as_full_as_whole_tensors_make_it_and_larger_only_for_one(plan: Plan, bucket_bytes: int) -> None:
    buckets = cut(plan, bucket_bytes)
    for bucket in buckets:
        assert bucket.num_bytes <= bucket_bytes or len(bucket.tensors) == 1
    for bucket, following in pairwise(buckets):
        assert following.tensors[0].end - bucket.start > bucket_bytes


@QUICK
@given(plans, sizes)
def test_no_broadcast_is_larger_than_a_buffer_and_together_they_are_the_bucket(plan: Plan, bucket_bytes: int) -> None:
    for bucket in cut(plan, bucket_bytes):
        pieces = list(bucket.pieces(bucket_bytes))
        assert all(start % ALIGN == 0 and 0 < stop - start <= bucket_bytes for start, stop in pieces)
        assert sum(stop - start for start, stop in pieces) == bucket.num_bytes
        assert [start for start, _ in pieces] == [bucket.start, *(stop for _, stop in pieces)][: len(pieces)]
        assert len(pieces) <= 1 or len(bucket.tensors) == 1


@QUICK
@given(plans, st.integers(1, 20_000))
def test_vllms_cut_comes_after_the_tensor_that_exceeds_the_size(plan: Plan, size: int) -> None:
    cuts = packed_cuts(plan, size)
    assert tuple(spec for tensors in cuts for spec in tensors) == plan.tensors
    for tensors in cuts:
        assert sum(spec.nbytes for spec in tensors[:-1]) <= size
    for tensors in cuts[:-1]:
        assert sum(spec.nbytes for spec in tensors) > size


def test_a_packed_buffer_that_is_exactly_full_takes_one_more() -> None:
    names = [[spec.name for spec in tensors] for tensors in packed_cuts(plan_of(*[(torch.float32, 4)] * 5), 32)]
    assert names == [["t0", "t1", "t2"], ["t3", "t4"]]


def misaligned_name(plan: Plan, size: int) -> str | None:
    spec = misaligned(packed_cuts(plan, size))
    return spec and spec.name


def test_what_vllms_receiver_could_not_view_is_named() -> None:
    odd = plan_of((torch.bfloat16, 3), (torch.float32, 1), (torch.bfloat16, 3))
    assert misaligned_name(odd, 1 << 20) == "t1"
    assert misaligned_name(odd, 1) is None, "each tensor is a buffer of its own"
    assert misaligned_name(plan_of((torch.bool, 3), (torch.bfloat16, 1)), 1 << 20) == "t1"
    assert misaligned_name(plan_of((torch.bfloat16, 4), (torch.float32, 1)), 1 << 20) is None
