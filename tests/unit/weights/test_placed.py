"""Where a source's weights are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_weightsync.errors import ConfigError
from ray_weightsync.weights.placed import device_of
from ray_weightsync.weights.sources import ModuleSource, StateDictSource, as_source

CPU = torch.device("cpu")


class Own:
    """A source of a user's own, which may say where its tensors are."""

    def metadata(self) -> list[Any]:
        raise AssertionError("nothing is to be read")

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("nothing is to be read")


class Saying(Own):
    def __init__(self, device: Any) -> None:
        self.device = device


def test_ours_are_where_their_first_tensor_is() -> None:
    assert device_of(ModuleSource(torch.nn.Linear(2, 2))) == CPU
    assert device_of(as_source({"a": torch.zeros(2)})) == CPU
    assert device_of(StateDictSource({"steps": 3, "a": torch.zeros(2)}, skip="steps")) == CPU  # type: ignore[dict-item]


def test_a_module_s_first_parameter_counts_and_without_one_its_first_buffer() -> None:
    module = torch.nn.BatchNorm1d(2)
    source = ModuleSource(module)
    module.weight = torch.nn.Parameter(torch.empty(2, device="meta"))  # a device that is there on every machine
    assert device_of(source) == torch.device("meta")
    bare = torch.nn.BatchNorm1d(2, affine=False)
    assert device_of(ModuleSource(bare, buffers="running_mean")) == CPU
    assert device_of(ModuleSource(torch.nn.Identity())) is None


def test_it_is_asked_anew_since_weights_are_put_aside_between_rounds() -> None:
    held = {"a": torch.zeros(2)}
    source = StateDictSource(held)
    held["a"] = torch.empty(2, device="meta")
    assert device_of(source) == torch.device("meta")


def test_files_are_read_into_host_memory(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    from ray_weightsync.weights.sources import SafetensorsSource

    safetensors.save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert device_of(SafetensorsSource(tmp_path)) == CPU


@pytest.mark.parametrize(
    ("device", "found"), [(torch.device("cuda", 1), torch.device("cuda", 1)), ("cuda:1", torch.device("cuda", 1)), ("cpu", CPU)]
)
def test_a_source_of_your_own_may_say_it(device: Any, found: torch.device) -> None:
    assert device_of(Saying(device)) == found


@pytest.mark.parametrize("device", [None, 0, "the one on the left", print])
def test_an_attribute_that_means_something_else_says_nothing(device: Any) -> None:
    assert device_of(Saying(device)) is None
    assert device_of(Own()) is None


@pytest.mark.parametrize("move", [lambda tensor: tensor.cpu(), lambda tensor: tensor.to("cpu")])
def test_a_transform_that_moves_what_it_is_given_cannot_run_over_meta_tensors_so_it_is_refused_with_the_plan(move: Any) -> None:
    source = ModuleSource(torch.nn.Linear(2, 2), transform=lambda name, tensor: [(name, move(tensor))])
    with pytest.raises(ConfigError, match="failed for 'weight' on a meta tensor"):
        source.metadata()
