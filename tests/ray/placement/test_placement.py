"""Trainers and engines get what was reserved for them, on three raylets; what cannot be reserved is said, and nothing stays behind."""

from __future__ import annotations

import re
from typing import Any

import pytest

import ray_weightsync as rws
from tests.ray.placement import jobs
from tests.ray.placement.conftest import CPUS, GPUS, NUM_NODES
from tests.ray.raylets import Driver, Node, Raylets


def ids(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[tuple[str, str]]:
    """Node and GPU of places that have one GPU each."""
    return [(place["node_id"], *place["gpu_ids"]) for place, _ in pairs]


def test_engines_are_numbered_by_node_and_gpu_and_run_there(driver: Driver) -> None:
    pairs = driver.call(jobs.placed_and_started, engines=NUM_NODES * GPUS)
    places = ids(pairs)
    assert places == sorted(places)
    assert len({node for node, _ in places}) == NUM_NODES
    for place, said in pairs:
        assert (said["node_id"], said["gpu_ids"]) == (place["node_id"], place["gpu_ids"])
        assert said["env"]["CUDA_VISIBLE_DEVICES"] == ",".join(place["gpu_ids"])


def test_separate_trainers_and_engines_share_no_gpu(driver: Driver) -> None:
    pairs = driver.call(jobs.placed_and_started, trainers=2, engines=2, tensor_parallel_size=2)
    used = [(place["node_id"], gpu) for place, _ in pairs for gpu in place["gpu_ids"]]
    assert len(used) == len(set(used)) == 6
    assert [len(place["gpu_ids"]) for place, _ in pairs] == [1, 1, 2, 2]
    for place, said in pairs:
        assert said["node_id"] == place["node_id"]
        assert set(said["gpu_ids"]) == set(place["gpu_ids"])
    assert [place["engine_args"] for place, _ in pairs[2:]] == [{"distributed_executor_backend": "mp"}] * 2


def test_colocated_trainers_and_engines_see_the_same_gpus(driver: Driver) -> None:
    pairs = driver.call(jobs.placed_and_started, trainers=4, engines=3, tensor_parallel_size=2, layout="colocated", cpus_per_process=1)
    trainers, engines = pairs[:4], pairs[4:]
    for number, (place, said) in enumerate(trainers):
        engine, engine_said = engines[number // 2]
        assert said["node_id"] == place["node_id"] == engine["node_id"] == engine_said["node_id"]
        assert set(said["gpu_ids"]) < set(engine["gpu_ids"])
    for first, second in zip(trainers[::2], trainers[1::2], strict=True):
        assert first[1]["gpu_ids"] != second[1]["gpu_ids"]
    for place, said in engines:
        assert said["env"]["CUDA_VISIBLE_DEVICES"] == ",".join(place["gpu_ids"])


def test_one_engine_per_node_and_the_trainers_where_there_is_room(driver: Driver) -> None:
    pairs = driver.call(jobs.placed_and_started, trainers=3, engines=NUM_NODES, layout="engine_per_node")
    trainers, engines = ids(pairs[:3]), ids(pairs[3:])
    assert len({node for node, _ in engines}) == NUM_NODES
    assert not set(trainers) & set(engines)
    assert all(said["node_id"] == place["node_id"] for place, said in pairs)


@pytest.mark.parametrize("layout", ["separate", "colocated", "engine_per_node"])
def test_every_layout_works_on_cpus_and_an_environment_of_ones_own_is_added(driver: Driver, layout: str) -> None:
    pairs = driver.call(jobs.placed_and_started, trainers=2, engines=3, tensor_parallel_size=2, gpus=False, layout=layout)
    nodes = [place["node_id"] for place, _ in pairs]
    assert [said["node_id"] for _, said in pairs] == nodes
    assert all(said["gpu_ids"] == () for _, said in pairs)
    assert [said["env"]["MINE"] for _, said in pairs] == ["0", "1", "0", "1", "2"]
    assert {said["env"]["VLLM_CPU_OMP_THREADS_BIND"] for _, said in pairs[2:]} == {"nobind"}
    assert {said["env"]["OMP_NUM_THREADS"] for _, said in pairs[2:]} == {"1"}
    assert (set(nodes[:2]) == {nodes[2]}) or layout != "colocated"
    assert len(set(nodes[2:])) == NUM_NODES or layout != "engine_per_node"


def test_what_the_cluster_can_never_hold_is_refused_at_once_with_what_each_node_has(driver: Driver) -> None:
    error, seconds = driver.call(jobs.refused, engines=1, tensor_parallel_size=GPUS + 1, timeout_s=60)
    assert isinstance(error, rws.AttachError)
    assert seconds < 5
    said = str(error)
    assert "1 x engine (3 CPU, 3 GPU) are asked for, each on one node, and the nodes have room for 0; an engine over several nodes" in said
    assert len(re.findall(rf"node [0-9a-f]{{8}} \([0-9.]+\): [0-9.]+ of {CPUS} CPU free, {GPUS} of {GPUS} GPU free", said)) == NUM_NODES
    assert driver.call(jobs.states).keys() <= {"REMOVED"}


def test_what_is_not_free_in_time_is_said_with_who_holds_it_and_nothing_stays_reserved(driver: Driver) -> None:
    held = [{"GPU": 1.0}] * (NUM_NODES * GPUS - 1)
    error, seconds = driver.call(jobs.refused_while_another_holds, held, trainers=1, engines=1, timeout_s=1.5)
    assert isinstance(error, rws.AttachError)
    assert 1.5 <= seconds < 10
    assert error.limit_s == 1.5
    said = str(error)
    assert "Asked for: 1 x engine (1 CPU, 1 GPU); 1 x trainer (1 CPU, 1 GPU)" in said
    assert "placement group somebody-elses holds 5 GPU" in said
    assert f"0 of {GPUS} GPU free" in said
    assert driver.call(jobs.states).keys() <= {"REMOVED"}


def test_a_first_group_is_given_back_when_the_second_one_is_not_to_be_had(driver: Driver) -> None:
    held = [{"GPU": 1.0}] * NUM_NODES
    error, _ = driver.call(jobs.refused_while_another_holds, held, trainers=2, engines=3, layout="engine_per_node", timeout_s=2)
    assert isinstance(error, rws.AttachError)
    assert driver.call(jobs.states).keys() <= {"REMOVED"}


def test_close_gives_the_group_back_and_ends_what_runs_there(driver: Driver) -> None:
    removed = driver.call(jobs.states).get("REMOVED", 0)
    during, after, ended = driver.call(jobs.left_after_close)
    assert during["CREATED"] == 1
    assert after == {"REMOVED": removed + 1}
    assert ended


def test_the_groups_of_a_killed_driver_are_free_again(three: Raylets, driver: Driver) -> None:
    removed = driver.call(jobs.states).get("REMOVED", 0)
    with three.driver() as doomed:
        doomed.call(jobs.reserve_and_keep, trainers=3, engines=3, layout="engine_per_node", timeout_s=60)
        assert driver.call(jobs.states)["CREATED"] == 2
        doomed.kill()
    driver.call(jobs.wait_for_states, {"REMOVED": removed + 2}, 30.0)
    assert len(driver.call(jobs.placed_and_started, engines=NUM_NODES * GPUS)) == NUM_NODES * GPUS


def test_a_session_spawns_into_the_places_and_a_new_engine_comes_to_the_place_of_one_that_left(driver: Driver) -> None:
    told = driver.call(jobs.session_in_places)
    assert list(told["before"].values()) == told["places"]
    assert len(set(told["places"])) == NUM_NODES
    assert "r1" not in told["after"]
    assert sorted(told["after"].values()) == sorted(told["places"])
    assert told["mine"] == "yes"


# The last one here that uses the raylets: it leaves one more, since Ray takes 10 s to notice that a node is gone.
def test_the_place_of_a_lost_node_is_vacant_on_the_next_one_with_the_gpus_that_it_has_there(three: Raylets, driver: Driver) -> None:
    lost = three.add(Node(num_cpus=CPUS, num_gpus=GPUS + 2))
    assert driver.call(jobs.begin_losing_a_node, lost, GPUS + 1) == ("1", "2", "3")
    three.kill(lost)
    said = driver.call(jobs.no_place_is_vacant)
    assert "0 of 1 places for engines are taken; engine 0: its node is gone, and Ray has found no other one for it" in said
    found = three.add(Node(num_cpus=CPUS, num_gpus=GPUS + 1))
    place, told, trainers = driver.call(jobs.go_on_where_ray_put_it)
    assert (place["node_id"], place["gpu_ids"]) == (found, ("0", "1", "2"))
    assert (told["node_id"], told["env"]["CUDA_VISIBLE_DEVICES"]) == (found, "0,1,2")
    assert [each["node_id"] for each in trainers] == [found]


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        ({}, "layout 'separate' needs trainers or engines"),
        ({"engines": 1, "layout": "colocated"}, "needs both trainers and engines"),
        ({"trainers": 1, "layout": "engine_per_node"}, "needs engines"),
        ({"engines": 1, "layout": "mixed"}, "layout must be one of 'separate', 'colocated', 'engine_per_node'"),
        ({"engines": -1}, "engines must be an int of at least 0"),
        ({"engines": 1, "tensor_parallel_size": 0}, "tensor_parallel_size must be an int of at least 1"),
        ({"engines": 1, "gpus": 4}, "gpus must be True or False"),
        ({"engines": 1, "cpus_per_process": 0}, "cpus_per_process must be more than 0"),
        ({"engines": 1, "cpus_per_process": 0.00005}, "cpus_per_process must be more than 0"),
        ({"engines": 1, "timeout_s": 0}, "timeout_s must be a positive number"),
        ({"engines": 1, "may_grow": 1}, "may_grow must be True or False"),
    ],
)
def test_a_wrong_argument_is_named(ask: dict[str, Any], said: str) -> None:
    with pytest.raises(rws.ConfigError, match=said):
        rws.placement.reserve(**ask)


def test_places_are_not_enough_for_a_spec_with_more_replicas() -> None:
    with rws.placement.reserve(engines=1, gpus=False) as placed, pytest.raises(rws.ConfigError, match="places for 1 engines"):
        rws.TorchEngineSpec(jobs.make_module, num_replicas=2, placement=placed)
    with pytest.raises(rws.ConfigError, match=r"must be what ray_weightsync\.placement\.reserve"):
        rws.TorchEngineSpec(jobs.make_module, placement="node-1")  # type: ignore[arg-type]
