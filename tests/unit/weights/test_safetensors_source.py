"""Safetensors files as a source."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_weightsync.errors import ConfigError
from ray_weightsync.weights.plan import Plan
from ray_weightsync.weights.safetensors_source import INDEX_NAME
from ray_weightsync.weights.sources import SafetensorsSource, checked

torch_files = pytest.importorskip("safetensors.torch", reason="needs the package safetensors (the extra of that name)")

TENSORS = {
    "b.weight": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "a.weight": torch.arange(4, dtype=torch.float32),
    "a.scale": torch.tensor(0.5),
    "mask": torch.tensor([True, False]),
    "f8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
    "empty": torch.empty(0, 3),
}


def arrives(source: SafetensorsSource) -> dict[str, torch.Tensor]:
    plan = Plan.from_metadata(source.metadata())
    return {spec.name: tensor for spec, tensor in checked(source, plan)}


def assert_same(arrived: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(arrived) == set(expected)
    for name, tensor in expected.items():
        assert arrived[name].dtype == tensor.dtype
        assert arrived[name].shape == tensor.shape
        assert arrived[name].view(-1).view(torch.uint8).tolist() == tensor.view(-1).view(torch.uint8).tolist()


def sharded(directory: Path) -> Path:
    torch_files.save_file({"a": torch.ones(2), "b": torch.ones(3)}, directory / "model-1.safetensors")
    torch_files.save_file({"c": torch.ones(4)}, directory / "model-2.safetensors")
    return directory


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def test_a_file_arrives_whole_again_and_again(tmp_path: Path) -> None:
    torch_files.save_file(TENSORS, tmp_path / "x.safetensors")
    source = SafetensorsSource(tmp_path / "x.safetensors")
    assert_same(arrives(source), TENSORS)
    assert_same(arrives(source), TENSORS)
    assert_same(arrives(SafetensorsSource(str(tmp_path))), TENSORS)
    assert set(arrives(SafetensorsSource(tmp_path, skip=["a.*", "mask"]))) == {"b.weight", "f8", "empty"}


def test_a_directory_is_read_by_its_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    torch_files.save_file({"a": torch.zeros(9)}, tmp_path / "consolidated.safetensors")
    with pytest.raises(ConfigError, match="'a' is there twice"):
        SafetensorsSource(tmp_path)
    write_index(tmp_path, {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"})
    assert {name: tensor.numel() for name, tensor in arrives(SafetensorsSource(tmp_path)).items()} == {"a": 2, "b": 3, "c": 4}


def test_several_files_without_an_index_are_read_in_order(tmp_path: Path) -> None:
    assert list(arrives(SafetensorsSource(sharded(tmp_path)))) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "model-1.safetensors", "x": "model-2.safetensors"}, "does not hold 'x'"),
        ({"a": "gone.safetensors"}, "gone.safetensors cannot be read"),
        ({"a": "../model-1.safetensors"}, "named without a directory"),
        (["a"], "not a safetensors index"),
    ],
)
def test_an_index_that_is_wrong_is_refused(tmp_path: Path, weight_map: Any, words: str) -> None:
    write_index(sharded(tmp_path), weight_map)
    with pytest.raises(ConfigError, match=words):
        SafetensorsSource(tmp_path)


def test_what_is_not_there_or_damaged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file or directory"):
        SafetensorsSource(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"no \.safetensors file"):
        SafetensorsSource(tmp_path)
    (tmp_path / "bad.safetensors").write_bytes(b"nonsense" * 10)
    with pytest.raises(ConfigError, match=r"bad\.safetensors cannot be read"):
        SafetensorsSource(tmp_path)
    with pytest.raises(ConfigError, match="takes a path, not int"):
        SafetensorsSource(7)  # type: ignore[arg-type]


def test_a_file_that_changed_since_the_plan_was_made_is_noticed(tmp_path: Path) -> None:
    torch_files.save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    source = SafetensorsSource(tmp_path)
    plan = Plan.from_metadata(source.metadata())
    torch_files.save_file({"a": torch.ones(3)}, tmp_path / "x.safetensors")
    with pytest.raises(ConfigError, match="'a'"):
        list(checked(source, plan))


def test_without_the_package_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded(tmp_path)
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "safetensors":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'ray_weightsync\[safetensors\]'"):
        SafetensorsSource(tmp_path)
