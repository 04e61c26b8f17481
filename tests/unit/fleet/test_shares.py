"""What each replica gets of a payload that a trainer engine sent for all of them."""

from __future__ import annotations

import pytest

from ray_weightsync.errors import ConfigError
from ray_weightsync.fleet.shares import own_init_info, own_update_info
from ray_weightsync.fleet.topology import Shape, group_of

DEPLOYMENT = tuple(Shape(id=f"d{index}", world_size=2, data_parallel_size=2, data_parallel_index=index, deployment="d") for index in (0, 1))
GROUP = group_of([Shape(id="r0", world_size=2), *DEPLOYMENT, Shape(id="r1", world_size=1)])


def test_a_list_has_an_entry_for_each_worker_and_engines_of_one_deployment_share_theirs() -> None:
    entries = [{"worker": worker} for worker in range(5)]
    shares = {name: own_update_info(entries, GROUP, name) for name in ("r0", "d0", "d1", "r1")}
    assert shares == {"r0": entries[:2], "d0": entries[2:4], "d1": entries[2:4], "r1": entries[4:]}


def test_a_list_of_another_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 entries for 5 workers"):
        own_update_info([{}] * 4, GROUP, "r0")


def test_one_payload_for_all_stays_as_it_is() -> None:
    assert own_update_info({"names": []}, GROUP, "r1") == {"names": []}
    assert own_init_info({"packed": True}, GROUP, "r1") == {"packed": True}


def test_replicas_are_numbered_where_workers_find_their_place_by_that() -> None:
    of_all = {"num_consumers": 4, "replica_rank": 0, "num_replicas": 1}
    pair = group_of([Shape(id=name, world_size=2) for name in ("r0", "r1")])
    own = [own_init_info(of_all, pair, name) for name in ("r0", "r1")]
    assert own == [{**of_all, "num_replicas": 2}, {**of_all, "replica_rank": 1, "num_replicas": 2}]
    unequal = group_of([Shape(id="r0", world_size=2), Shape(id="r1", world_size=1)])
    with pytest.raises(ConfigError, match=r"as many workers each, and they have \{'r0': 2, 'r1': 1\}"):
        own_init_info(of_all, unequal, "r0")


def test_ranks_begin_after_as_many_trainers_as_the_engine_says() -> None:
    of_three = {"rank_offset": 3, "world_size": 8, "num_trainer_ranks": 3}
    assert [own_init_info(of_three, GROUP, name)["rank_offset"] for name in ("r0", "d0", "d1", "r1")] == [3, 5, 5, 7]  # type: ignore[call-overload]


def test_the_engines_of_one_deployment_have_one_number() -> None:
    counted = {"replica_rank": 0, "num_replicas": 1, "num_consumers": 4}
    group = group_of([Shape(id="r0", world_size=2), *DEPLOYMENT])
    told = [own_init_info(counted, group, name) for name in ("r0", "d0", "d1")]
    assert told == [{"replica_rank": rank, "num_replicas": 2, "num_consumers": 4} for rank in (0, 1, 1)]
