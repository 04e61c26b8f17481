"""Our cuts of vLLM's packed format are vLLM's own. No engine; importing vLLM costs 17 s, and it is skipped where vLLM is missing."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ray_weightsync.errors import ConfigError
from ray_weightsync.transports.collective.packed import misaligned, packed_cuts
from ray_weightsync.transports.native.forms import fitting
from ray_weightsync.weights.plan import ParamMeta, Plan

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")

DTYPES = (torch.bool, torch.bfloat16, torch.float32, torch.float64)
layouts = st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 12), max_size=3)), min_size=1, max_size=25)
often = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def theirs() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own imports
        from vllm.distributed.weight_transfer import packed_tensor

    return packed_tensor


def tensors_of(layout: list[tuple[torch.dtype, list[int]]]) -> dict[str, torch.Tensor]:
    return {f"t{number}": torch.zeros(shape, dtype=dtype) for number, (dtype, shape) in enumerate(layout)}


def plan_of(tensors: dict[str, torch.Tensor]) -> Plan:
    return Plan.from_metadata(ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())


def chunks_of(theirs: Any, tensors: dict[str, torch.Tensor], size: int) -> list[Any]:
    pairs = iter(tensors.items())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensors that are larger than the buffer
        return list(iter(lambda: theirs.pack_tensors(pairs, lambda item: item[1], size), None))


@often
@given(layout=layouts, size=st.integers(1, 3000))
def test_our_cuts_are_those_of_vllms_own_sender(theirs: Any, layout: list[tuple[torch.dtype, list[int]]], size: int) -> None:
    tensors = tensors_of(layout)
    chunks = chunks_of(theirs, tensors, size)
    cuts = packed_cuts(plan_of(tensors), size)
    assert [[spec.name for spec in cut] for cut in cuts] == [chunk.names for chunk in chunks]
    assert [[spec.nbytes for spec in cut] for cut in cuts] == [chunk.tensor_sizes for chunk in chunks]


@often
@given(layout=layouts, size=st.integers(1, 3000))
def test_what_we_call_misaligned_is_what_vllms_receiver_cannot_view(
    theirs: Any, layout: list[tuple[torch.dtype, list[int]]], size: int
) -> None:
    tensors = tensors_of(layout)
    failed = False
    for chunk in chunks_of(theirs, tensors, size):
        try:
            theirs.unpack_tensor(chunk.packed_tensor, chunk.names, chunk.shapes, chunk.dtypes, chunk.tensor_sizes)
        except RuntimeError:
            failed = True
    assert failed == (misaligned(packed_cuts(plan_of(tensors), size)) is not None)


def ipc_chunks_of(theirs: Any, tensors: dict[str, torch.Tensor], size: int) -> list[list[int]]:
    """What vLLM's ``ipc`` sender packs together, tried out on its receiver's view; its buffer is in host memory."""
    buffer = torch.zeros(size, dtype=torch.uint8)
    sizes = []
    with (
        patch.object(theirs, "reduce_tensor", lambda tensor: (None, ())),
        patch.object(torch.cuda, "current_stream", MagicMock()),
        patch.object(torch, "empty", lambda *args, **kwargs: buffer),
    ):
        for chunk in theirs.packed_ipc_producer(iter(tensors.items()), "gpu", lambda item: item[1], size):
            dtypes = [getattr(torch, name) for name in chunk.dtype_names]
            theirs.unpack_tensor(buffer[: sum(chunk.tensor_sizes)], chunk.names, chunk.shapes, dtypes, chunk.tensor_sizes)
            sizes.append(chunk.tensor_sizes)
    return sizes


@often
@given(layout=layouts, size=st.integers(1, 3000))
def test_what_we_do_not_send_packed_by_ipc_is_what_vllms_ends_cannot_carry(
    theirs: Any, layout: list[tuple[torch.dtype, list[int]]], size: int
) -> None:
    tensors = tensors_of(layout)
    try:
        ipc_chunks_of(theirs, tensors, size)
        carried = True
    except (ValueError, RuntimeError):
        carried = False
    try:
        fitting("ipc", {"packed": True, "packed_buffer_size_bytes": size}, plan_of(tensors))
        allowed = True
    except ConfigError:
        allowed = False
    assert allowed == carried
