"""What to spawn: replicas of an engine that does not exist yet. A spec is a value; `create` and `spawn` start actors from it.

It owns the start and, when one replica fails to start, the end of those that did. What runs is owned by whoever holds the handles.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from ray_weightsync.errors import AttachError, ConfigError
from ray_weightsync.protocol.channel import GET_VERSION

if TYPE_CHECKING:
    import torch
    from ray.actor import ActorHandle

SPAWN_LIMIT_S = 300.0
"""Seconds for all replicas to be up. A vLLM engine takes 20 to 35 s for a tiny model and minutes for a large one."""

KEEP_REPLICAS = {"max_restarts": 0, "max_task_retries": 0}
"""A restarted engine has lost its weights, a repeated call would be a second update: both are the coordinator's decision, not Ray's."""


@dataclass(frozen=True)
class TorchEngineSpec:
    """Replicas of `TorchEngine`, which need neither vLLM nor a GPU.

    Attributes:
        make_module: Makes the module, in each actor's own process. Called once per replica.
        num_replicas: How many.
        num_cpus: CPUs that Ray reserves for each.
        num_gpus: GPUs that Ray reserves for each; where the module lives is for ``make_module`` to decide.
        max_concurrency: Requests each can have in flight, frozen ones included.
        num_threads: torch's intra-op threads in each.
        env: Environment variables of each actor's process.

    Raises:
        ConfigError: naming the field.
    """

    make_module: Callable[[], torch.nn.Module]
    num_replicas: int = field(default=1, kw_only=True)
    num_cpus: float = field(default=0.0, kw_only=True)
    num_gpus: float = field(default=0.0, kw_only=True)
    max_concurrency: int = field(default=8, kw_only=True)
    num_threads: int = field(default=1, kw_only=True)
    env: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        if not callable(self.make_module):
            raise ConfigError(f"TorchEngineSpec.make_module must be a function that makes a module, not a {type(self.make_module).__name__}")
        for name in ("num_replicas", "max_concurrency", "num_threads"):
            require_count(f"TorchEngineSpec.{name}", getattr(self, name))
        for name in ("num_cpus", "num_gpus"):
            require_amount(f"TorchEngineSpec.{name}", getattr(self, name))
        require_env("TorchEngineSpec.env", self.env)

    def create(self, index: int = 0) -> ActorHandle[Any]:
        """Start one replica and return its handle at once."""
        from ray_weightsync.engines.torch_engine import TorchEngine

        options = TorchEngine.options(
            num_cpus=self.num_cpus, num_gpus=self.num_gpus, max_concurrency=self.max_concurrency, runtime_env=runtime_env(self.env), **KEEP_REPLICAS
        )
        return options.remote(self.make_module, num_threads=self.num_threads)

    def spawn(self, limit_s: float = SPAWN_LIMIT_S) -> list[ActorHandle[Any]]:
        """Start all replicas and return their handles when each is up.

        Raises:
            AttachError: if one cannot start, or not within ``limit_s`` seconds; none is left behind.
        """
        return spawn_all(self.create, self.num_replicas, limit_s=limit_s, needs={"CPU": self.num_cpus, "GPU": self.num_gpus})


def spawn_all(
    create: Callable[[int], ActorHandle[Any]], num_replicas: int, *, limit_s: float, needs: Mapping[str, float], hint: str | None = None
) -> list[ActorHandle[Any]]:
    """Start ``num_replicas`` engines at once and wait until each is up.

    Args:
        create: Starts the engine with that index.
        num_replicas: How many.
        limit_s: Seconds until all must be up.
        needs: Resources that one engine asks Ray for; said, next to what is free, when they do not start.
        hint: What to do when an engine fails to start.

    Raises:
        AttachError: if one fails or the limit is missed. Everything started here has been killed by then.
    """
    began = time.monotonic()
    handles: list[ActorHandle[Any]] = []
    try:
        for index in range(num_replicas):
            handles.append(create(index))
        # Any call is answered after the constructor; this one every engine has.
        starting = {getattr(handle, GET_VERSION).remote(): index for index, handle in enumerate(handles)}
        waiting = list(starting)
        while waiting:
            left_s = began + limit_s - time.monotonic()
            done, waiting = ray.wait(waiting, timeout=max(left_s, 0.0))
            for ref in done:
                try:
                    ray.get(ref)
                except ray.exceptions.RayError as error:
                    raise AttachError(
                        f"engine {starting[ref]} of {num_replicas} failed to start; the others were stopped",
                        phase="spawn",
                        elapsed_s=time.monotonic() - began,
                        engine_message=str(getattr(error, "cause", None) or error),
                        log_hint="the worker-*.out and worker-*.err files of that actor in Ray's log directory; the first error there is the cause",
                        hint=hint,
                    ) from error
            if not done:
                missing = ", ".join(str(starting[ref]) for ref in waiting)
                raise AttachError(
                    f"engines {missing} of {num_replicas} were not up in time; all were stopped",
                    phase="spawn",
                    elapsed_s=time.monotonic() - began,
                    limit_s=limit_s,
                    hint=_room(needs, num_replicas),
                )
        return handles
    except BaseException:
        for handle in handles:
            ray.kill(handle, no_restart=True)
        raise


def _room(needs: Mapping[str, float], num_replicas: int) -> str:
    asked = {name: amount for name, amount in needs.items() if amount}
    if not asked:
        return "give them more time (limit_s), or look into their logs"
    total, free = ray.cluster_resources(), ray.available_resources()
    lines = [f"{num_replicas} x {amount:g} {name} asked for, {free.get(name, 0):g} free of {total.get(name, 0):g}" for name, amount in asked.items()]
    return f"{'; '.join(lines)}. Give them more time (limit_s), fewer replicas, or a larger cluster"


def runtime_env(env: Mapping[str, str]) -> dict[str, Any] | None:
    """The runtime environment that adds ``env`` to the job's own; None where there is nothing to add."""
    return {"env_vars": dict(env)} if env else None


def require_count(name: str, value: object) -> None:
    """Raise `ConfigError` unless ``value`` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be an int of at least 1, not {value!r}")


def require_amount(name: str, value: object) -> None:
    """Raise `ConfigError` unless ``value`` is a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{name} must be a number of at least 0, not {value!r}")


def require_env(name: str, value: object) -> None:
    """Raise `ConfigError` unless ``value`` maps strings to strings."""
    if not isinstance(value, Mapping) or not all(isinstance(each, str) for pair in value.items() for each in pair):
        raise ConfigError(f"{name} must map names to strings (environment variables), not {value!r}")
