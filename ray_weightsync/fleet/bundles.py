"""Which bundles a placement needs, whether the cluster can hold them at all, and who sits where once they are reserved. Pure.

An engine is one bundle: Ray reserves a bundle on one node, so the GPUs of its workers are together, and vLLM's multiprocessing executor
runs them. (Its Ray executor would take bundles of one GPU each, which may lie on several nodes: such engines are not placed here.)
"""

from __future__ import annotations

import ipaddress
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Layout = Literal["separate", "colocated", "engine_per_node"]
LAYOUTS: tuple[Layout, ...] = ("separate", "colocated", "engine_per_node")

Resources = Mapping[str, float]

STEPS = 10_000
"""Ray counts resources in steps of 1e-4. It cuts off what is asked for: of 1.3499999, nine times 0.15, it takes 1.3499."""

ROUNDING = 1e-6
"""What Ray tells of resources are floats."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What is to be placed.

    Attributes:
        trainers: Trainer processes, with one GPU each.
        engines: Engines.
        tensor_parallel_size: Workers of each engine, with one GPU each.
        layout: See `ray_weightsync.placement.reserve`.
        gpus: Whether they have GPUs; else CPUs alone.
        cpus_per_process: CPUs of a trainer, and of each worker of an engine.
    """

    trainers: int
    engines: int
    tensor_parallel_size: int = 1
    layout: Layout = "separate"
    gpus: bool = True
    cpus_per_process: float = 1

    def cpus(self, processes: int) -> float:
        """CPUs of that many processes, which Ray takes for the sum of what each of them takes: so all find room in their bundle."""
        steps = processes * int(self.cpus_per_process * STEPS + ROUNDING)
        return steps / STEPS if int(steps / STEPS * STEPS) == steps else math.nextafter(steps / STEPS, math.inf)


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What is reserved as one piece, on one node: an engine, a trainer, or an engine and the trainers on its GPUs."""

    trainers: int = 0
    has_engine: bool = False
    cpus: float = 0
    gpus: int = 0

    @property
    def resources(self) -> dict[str, float]:
        """As Ray is asked for them."""
        return {name: float(amount) for name, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount}

    def __str__(self) -> str:
        trainers = f"{self.trainers} trainers" if self.trainers > 1 else "trainer" * self.trainers
        who = " + ".join(part for part in ("engine" * self.has_engine, trainers) if part)
        return f"{who} ({shown(self.resources)})"


@dataclass(frozen=True)
class BundleGroup:
    """Bundles that are reserved together. With ``spread`` each is on a node of its own, else on as few nodes as possible."""

    bundles: tuple[Bundle, ...]
    spread: bool = False


@dataclass(frozen=True, kw_only=True)
class NodeRoom:
    """What a live node has, and what of it is free."""

    node_id: str
    node_ip: str
    total: Resources
    free: Resources

    def __str__(self) -> str:
        names = [name for name in ("CPU", "GPU") if self.total.get(name)]
        room = ", ".join(f"{self.free.get(name, 0):g} of {self.total[name]:g} {name} free" for name in names)
        return f"node {self.node_id[:8]} ({self.node_ip}): {room or 'neither CPU nor GPU'}"


@dataclass(frozen=True, kw_only=True)
class Located:
    """A bundle where it was reserved.

    Attributes:
        bundle: What is in it.
        group: Which of the groups it belongs to.
        index: Its index there, which means nothing: Ray fills nodes in any order (ray#51117, ray#59547).
        node_id: Ray's id of the node.
        node_ip: Its address.
        gpu_ids: The GPUs that it holds, as ``CUDA_VISIBLE_DEVICES`` on its node names them.
    """

    bundle: Bundle
    group: int
    index: int
    node_id: str
    node_ip: str
    gpu_ids: tuple[str, ...] = ()

    @property
    def lacks_gpus(self) -> bool:
        """Whether it has GPUs that are not known."""
        return len(self.gpu_ids) < self.bundle.gpus


@dataclass(frozen=True, kw_only=True)
class Seat:
    """What one trainer or engine is started with.

    Attributes:
        where: Its bundle.
        num_workers: Its worker processes; 1 for a trainer.
        num_cpus: CPUs that it asks Ray for.
        num_gpus: GPUs that it asks Ray for.
        env: Environment variables of its process.
        engine_args: vLLM's engine arguments that belong to this place.
    """

    where: Located
    num_workers: int
    num_cpus: float
    num_gpus: int
    env: Mapping[str, str] = field(default_factory=dict)
    engine_args: Mapping[str, object] = field(default_factory=dict)


def groups_for(ask: Ask) -> tuple[BundleGroup, ...]:
    """The groups of bundles to reserve, in the order in which they should be: what is hardest to place comes first."""
    size = ask.tensor_parallel_size
    sharing = [0] * ask.engines
    if ask.layout == "colocated":
        sharing = [max(0, min(size, ask.trainers - number * size)) for number in range(ask.engines)]
    engines = tuple(_bundle(ask, trainers=trainers, has_engine=True) for trainers in sharing)
    trainers = (_bundle(ask, trainers=1),) * (ask.trainers - sum(sharing))
    apart = ask.layout == "engine_per_node"
    groups = (BundleGroup(engines, spread=True), BundleGroup(trainers)) if apart else (BundleGroup(engines + trainers),)
    return tuple(group for group in groups if group.bundles)


def _bundle(ask: Ask, *, trainers: int, has_engine: bool = False) -> Bundle:
    workers = ask.tensor_parallel_size if has_engine else 0
    gpus = max(trainers, workers) if ask.gpus else 0  # shared by those who share the bundle; CPUs are not
    return Bundle(trainers=trainers, has_engine=has_engine, cpus=ask.cpus(trainers + workers), gpus=gpus)


def shortage(groups: Sequence[BundleGroup], nodes: Sequence[NodeRoom]) -> str | None:
    """Why ``groups`` can never be reserved on ``nodes``, however idle these are; None where that is not certain.

    Bundles that need as much as another one or more compete with it for the same nodes: they are counted together.
    """
    bundles = [bundle for group in groups for bundle in group.bundles]
    for name in ("CPU", "GPU"):
        asked = sum(bundle.resources.get(name, 0) for bundle in bundles)
        there = sum(node.total.get(name, 0) for node in nodes)
        if asked > there + ROUNDING:
            on_cpus = "" if name == "CPU" or there else " (gpus=False asks for CPUs alone)"
            return f"{asked:g} {name} are asked for, and the cluster has {there:g}{on_cpus}"
    for group in groups:
        for bundle in Counter(group.bundles):
            rivals = [other for other in (group.bundles if group.spread else bundles) if _needs_as_much(other, bundle)]
            on_each = [_times(bundle.resources, node.total) for node in nodes]
            room = sum(min(times, 1) if group.spread else times for times in on_each)
            if room < len(rivals):
                competing = "; ".join(f"{count} x {rival}" for rival, count in Counter(rivals).items())
                each_on = "each on a node of its own" if group.spread else "each on one node"
                of_these = f" such as {bundle}" if len(set(rivals)) > 1 else ""
                too_large = "; an engine over several nodes is not placed here" if bundle.has_engine and not any(on_each) else ""
                return f"{competing} are asked for, {each_on}, and the nodes have room for {room}{of_these}{too_large}"
    return None


def _needs_as_much(bundle: Bundle, other: Bundle) -> bool:
    return bundle.cpus >= other.cpus - ROUNDING and bundle.gpus >= other.gpus


def asked_for(groups: Sequence[BundleGroup]) -> str:
    """What is asked for, in words."""
    return "; ".join(
        f"{count} x {bundle}{' on a node of its own' if group.spread else ''}"
        for group in groups
        for bundle, count in Counter(group.bundles).items()
    )


def _times(needs: Resources, room: Resources) -> int:
    """How often ``needs`` fits into ``room``."""
    return min(int((room.get(name, 0) + ROUNDING) / amount) for name, amount in needs.items())


def shown(resources: Resources) -> str:
    """Amounts in words, such as ``1 CPU, 2 GPU``."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def in_order(located: Iterable[Located]) -> tuple[Located, ...]:
    """Bundles by node, and by GPU on each, so that neighbours in rank are neighbours in the cluster. Nodes come by address."""
    return tuple(sorted(located, key=lambda each: (_address(each.node_ip), each.node_id, _first_gpu(each), each.group, each.index)))


def _address(node_ip: str) -> tuple[int, int | str]:
    try:
        address = ipaddress.ip_address(node_ip)
    except ValueError:
        return (0, node_ip)
    return (address.version, int(address))


def _first_gpu(located: Located) -> tuple[int, int, str]:
    ids = [(0, int(gpu), "") if gpu.isdecimal() else (1, 0, gpu) for gpu in located.gpu_ids]
    return min(ids, default=(0, 0, ""))


def seats_for(ask: Ask, located: Iterable[Located]) -> tuple[tuple[Seat, ...], tuple[Seat, ...]]:
    """Trainers and engines, both numbered in the order of `in_order`; engines that trainers share GPUs with come first, with these."""
    places = sorted(in_order(located), key=lambda each: (not each.bundle.has_engine, -each.bundle.trainers))
    trainers = [_trainer_seat(ask, place) for place in places for _ in range(place.bundle.trainers)]
    return tuple(trainers), tuple(_engine_seat(ask, place) for place in places if place.bundle.has_engine)


def seats_after(ask: Ask, trainers: Sequence[Seat], engines: Sequence[Seat], moved: Located) -> tuple[tuple[Seat, ...], tuple[Seat, ...]]:
    """The same seats under the same numbers, now that the bundle of ``moved`` is where that says."""

    def stays(seat: Seat) -> bool:
        return (seat.where.group, seat.where.index) != (moved.group, moved.index)

    return (
        tuple(seat if stays(seat) else _trainer_seat(ask, moved) for seat in trainers),
        tuple(seat if stays(seat) else _engine_seat(ask, moved) for seat in engines),
    )


def _trainer_seat(ask: Ask, place: Located) -> Seat:
    return Seat(where=place, num_workers=1, num_cpus=ask.cpus(1), num_gpus=int(ask.gpus))


def _engine_seat(ask: Ask, place: Located) -> Seat:
    size = ask.tensor_parallel_size
    env: dict[str, str] = {}
    shares_gpus = ask.gpus and place.bundle.trainers > 0
    if shares_gpus:
        # In Ray's books the trainers have the GPUs (a fraction of several is nothing that Ray can be asked for), so the engine names them.
        env = {"CUDA_VISIBLE_DEVICES": ",".join(place.gpu_ids), "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    elif not ask.gpus:
        # vLLM would bind worker r of every engine to the cores of NUMA node r, and refuse to start where there are fewer nodes.
        env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(max(1, int(ask.cpus_per_process)))}
    # In a placement group vLLM takes its Ray executor for more than one worker, unless it is told otherwise.
    engine_args = {"distributed_executor_backend": "mp" if size > 1 else "uni"}
    num_gpus = size if ask.gpus and not shares_gpus else 0
    return Seat(where=place, num_workers=size, num_cpus=ask.cpus(size), num_gpus=num_gpus, env=env, engine_args=engine_args)
