"""A trainer engine of vLLM's sends one init_info to all engines; each gets its own ranks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_weightsync.errors import ConfigError
from ray_weightsync.protocol.offsets import joins_a_group, spread


def info(world_size: int, **fields: Any) -> dict[str, Any]:
    return {"master_address": "a", "master_port": 1, "rank_offset": 1, "world_size": world_size, "packed": True} | fields


def spread_over(
    sizes: list[int], indices: list[int | None], init_info: dict[str, Any], *, workers: int | None = None
) -> list[dict[str, Any]]:
    """``workers``: of each engine by itself, if not ``sizes``."""
    places = [None if index is None else (index, workers or size) for index, size in zip(indices, sizes, strict=True)]
    return spread(init_info, labels=[f"e{number}" for number in range(len(sizes))], world_sizes=sizes, places=places)


@given(sizes=st.lists(st.integers(1, 8), min_size=1, max_size=6), first=st.integers(1, 3), see=st.booleans())
def test_independent_engines_workers_have_the_ranks_after_the_trainers_each_one_once(sizes: list[int], first: int, see: bool) -> None:
    world_size = first + sum(sizes)
    sent = info(world_size, rank_offset=first)
    told = spread_over(sizes, [0 if see else None] * len(sizes), sent)
    ranks = [each["rank_offset"] + rank for each, size in zip(told, sizes, strict=True) for rank in range(size)]
    assert ranks == list(range(first, world_size))
    assert all({**each, "rank_offset": first} == sent for each in told)
    assert sent == info(world_size, rank_offset=first)


def test_data_parallel_engines_of_one_deployment_share_an_offset() -> None:
    # An engine of a mixture of experts counts its whole deployment; one of a dense model itself alone.
    assert spread_over([4, 4], [1, 0], info(5), workers=2) == [info(5)] * 2
    assert spread_over([4, 4], [1, 0], info(9)) == [info(9)] * 2


@pytest.mark.parametrize(("world_size", "workers"), [(9, 2), (4, 2), (5, 4)])
def test_a_world_size_that_is_not_the_deployments_is_refused_too(world_size: int, workers: int) -> None:
    each = rf"e0 has {workers}, e1 has {workers}"
    with pytest.raises(ConfigError, match=rf"(?s){each}.* world_size={world_size}: .*world_size={1 + 2 * workers}$"):
        spread_over([4, 4], [0, 1], info(world_size), workers=workers)


@pytest.mark.parametrize("indices", [[0, 0, 1], [1, 2, 2], [0, 1, 1]])
def test_a_mix_of_deployments_is_refused_with_what_to_do(indices: list[int | None]) -> None:
    with pytest.raises(ConfigError, match=r"(?s)e0 is \d.*PerReplica"):
        spread_over([1, 1, 1], indices, info(4))


def test_a_world_size_that_is_not_the_engines_is_refused_because_joining_would_never_end() -> None:
    with pytest.raises(ConfigError, match=r"(?s)4 ranks, 1 before .*e0 has 1, e1 has 2.* world_size=3.*world_size=4"):
        spread_over([1, 2], [0, 0], info(3))


def test_only_init_infos_of_the_backends_whose_offsets_differ_are_spread() -> None:
    assert joins_a_group(info(3))
    assert joins_a_group({"rank_offset": 1, "world_size": 3, "nccl_unique_id_b64": "x"})
    assert not joins_a_group(info(3) | {"src_mesh_dims": [1]})  # nccl_m2n: one mesh, one offset
    assert not joins_a_group({"packed": False})
    assert not joins_a_group([info(3)])
