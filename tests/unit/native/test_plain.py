"""What vLLM's ``ipc`` sends beside plain values survives a wire for plain values."""

from __future__ import annotations

import json

import pytest
import torch

from ray_weightsync.transports.native.plain import from_plain, to_plain

HANDLE = (torch.Tensor, torch.Size([2, 3]), (3, 1), 0, torch.storage.TypedStorage, torch.bfloat16, 0, "handle", 12, False, None)
UPDATE = {"names": ["a"], "packed": True, "ipc_handles": [{"GPU-1": HANDLE}]}


def test_an_update_of_ipc_is_plain_on_the_wire_and_the_same_behind_it_with_lists_for_tuples() -> None:
    behind = from_plain(json.loads(json.dumps(to_plain(UPDATE))))
    assert behind == {**UPDATE, "ipc_handles": [{"GPU-1": [list(each) if isinstance(each, tuple) else each for each in HANDLE]}]}


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "uint8"])
def test_every_dtype_comes_back(name: str) -> None:
    assert from_plain(to_plain(getattr(torch, name))) is getattr(torch, name)


@pytest.mark.parametrize("name", ["os.system", "load", "", "__class__"])
def test_nothing_else_can_be_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is none of the dtypes and classes"):
        from_plain({"args": [{"rws.torch": name}]})


def test_a_class_that_cannot_be_named_stays_for_the_wire_to_refuse() -> None:
    assert to_plain([dict]) == [dict]
    assert to_plain({"rws.torch": "uint8", "more": 1}) == {"rws.torch": "uint8", "more": 1}
