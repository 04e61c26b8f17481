"""A fleet over three nodes, each with shared memory of its own: one version everywhere, whatever node, store or byte is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ray.nodes import crossing, stories
from tests.ray.nodes.conftest import Ground
from tests.ray.raylets import Node


@pytest.fixture(autouse=True)
def _nothing_stays(ground: Ground) -> Iterator[None]:
    yield
    ground.driver.call(stories.end)
    ground.wait_until_empty()


def test_engines_on_three_nodes_get_one_version_each_from_its_own_node(ground: Ground) -> None:
    told = ground.driver.call(stories.three_rounds)
    assert told["served"] == [[True] * 3] * 3
    assert told["versions"] == ["3"] * 3
    assert told["digest"]
    assert told["relayed"] == [False, True, True]
    committed = {stats.committed for stats in told["stats"].values()}
    assert len(committed) == 1, "one snapshot, under one name on every node"
    for stats in told["stats"].values():
        assert (stats.slots, stats.allocated, stats.retired) == (2, 2, 0), "slots are reused on every node"


def test_a_byte_that_flips_on_the_wire_aborts_the_round_before_anything_changed(ground: Ground) -> None:
    told = ground.driver.call(stories.a_byte_flips)
    assert "bytes changed on the way between the nodes" in told["error"]
    assert "version 1 still serves everywhere" in told["error"]
    assert (told["replicas"], told["phase"]) == (("r1", "r2"), "relay")
    assert told["served"] == [True] * 3


def test_a_store_that_is_killed_between_rounds_is_started_anew_and_one_that_is_killed_while_its_bytes_cross_aborts_the_round(
    ground: Ground,
) -> None:
    told = ground.driver.call(stories.stores_die, ground.cluster.node_ids[2])
    whole = {"committed": ("r0", "r1", "r2"), "served": [True] * 3}
    assert (told["between"], told["after"]) == (whole, whole)
    crossing = told["while they cross"]
    assert "the store that they came from has died" in crossing["error"]
    assert "version 2 still serves everywhere" in crossing["error"]
    assert (crossing["replicas"], crossing["served"]) == (("r1", "r2"), [True] * 3)


@pytest.mark.parametrize("coordinator_dies", [False, True], ids=["while_its_bytes_cross", "before_and_the_coordinator_too"])
def test_with_the_store_beside_the_trainer_dead_a_replica_is_healed_from_another_nodes(ground: Ground, coordinator_dies: bool) -> None:
    told = ground.driver.call(stories.healed_from_a_relay, ground.cluster.node_ids, coordinator_dies)
    assert told["healed"] == (["r0", "r1", "r2"], [True] * 3)
    assert told["committed"] == ("r0", "r1", "r2")
    assert told["served"] == [True] * 3


def test_a_relay_takes_a_few_pieces_of_object_store_and_not_a_model(ground: Ground) -> None:
    told = ground.driver.call(crossing.relay_more_than_an_object_store_holds, ground.cluster.node_ids[:2])
    assert told["num_bytes"] > 1.5 * Node().object_store_memory
    assert "Plasma memory usage" in told["object_stores"]
    assert "Spilled" not in told["object_stores"]


def test_with_overlap_engines_on_other_nodes_read_behind_their_relay(ground: Ground) -> None:
    told = ground.driver.call(stories.overlapped)
    assert told["served"] == [True] * 3
    assert any("r1, r2 waited, paused" in note for note in told["notes"])


def test_of_a_node_that_is_killed_one_engine_is_healed_where_it_was_restarted_and_the_other_is_replaced(ground: Ground) -> None:
    ground.driver.call(stories.begin_losing_a_node)
    lost, fresh = ground.cluster.node_ids[2], ground.add_node()
    assert ground.files(lost) != []
    ground.cluster.kill(lost)
    told = ground.driver.call(stories.heal_where_it_was_restarted, fresh)
    assert told == {"noticed": "QUARANTINED", "serving": True, "served": [True]}
    assert ground.files(fresh) != []
    told = ground.driver.call(stories.go_on_without, lost)
    assert told["committed"] == ("r0", "r1", "r3")
    assert {replicas for _, replicas in told["aborted"]} <= {("r2",)}
    assert told["served"] == [True] * 3
    told = ground.driver.call(stories.replace_on, "r2", fresh)
    assert told["joined"] == [True] * 4
    assert told["committed"] == ("r0", "r1", "r3", "new")
    assert told["served"] == [True] * 4
