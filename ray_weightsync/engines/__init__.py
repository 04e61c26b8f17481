"""Engines: what is attached to, and what is spawned. Names only; torch and vllm are imported by the modules that need them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_weightsync.engines.facts import EngineFacts, WorkerFacts
    from ray_weightsync.engines.mixin import EngineMixin
    from ray_weightsync.engines.ref import EngineLike, EngineRef
    from ray_weightsync.engines.resolve import Engine
    from ray_weightsync.engines.specs import TorchEngineSpec, VLLMEngineSpec
    from ray_weightsync.engines.torch_engine import TorchEngine
    from ray_weightsync.engines.vllm_actor import VLLMEngineActor
    from ray_weightsync.engines.vllm_args import vllm_engine_args

__all__ = [
    "Engine",
    "EngineFacts",
    "EngineLike",
    "EngineMixin",
    "EngineRef",
    "TorchEngine",
    "TorchEngineSpec",
    "VLLMEngineActor",
    "VLLMEngineSpec",
    "WorkerFacts",
    "vllm_engine_args",
]

_HOME = {
    "Engine": "resolve",
    "EngineFacts": "facts",
    "EngineLike": "ref",
    "EngineMixin": "mixin",
    "EngineRef": "ref",
    "TorchEngine": "torch_engine",
    "TorchEngineSpec": "specs",
    "VLLMEngineActor": "vllm_actor",
    "VLLMEngineSpec": "specs",
    "WorkerFacts": "facts",
    "vllm_engine_args": "vllm_args",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
