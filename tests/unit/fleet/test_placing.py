"""Reserving on a cluster that grows, and places of which nodes are lost, with a Ray that is made up."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import pytest
from ray.exceptions import NodeDiedError, RuntimeEnvSetupError

import ray_weightsync as rws
from ray_weightsync.fleet import groups, places
from ray_weightsync.fleet.bundles import Ask, Located, NodeRoom, groups_for

LOCATED = groups._located
ONE_ENGINE = groups_for(Ask(trainers=0, engines=1, tensor_parallel_size=4))


class MadeUp:
    """A placement group that is reserved once ``nodes`` have room for it."""

    def __init__(self, number: int = 0) -> None:
        self.id = bytes([number])
        self.nodes: list[NodeRoom] = []
        self.removed = False

    def wait(self, seconds: float) -> bool:
        return bool(self.nodes)


def room(name: str, gpus: float) -> NodeRoom:
    return NodeRoom(node_id=name, node_ip="10.0.0.1", total={"CPU": 8.0, "GPU": gpus}, free={})


class TestGrowing:
    @pytest.fixture
    def cluster(self, monkeypatch: pytest.MonkeyPatch) -> MadeUp:
        """Without a node. Whatever is reserved there is this group."""
        group = MadeUp()
        monkeypatch.setattr(groups, "nodes", lambda: group.nodes)
        monkeypatch.setattr(groups, "placement_group", lambda *args, **options: group)
        monkeypatch.setattr(groups, "placement_group_table", dict)
        monkeypatch.setattr(groups, "remove_groups", lambda made: setattr(group, "removed", made == [group]))
        monkeypatch.setattr(groups, "_located", lambda *args: [])
        return group

    def test_a_cluster_that_does_not_grow_is_refused_with_the_word_for_one_that_does(self, cluster: MadeUp) -> None:
        with pytest.raises(rws.AttachError, match=r"(?s)4 CPU are asked for, and the cluster has 0.*reserve\(may_grow=True\) waits"):
            groups.reserve_groups(ONE_ENGINE, limit_s=60, may_grow=False)

    def test_a_node_that_is_lost_before_it_told_its_gpus_is_said_and_nothing_stays_reserved(
        self, cluster: MadeUp, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def lost(*args: Any, **options: Any) -> None:
            raise NodeDiedError("node a is gone")

        cluster.nodes.append(room("a", 4.0))
        monkeypatch.setattr(groups, "_located", LOCATED)
        monkeypatch.setattr(groups, "placement_group_table", lambda group: {"bundles_to_node_id": {0: "a"}})
        monkeypatch.setattr(groups, "_ask_gpus", lambda *args: object())
        monkeypatch.setattr(groups.ray, "get", lost)
        with pytest.raises(rws.AttachError, match="one of its nodes cannot tell which GPUs") as caught:
            groups.reserve_groups(ONE_ENGINE, limit_s=60, may_grow=False)
        assert caught.value.engine_message == "node a is gone"
        assert cluster.removed

    def test_the_waiting_group_brings_the_nodes(
        self, cluster: MadeUp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def pending(*args: Any, **options: Any) -> MadeUp:
            cluster.nodes.append(room("a", 4.0))
            return cluster

        monkeypatch.setattr(groups, "placement_group", pending)
        with caplog.at_level(logging.WARNING, logger=groups.logger.name):
            made, _ = groups.reserve_groups(ONE_ENGINE, limit_s=60, may_grow=True)
        assert made == [cluster]
        assert "waiting up to 60 s for the cluster to grow: 4 CPU are asked for, and the cluster has 0" in caplog.text

    def test_a_cluster_that_has_not_grown_in_time_is_said_with_what_is_missing(self, cluster: MadeUp) -> None:
        with pytest.raises(rws.AttachError, match="has not grown in time to hold this placement: 4 CPU are asked for") as caught:
            groups.reserve_groups(ONE_ENGINE, limit_s=0.01, may_grow=True)
        assert "a new node takes minutes" in str(caught.value)
        assert cluster.removed


def test_room_that_is_not_free_in_time_is_not_called_a_cluster_that_has_not_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = MadeUp()
    monkeypatch.setattr(groups, "nodes", lambda: [room("a", 4.0)])
    monkeypatch.setattr(groups, "placement_group", lambda *args, **options: pending)
    monkeypatch.setattr(groups, "placement_group_table", dict)
    monkeypatch.setattr(groups, "remove_groups", lambda made: None)
    with pytest.raises(rws.AttachError, match=r"Nothing shows that the cluster is too small .* room for it was not free in time"):
        groups.reserve_groups(ONE_ENGINE, limit_s=0.01, may_grow=False)


def test_a_node_on_which_no_process_of_the_job_can_run_is_said_and_nothing_stays_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(asked: object, *, timeout: float) -> Any:
        raise RuntimeEnvSetupError("pip install failed")

    made, removed = MadeUp(), []
    made.nodes.append(room("a", 4.0))
    monkeypatch.setattr(groups, "nodes", lambda: made.nodes)
    monkeypatch.setattr(groups, "placement_group", lambda *args, **options: made)
    monkeypatch.setattr(groups, "placement_group_table", lambda group: {"bundles_to_node_id": {0: "a"}})
    monkeypatch.setattr(groups, "remove_groups", removed.extend)
    monkeypatch.setattr(groups, "_ask_gpus", lambda *args: object())
    monkeypatch.setattr(groups.ray, "get", failed)
    with pytest.raises(rws.AttachError, match=r"(?s)Nothing stays reserved.*pip install failed.*runtime environment"):
        groups.reserve_groups(ONE_ENGINE, limit_s=60, may_grow=False)
    assert removed == [made]


def test_places_of_a_ray_that_has_ended_are_gone_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    removed: list[Any] = []
    monkeypatch.setattr(groups.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(groups, "remove_placement_group", removed.append)
    monkeypatch.setattr(groups, "placement_group_table", lambda group: {})
    monkeypatch.setattr(groups, "REMOVAL_LIMIT_S", 0.1)
    made: Any = MadeUp()
    groups.remove_groups([made])
    assert removed == [made]
    assert not caplog.messages


def test_places_can_be_handed_to_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Ask(trainers=1, engines=2)
    (group,) = groups_for(ask)
    where = [
        Located(bundle=bundle, group=0, index=index, node_id="a", node_ip="10.0.0.1", gpu_ids=(str(index),))
        for index, bundle in enumerate(group.bundles)
    ]
    made: Any = MadeUp()
    copy = pickle.loads(pickle.dumps(rws.TorchEngineSpec(dict, num_replicas=2, placement=rws.placement.Placed(ask, [made], where))))  # type: ignore[arg-type]
    monkeypatch.setattr(places, "nodes_of", lambda made: {(0, index): "a" for index in range(3)})
    assert [copy.placement.engine(index).gpu_ids for index in range(2)] == [("0",), ("1",)]


def test_a_place_whose_fractions_of_cpus_are_no_round_number_is_vacant_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Ask(trainers=0, engines=1, gpus=False, cpus_per_process=0.0029)
    (group,) = groups_for(ask)
    made: Any = MadeUp()
    where = Located(bundle=group.bundles[0], group=0, index=0, node_id="a", node_ip="10.0.0.1")
    placed = rws.placement.Placed(ask, [made], [where])
    assert placed.engines[0].num_cpus > 0.0029, "which Ray cuts off to 0.0028"
    monkeypatch.setattr(places, "NOTICED_WITHIN_S", 0.01)
    monkeypatch.setattr(places, "nodes_of", lambda made: {(0, 0): "a"})
    monkeypatch.setattr(places, "free_by_node", lambda: {"a": {"CPU_group_0_00": 0.0029}})
    assert placed.vacant_engine().index == 0


class TestLosingNodes:
    """Two engines that share GPUs with a trainer each, on nodes a and b."""

    @pytest.fixture
    def now(self, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], str]:
        """The node of each bundle now. Every node is empty, and a bundle that moves gets GPU 7."""
        now = {(0, 0): "a", (0, 1): "b"}
        self.moves: list[tuple[str, int]] = []
        self.told: tuple[str, ...] = ("7",)

        def moved_to(node_id: str, where: Located, group: MadeUp) -> Located:
            self.moves.append((node_id, where.index))
            return Located(
                bundle=where.bundle, group=where.group, index=where.index, node_id=node_id, node_ip="10.0.0.7", gpu_ids=self.told
            )

        monkeypatch.setattr(places, "NOTICED_WITHIN_S", 0.01)
        monkeypatch.setattr(places, "nodes_of", lambda made: dict(now))
        monkeypatch.setattr(places, "moved_to", moved_to)
        free = {f"{name}_group_{index}_00": 2.0 for name in ("CPU", "GPU") for index in (0, 1)}
        monkeypatch.setattr(places, "free_by_node", lambda: dict.fromkeys(("a", "c"), free))
        return now

    @pytest.fixture
    def placed(self, now: dict[tuple[int, int], str], monkeypatch: pytest.MonkeyPatch) -> rws.placement.Placed:
        ask = Ask(trainers=2, engines=2, layout="colocated")
        (group,) = groups_for(ask)
        located = [
            Located(bundle=bundle, group=0, index=index, node_id="ab"[index], node_ip=f"10.0.0.{index}", gpu_ids=("3",))
            for index, bundle in enumerate(group.bundles)
        ]
        made: Any = MadeUp()
        monkeypatch.setattr(made, "id", type("Id", (), {"hex": lambda self: "00"})())
        return rws.placement.Placed(ask, [made], located)

    def test_nothing_is_asked_of_a_bundle_that_stayed(self, placed: rws.placement.Placed) -> None:
        assert placed.engine(0).gpu_ids == ("3",)
        assert placed.vacant_engine().index == 0
        assert self.moves == []

    def test_a_place_whose_node_is_lost_is_vacant_on_the_node_that_ray_gave_it(
        self, placed: rws.placement.Placed, now: dict[tuple[int, int], str]
    ) -> None:
        now[0, 1] = "c"
        del now[0, 0]
        place = placed.vacant_engine()
        assert (place.index, place.node_id, place.gpu_ids, place.env["CUDA_VISIBLE_DEVICES"]) == (1, "c", ("7",), "7")
        assert [(trainer.node_id, trainer.gpu_ids) for trainer in placed.trainers] == [("a", ("3",)), ("c", ("7",))]
        assert placed.engine(1) == placed.engines[1] == place
        assert placed.trainer(1).node_id == "c"
        assert self.moves == [("c", 1)]

    def test_a_place_that_ray_put_nowhere_is_said_and_not_called_taken(
        self, placed: rws.placement.Placed, now: dict[tuple[int, int], str]
    ) -> None:
        del now[0, 0]
        gone = "its node is gone, and Ray has found no other one for it"
        with pytest.raises(rws.AttachError, match=f"1 of 2 places for engines are taken; engine 0: {gone}"):
            placed.vacant_engine()
        for lookup, role in ((placed.engine, "engine"), (placed.trainer, "trainer")):
            with pytest.raises(rws.AttachError, match=f"{role} 0 has no place: {gone}"):
                lookup(0)

    def test_gpus_that_trainers_took_before_they_could_be_told_are_not_guessed_for_the_engine(
        self, placed: rws.placement.Placed, now: dict[tuple[int, int], str]
    ) -> None:
        now[0, 0], self.told = "c", ()
        del now[0, 1]
        assert placed.trainer(0).node_id == "c"
        for lookup in (placed.vacant_engine, lambda: placed.engine(0)):
            with pytest.raises(rws.AttachError, match=r"(?s)trainers had its GPUs before these could be told.*ask for the engine's place"):
                lookup()
        self.told = ("5",)
        assert placed.engine(0).env["CUDA_VISIBLE_DEVICES"] == "5"

    def test_the_gpus_of_an_engine_that_shares_none_are_asked_for_once(
        self, now: dict[tuple[int, int], str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ask = Ask(trainers=0, engines=1)
        (group,) = groups_for(ask)
        made: Any = MadeUp()
        placed = rws.placement.Placed(
            ask, [made], [Located(bundle=group.bundles[0], group=0, index=0, node_id="a", node_ip="10.0.0.1", gpu_ids=("3",))]
        )
        now[0, 0], self.told = "c", ()  # it came up there before they could be told
        for _ in range(2):
            assert (placed.engine(0).node_id, placed.engine(0).gpu_ids) == ("c", ())
        assert self.moves == [("c", 0)]

    def test_a_place_whose_new_node_is_lost_as_well_has_none_until_ray_finds_another_one(
        self, placed: rws.placement.Placed, now: dict[tuple[int, int], str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def lost(asked: object, *, timeout: float) -> Any:
            raise NodeDiedError("the node died")

        told = places.moved_to
        monkeypatch.setattr(groups, "_ask_gpus", lambda *args: object())
        monkeypatch.setattr(groups.ray, "get", lost)
        monkeypatch.setattr(places, "moved_to", groups.moved_to)
        now[0, 0] = "c"
        with pytest.raises(rws.AttachError, match="engine 0 has no place: its node is gone, and Ray has found no other one"):
            placed.engine(0)
        monkeypatch.setattr(places, "moved_to", told)
        assert placed.engine(0).node_id == "c"

    def test_places_that_were_given_back_are_refused(self, placed: rws.placement.Placed, monkeypatch: pytest.MonkeyPatch) -> None:
        given_back: list[Any] = []
        monkeypatch.setattr(places, "remove_groups", given_back.append)
        placed.close()
        placed.close()
        assert len(given_back) == 1
        with pytest.raises(rws.ConfigError, match="were given back"):
            placed.vacant_engine()
