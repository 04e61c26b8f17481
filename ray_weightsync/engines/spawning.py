"""Starting several engines at once, and ending those that did start when one of them does not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import ray

from ray_weightsync.errors import AttachError, ConfigError
from ray_weightsync.protocol.channel import GET_VERSION

if TYPE_CHECKING:
    from ray.actor import ActorHandle

SPAWN_LIMIT_S = 300.0
"""Seconds for all replicas to be up. A vLLM engine takes 20 to 35 s for a tiny model and minutes for a large one."""

KEEP_REPLICAS = {"max_restarts": 0, "max_task_retries": 0}
"""A restarted engine has lost its weights, a repeated call would be a second update: both are the coordinator's decision, not Ray's."""


MORE_TIME = "Give them more time (Timeouts(heal_s=...), or limit_s of a spec's own spawn)"


class EnginePlace(Protocol):
    """Where one engine belongs: `ray_weightsync.placement.Place`."""

    @property
    def num_workers(self) -> int: ...
    @property
    def engine_args(self) -> Mapping[str, object]: ...
    def options(self, *, env: Mapping[str, str] | None = None) -> dict[str, Any]: ...


class EnginePlaces(Protocol):
    """Places that were reserved: `ray_weightsync.placement.Placed`."""

    @property
    def engines(self) -> Sequence[EnginePlace]: ...
    def engine(self, index: int) -> EnginePlace: ...
    def vacant_engine(self) -> EnginePlace: ...


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
                        log_hint="worker-*.out and worker-*.err of that actor in Ray's log directory; the first error there is the cause",
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
        return f"{MORE_TIME}, or look into their logs"
    api: Any = ray  # these two have no annotations
    total, free = api.cluster_resources(), api.available_resources()
    lines = [
        f"{num_replicas} x {amount:g} {name} asked for, {free.get(name, 0):g} free of {total.get(name, 0):g}"
        for name, amount in asked.items()
    ]
    return f"{'; '.join(lines)}. {MORE_TIME}, ask for fewer replicas, or add nodes"


def runtime_env(env: Mapping[str, str]) -> dict[str, Any] | None:
    """The runtime environment that adds ``env`` to the job's own; None where there is nothing to add."""
    return {"env_vars": dict(env)} if env else None


def place_of(places: EnginePlaces, index: int | None) -> EnginePlace:
    """The place of the engine with that index; of one more engine (None), the first that is vacant."""
    return places.vacant_engine() if index is None else places.engine(index)


def require_places(name: str, places: EnginePlaces | None, num_replicas: int) -> None:
    """Raise `ConfigError` unless ``places`` is None or has one for each replica."""
    if places is None:
        return
    if not hasattr(places, "engines"):
        raise ConfigError(f"{name} must be what ray_weightsync.placement.reserve(...) returns, not {type(places).__name__}")
    if len(places.engines) < num_replicas:
        raise ConfigError(f"{name} has places for {len(places.engines)} engines, and num_replicas is {num_replicas}")


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
