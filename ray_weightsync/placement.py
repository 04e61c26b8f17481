"""Places for trainers and engines in the cluster: reserved together, told apart, and given back.

::

    with rws.placement.reserve(trainers=2, engines=4, tensor_parallel_size=2) as placed:
        trainers = [Trainer.options(**place.options()).remote() for place in placed.trainers]
        sync = rws.WeightSync.spawn(rws.VLLMEngineSpec(model=path, num_replicas=4, tensor_parallel_size=2, placement=placed), ...)

What is decided (which bundles, whether they can fit, who sits where) is in `ray_weightsync.fleet.bundles`, what a place offers in
`ray_weightsync.fleet.places`.
"""

from __future__ import annotations

import logging
import math
import time

from ray_weightsync.config import require_choice
from ray_weightsync.engines.spawning import require_amount, require_count
from ray_weightsync.errors import ConfigError
from ray_weightsync.fleet.bundles import LAYOUTS, Ask, Layout, groups_for
from ray_weightsync.fleet.cluster import require_ray
from ray_weightsync.fleet.groups import reserve_groups
from ray_weightsync.fleet.places import Place, Placed

__all__ = ["Place", "Placed", "reserve"]

logger = logging.getLogger(__name__)


def reserve(
    *,
    trainers: int = 0,
    engines: int = 0,
    tensor_parallel_size: int = 1,
    layout: Layout = "separate",
    gpus: bool = True,
    cpus_per_process: float = 1,
    timeout_s: float = 60,
    may_grow: bool = False,
) -> Placed:
    """Reserve room for trainers and engines, and return when it is theirs.

    Engines over several nodes, and those whose workers are Ray's (vLLM's ``sharded_rdt`` needs them), are not placed here.

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
        may_grow: The cluster adds nodes on demand: wait for them, up to ``timeout_s``, instead of refusing what the present nodes cannot
            hold.

    Returns:
        The places, as a context manager that gives them back.

    Raises:
        ConfigError: naming the argument, or if Ray is not initialised.
        AttachError: at once if the cluster could not hold it even if it were idle, and may not grow; after ``timeout_s`` if it is not
            free. It says what was asked for, what each node has, and who holds the rest. Nothing stays reserved.
    """
    ask = Ask(
        trainers=trainers,
        engines=engines,
        tensor_parallel_size=tensor_parallel_size,
        layout=layout,
        gpus=gpus,
        cpus_per_process=cpus_per_process,
    )
    _check(ask, timeout_s, may_grow)
    require_ray()
    began = time.monotonic()
    groups, located = reserve_groups(groups_for(ask), limit_s=timeout_s, may_grow=may_grow)
    placed = Placed(ask, groups, located)
    logger.info("placed in %.1f s: %s", time.monotonic() - began, placed)
    return placed


def _check(ask: Ask, timeout_s: object, may_grow: object) -> None:
    require_choice("layout", ask.layout, LAYOUTS)
    for name in ("trainers", "engines"):
        value = getattr(ask, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{name} must be an int of at least 0, not {value!r}")
    require_count("tensor_parallel_size", ask.tensor_parallel_size)
    if not isinstance(ask.gpus, bool):
        raise ConfigError(f"gpus must be True or False, not {ask.gpus!r}; how many follows from trainers and engines")
    if not isinstance(may_grow, bool):
        raise ConfigError(f"may_grow must be True or False, not {may_grow!r}")
    require_amount("cpus_per_process", ask.cpus_per_process)
    if not ask.cpus(1):
        raise ConfigError("cpus_per_process must be more than 0 (it may be a fraction, of 0.0001): by its CPUs a place is seen to be taken")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise ConfigError(f"timeout_s must be a positive number of seconds, not {timeout_s!r}")
    needs = {"separate": ask.trainers + ask.engines, "colocated": min(ask.trainers, ask.engines), "engine_per_node": ask.engines}
    if not needs[ask.layout]:
        who = {"separate": "trainers or engines", "colocated": "both trainers and engines", "engine_per_node": "engines"}
        raise ConfigError(f"layout {ask.layout!r} needs {who[ask.layout]}, and trainers={ask.trainers}, engines={ask.engines} were given")
