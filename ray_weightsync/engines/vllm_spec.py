"""`VLLMEngineSpec`: replicas of `VLLMEngineActor`. vLLM is not imported where the spec is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from ray_weightsync.engines.specs import KEEP_REPLICAS, SPAWN_LIMIT_S, require_amount, require_count, require_env, runtime_env, spawn_all
from ray_weightsync.errors import ConfigError

if TYPE_CHECKING:
    from ray.actor import ActorHandle

OURS = ("model", "tensor_parallel_size", "weight_transfer_config")
"""Engine arguments that the spec sets itself."""


@dataclass(frozen=True)
class VLLMEngineSpec:
    """Replicas of a vLLM engine, each in an actor of its own.

    Attributes:
        model: Path or name of the model.
        num_replicas: How many.
        tensor_parallel_size: Workers of each.
        engine_args: Further keyword arguments of vLLM's ``AsyncEngineArgs``.
        num_cpus: CPUs that Ray reserves for each.
        num_gpus: GPUs that Ray reserves for each. None: ``tensor_parallel_size`` where the cluster has GPUs, else 0.
        max_concurrency: Requests each can have in flight, frozen ones included.
        env: Environment variables of each actor's process, such as ``VLLM_CPU_KVCACHE_SPACE``.

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
        if not isinstance(self.engine_args, Mapping) or not all(isinstance(name, str) for name in self.engine_args):
            raise ConfigError(f"VLLMEngineSpec.engine_args must map names of AsyncEngineArgs' arguments to values, not {self.engine_args!r}")
        for name in OURS:
            if name in self.engine_args:
                raise ConfigError(f"VLLMEngineSpec.engine_args must not set {name!r}: the spec does")

    def create(self, index: int = 0) -> ActorHandle[Any]:
        """Start one replica and return its handle at once."""
        from ray_weightsync.engines.vllm_actor import VLLMEngineActor

        options = VLLMEngineActor.options(
            num_cpus=self.num_cpus, num_gpus=self._gpus(), max_concurrency=self.max_concurrency, runtime_env=runtime_env(self.env), **KEEP_REPLICAS
        )
        return options.remote({"model": self.model, "tensor_parallel_size": self.tensor_parallel_size, **self.engine_args})

    def spawn(self, limit_s: float = SPAWN_LIMIT_S) -> list[ActorHandle[Any]]:
        """Start all replicas and return their handles when each is up.

        Raises:
            AttachError: if one cannot start, or not within ``limit_s`` seconds; none is left behind.
        """
        return spawn_all(
            self.create,
            self.num_replicas,
            limit_s=limit_s,
            needs={"CPU": self.num_cpus, "GPU": self._gpus()},
            hint="'Engine core initialization failed' hides the cause, which stands further up in that log",
        )

    def _gpus(self) -> float:
        if self.num_gpus is not None:
            return self.num_gpus
        return float(self.tensor_parallel_size) if ray.cluster_resources().get("GPU") else 0.0
