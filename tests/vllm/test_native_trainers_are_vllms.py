"""What vLLM's own trainer engines are made with, compared with the classes that they take. No engine is started."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from ray_weightsync.config import Native
from ray_weightsync.errors import ConfigError
from ray_weightsync.fleet.shares import own_init_info
from ray_weightsync.fleet.topology import Group, Shape, group_of
from ray_weightsync.transports.native import backends
from ray_weightsync.transports.native.backends import traits
from ray_weightsync.transports.native.engine import OURS, VllmEngines, as_vllms, of_fleet
from ray_weightsync.transports.native.source import RoundSource
from ray_weightsync.weights.digest import weights_digest
from ray_weightsync.weights.plan import Plan
from ray_weightsync.weights.sources import StateDictSource
from ray_weightsync.worker.identity import is_installed

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own imports
    factory: Any = pytest.importorskip("vllm.distributed.weight_transfer.factory")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what its classes import

PAIR: Group = group_of([Shape(id=name, world_size=2) for name in ("r0", "r1")])
WORKERS = [len(member.ranks) for member in PAIR.members]
KNOWN: dict[str, Any] = factory.WeightTransferTrainerFactory._registry
BACKENDS = [name for name in ("ipc", "nccl", "sparse_nccl", "sharded_rdt", "nccl_m2n") if name in KNOWN]
"""vLLM 0.28 has not all of them."""


def info_of(backend: str) -> Any:
    cls = KNOWN[backend]().init_info_cls
    names = {field.name for field in dataclasses.fields(cls) if field.init}
    ours = {**of_fleet(WORKERS), "master_address": "127.0.0.1", "master_port": 1}
    return cls(**{name: value for name, value in ours.items() if name in names})


def source_of(**tensors: torch.Tensor) -> RoundSource:
    given, source = StateDictSource(tensors), RoundSource()
    source.begin(given, Plan.from_metadata(given.metadata()))
    return source


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_trainer_engine_of_vllm_is_told_whom_it_reaches(backend: str) -> None:
    info = info_of(backend)
    assert info.backend == backend
    assert info.is_sender
    needed = {field.name for field in dataclasses.fields(info) if field.default is field.default_factory is dataclasses.MISSING}
    assert needed <= {*OURS, "master_address"}
    assert getattr(info, "world_size", 5) == 5
    assert getattr(info, "num_consumers", 4) == 4


@pytest.mark.skipif("nccl_m2n" not in KNOWN, reason="this vLLM has no nccl_m2n")
def test_a_trainer_that_holds_all_of_each_tensor_says_so_where_layouts_are_asked_for() -> None:
    from vllm.distributed.weight_transfer.m2n_common import check_transferable, resolve_layout, validate_layout
    from vllm.distributed.weight_transfer.m2n_source import M2NWeightSource

    assert traits("nccl_m2n").layouts
    source = as_vllms(source_of(w=torch.ones(4, 2), b=torch.ones(3)), layouts=True)
    assert isinstance(source, M2NWeightSource)
    info = info_of("nccl_m2n")
    assert source.mesh().size == info.num_trainer_ranks
    assert info.destination_mesh_dims == (2, 2)
    for meta in source.metadata():  # as its trainer_init does
        check_transferable(meta.name, meta.dtype, meta.shape)
        mesh, placements = resolve_layout(source.mesh(), meta.placements)
        validate_layout(mesh, placements, meta.shape, "source")
    assert [name for name, _ in source] == ["w", "b"]


@pytest.mark.skipif("sharded_rdt" not in KNOWN, reason="this vLLM has no sharded_rdt")
def test_workers_of_independent_replicas_take_parts_of_their_own_of_sharded_rdt() -> None:
    from vllm.distributed.weight_transfer.sharded_rdt_engine import ShardedRDTWeightTransferEngine, ShardedRDTWeightTransferInitInfo

    told = dataclasses.asdict(ShardedRDTWeightTransferInitInfo(trainer_actor_names=["t"], num_consumers=4))
    taken = []
    for member in PAIR.members:
        worker: Any = object.__new__(ShardedRDTWeightTransferEngine)
        info = ShardedRDTWeightTransferInitInfo(**own_init_info(told, PAIR, member.id))  # type: ignore[arg-type]
        worker._num_consumers_override = info.num_consumers
        for rank in range(len(member.ranks)):
            worker.parallel_config = type("Parallel", (), {"data_parallel_index": 0, "world_size": 2, "rank": rank})()
            taken.append(worker._resolve_consumer_id(info))
    assert taken == [0, 1, 2, 3]


def test_a_source_is_one_of_vllms_own() -> None:
    from vllm.distributed.weight_transfer.base import WeightSource

    source = as_vllms(source_of(a=torch.ones(2), b=torch.ones(3)))
    assert isinstance(source, WeightSource)
    assert [meta.name for meta in source.metadata()] == [name for name, _ in source] == ["a", "b"]
    if not hasattr(WeightSource, "groups"):  # vLLM 0.28
        return
    assert source.groups() == [["a", "b"]]
    assert [names for names, _ in source.iter_groups()] == [["a", "b"]]


@pytest.mark.parametrize(("backend", "module"), [("nccl_m2n", "nccl.m2n"), ("sharded_rdt", "nixl")])
def test_what_vllm_does_not_install_is_missed_before_a_round_begins(backend: str, module: str) -> None:
    if backend not in KNOWN or is_installed(module):
        pytest.skip(f"no {backend} here, or all that it needs")
    with pytest.raises(ConfigError, match=f"'native:{backend}' needs '{module}', which is not installed in the trainer"):
        VllmEngines(Native(backend))


@pytest.mark.skipif("nccl_m2n" not in KNOWN, reason="this vLLM has no nccl_m2n")
def test_nccl_m2n_sends_every_tensor_whole_from_one_trainer_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import m2n_trainer

    class Ranks:
        rank, comm, device = 0, 1, torch.device("cpu")

        def broadcast(self, placements: torch.Tensor, src: int) -> None:
            placements.fill_(-2)  # every worker wants every tensor whole

        def destroy(self) -> None:
            pass

    library, client = MagicMock(), MagicMock()
    monkeypatch.setattr(m2n_trainer, "import_m2n", lambda: library)
    monkeypatch.setattr(backends, "is_installed", lambda module: True)
    monkeypatch.setattr(m2n_trainer, "trainer_init", lambda *args, **kwargs: Ranks())
    monkeypatch.setattr(torch.cuda, "current_stream", MagicMock())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *args: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    weights = {"w": torch.arange(8.0).reshape(4, 2), "b": torch.ones(3, dtype=torch.bfloat16)}
    source = source_of(**weights)
    engine = VllmEngines(Native("nccl_m2n")).make(client, source, workers=[2])
    engine.send_weights()
    engine.shutdown()
    (init_info,) = client.init_weight_transfer_engine.call_args.args
    assert (init_info["rank_offset"], init_info["world_size"], init_info["src_mesh_dims"], init_info["dst_mesh_dims"]) == (
        1,
        3,
        [1, 1],
        [1, 2],
    )
    assert (init_info["names"], init_info["src_placements"]) == (["w", "b"], [None, None])
    client.update_weights.assert_called_once_with({"names": ["w", "b"]})
    sent = [call.args[0] for call in library.reshard.call_args_list]
    assert all(torch.equal(each, tensor) for each, tensor in zip(sent, weights.values(), strict=True))
    assert source.packed().digest == weights_digest(weights)


ODD = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(1)}
"""Packed end to end, the second one could not be viewed by an engine: it would raise there, while the sender waits in a broadcast."""


def test_vllms_broadcast_of_what_it_cannot_pack_is_made_one_by_one_or_refused_before_any_engine_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.distributed.weight_transfer import nccl_engine

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda init_info: MagicMock())
    client = MagicMock()
    engine: Any = VllmEngines(Native("nccl")).make(client, source_of(**ODD), workers=[1])
    assert client.init_weight_transfer_engine.call_args.args[0]["packed"] is False
    engine.shutdown()
    client.reset_mock()
    with pytest.raises(ConfigError, match="'b'"):
        VllmEngines(Native("nccl", options={"packed": True})).make(client, source_of(**ODD), workers=[1])
    assert client.mock_calls == []
