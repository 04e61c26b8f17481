"""On which node an engine reads its weights: a pure decision over what it said of itself and over Ray's list of nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray_weightsync.engines.facts import EngineFacts


def home_of(facts: EngineFacts, nodes: Mapping[str, str], *, origin: str) -> str:
    """The node whose snapshot store an engine is to read from. Whether it sees that store's memory is proved by the store's nonce.

    It is where its workers are, by their address; of several nodes at one address, its actor's, or else the origin. An engine that tells
    neither (a server on a machine that Ray does not know under this address) is taken to be beside the origin.

    Args:
        facts: What the engine told.
        nodes: Addresses of the living nodes, by id.
        origin: The node where the bytes are.
    """
    addresses = {worker.node_ip for worker in facts.workers}
    with_workers = sorted(node for node, address in nodes.items() if address in addresses)
    if facts.node_id is not None and facts.node_id in nodes and (facts.node_id in with_workers or not with_workers):
        return facts.node_id
    return origin if origin in with_workers or not with_workers else with_workers[0]
