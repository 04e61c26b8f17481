"""Payloads are normalised or refused before anything is sent."""

from __future__ import annotations

import copy
import enum
import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from ray_weightsync.errors import ConfigError
from ray_weightsync.protocol.messages import DTYPE_NAMES, PerReplica, plain, plain_args


class Name(enum.StrEnum):
    WEIGHT = "layer.weight"


def test_dtypes_sizes_and_tuples_become_what_json_can_carry() -> None:
    payload = {
        "names": ["a", Name.WEIGHT],
        "dtype_names": [torch.bfloat16, "torch.float16", "float32"],
        "shapes": [torch.Size([2, 3]), (4,), []],
        "wire_dtype": torch.float8_e4m3fn,
        "count": np.int64(7),
        "rate": np.float32(0.5),
        "nested": {"deep": [{"dtype": "torch.bool"}]},
        "none": None,
        "packed": True,
    }
    assert plain(payload, what="update_info") == {
        "names": ["a", "layer.weight"],
        "dtype_names": ["bfloat16", "float16", "float32"],
        "shapes": [[2, 3], [4], []],
        "wire_dtype": "float8_e4m3fn",
        "count": 7,
        "rate": 0.5,
        "nested": {"deep": [{"dtype": "bool"}]},
        "none": None,
        "packed": True,
    }
    json.dumps(plain(payload, what="update_info"), allow_nan=False)


def test_the_callers_payload_is_not_modified_and_not_shared() -> None:
    payload: dict[str, Any] = {"shapes": [(1, 2)], "dtype_names": ["torch.float16"], "options": {"a": [1]}}
    before = copy.deepcopy(payload)
    sent = plain(payload, what="update_info")
    assert isinstance(sent, dict)
    sent["options"]["a"].append(2)
    sent["shapes"][0].append(3)
    assert payload == before


def test_a_parameter_that_is_called_like_a_dtype_keeps_its_name() -> None:
    assert plain({"names": ["torch.float16"]}, what="x") == {"names": ["torch.float16"]}


def test_a_list_payload_has_one_entry_per_worker_rank() -> None:
    assert plain([{"rank": 0}, {"shape": (1,)}], what="x") == [{"rank": 0}, {"shape": [1]}]


class Thing:
    pass


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        ({"a": b"bytes"}, r"update_info\['a'\] is bytes, which is not plain data"),
        ({"a": {"b": [1, bytearray()]}}, r"update_info\['a'\]\['b'\]\[1\] is bytearray"),
        ({"lr": math.nan}, r"update_info\['lr'\] is nan, which JSON cannot carry"),
        ({"lr": [1.0, -math.inf]}, r"update_info\['lr'\]\[1\] is -inf"),
        ({"a": {1, 2}}, r"update_info\['a'\] is set"),
        ({"a": Thing()}, r"update_info\['a'\] is .*test_messages\.Thing"),
        ({"a": torch.zeros(2)}, r"update_info\['a'\] is torch\.Tensor"),
        ({"a": 1j}, r"update_info\['a'\] is complex"),
        ({1: "a"}, r"update_info has the key 1; keys must be strings"),
        ({"a": {2: 3}}, r"update_info\['a'\] has the key 2"),
        ({"dtype": "float17"}, r"update_info\['dtype'\] is 'float17', which names no torch dtype"),
        ({"dtype_names": ["torch.nn"]}, r"update_info\['dtype_names'\]\[0\] is 'torch\.nn'"),
        ({"names": ["\ud800"]}, r"update_info\['names'\]\[0\] is not valid unicode"),
        ({"a": LOOP}, r"refers to itself"),
        ([{"a": 1}, {"a": b""}], r"update_info\[1\]\['a'\] is bytes"),
        ([{"a": 1}, None], r"update_info must be a dict, or a list of dicts .* not list"),
        ("text", r"update_info must be a dict.* not str"),
        (None, r"update_info must be a dict.* not NoneType"),
    ],
)
def test_what_is_no_plain_data_is_a_type_error_that_says_where(payload: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        plain(payload, what="update_info")


def test_an_opaque_field_is_handed_on_as_it_is_but_only_at_the_top() -> None:
    handles = [{"gpu": (Thing, 1)}]
    sent = plain({"ipc_handles": handles, "names": ("a",)}, what="x", opaque=("ipc_handles",))
    assert sent == {"ipc_handles": handles, "names": ["a"]}
    assert isinstance(sent, dict)
    assert sent["ipc_handles"] is handles
    with pytest.raises(TypeError, match=r"\['inner'\]\['ipc_handles'\]"):
        plain({"inner": {"ipc_handles": Thing()}}, what="x", opaque=("ipc_handles",))


def test_arguments_of_a_call_are_checked_too() -> None:
    assert plain_args([(1, 2)], {"a": torch.Size([3])}, what="rpc") == ([[1, 2]], {"a": [3]})
    with pytest.raises(TypeError, match=r"rpc\[0\] is bytes"):
        plain_args([b""], {}, what="rpc")


def test_every_dtype_of_this_torch_is_known_by_name() -> None:
    assert {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)} <= DTYPE_NAMES


class TestPerReplica:
    def test_it_keeps_the_payloads_in_order(self) -> None:
        assert PerReplica([{"rank_offset": 1}, [{"a": 1}]]).payloads == ({"rank_offset": 1}, [{"a": 1}])

    @pytest.mark.parametrize("payloads", [{"a": 1}, "text", 7, [{"a": 1}, None], [[1]]])
    def test_what_is_no_sequence_of_payloads_is_refused(self, payloads: Any) -> None:
        with pytest.raises(ConfigError, match="PerReplica"):
            PerReplica(payloads)

    def test_it_cannot_be_changed(self) -> None:
        with pytest.raises(AttributeError):
            PerReplica([{}]).payloads = ()  # type: ignore[misc]
