"""Move a trainer's new weights into running vLLM engines: every engine, the right bytes, one version, with requests in flight.

Names are loaded when they are first used: importing this package imports neither torch, nor ray, nor vllm.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_weightsync import placement
    from ray_weightsync.config import Auto, Collective, FailurePolicy, Host, Native, Timeouts
    from ray_weightsync.engines.mixin import EngineMixin
    from ray_weightsync.engines.ref import EngineLike, EngineRef
    from ray_weightsync.engines.specs import TorchEngineSpec, VLLMEngineSpec
    from ray_weightsync.engines.torch_engine import TorchEngine
    from ray_weightsync.engines.vllm_actor import VLLMEngineActor
    from ray_weightsync.engines.vllm_args import vllm_engine_args
    from ray_weightsync.errors import (
        AttachError,
        CallFailure,
        ConfigError,
        EngineCallError,
        FleetTorn,
        ReplicasLost,
        RoundAborted,
        SessionConflict,
        UnsupportedError,
        WeightSyncError,
    )
    from ray_weightsync.protocol.client import VLLMWeightSyncClient
    from ray_weightsync.protocol.http_client import HTTPVLLMWeightSyncClient
    from ray_weightsync.protocol.ray_client import RayVLLMWeightSyncClient
    from ray_weightsync.report import FleetStatus, ReplicaReport, ReplicaStatus, SyncReport
    from ray_weightsync.session import WeightSync
    from ray_weightsync.trainer.mixin import TrainerMixin
    from ray_weightsync.trainer.staged import StagedWeights
    from ray_weightsync.trainer.weight_sender import WeightSender
    from ray_weightsync.view import FleetView
    from ray_weightsync.weights.digest import weights_digest
    from ray_weightsync.weights.sources import ModuleSource, ParamMeta, SafetensorsSource, StateDictSource, WeightSource
    from ray_weightsync.weights.transforms import cast, rename, split_experts

__version__ = "0.1.0"

_MODULES = {
    "config": ("Auto", "Collective", "FailurePolicy", "Host", "Native", "Timeouts"),
    "engines.mixin": ("EngineMixin",),
    "engines.ref": ("EngineLike", "EngineRef"),
    "engines.specs": ("TorchEngineSpec", "VLLMEngineSpec"),
    "engines.torch_engine": ("TorchEngine",),
    "engines.vllm_actor": ("VLLMEngineActor",),
    "engines.vllm_args": ("vllm_engine_args",),
    "errors": (
        "AttachError",
        "CallFailure",
        "ConfigError",
        "EngineCallError",
        "FleetTorn",
        "ReplicasLost",
        "RoundAborted",
        "SessionConflict",
        "UnsupportedError",
        "WeightSyncError",
    ),
    "placement": ("placement",),  # the module itself
    "protocol.client": ("VLLMWeightSyncClient",),
    "protocol.http_client": ("HTTPVLLMWeightSyncClient",),
    "protocol.ray_client": ("RayVLLMWeightSyncClient",),
    "report": ("FleetStatus", "ReplicaReport", "ReplicaStatus", "SyncReport"),
    "session": ("WeightSync",),
    "trainer.mixin": ("TrainerMixin",),
    "trainer.staged": ("StagedWeights",),
    "trainer.weight_sender": ("WeightSender",),
    "view": ("FleetView",),
    "weights.digest": ("weights_digest",),
    "weights.sources": ("ModuleSource", "ParamMeta", "SafetensorsSource", "StateDictSource", "WeightSource"),
    "weights.transforms": ("cast", "rename", "split_experts"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AttachError",
    "Auto",
    "CallFailure",
    "Collective",
    "ConfigError",
    "EngineCallError",
    "EngineLike",
    "EngineMixin",
    "EngineRef",
    "FailurePolicy",
    "FleetStatus",
    "FleetTorn",
    "FleetView",
    "HTTPVLLMWeightSyncClient",
    "Host",
    "ModuleSource",
    "Native",
    "ParamMeta",
    "RayVLLMWeightSyncClient",
    "ReplicaReport",
    "ReplicaStatus",
    "ReplicasLost",
    "RoundAborted",
    "SafetensorsSource",
    "SessionConflict",
    "StagedWeights",
    "StateDictSource",
    "SyncReport",
    "Timeouts",
    "TorchEngine",
    "TorchEngineSpec",
    "TrainerMixin",
    "UnsupportedError",
    "VLLMEngineActor",
    "VLLMEngineSpec",
    "VLLMWeightSyncClient",
    "WeightSender",
    "WeightSource",
    "WeightSync",
    "WeightSyncError",
    "cast",
    "placement",
    "rename",
    "split_experts",
    "vllm_engine_args",
    "weights_digest",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_HOME[name]}")
    value = module if name == _HOME[name] else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
