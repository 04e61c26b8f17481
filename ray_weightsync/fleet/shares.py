"""Each replica's share of a payload that one of vLLM's trainer engines sent for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray_weightsync.errors import ConfigError
from ray_weightsync.fleet.topology import Group, Member
from ray_weightsync.protocol.messages import Payload


def own_init_info(init_info: Payload, group: Group, replica: str) -> Payload:
    """What a replica gets of the ``init_info`` that a trainer engine sent for all: with its own workers' place among all.

    That is the rank that they begin at, or (``sharded_rdt``) the number of its deployment, from which they find their own.

    Raises:
        ConfigError: if the ranks would not be the group's, or engines that are to be counted differ in size.
    """
    if not isinstance(init_info, Mapping):
        return init_info
    if {"replica_rank", "num_replicas"} <= init_info.keys():
        return _numbered(init_info, group, replica)
    if "rank_offset" not in init_info:
        return init_info
    first = init_info["rank_offset"]
    ranks = first + group.world_size - 1
    if init_info.get("world_size", ranks) != ranks:
        raise ConfigError(
            f"the trainer engine says world_size={init_info['world_size']}, and with {first} ranks before the engines' workers there are "
            f"{ranks} ({group.table()}): joining would never end"
        )
    return {**init_info, "rank_offset": first + group.member(replica).rank_offset - 1}


def _numbered(init_info: Mapping[str, Any], group: Group, replica: str) -> dict[str, Any]:
    # The engines of one deployment share an offset, and count their workers through.
    deployments: dict[int, list[Member]] = {}
    for member in group.members:
        deployments.setdefault(member.rank_offset, []).append(member)
    sizes = {"+".join(each.id for each in parts): sum(len(each.ranks) for each in parts) for parts in deployments.values()}
    if len(set(sizes.values())) > 1:
        raise ConfigError(
            f"this backend takes replicas of as many workers each, and they have {sizes}: workers would take each other's parts",
            hint="attach them in a session for each size, or choose another transport",
        )
    return {**init_info, "replica_rank": list(deployments).index(group.member(replica).rank_offset), "num_replicas": len(sizes)}


def own_update_info(update_info: Payload, group: Group, replica: str) -> Payload:
    """A replica's part of an ``update_info`` that has one entry for each worker of the group; one for all stays as it is.

    Raises:
        ConfigError: if there are more or fewer entries than workers.
    """
    if not isinstance(update_info, list):
        return update_info
    workers = group.world_size - 1
    if len(update_info) != workers:
        raise ConfigError(f"the trainer engine sent {len(update_info)} entries for {workers} workers ({group.table()})")
    offset = group.member(replica).rank_offset
    # The engines of one deployment share an offset, and count their workers through.
    last = max(member.ranks.stop for member in group.members if member.rank_offset == offset)
    return update_info[offset - 1 : last - 1]
