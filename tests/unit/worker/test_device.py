"""What a process says of the device that it computes on. What a GPU says is in `tests/gpu/test_gpu_choosing.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ray_weightsync.worker.device import has_nccl, is_installed, told_device


def test_only_a_gpu_has_an_identity() -> None:
    assert told_device(torch.device("cpu")) == {"type": "cpu", "uuid": None}
    assert told_device(torch.device("meta")) == {"type": "meta", "uuid": None}


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-{index}"))
    assert told_device(torch.device("cuda")) == {"type": "cuda", "uuid": "uuid-1"}
    assert told_device(torch.device("cuda", 0)) == {"type": "cuda", "uuid": "uuid-0"}


def test_a_torch_that_knows_no_identity_tells_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name="GPU"))
    assert told_device(torch.device("cuda", 0)) == {"type": "cuda", "uuid": None}


def test_what_is_installed_is_found_without_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_installed("this")  # it would print when imported
    assert not is_installed("no_such_module_anywhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name == "nccl" else None)
    assert has_nccl()
