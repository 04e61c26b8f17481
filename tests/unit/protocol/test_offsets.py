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


def spread_over(sizes: list[int], indices: list[int | None], init_info: dict[str, Any]) -> list[dict[str, Any]]:
    return spread(init_info, labels=[f"e{number}" for number in range(len(sizes))], world_sizes=sizes, indices=indices)


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
    assert spread_over([4, 4], [1, 0], info(5)) == [info(5)] * 2
    assert spread_over([2, 2], [1, 0], info(5)) == [info(5)] * 2  # of a dense model each tells its own workers alone


def test_a_world_size_that_no_such_deployment_has_is_refused_because_joining_would_never_end() -> None:
    with pytest.raises(ConfigError, match=r"world_size=4, .* there are 5 or 9: joining would never end"):
        spread_over([4, 4], [1, 0], info(4))


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
