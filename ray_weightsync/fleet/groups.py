"""Placement groups in Ray: made, waited for, looked into, removed. What goes into them is decided in `bundles`."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_weightsync.errors import AttachError
from ray_weightsync.fleet.bundles import BundleGroup, Located, NodeRoom, asked_for, shortage, shown

logger = logging.getLogger(__name__)

PHASE = "placement"
WARN_EVERY_S = 10.0
REMOVAL_LIMIT_S = 30.0
PROBE_LIMIT_S = 30.0
"""For a task in a bundle that moved to another node, which may have to start a process there first."""


def reserve_groups(wanted: Sequence[BundleGroup], *, limit_s: float, may_grow: bool) -> tuple[list[PlacementGroup], list[Located]]:
    """Reserve ``wanted``, and find out where its bundles are.

    Args:
        wanted: What to reserve.
        limit_s: Seconds until all of it must be reserved.
        may_grow: Whether nodes come on demand: it is the waiting group that brings them.

    Raises:
        AttachError: at once if the cluster could not hold them even if it were idle and does not grow, and after ``limit_s`` seconds.
            Nothing stays reserved.
    """
    began = time.monotonic()
    if (problem := shortage(wanted, nodes())) is not None:
        if not may_grow:
            raise AttachError(
                f"There is no room for this placement: {problem}. Nothing was reserved.\nAsked for: {asked_for(wanted)}\n{_room()}",
                phase=PHASE,
                hint="ask for less, or add nodes; reserve(may_grow=True) waits for them where the cluster adds them on demand",
            )
        logger.warning("waiting up to %.0f s for the cluster to grow: %s", limit_s, problem)
    groups: list[PlacementGroup] = []
    try:
        for group in wanted:
            bundles = [bundle.resources for bundle in group.bundles]
            strategy = "STRICT_SPREAD" if group.spread else "PACK"
            # No lifetime="detached": Ray removes the group with the job that made it (or the detached actor), however that ends.
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
            problem = shortage(wanted, nodes())
            if problem is None:
                said = "Nothing shows that the cluster is too small for this placement, and room for it was not free in time"
                hint = "end what holds the rest, ask for less, or wait longer (timeout_s)"
            else:
                said = f"The cluster has not grown in time to hold this placement: {problem}"
                hint = "`ray status` says what the autoscaler does; ask for less, or wait longer (timeout_s): a new node takes minutes"
            raise AttachError(
                f"{said}. Nothing stays reserved.\nAsked for: {asked_for(wanted)}\n{_room(ours=groups)}",
                phase=PHASE,
                elapsed_s=now - began,
                limit_s=limit_s,
                hint=hint,
            )
        if now >= warn_at:
            warn_at = now + WARN_EVERY_S
            logger.warning("after %.0f s of %.0f s not yet reserved: %s\n%s", now - began, limit_s, asked_for(wanted), _room(ours=groups))


def _located(groups: Sequence[PlacementGroup], wanted: Sequence[BundleGroup], began: float, limit_s: float) -> list[Located]:
    """Where each bundle is, and which GPUs it has: Ray tells these only to a task that runs in it."""
    addresses = {node.node_id: node.node_ip for node in nodes()}
    places: dict[tuple[int, int], str] = {}
    asked: dict[tuple[int, int], ObjectRef[tuple[str, ...]]] = {}
    for number, (group, plan) in enumerate(zip(groups, wanted, strict=True)):
        node_of = placement_group_table(group)["bundles_to_node_id"]
        for index, bundle in enumerate(plan.bundles):
            places[number, index] = node_of[index]
            if bundle.gpus:
                asked[number, index] = _ask_gpus(group, index, bundle.gpus)
    try:
        told = ray.get(list(asked.values()), timeout=max(began + limit_s - time.monotonic(), 0.0))
    except RayError as error:
        late = isinstance(error, GetTimeoutError)
        problem = "its nodes did not tell in time which GPUs it has" if late else "one of its nodes cannot tell which GPUs it has"
        hint = "starting a process on each node takes seconds: wait longer (timeout_s), or look into the nodes' logs"
        if not late:
            hint = "a process of this job cannot run there: mend its runtime environment; if the node was lost, reserve again"
        raise AttachError(
            f"The placement was reserved, and {problem}. Nothing stays reserved.",
            phase=PHASE,
            elapsed_s=time.monotonic() - began,
            limit_s=limit_s,
            engine_message=None if late else str(error),
            hint=hint,
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


def nodes_of(groups: Sequence[PlacementGroup]) -> dict[tuple[int, int], str]:
    """By group and bundle the id of the node that it is on now; without bundles whose node is gone and that Ray has not put elsewhere."""
    live = {node.node_id for node in nodes()}
    return {
        (number, index): node_id
        for number, group in enumerate(groups)
        for index, node_id in placement_group_table(group)["bundles_to_node_id"].items()
        if node_id in live
    }


def moved_to(node_id: str, where: Located, group: PlacementGroup) -> Located | None:
    """``where``, a bundle of ``group``, on the node that Ray has put it on since; without GPUs if somebody there has them already.

    None if it cannot be asked there, because that node was lost as well.
    """
    gpu_ids: tuple[str, ...] = ()
    if where.bundle.gpus:
        asked = _ask_gpus(group, where.index, where.bundle.gpus)
        try:
            gpu_ids = ray.get(asked, timeout=PROBE_LIMIT_S)
        except GetTimeoutError:
            ray.cancel(asked)
            logger.warning("bundle %d of %s moved to node %s, and its GPUs were taken at once", where.index, group.id.hex(), node_id)
        except RayError as error:
            logger.warning("bundle %d of %s moved to node %s, which does not answer: %s", where.index, group.id.hex(), node_id, error)
            return None
    addresses = {node.node_id: node.node_ip for node in nodes()}
    return replace(where, node_id=node_id, node_ip=addresses.get(node_id, ""), gpu_ids=gpu_ids)


def _ask_gpus(group: PlacementGroup, index: int, gpus: int) -> ObjectRef[tuple[str, ...]]:
    probe: Any = ray.remote(num_cpus=0, num_gpus=gpus)(_own_gpus)
    asked: ObjectRef[tuple[str, ...]] = probe.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote()
    return asked


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
        while placement_group_table(group).get("state", "REMOVED") != "REMOVED":  # a Ray that was started since knows nothing of it
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
