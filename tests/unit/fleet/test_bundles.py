"""What is reserved for trainers and engines, what is refused because it can never fit, and who sits where."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_weightsync.fleet.bundles import (
    LAYOUTS,
    ROUNDING,
    Ask,
    Bundle,
    BundleGroup,
    Layout,
    Located,
    NodeRoom,
    asked_for,
    groups_for,
    in_order,
    seats_after,
    seats_for,
    shortage,
)


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    layout: Layout = draw(st.sampled_from(LAYOUTS))
    at_least = 1 if layout == "colocated" else 0
    return Ask(
        trainers=draw(st.integers(at_least, 5)),
        engines=draw(st.integers(1, 4)),
        tensor_parallel_size=draw(st.integers(1, 3)),
        layout=layout,
        gpus=draw(st.booleans()),
        cpus_per_process=draw(st.sampled_from([0.5, 1.0, 2.0])),
    )


def node(name: str, *, cpus: float = 0, gpus: float = 0) -> NodeRoom:
    total = {"CPU": cpus, "GPU": gpus, "memory": 1e9}
    return NodeRoom(node_id=name * 8, node_ip="10.0.0.1", total=total, free=total)


nodes = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), min_size=1, max_size=3).map(
    lambda sizes: [node("abc"[place], cpus=cpus, gpus=gpus) for place, (cpus, gpus) in enumerate(sizes)]
)


def bundles_of(groups: Sequence[BundleGroup]) -> list[Bundle]:
    return [bundle for group in groups for bundle in group.bundles]


@given(asks())
def test_everyone_has_a_place_and_every_bundle_is_big_enough_for_who_is_in_it(ask: Ask) -> None:
    groups = groups_for(ask)
    bundles = bundles_of(groups)
    assert sum(bundle.trainers for bundle in bundles) == ask.trainers
    assert sum(bundle.has_engine for bundle in bundles) == ask.engines
    for bundle in bundles:
        workers = ask.tensor_parallel_size * bundle.has_engine
        assert bundle.resources["CPU"] == ask.cpus_per_process * (bundle.trainers + workers)
        assert bundle.resources.get("GPU", 0) == (max(workers, bundle.trainers) if ask.gpus else 0)


@given(asks())
def test_only_the_colocated_layout_lets_trainers_share_and_then_as_many_as_it_can(ask: Ask) -> None:
    shared = sum(bundle.trainers for bundle in bundles_of(groups_for(ask)) if bundle.has_engine)
    room = ask.engines * ask.tensor_parallel_size
    assert shared == (min(ask.trainers, room) if ask.layout == "colocated" else 0)


@given(asks())
def test_one_engine_per_node_is_asked_of_ray_before_the_trainers_take_a_node(ask: Ask) -> None:
    groups = groups_for(ask)
    assert groups[0].spread == (ask.layout == "engine_per_node")
    if ask.layout == "engine_per_node":
        assert all(bundle.has_engine and not bundle.trainers for bundle in groups[0].bundles)
        assert all(not group.spread for group in groups[1:])


def packings(groups: Sequence[BundleGroup], rooms: Sequence[NodeRoom]) -> Iterator[dict[tuple[int, int], int]]:
    """Every way to put the bundles on the nodes that Ray could choose, by trying them all."""
    keys = [(number, index) for number, group in enumerate(groups) for index in range(len(group.bundles))]
    for choice in itertools.product(range(len(rooms)), repeat=len(keys)):
        at = dict(zip(keys, choice, strict=True))
        fits = all(
            sum(groups[number].bundles[index].resources.get(name, 0) for (number, index), place in at.items() if place == here)
            <= rooms[here].total[name]
            for here in range(len(rooms))
            for name in ("CPU", "GPU")
        )
        spread = all(
            len({at[number, index] for index in range(len(group.bundles))}) == len(group.bundles)
            for number, group in enumerate(groups)
            if group.spread
        )
        if fits and spread:
            yield at


def counted(amount: float) -> int:
    """What Ray takes a resource for, in its steps; seen with 0.15 CPUs for each of nine processes, of which one then never started."""
    return int(amount * 10_000)


@given(asks(), st.one_of(st.decimals("0.01", 4, places=2).map(float), st.integers(1, 99).map(lambda parts: 1 / parts)))
def test_whoever_is_in_a_bundle_finds_room_there_as_ray_counts_it_and_its_room_is_seen_when_it_has_gone(ask: Ask, cpus: float) -> None:
    ask = replace(ask, cpus_per_process=cpus)
    for group in groups_for(ask):
        for bundle in group.bundles:
            trainers, engines = seats_for(ask, [Located(bundle=bundle, group=0, index=0, node_id="a", node_ip="10.0.0.1")])
            has = counted(bundle.resources["CPU"])
            assert sum(counted(seat.num_cpus) for seat in (*trainers, *engines)) <= has
            left = has - sum(counted(seat.num_cpus) for seat in trainers)
            assert all(left / 10_000 + ROUNDING >= seat.num_cpus for seat in engines)


@given(asks(), nodes)
def test_nothing_is_refused_that_could_be_placed(ask: Ask, rooms: list[NodeRoom]) -> None:
    groups = groups_for(ask)
    if len(bundles_of(groups)) <= 6 and next(packings(groups, rooms), None) is not None:
        assert shortage(groups, rooms) is None


@given(asks(), st.lists(st.integers(0, 5), min_size=1, max_size=3))
def test_where_cpus_are_no_matter_all_that_can_never_be_placed_is_refused(ask: Ask, gpus: list[int]) -> None:
    groups, rooms = groups_for(ask), [node("abc"[place], cpus=99, gpus=here) for place, here in enumerate(gpus)]
    if ask.gpus and len(bundles_of(groups)) <= 6 and shortage(groups, rooms) is None:
        assert next(packings(groups, rooms), None) is not None


@pytest.mark.parametrize(
    ("ask", "rooms", "said"),
    [
        (Ask(trainers=2, engines=2), [node("a", cpus=9, gpus=3)], "4 GPU are asked for, and the cluster has 3"),
        (Ask(trainers=0, engines=1), [node("a", cpus=4)], r"1 GPU are asked for, and the cluster has 0 \(gpus=False asks for CPUs alone\)"),
        (Ask(trainers=4, engines=1, gpus=False), [node("a", cpus=4)], "5 CPU are asked for, and the cluster has 4"),
        (
            Ask(trainers=0, engines=1, tensor_parallel_size=4),
            [node("a", cpus=4, gpus=2), node("b", cpus=4, gpus=2)],
            r"1 x engine \(4 CPU, 4 GPU\) are asked for, each on one node, and the nodes have room for 0; an engine over several nodes",
        ),
        (
            Ask(trainers=0, engines=3, tensor_parallel_size=2),
            [node("a", cpus=9, gpus=3), node("b", cpus=9, gpus=3)],
            "3 x engine .* each on one node, and the nodes have room for 2",
        ),
        (
            Ask(trainers=3, engines=2, tensor_parallel_size=2, layout="colocated"),
            [node("a", cpus=9, gpus=3), node("b", cpus=9, gpus=1)],
            r"1 x engine \+ 2 trainers \(4 CPU, 2 GPU\); 1 x engine \+ trainer \(3 CPU, 2 GPU\) are asked for, each on one node, "
            r"and the nodes have room for 1 such as engine \+ trainer",
        ),
        (
            Ask(trainers=1, engines=3, layout="engine_per_node"),
            [node("a", cpus=9, gpus=8), node("b", cpus=9, gpus=8)],
            "3 x engine .* each on a node of its own, and the nodes have room for 2",
        ),
    ],
)
def test_what_can_never_fit_is_said_with_what_is_missing(ask: Ask, rooms: list[NodeRoom], said: str) -> None:
    problem = shortage(groups_for(ask), rooms)
    assert problem is not None
    assert re.search(said, problem)


def test_amounts_that_ray_tells_inexactly_are_enough() -> None:
    ask = Ask(trainers=0, engines=3, gpus=False, cpus_per_process=0.1)
    assert shortage(groups_for(ask), [node("a", cpus=0.3 - 1e-9)]) is None


def test_what_is_asked_for_is_said_in_one_line() -> None:
    ask = Ask(trainers=3, engines=2, tensor_parallel_size=2, layout="colocated")
    assert asked_for(groups_for(ask)) == "1 x engine + 2 trainers (4 CPU, 2 GPU); 1 x engine + trainer (3 CPU, 2 GPU)"
    apart = Ask(trainers=1, engines=2, layout="engine_per_node", cpus_per_process=0.5)
    assert asked_for(groups_for(apart)) == "2 x engine (0.5 CPU, 1 GPU) on a node of its own; 1 x trainer (0.5 CPU, 1 GPU)"


def test_a_node_says_what_it_has() -> None:
    room = NodeRoom(node_id="0123456789", node_ip="10.0.0.1", total={"CPU": 4.0, "GPU": 2.0, "memory": 1e9}, free={"CPU": 1.5})
    assert str(room) == "node 01234567 (10.0.0.1): 1.5 of 4 CPU free, 0 of 2 GPU free"


@st.composite
def located(draw: st.DrawFn) -> tuple[Ask, list[Located]]:
    """The bundles of an ask as Ray may have put them: on any node, with any of its GPUs, in any order."""
    ask = draw(asks())
    left = {name: list(draw(st.permutations(range(32)))) for name in "abc"}
    places = []
    for number, group in enumerate(groups_for(ask)):
        for index, bundle in enumerate(group.bundles):
            name = draw(st.sampled_from("abc"))
            gpus = sorted(left[name].pop() for _ in range(bundle.gpus))
            ids, address = tuple(map(str, gpus)), {"a": "10.0.0.9", "b": "10.0.0.10", "c": "10.0.0.10"}[name]
            places.append(Located(bundle=bundle, group=number, index=index, node_id=name, node_ip=address, gpu_ids=ids))
    return ask, list(draw(st.permutations(places)))


@given(located())
def test_bundles_come_by_node_and_by_gpu_whatever_order_ray_gave_them(placed: tuple[Ask, list[Located]]) -> None:
    _, places = placed
    ordered = in_order(places)
    assert sorted(ordered, key=lambda each: (each.group, each.index)) == sorted(places, key=lambda each: (each.group, each.index))
    assert [each.node_id for each in ordered] == sorted(each.node_id for each in places)  # 10.0.0.9 before 10.0.0.10
    for _, here in itertools.groupby(ordered, key=lambda each: each.node_id):
        first = [int(each.gpu_ids[0]) for each in here if each.gpu_ids]
        assert first == sorted(first)
    assert ordered == in_order(reversed(places))


@given(located())
def test_everyone_gets_one_seat_and_no_two_processes_share_what_they_should_not(placed: tuple[Ask, list[Located]]) -> None:
    ask, places = placed
    trainers, engines = seats_for(ask, places)
    assert (len(trainers), len(engines)) == (ask.trainers, ask.engines)
    for place in places:
        inside = [seat for seat in (*trainers, *engines) if seat.where is place]
        assert sum(seat.num_cpus for seat in inside) == place.bundle.cpus
        assert sum(seat.num_gpus for seat in inside) <= place.bundle.gpus
    assert all(len(seat.where.gpu_ids) >= ask.tensor_parallel_size for seat in engines if ask.gpus)


@given(located())
def test_a_colocated_trainer_sits_with_the_engine_whose_worker_has_its_number(placed: tuple[Ask, list[Located]]) -> None:
    ask, places = placed
    trainers, engines = seats_for(ask, places)
    if ask.layout == "colocated":
        for number, trainer in enumerate(trainers[: ask.engines * ask.tensor_parallel_size]):
            assert trainer.where is engines[number // ask.tensor_parallel_size].where


@given(located(), st.data())
def test_when_a_bundle_moves_those_in_it_keep_their_numbers_and_get_its_new_gpus(
    placed: tuple[Ask, list[Located]], data: st.DataObject
) -> None:
    ask, places = placed
    before = seats_for(ask, places)
    old = data.draw(st.sampled_from(places))
    moved = replace(old, node_id="d", node_ip="10.0.0.99", gpu_ids=tuple(f"new-{number}" for number, _ in enumerate(old.gpu_ids)))
    after = seats_after(ask, *before, moved)
    for seats_before, seats_now in zip(before, after, strict=True):
        assert [seat.where if seat.where is not old else moved for seat in seats_before] == [seat.where for seat in seats_now]
        for then, now in zip(seats_before, seats_now, strict=True):
            assert replace(now, where=then.where, env=then.env) == then
            assert now.env.get("CUDA_VISIBLE_DEVICES") == ((then.env and ask.gpus and ",".join(now.where.gpu_ids)) or None)


def seats(ask: Ask, *, gpu_ids: tuple[str, ...] = ()) -> tuple[dict[str, str], dict[str, object], int]:
    """Environment, engine arguments and Ray's GPUs of the one engine."""
    places = [
        Located(bundle=bundle, group=0, index=index, node_id="a", node_ip="10.0.0.1", gpu_ids=gpu_ids)
        for index, bundle in enumerate(bundles_of(groups_for(ask)))
    ]
    (engine,) = seats_for(ask, places)[1]
    return dict(engine.env), dict(engine.engine_args), engine.num_gpus


def test_an_engine_with_gpus_of_its_own_has_them_from_ray() -> None:
    assert seats(Ask(trainers=0, engines=1), gpu_ids=("3",)) == ({}, {"distributed_executor_backend": "uni"}, 1)
    assert seats(Ask(trainers=0, engines=1, tensor_parallel_size=2), gpu_ids=("3", "4")) == ({}, {"distributed_executor_backend": "mp"}, 2)


def test_an_engine_that_shares_gpus_with_trainers_names_them_itself() -> None:
    env, engine_args, num_gpus = seats(Ask(trainers=2, engines=1, tensor_parallel_size=2, layout="colocated"), gpu_ids=("3", "4"))
    assert env == {"CUDA_VISIBLE_DEVICES": "3,4", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    assert (engine_args, num_gpus) == ({"distributed_executor_backend": "mp"}, 0)


def test_an_engine_on_cpus_does_not_bind_itself_to_cores_that_others_use() -> None:
    env, _, num_gpus = seats(Ask(trainers=1, engines=1, layout="colocated", gpus=False, cpus_per_process=2))
    assert (env, num_gpus) == ({"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "2"}, 0)


def test_gpus_that_are_named_by_uuid_are_ordered_too() -> None:
    bundle = Bundle(has_engine=True, cpus=1, gpus=1)
    places = [
        Located(bundle=bundle, group=0, index=index, node_id="a", node_ip="host-a", gpu_ids=(gpu,))
        for index, gpu in enumerate(("GPU-b", "10", "GPU-a", "9"))
    ]
    assert [each.gpu_ids[0] for each in in_order(places)] == ["9", "10", "GPU-a", "GPU-b"]
