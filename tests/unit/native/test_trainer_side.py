"""The trainer's end of a native transport: what its engine reads, the place where it is met, and what it is left with when it hangs."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ray_weightsync as rws
from ray_weightsync.errors import ConfigError
from ray_weightsync.transports.native.engine import _Place, of_fleet
from ray_weightsync.transports.native.patches import Patches
from ray_weightsync.transports.native.source import RoundSource
from ray_weightsync.weights.plan import Plan
from ray_weightsync.weights.sources import StateDictSource

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}


def source_of(weights: Any) -> RoundSource:
    given = StateDictSource(WEIGHTS)
    source = RoundSource()
    source.begin(weights or given, Plan.from_metadata(given.metadata()))
    return source


class TestRoundSource:
    def test_what_an_engine_reads_is_what_the_round_sends_and_its_digest_is_the_weights(self) -> None:
        source = source_of(None)
        assert [(each.name, each.dtype, each.shape) for each in source.metadata()] == [
            ("a", torch.float32, (2, 3)),
            ("b", torch.bfloat16, (3,)),
        ]
        assert [name for name, _ in source] == ["a", "b"]
        packed = source.packed()
        assert (packed.digest, packed.num_bytes, packed.num_tensors) == (rws.weights_digest(WEIGHTS), 30, 2)

    def test_an_engine_that_stops_reading_has_sent_nothing_that_could_be_sealed(self) -> None:
        source = source_of(None)
        next(iter(source))
        with pytest.raises(ConfigError, match="had not read all weights"):
            source.packed()

    def test_what_an_earlier_round_read_is_forgotten(self) -> None:
        source = source_of(None)
        list(source)
        source.begin(source.given, source.plan)
        with pytest.raises(ConfigError, match="had not read all weights"):
            source.packed()

    def test_a_source_that_disagrees_with_its_metadata_is_stopped_before_its_tensor_is_sent(self) -> None:
        class Disagreeing(StateDictSource):
            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                yield "a", WEIGHTS["a"]
                yield "b", WEIGHTS["b"].float()

        source, read = source_of(Disagreeing(WEIGHTS)), []
        with pytest.raises(ConfigError, match=r"'b' as .*float32"):
            read.extend(name for name, _ in source)
        with pytest.raises(ConfigError, match="had not read all weights"):
            source.packed()


@pytest.mark.parametrize(
    ("workers", "world_size", "workers_per_replica", "mesh"),
    [([1], 2, 1, (1, 1)), ([2, 2, 2], 7, 2, (3, 2)), ([1, 2], 4, 0, (3, 1))],
)
def test_a_trainer_engine_is_told_of_all_workers_and_of_their_shards_only_where_replicas_are_alike(
    workers: list[int], world_size: int, workers_per_replica: int, mesh: tuple[int, int]
) -> None:
    told = of_fleet(workers)
    assert (told["rank"], told["num_trainer_ranks"]) == (0, 1)
    assert (told["world_size"], told["num_consumers"]) == (world_size, world_size - 1)
    assert (told["workers_per_replica"], told["dst_mesh_dims"]) == (workers_per_replica, mesh)


class TestPlace:
    @pytest.mark.parametrize("address", [None, "127.0.0.1"])
    def test_whoever_sets_the_same_option_may_listen_beside_it_and_nobody_is_given_it_as_any_free_port(self, address: str | None) -> None:
        place = _Place(address)
        try:
            with socket.socket() as vllms:
                vllms.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                vllms.bind((place.address, place.port))
                vllms.listen()
                with socket.create_connection((place.address, place.port), timeout=5):
                    pass
            with socket.socket() as another, pytest.raises(OSError, match="in use"):
                another.bind((place.address, place.port))
        finally:
            place.close()

    def test_it_is_at_the_nodes_address_in_ray_unless_another_is_asked_for(self, in_ray: str) -> None:
        for asked, found in ((None, in_ray), ("127.0.0.1", "127.0.0.1")):
            place = _Place(asked)
            place.close()
            assert place.address == found

    def test_the_port_is_free_again_when_it_is_closed(self) -> None:
        place = _Place()
        place.close()
        with socket.socket() as another:
            another.bind((place.address, place.port))


def patch(name: str = "a", **fields: Any) -> Any:
    values = {"indices": torch.tensor([1, 4], dtype=torch.int32), "values": torch.tensor([1.0, 2.0]), "full_shape": (2, 3)}
    return SimpleNamespace(name=name, **(values | fields))


class TestPatches:
    def test_the_plan_has_the_whole_tensors_and_says_that_they_are_some_of_the_models(self) -> None:
        plan = Plan.from_metadata(Patches([patch()]).metadata(), partial=True)
        assert [(spec.name, spec.shape) for spec in plan.tensors] == [("a", (2, 3))]
        assert plan.partial

    def test_the_digest_tells_what_is_changed_and_where(self) -> None:
        elsewhere = patch(indices=torch.tensor([1, 5], dtype=torch.int32))
        others = [patch("b"), elsewhere, patch(values=torch.tensor([1.0, 3.0])), patch(full_shape=(3, 2))]
        digests = [Patches([each]).packed().digest for each in (patch(), *others)]
        assert len(set(digests)) == 5
        assert Patches([patch()]).packed().digest == digests[0]
        assert (Patches([patch()]).packed().num_bytes, Patches([patch()]).packed().num_tensors) == (16, 1)

    @pytest.mark.parametrize("given", [WEIGHTS, [("a", WEIGHTS["a"])], torch.nn.Linear(1, 1), [patch(values=torch.ones(3))], 3])
    def test_what_is_no_patch_is_refused_with_what_one_is(self, given: Any) -> None:
        with pytest.raises(ConfigError, match="SparseWeightPatch"):
            Patches(given)

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"indices": torch.tensor([1, 4])}, "indices of int64"),
            ({"indices": torch.tensor([1, 6], dtype=torch.int32)}, r"index 6, .* 6 elements"),
            ({"indices": torch.tensor([-1, 4], dtype=torch.int32)}, r"index -1, .* 6 elements"),
            ({"indices": torch.tensor([4, 4], dtype=torch.int32)}, "the same index twice"),
            ({"indices": torch.tensor([1, 0, 4, 0], dtype=torch.int32)[::2]}, "contiguous"),
            ({"values": torch.tensor([1.0, 0.0, 2.0, 0.0])[::2]}, "contiguous"),
            ({"indices": torch.tensor([[1, 4]], dtype=torch.int32), "values": torch.ones(1, 2)}, "flat"),
            ({"indices": torch.tensor([1], dtype=torch.int32)}, "needs name, indices"),
            ({"values": torch.ones(2, dtype=torch.int32)}, "values of int32"),
            ({"values": torch.ones(2).to(torch.float8_e5m2)}, "values of float8_e5m2, for which vLLM's NCCL has no type"),
            ({"values": torch.tensor([1.0, float("nan")])}, "NaN"),
            ({"values": torch.ones(2, device="meta")}, "meta"),
            ({"values": torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)}, "NaN"),
            ({"full_shape": (2, -3)}, "layers.b"),
        ],
        ids=str,
    )
    def test_what_an_engine_could_not_apply_is_refused_by_its_name_before_any_engine_is_asked(self, fields: Any, said: str) -> None:
        with pytest.raises(ConfigError, match=said) as caught:
            Patches([patch(), patch("layers.b", **fields)])
        assert "layers.b" in str(caught.value) or "patch 1" in str(caught.value)

    def test_indices_need_no_order(self) -> None:
        (one,) = Patches([patch(indices=torch.tensor([4, 1], dtype=torch.int32))]).patches
        assert one.indices.tolist() == [4, 1]

    def test_two_patches_of_one_tensor_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="'a'"):
            Plan.from_metadata(Patches([patch(), patch()]).metadata(), partial=True)

    def test_one_without_indices_changes_nothing_and_is_not_sent(self) -> None:
        empty = patch("b", indices=torch.empty(0, dtype=torch.int32), values=torch.empty(0))
        assert [each.name for each in Patches([empty, patch()]).patches] == ["a"]
        with pytest.raises(ConfigError, match="nothing to send"):
            Patches([empty])

    def test_no_patches_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="nothing to send"):
            Patches([])
