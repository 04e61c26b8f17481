"""On which node an engine reads, by what it told."""

from __future__ import annotations

import pytest

from ray_weightsync.engines.facts import EngineFacts, WorkerFacts
from ray_weightsync.fleet.homes import home_of

NODES = {"a": "10.0.0.1", "b": "10.0.0.2", "b2": "10.0.0.2", "c": "10.0.0.3"}


def facts(node_id: str | None, *addresses: str) -> EngineFacts:
    workers = [
        WorkerFacts(nonce="n", rank=rank, world_size=len(addresses), package_version="0", node_ip=address)
        for rank, address in enumerate(addresses)
    ]
    return EngineFacts(kind="async", node_id=node_id, workers=tuple(workers))


@pytest.mark.parametrize(
    ("node_id", "addresses", "home"),
    [
        ("b", ["10.0.0.2"], "b"),
        ("b2", ["10.0.0.2"], "b2"),  # two nodes of one machine
        ("b", ["192.168.7.7"], "b"),  # an interface that Ray does not use
        ("b", [], "b"),
        ("b", ["10.0.0.3", "10.0.0.3"], "c"),  # an actor whose workers its executor has put elsewhere
        (None, ["10.0.0.3"], "c"),  # a server
        (None, ["10.0.0.1"], "a"),
        (None, ["192.168.7.7"], "a"),  # a server on a machine that Ray does not know
        (None, [], "a"),
        ("dead", ["10.0.0.9"], "a"),
    ],
)
def test_the_actors_node_counts_unless_the_workers_are_elsewhere_and_the_origin_where_nothing_is_known(
    node_id: str | None, addresses: list[str], home: str
) -> None:
    assert home_of(facts(node_id, *addresses), NODES, origin="a") == home


def test_of_two_nodes_at_one_address_a_server_is_taken_to_be_beside_the_origin() -> None:
    assert home_of(facts(None, "10.0.0.2"), NODES, origin="b2") == "b2"
