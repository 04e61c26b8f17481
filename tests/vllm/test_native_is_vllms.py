"""vLLM's own ``nccl_m2n`` and ``sharded_rdt`` understand what they are given. What moves the bytes alone is stood in for."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import warnings
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from ray_weightsync.config import Native
from ray_weightsync.errors import ConfigError
from ray_weightsync.fleet.relay import own_init_info
from ray_weightsync.fleet.topology import Shape, group_of
from ray_weightsync.transports.native.engine import VllmEngines
from ray_weightsync.transports.native.source import RoundSource
from ray_weightsync.weights.digest import weights_digest
from ray_weightsync.weights.plan import Plan
from ray_weightsync.weights.sources import StateDictSource

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}


def vllms(module: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own imports
        try:
            return importlib.import_module(f"vllm.distributed.weight_transfer.{module}")
        except ModuleNotFoundError as error:
            pytest.skip(f"this vLLM has no {error.name}")


class Group:
    """Ranks whose workers all want every tensor whole."""

    rank, comm, device = 0, 1, torch.device("cpu")

    def broadcast(self, placements: torch.Tensor, src: int) -> None:
        assert src == 1
        placements.fill_(-2)

    def destroy(self) -> None:
        pass


class Client:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, verb: str) -> Any:
        return lambda *payload: self.calls.append((verb, *payload))


@pytest.fixture
def m2n(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """NVIDIA's library."""
    trainer, library = vllms("m2n_trainer"), MagicMock()
    monkeypatch.setattr(trainer, "import_m2n", lambda: library)
    monkeypatch.setattr(trainer, "trainer_init", lambda *args, **kwargs: Group())
    monkeypatch.setattr(torch.cuda, "current_stream", MagicMock())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *args: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    return library


def test_nccl_m2n_is_given_one_trainer_rank_that_holds_every_tensor_whole(m2n: MagicMock) -> None:
    given, source, client = StateDictSource(WEIGHTS), RoundSource(), Client()
    source.begin(given, Plan.from_metadata(given.metadata()))
    engine = VllmEngines(Native("nccl_m2n")).make(client, source, world_size=3)
    engine.send_weights()
    engine.shutdown()
    (verb, init_info), *session = client.calls
    assert verb == "init_weight_transfer_engine"
    assert (init_info["rank_offset"], init_info["world_size"], init_info["src_mesh_dims"]) == (1, 3, [1, 1])
    assert (init_info["names"], init_info["src_placements"]) == (["a", "b"], [None, None])
    assert session == [("start_weight_update",), ("update_weights", {"names": ["a", "b"]}), ("finish_weight_update",)]
    sent = [call.args[0] for call in m2n.reshard.call_args_list]
    assert all(torch.equal(each, tensor) for each, tensor in zip(sent, WEIGHTS.values(), strict=True))
    assert source.packed().digest == weights_digest(WEIGHTS)


def test_how_many_trainers_there_are_is_not_the_users_to_say() -> None:
    vllms("m2n_trainer")
    with pytest.raises(ConfigError, match="cannot have num_trainer_ranks; options of this backend: dst_mesh_dims"):
        VllmEngines(Native("nccl_m2n", options={"num_trainer_ranks": 2}))


def test_sharded_rdt_counts_engines_by_what_each_is_told() -> None:
    info = vllms("sharded_rdt_engine").ShardedRDTWeightTransferInitInfo
    defaults = {field.name: field.default for field in dataclasses.fields(info) if field.default is not dataclasses.MISSING}
    group = group_of([Shape(id="r0", world_size=1), Shape(id="r1", world_size=1)])
    told = own_init_info(defaults, group, "r1")
    assert {name for name in defaults if told[name] != defaults[name]} == {"replica_rank", "num_replicas"}
    assert (told["replica_rank"], told["num_replicas"]) == (1, 2)
