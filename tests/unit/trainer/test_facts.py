"""What a sender's process tells of itself, as far as it needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ray_weightsync.trainer import facts
from ray_weightsync.weights.sources import StateDictSource


@pytest.fixture
def process_group() -> Iterator[None]:
    """This process is one rank of four."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def num_ranks(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(facts.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    return facts.sender_facts(StateDictSource({"a": torch.ones(1)})).num_ranks


def test_a_process_without_a_process_group_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_ranks(monkeypatch) == 1


def test_one_of_many_trainer_ranks_says_so(process_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_ranks(monkeypatch) == 4
