"""Placement groups in Ray: made, waited for, looked into, removed. What goes into them is decided in `bundles`."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_weightsync.errors import AttachError
from ray_weightsync.fleet.bundles import BundleGroup, Located, NodeRoom, asked_for, shortage, shown

logger = logging.getLogger(__name__)

PHASE = "placement"
WARN_EVERY_S = 10.0
REMOVAL_LIMIT_S = 30.0


def reserve_groups(wanted: Sequence[BundleGroup], *, limit_s: float) -> tuple[list[PlacementGroup], list[Located]]:
    """Reserve ``wanted``, and find out where its bundles are.

    Raises:
        AttachError: at once if the cluster could not hold them even if it were idle, and after ``limit_s`` seconds. Nothing stays reserved.
    """
    began = time.monotonic()
    if (problem := shortage(wanted, nodes())) is not None:
        raise AttachError(
            f"There is no room for this placement: {problem}. Nothing was reserved.\nAsked for: {asked_for(wanted)}\n{_room()}",
            phase=PHASE,
            hint="ask for less, or add nodes; Ray would wait for them for ever",
        )
    groups: list[PlacementGroup] = []
    try:
        for group in wanted:
            bundles = [bundle.resources for bundle in group.bundles]
            strategy = "STRICT_SPREAD" if group.spread else "PACK"
            # No lifetime="detached": Ray removes the group with the job (or the actor) that made it, however that ends.
            groups.append(placement_group(bundles, strategy=strategy, name=f"rws-{uuid.uuid4().hex[:8]}"))
            _wait(groups, wanted, began, limit_s)
        return groups, _located(groups, wanted, began, limit_s)
    except BaseException:
        remove_groups(groups)
        raise


def _wait(groups: Sequence[PlacementGroup], wanted: Sequence[BundleGroup], began: float, limit_s: float) -> None:
    """Wait until the last of ``groups`` is reserved."""
    warn_at = began + WARN_EVERY_S
    while not groups[-1].wait(min(1.0, max(began + limit_s - time.monotonic(), 0.0))):
        now = time.monotonic()
        if now >= began + limit_s:
            raise AttachError(
                f"The cluster has room for this placement, and it was not free in time. Nothing stays reserved.\n"
                f"Asked for: {asked_for(wanted)}\n{_room(ours=groups)}",
                phase=PHASE,
                elapsed_s=now - began,
                limit_s=limit_s,
                hint="end what holds the rest, ask for less, or wait longer (timeout_s)",
            )
        if now >= warn_at:
            warn_at = now + WARN_EVERY_S
            logger.warning("after %.0f s of %.0f s not yet reserved: %s\n%s", now - began, limit_s, asked_for(wanted), _room(ours=groups))


def _located(groups: Sequence[PlacementGroup], wanted: Sequence[BundleGroup], began: float, limit_s: float) -> list[Located]:
    """Where each bundle is, and which GPUs it has: Ray tells these only to a task that runs in it."""
    addresses = {node.node_id: node.node_ip for node in nodes()}
    places: dict[tuple[int, int], str] = {}
    asked: dict[tuple[int, int], Any] = {}
    for number, (group, plan) in enumerate(zip(groups, wanted, strict=True)):
        node_of = placement_group_table(group)["bundles_to_node_id"]
        for index, bundle in enumerate(plan.bundles):
            places[number, index] = node_of[index]
            if bundle.gpus:
                probe: Any = ray.remote(num_cpus=0, num_gpus=bundle.gpus)(_own_gpus)
                asked[number, index] = probe.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote()
    try:
        told = ray.get(list(asked.values()), timeout=max(began + limit_s - time.monotonic(), 0.0))
    except GetTimeoutError as error:
        raise AttachError(
            "The placement was reserved, and its nodes did not tell in time which GPUs it has. Nothing stays reserved.",
            phase=PHASE,
            elapsed_s=time.monotonic() - began,
            limit_s=limit_s,
            hint="starting a process on each node takes seconds: wait longer (timeout_s), or look into the nodes' logs",
        ) from error
    gpus = dict(zip(asked, told, strict=True))
    return [
        Located(
            bundle=wanted[number].bundles[index],
            group=number,
            index=index,
            node_id=node_id,
            node_ip=addresses.get(node_id, ""),
            gpu_ids=gpus.get((number, index), ()),
        )
        for (number, index), node_id in places.items()
    ]


def _own_gpus() -> tuple[str, ...]:
    api: Any = ray  # get_gpu_ids has no annotations
    return tuple(sorted(map(str, api.get_gpu_ids()), key=lambda gpu: (len(gpu), gpu)))


def remove_groups(groups: Sequence[PlacementGroup]) -> None:
    """Give everything back, and wait until Ray has. Actors that still run there are ended."""
    if not ray.is_initialized():  # the job is over, and its groups with it
        return
    for group in groups:
        remove_placement_group(group)
    deadline = time.monotonic() + REMOVAL_LIMIT_S
    for group in groups:
        while placement_group_table(group).get("state") != "REMOVED":
            if time.monotonic() > deadline:
                logger.warning("placement group %s was given back and is still there after %.0f s", group.id.hex(), REMOVAL_LIMIT_S)
                return
            time.sleep(0.02)


def free_by_node() -> Mapping[str, Mapping[str, float]]:
    """By node id what is free there, also within bundles. Ray has this per node only among its internals."""
    from ray._private.state import available_resources_per_node

    free: Any = available_resources_per_node  # it has no annotations
    return dict(free())


def nodes() -> list[NodeRoom]:
    """The live nodes."""
    api: Any = ray  # nodes has no annotations
    free = free_by_node()
    return [
        NodeRoom(node_id=node_id, node_ip=node["NodeManagerAddress"], total=dict(node["Resources"]), free=dict(free.get(node_id, {})))
        for node in api.nodes()
        if node["Alive"]
        for node_id in [node["NodeID"]]
    ]


def _room(ours: Sequence[PlacementGroup] = ()) -> str:
    """What each node has, and what other placement groups hold."""
    lines = [str(node) for node in nodes()]
    mine = {group.id.hex() for group in ours}
    for group_id, group in placement_group_table().items():
        if group["state"] == "CREATED" and group_id not in mine:
            held: dict[str, float] = {}
            for bundle in group["bundles"].values():
                for name, amount in bundle.items():
                    held[name] = held.get(name, 0.0) + amount
            lines.append(f"placement group {group['name'] or group_id[:8]} holds {shown(held)}")
    return "\n".join(lines)
