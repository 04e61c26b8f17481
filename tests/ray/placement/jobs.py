"""What the tests here have done in a driver of the raylets. Plain values come back.

Every actor that tells where it is imports this module: what only the driver needs is imported there.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray_weightsync as rws

if TYPE_CHECKING:
    import torch

LIMIT_S = 60.0


@ray.remote
class Process:
    """Tells where it is."""

    def told(self) -> dict[str, Any]:
        context = ray.get_runtime_context()
        env = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS", "MINE")}
        return {"node_id": context.get_node_id(), "gpu_ids": tuple(map(str, ray.get_gpu_ids())), "env": env}


def where(place: rws.placement.Place) -> dict[str, Any]:
    """A place, without what only this process can use."""
    fields = ("node_id", "gpu_ids", "bundle_index", "num_gpus", "num_cpus")
    return {"env": dict(place.env), "engine_args": dict(place.engine_args), **{name: getattr(place, name) for name in fields}}


def placed_and_started(**ask: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Reserve, start an actor at every place, and tell the places, each with what its actor said; trainers first."""
    with rws.placement.reserve(timeout_s=LIMIT_S, **ask) as placed:
        places = (*placed.trainers, *placed.engines)
        actors = [Process.options(**place.options(env={"MINE": str(place.index)})).remote() for place in places]
        told = ray.get([actor.told.remote() for actor in actors], timeout=LIMIT_S)
        return [(where(place), said) for place, said in zip(places, told, strict=True)]


def refused(**ask: Any) -> tuple[rws.WeightSyncError, float]:
    """The error of a placement that there is no room for, and the seconds that it took."""
    began = time.monotonic()
    try:
        rws.placement.reserve(**ask).close()
    except rws.WeightSyncError as error:
        return error, time.monotonic() - began
    raise AssertionError("it was reserved")


def refused_while_another_holds(bundles: list[dict[str, float]], **ask: Any) -> tuple[rws.WeightSyncError, float]:
    other = placement_group(bundles, name="somebody-elses")
    assert other.wait(LIMIT_S)
    try:
        return refused(**ask)
    finally:
        remove_placement_group(other)


def states() -> dict[str, int]:
    """How many placement groups of ours are in which state."""
    counts: dict[str, int] = {}
    for group in placement_group_table().values():
        if group["name"].startswith("rws-"):
            counts[group["state"]] = counts.get(group["state"], 0) + 1
    return counts


def left_after_close() -> tuple[dict[str, int], dict[str, int], bool]:
    """States while reserved and afterwards, and whether an actor that was left there has ended."""
    with rws.placement.reserve(engines=2, gpus=False) as placed:
        actor = Process.options(**placed.engine(0).options()).remote()
        ray.get(actor.told.remote(), timeout=LIMIT_S)
        during = states()
    placed.close()
    try:
        ray.get(actor.told.remote(), timeout=LIMIT_S)
    except ray.exceptions.RayActorError:
        return during, states(), True
    return during, states(), False


KEPT: list[rws.placement.Placed] = []
STARTED: list[Any] = []


def reserve_and_keep(**ask: Any) -> None:
    """Reserve in a driver that is going to be killed."""
    KEPT.append(rws.placement.reserve(**ask))
    actor = Process.options(**KEPT[-1].engine(0).options()).remote()
    ray.get(actor.told.remote(), timeout=LIMIT_S)


def wait_for_states(wanted: dict[str, int], within_s: float) -> float:
    """Seconds until our placement groups are in these states."""
    began = time.monotonic()
    while (found := states()) != wanted:
        assert time.monotonic() < began + within_s, f"after {within_s:.0f} s: {found}"
        time.sleep(0.05)
    return time.monotonic() - began


def begin_losing_a_node(node_id: str, size: int) -> tuple[str, ...]:
    """A trainer and an engine share ``size`` GPUs of a node, of which somebody has the first; the GPUs."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    other: Any = Process.options(num_cpus=0, num_gpus=1, scheduling_strategy=there).remote()
    ray.get(other.told.remote(), timeout=LIMIT_S)
    placed = rws.placement.reserve(trainers=1, engines=1, tensor_parallel_size=size, layout="colocated", timeout_s=LIMIT_S)
    KEPT.append(placed)
    for place in (placed.trainer(0), placed.engine(0)):
        STARTED.append(Process.options(**place.options()).remote())
    ray.get([actor.told.remote() for actor in STARTED], timeout=LIMIT_S)
    return placed.engine(0).gpu_ids


def no_place_is_vacant() -> str:
    from tests.ray.killing import until_dead

    for actor in STARTED:
        until_dead(actor)
    STARTED.clear()
    try:
        KEPT[-1].vacant_engine()
    except rws.AttachError as error:
        return str(error)
    raise AssertionError("a place was vacant")


def go_on_where_ray_put_it() -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """The engine's place, what its actor says there, and the trainers' places. They are given back."""
    with KEPT.pop() as placed:
        place = placed.vacant_engine()
        actor = Process.options(**place.options()).remote()
        return where(place), ray.get(actor.told.remote(), timeout=LIMIT_S), [where(trainer) for trainer in placed.trainers]


def make_module() -> torch.nn.Module:
    import torch

    return torch.nn.Linear(4, 2)


def session_in_places() -> dict[str, Any]:
    """A session on engines that were placed; one goes, and another comes to its place."""
    logging.getLogger("ray_weightsync").setLevel(logging.ERROR)
    with rws.placement.reserve(engines=3, gpus=False, layout="engine_per_node") as placed:
        spec = rws.TorchEngineSpec(make_module, num_replicas=3, placement=placed, env={"MINE": "yes"})
        with rws.WeightSync.spawn(spec) as sync:
            sync.send_weights(make_module(), version=1)
            before = {replica.id: replica.node_id for replica in sync.serving()}
            mine = ray.get(sync.engines[0].__ray_call__.remote(lambda actor: os.environ["MINE"]), timeout=LIMIT_S)
            sync.remove("r1")
            sync.add(count=1)
            sync.wait_serving(3, timeout_s=LIMIT_S)
            after = {replica.id: replica.node_id for replica in sync.serving()}
        places = [place.node_id for place in placed.engines]
    return {"places": places, "before": before, "after": after, "mine": mine}
