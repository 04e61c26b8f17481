"""Places for trainers and engines in the cluster: reserved together, told apart, and given back.

::

    with rws.placement.reserve(trainers=2, engines=4, tensor_parallel_size=2) as placed:
        trainers = [Trainer.options(**place.options()).remote() for place in placed.trainers]
        sync = rws.WeightSync.spawn(rws.VLLMEngineSpec(model=path, num_replicas=4, tensor_parallel_size=2, placement=placed), ...)

What is decided (which bundles, whether they can fit, who sits where) is in `ray_weightsync.fleet.bundles`; here Ray is asked.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_weightsync.config import require_choice
from ray_weightsync.engines.spawning import require_amount, require_count
from ray_weightsync.errors import AttachError, ConfigError
from ray_weightsync.fleet.bundles import LAYOUTS, Ask, Layout, Seat, groups_for, seats_for
from ray_weightsync.fleet.groups import PHASE, free_by_node, remove_groups, reserve_groups
from ray_weightsync.session_options import require_ray

__all__ = ["Place", "Placed", "reserve"]

logger = logging.getLogger(__name__)

NOTICED_WITHIN_S = 5.0
"""Within this, Ray's view of what is free shows actors that were just started or ended."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one trainer or engine belongs, as it was found when it was reserved. Picklable.

    Attributes:
        role: What it is a place for.
        index: Its number among those; neighbours in number are neighbours in the cluster.
        node_id: Ray's id of the node.
        node_ip: Its address.
        gpu_ids: GPUs of its bundle, as ``CUDA_VISIBLE_DEVICES`` on the node names them. Trainers that share the bundle of an engine have
            one of them each.
        group: The placement group.
        bundle_index: Its bundle there.
        num_cpus: CPUs to ask Ray for.
        num_gpus: GPUs to ask Ray for. An engine that shares its GPUs with trainers asks for none and names them in ``env``.
        env: Environment variables that its process needs.
        engine_args: vLLM's engine arguments that it needs there.
    """

    role: Literal["trainer", "engine"]
    index: int
    node_id: str
    node_ip: str
    gpu_ids: tuple[str, ...]
    group: PlacementGroup
    bundle_index: int
    num_cpus: float
    num_gpus: int
    env: Mapping[str, str]
    engine_args: Mapping[str, object]

    def options(self, *, env: Mapping[str, str] | None = None) -> dict[str, Any]:
        """What ``Actor.options(...)`` takes to start it there.

        Args:
            env: Further environment variables, which win over the place's own.
        """
        options: dict[str, Any] = {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            # What the actor starts itself is not captured: a coordinator or a snapshot store has no share in the bundle.
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, self.bundle_index),
        }
        if merged := {**self.env, **(env or {})}:
            options["runtime_env"] = {"env_vars": merged}
        return options

    def __str__(self) -> str:
        gpus = f" GPU {','.join(self.gpu_ids)}" if self.gpu_ids else ""
        return f"{self.role} {self.index} node {self.node_id[:8]} ({self.node_ip}){gpus}"


class Placed:
    """Reserved places; a context manager. Made by `reserve`.

    They are given back by `close`, which ends whatever still runs in them, and by Ray when the process that reserved them ends.

    Attributes:
        trainers: A place for each trainer, by node and GPU.
        engines: A place for each engine, by node and GPU.
    """

    def __init__(self, groups: Sequence[PlacementGroup], trainers: Sequence[Seat], engines: Sequence[Seat]) -> None:
        self._groups = tuple(groups)
        self._lock = threading.Lock()
        self._given: dict[int, float] = {}
        self.trainers = tuple(self._place("trainer", index, seat) for index, seat in enumerate(trainers))
        self.engines = tuple(self._place("engine", index, seat) for index, seat in enumerate(engines))

    def _place(self, role: Literal["trainer", "engine"], index: int, seat: Seat) -> Place:
        where = seat.where
        return Place(
            role=role,
            index=index,
            node_id=where.node_id,
            node_ip=where.node_ip,
            gpu_ids=where.gpu_ids,
            group=self._groups[where.group],
            bundle_index=where.index,
            num_cpus=seat.num_cpus,
            num_gpus=seat.num_gpus,
            env=dict(seat.env),
            engine_args=dict(seat.engine_args),
        )

    def trainer(self, index: int) -> Place:
        """The place of that trainer."""
        return self.trainers[index]

    def engine(self, index: int) -> Place:
        """The place of that engine."""
        return self.engines[index]

    def vacant_engine(self) -> Place:
        """A place for an engine in which none is, such as where a lost one was. It is not told again for a few seconds.

        What is free in its bundle tells, so trainers that share bundles with engines have to be there already.

        Raises:
            AttachError: if all are taken, and none is left within those seconds: Ray takes a moment to notice the end of an actor.
        """
        began = time.monotonic()
        while (place := self._take_vacant()) is None:
            if (waited := time.monotonic() - began) > NOTICED_WITHIN_S:
                raise AttachError(
                    f"all {len(self.engines)} places for engines are taken",
                    phase=PHASE,
                    elapsed_s=waited,
                    limit_s=NOTICED_WITHIN_S,
                    hint="reserve more engines than the session starts with, or end one first",
                )
            time.sleep(0.1)
        return place

    def _take_vacant(self) -> Place | None:
        with self._lock:
            now, free = time.monotonic(), free_by_node()
            for place in self.engines:
                if self._given.get(place.index, -math.inf) + NOTICED_WITHIN_S < now and _is_empty(place, free.get(place.node_id, {})):
                    self._given[place.index] = now
                    return place
        return None

    def __str__(self) -> str:
        return " | ".join(map(str, (*self.trainers, *self.engines)))

    def __enter__(self) -> Placed:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Give everything back; actors that still run there are ended. Idempotent."""
        groups, self._groups = self._groups, ()
        remove_groups(groups)


def reserve(
    *,
    trainers: int = 0,
    engines: int = 0,
    tensor_parallel_size: int = 1,
    layout: Layout = "separate",
    gpus: bool = True,
    cpus_per_process: float = 1,
    timeout_s: float = 60,
) -> Placed:
    """Reserve room for trainers and engines, and return when it is theirs.

    Args:
        trainers: How many trainer processes, with one GPU each.
        engines: How many engines. Each gets its GPUs from one node.
        tensor_parallel_size: Workers of each engine (tensor x pipeline parallel), with one GPU each.
        layout: ``"separate"``: trainers and engines have GPUs of their own. ``"colocated"``: trainer k is on the node of engine
            ``k // tensor_parallel_size`` and shares its GPUs, up to one trainer per GPU; trainers beyond that have GPUs of their own.
            ``"engine_per_node"``: no two engines on one node; trainers wherever there is room, with GPUs of their own.
        gpus: Whether GPUs are reserved. Without, "GPU" above is to be read as ``cpus_per_process`` CPUs, and nothing is shared.
        cpus_per_process: CPUs of a trainer, and of each worker of an engine. May be a fraction.
        timeout_s: Seconds until all of it must be reserved.

    Returns:
        The places, as a context manager that gives them back.

    Raises:
        ConfigError: naming the argument, or if Ray is not initialised.
        AttachError: at once if the cluster could not hold it even if it were idle; after ``timeout_s`` if it is not free. It says what was
            asked for, what each node has, and who holds the rest. Nothing stays reserved.
    """
    ask = Ask(
        trainers=trainers,
        engines=engines,
        tensor_parallel_size=tensor_parallel_size,
        layout=layout,
        gpus=gpus,
        cpus_per_process=cpus_per_process,
    )
    _check(ask, timeout_s)
    require_ray()
    began = time.monotonic()
    groups, located = reserve_groups(groups_for(ask), limit_s=timeout_s)
    placed = Placed(groups, *seats_for(ask, located))
    logger.info("placed in %.1f s: %s", time.monotonic() - began, placed)
    return placed


def _is_empty(place: Place, free: Mapping[str, float]) -> bool:
    """Whether its bundle has room for what belongs there. Ray calls a bundle's own resources ``<name>_group_<index>_<group>``."""
    bundle = f"group_{place.bundle_index}_{place.group.id.hex()}"
    needs = {"CPU": place.num_cpus, "GPU": place.num_gpus}
    return all(free.get(f"{name}_{bundle}", 0.0) >= amount for name, amount in needs.items())


def _check(ask: Ask, timeout_s: object) -> None:
    require_choice("layout", ask.layout, LAYOUTS)
    for name in ("trainers", "engines"):
        value = getattr(ask, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{name} must be an int of at least 0, not {value!r}")
    require_count("tensor_parallel_size", ask.tensor_parallel_size)
    if not isinstance(ask.gpus, bool):
        raise ConfigError(f"gpus must be True or False, not {ask.gpus!r}; how many follows from trainers and engines")
    require_amount("cpus_per_process", ask.cpus_per_process)
    if not ask.cpus_per_process:
        raise ConfigError("cpus_per_process must be more than 0 (it may be a fraction): by its CPUs a place is seen to be taken")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise ConfigError(f"timeout_s must be a positive number of seconds, not {timeout_s!r}")
    needs = {"separate": ask.trainers + ask.engines, "colocated": min(ask.trainers, ask.engines), "engine_per_node": ask.engines}
    if not needs[ask.layout]:
        who = {"separate": "trainers or engines", "colocated": "both trainers and engines", "engine_per_node": "engines"}
        raise ConfigError(f"layout {ask.layout!r} needs {who[ask.layout]}, and trainers={ask.trainers}, engines={ask.engines} were given")
