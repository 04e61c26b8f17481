"""Ranks: the sender is 0, and by vLLM's own formula every worker of every replica gets another one of the rest."""

from __future__ import annotations

import dataclasses
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_weightsync.engines.facts import EngineFacts
from ray_weightsync.engines.ref import EngineRef
from ray_weightsync.engines.resolve import Engine
from ray_weightsync.errors import ConfigError
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.topology import Shape, group_of, shape_of

Fleet = list[Shape]


def independent(name: str, *, tp: int = 1, pp: int = 1, dp: int = 1) -> Shape:
    """An engine of its own; with ``dp`` above 1 its data-parallel engines are inside."""
    sizes: dict[str, Any] = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "data_parallel_size": dp}
    return Shape(id=name, world_size=tp * pp * dp, data_parallel_index=0, **sizes)


def deployed(name: str, *, index: int, size: int, tp: int = 1, says_size: bool = True, deployment: str = "d") -> Shape:
    """One of the data-parallel engines of a deployment; of a dense model each says that there is one."""
    told = size if says_size else 1
    return Shape(
        id=name,
        world_size=tp * told,
        tensor_parallel_size=tp,
        data_parallel_size=told,
        data_parallel_index=index,
        deployment=deployment,
    )


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    """Any mix of engines of their own and of deployments, in any order."""
    sizes = st.integers(1, 3)
    shapes = [independent(f"r{number}", tp=draw(sizes), pp=draw(sizes), dp=draw(sizes)) for number in range(draw(st.integers(0, 4)))]
    for number in range(draw(st.integers(0 if shapes else 1, 2))):
        name, size, tp, says_size = f"d{number}", draw(sizes), draw(sizes), draw(st.booleans())
        shapes += [
            deployed(f"{name}-{index}", index=index, size=size, tp=tp, says_size=says_size, deployment=name) for index in range(size)
        ]
    return list(draw(st.permutations(shapes)))


def workers_ranks(shape: Shape, rank_offset: int) -> list[int]:
    """The ranks that a replica's workers find by vLLM's formula, data_parallel_index * TP * PP + rank + rank_offset."""
    per_engine = (shape.tensor_parallel_size or 1) * (shape.pipeline_parallel_size or 1)
    indices = range(shape.data_parallel_size or 1) if shape.deployment is None else [shape.data_parallel_index or 0]
    return [index * per_engine + rank + rank_offset for index in indices for rank in range(per_engine)]


@given(fleets())
def test_the_workers_of_any_fleet_have_each_rank_but_the_senders_once(shapes: Fleet) -> None:
    group = group_of(shapes)
    ranks = [rank for shape in shapes for rank in workers_ranks(shape, group.init_payload(shape.id)["rank_offset"])]
    assert sorted(ranks) == list(range(1, group.world_size))


@given(fleets())
def test_what_the_group_says_of_a_replica_is_what_its_workers_find(shapes: Fleet) -> None:
    group = group_of(shapes)
    assert [member.id for member in group.members] == [shape.id for shape in shapes]
    for shape in shapes:
        member = group.member(shape.id)
        assert list(member.ranks) == workers_ranks(shape, member.rank_offset)


@given(fleets())
def test_independent_replicas_come_in_the_order_of_the_fleet(shapes: Fleet) -> None:
    group = group_of(shapes)
    alone = [group.member(shape.id) for shape in shapes if shape.deployment is None]
    assert [member.ranks.start for member in alone] == sorted(member.ranks.start for member in alone)
    assert all(member.rank_offset == member.ranks.start for member in alone)


@given(fleets())
def test_a_deployment_shares_one_offset(shapes: Fleet) -> None:
    group = group_of(shapes)
    for name in {shape.deployment for shape in shapes} - {None}:
        assert len({group.member(shape.id).rank_offset for shape in shapes if shape.deployment == name}) == 1


@given(fleets(), st.data())
def test_a_deployment_with_a_part_missing_is_an_error_that_says_which(shapes: Fleet, data: st.DataObject) -> None:
    parts = [shape for shape in shapes if shape.deployment is not None and (shape.data_parallel_size or 1) > 1]
    if not parts:
        return
    lost = data.draw(st.sampled_from(parts))
    with pytest.raises(ConfigError, match=rf"{lost.deployment}.* and {lost.data_parallel_index} is missing from the fleet"):
        group_of([shape for shape in shapes if shape is not lost])


def test_the_table_is_one_line_in_the_order_of_the_ranks() -> None:
    shapes = [
        independent("r0", tp=2),
        deployed("b", index=1, size=2, tp=2, says_size=False),
        independent("r1"),
        deployed("a", index=0, size=2, tp=2, says_size=False),
        independent("r2", tp=2, pp=2, dp=2),
    ]
    group = group_of(shapes)
    assert group.table() == (
        "group of 16: 0 sender | 1-2 r0 (TP 2) | 3-4 a (TP 2, DP 0 of d) | 5-6 b (TP 2, DP 1 of d) | 7 r1 | 8-15 r2 (TP 2, PP 2, DP 2)"
    )
    assert group.member("b").rank_offset == group.member("a").rank_offset == 3


def test_payloads_are_those_of_our_receiver_and_of_vllms_nccl_backend() -> None:
    group = group_of([independent("r0", tp=2), independent("r1")])
    assert group.init_payload("r1") == {"rank_offset": 3, "world_size": 4}
    assert group.init_payload("r0") == {"rank_offset": 1, "world_size": 4}
    with pytest.raises(KeyError, match="r2 is not in the group"):
        group.init_payload("r2")
    assert pickle.loads(pickle.dumps(group)) == group


def test_a_size_that_cannot_be_seen_is_an_error_that_says_how_to_give_it() -> None:
    with pytest.raises(ConfigError, match="how many workers r1 has") as raised:
        group_of([independent("r0"), dataclasses.replace(independent("r1"), world_size=None)])
    assert "EngineRef(..., world_size=N)" in str(raised.value)
    assert raised.value.replicas == ("r1",)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ([], "at least one replica"),
        ([independent("r0"), independent("r0")], "two replicas of the group have the id r0"),
        ([dataclasses.replace(independent("r0"), data_parallel_index=1)], "it is not said of which"),
        ([dataclasses.replace(independent("r0", dp=2), world_size=3)], "3 workers in 2 data-parallel engines"),
        ([deployed("a", index=0, size=2), deployed("b", index=0, size=2)], "a and b are both data-parallel engine 0"),
        ([deployed("a", index=3, size=4)], "0, 1, 2 are missing from the fleet"),
        ([deployed("a", index=0, size=2), deployed("b", index=1, size=3)], "a has 2 data-parallel engines, others have 3"),
        ([deployed("a", index=0, size=2, tp=1), deployed("b", index=1, size=2, tp=2)], "a has 1, b has 2 workers per engine"),
        (
            [deployed("a", index=0, size=2), dataclasses.replace(deployed("b", index=1, size=2), data_parallel_index=None)],
            "the data-parallel index of b cannot be seen",
        ),
    ],
)
def test_a_fleet_without_ranks_is_an_error_that_names_its_replicas(shapes: Fleet, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        group_of(shapes)
    assert bool(raised.value.replicas) == bool(shapes)


def engine(facts: EngineFacts, **ref: Any) -> Engine:
    channel: Any = SimpleNamespace(label="r0")
    return Engine(id="r0", label="r0", channel=channel, facts=facts, ref=EngineRef("generator", **ref))


def test_what_an_engine_did_not_tell_is_taken_from_its_reference() -> None:
    shape = shape_of(engine(EngineFacts(kind="client"), world_size=4))
    assert group_of([shape]).table() == "group of 5: 0 sender | 1-4 r0 (4 workers)"
    seen = EngineFacts(kind="async", world_size=2, tensor_parallel_size=2, data_parallel_size=1, data_parallel_index=0)
    shape = shape_of(engine(seen, world_size=2, deployment="d"))
    assert (shape.world_size, shape.deployment) == (2, "d")
    assert group_of([shape]).table() == "group of 3: 0 sender | 1-2 r0 (TP 2, DP 0 of d)"


def test_the_status_shows_a_size_that_only_the_user_knows() -> None:
    assert Replica(engine(EngineFacts(kind="client"), world_size=4)).status().world_size == 4
