"""What to spawn: replicas of an engine that does not exist yet. A spec is a value; `create` and `spawn` start actors from it.

Neither torch nor vLLM is imported where a spec is made. What runs is owned by whoever holds the handles.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import ray

from ray_weightsync.engines.spawning import (
    KEEP_REPLICAS,
    SPAWN_LIMIT_S,
    EnginePlaces,
    place_of,
    require_amount,
    require_count,
    require_env,
    require_places,
    runtime_env,
    spawn_all,
)
from ray_weightsync.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from ray.actor import ActorHandle

SET_BY_SPEC = ("model", "tensor_parallel_size", "weight_transfer_config")
"""Engine arguments that `VLLMEngineSpec` sets itself."""

WORKERS_BESIDE_TENSOR = ("pipeline_parallel_size", "prefill_context_parallel_size", "data_parallel_size")
"""Engine arguments that multiply the workers of an engine."""

LOG_HINT = "'Engine core initialization failed' hides the cause, which stands further up in that log"
NO_GPU_HINT = "no GPU was asked for, since no node had one: say num_gpus where the cluster adds nodes on demand"


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
        placement: Where the replicas go (`ray_weightsync.placement.reserve`): replica k to the place of engine k, with its CPUs and GPUs
            instead of ``num_cpus`` and ``num_gpus``. It is yours to close, after the session.

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
    placement: EnginePlaces | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        is_module = hasattr(self.make_module, "named_parameters") and not isinstance(self.make_module, type)
        if not callable(self.make_module) or is_module:  # which is callable, too
            raise ConfigError(f"TorchEngineSpec.make_module must be a function that makes a module, not {self.make_module!r}")
        for name in ("num_replicas", "max_concurrency", "num_threads"):
            require_count(f"TorchEngineSpec.{name}", getattr(self, name))
        for name in ("num_cpus", "num_gpus"):
            require_amount(f"TorchEngineSpec.{name}", getattr(self, name))
        require_env("TorchEngineSpec.env", self.env)
        require_places("TorchEngineSpec.placement", self.placement, self.num_replicas)

    def create(self, index: int | None = None) -> ActorHandle[Any]:
        """Start one replica and return its handle at once.

        Args:
            index: Which of the replicas; None for one more, or one in place of another.

        Raises:
            AttachError: if it is one more, and no place for an engine is vacant.
        """
        from ray_weightsync.engines.torch_engine import TorchEngine

        if self.placement is None:
            room: dict[str, Any] = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, "runtime_env": runtime_env(self.env)}
        else:
            room = place_of(self.placement, index).options(env=self.env)
        options = TorchEngine.options(max_concurrency=self.max_concurrency, **room, **KEEP_REPLICAS)
        return cast("ActorHandle[Any]", options.remote(self.make_module, num_threads=self.num_threads))

    def spawn(self, limit_s: float = SPAWN_LIMIT_S) -> list[ActorHandle[Any]]:
        """Start all replicas and return their handles when each is up.

        Raises:
            AttachError: if one cannot start, or not within ``limit_s`` seconds; none is left behind.
        """
        return spawn_all(self.create, self.num_replicas, limit_s=limit_s, needs=self._needs())

    def _needs(self) -> Mapping[str, float]:
        # What is reserved already is not waited for.
        return {} if self.placement is not None else {"CPU": self.num_cpus, "GPU": self.num_gpus}


@dataclass(frozen=True)
class VLLMEngineSpec:
    """Replicas of a vLLM engine, each in an actor of its own.

    Attributes:
        model: Path or name of the model.
        num_replicas: How many.
        tensor_parallel_size: Workers of each.
        engine_args: Further keyword arguments of vLLM's ``AsyncEngineArgs``.
        num_cpus: CPUs that Ray reserves for each.
        num_gpus: GPUs that Ray reserves for each. None: one for each worker (tensor x pipeline x data parallel) if a node of the cluster
            has GPUs at that time, else 0. Say it where nodes with GPUs are added on demand.
        max_concurrency: Requests each can have in flight, frozen ones included.
        env: Environment variables of each actor's process, such as ``VLLM_CPU_KVCACHE_SPACE``.
        placement: As of `TorchEngineSpec`, reserved with as many workers for each engine as this has. What vLLM needs there is added to
            ``env`` and ``engine_args``; yours win.

    Raises:
        ConfigError: naming the field.
    """

    model: str
    num_replicas: int = field(default=1, kw_only=True)
    tensor_parallel_size: int = field(default=1, kw_only=True)
    engine_args: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    num_cpus: float = field(default=1.0, kw_only=True)
    num_gpus: float | None = field(default=None, kw_only=True)
    max_concurrency: int = field(default=1000, kw_only=True)
    env: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    placement: EnginePlaces | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | os.PathLike) or not str(self.model):
            raise ConfigError(f"VLLMEngineSpec.model must be the path or name of a model, not {self.model!r}")
        object.__setattr__(self, "model", str(self.model))
        for name in ("num_replicas", "tensor_parallel_size", "max_concurrency"):
            require_count(f"VLLMEngineSpec.{name}", getattr(self, name))
        require_amount("VLLMEngineSpec.num_cpus", self.num_cpus)
        if self.num_gpus is not None:
            require_amount("VLLMEngineSpec.num_gpus", self.num_gpus)
        require_env("VLLMEngineSpec.env", self.env)
        require_places("VLLMEngineSpec.placement", self.placement, self.num_replicas)
        if not isinstance(self.engine_args, Mapping) or not all(isinstance(name, str) for name in self.engine_args):
            raise ConfigError(f"VLLMEngineSpec.engine_args must map names of AsyncEngineArgs' fields to values, not {self.engine_args!r}")
        for name in SET_BY_SPEC:
            if name in self.engine_args:
                raise ConfigError(f"VLLMEngineSpec.engine_args must not set {name!r}: the spec does")
        for name in WORKERS_BESIDE_TENSOR:
            require_count(f"VLLMEngineSpec.engine_args[{name!r}]", self.engine_args.get(name, 1))
        if self.placement is not None:
            self._require_size(self.placement)

    def _require_size(self, placement: EnginePlaces) -> None:
        if self.engine_args.get("distributed_executor_backend") == "ray":
            raise ConfigError(
                "VLLMEngineSpec.placement holds all GPUs of an engine in one bundle, and with distributed_executor_backend='ray' vLLM "
                "wants a bundle for each worker: leave out placement, or that argument"
            )
        room = placement.engines[0].num_workers
        if room != self._workers:
            raise ConfigError(
                f"VLLMEngineSpec has {self._workers} workers for each engine (tensor x pipeline x data parallel), and its placement was "
                f"reserved with tensor_parallel_size={room}: the two must be equal"
            )

    @property
    def _workers(self) -> int:
        sizes = [int(self.engine_args.get(name, 1)) for name in WORKERS_BESIDE_TENSOR]
        return self.tensor_parallel_size * math.prod(sizes)

    def create(self, index: int | None = None) -> ActorHandle[Any]:
        """Start one replica and return its handle at once; see `TorchEngineSpec.create`."""
        from ray_weightsync.engines.vllm_actor import VLLMEngineActor

        if self.placement is None:
            room: dict[str, Any] = {"num_cpus": self.num_cpus, "num_gpus": self._gpus(), "runtime_env": runtime_env(self.env)}
            needed: Mapping[str, object] = {}
        else:
            place = place_of(self.placement, index)
            room, needed = place.options(env=self.env), place.engine_args
        options = VLLMEngineActor.options(max_concurrency=self.max_concurrency, **room, **KEEP_REPLICAS)
        arguments = {"model": self.model, "tensor_parallel_size": self.tensor_parallel_size, **needed, **self.engine_args}
        return cast("ActorHandle[Any]", options.remote(arguments))

    def spawn(self, limit_s: float = SPAWN_LIMIT_S) -> list[ActorHandle[Any]]:
        """Start all replicas and return their handles when each is up.

        Raises:
            AttachError: if one cannot start, or not within ``limit_s`` seconds; none is left behind.
        """
        return spawn_all(
            self.create,
            self.num_replicas,
            limit_s=limit_s,
            needs=self._needs(),
            hint=LOG_HINT if self.placement is not None or self._gpus() else f"{LOG_HINT}; {NO_GPU_HINT}",
        )

    def _needs(self) -> Mapping[str, float]:
        return {} if self.placement is not None else {"CPU": self.num_cpus, "GPU": self._gpus()}

    def _gpus(self) -> float:
        if self.num_gpus is not None:
            return self.num_gpus
        api: Any = ray  # cluster_resources has no annotations
        return float(self._workers) if api.cluster_resources().get("GPU") else 0.0
