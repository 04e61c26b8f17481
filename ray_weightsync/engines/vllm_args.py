"""The engine arguments that give a vLLM engine this package's worker side."""

from __future__ import annotations

from typing import Any

WORKER_EXTENSION = "ray_weightsync.engines.plugin.WorkerExtension"


def vllm_engine_args() -> dict[str, Any]:
    """Arguments for ``EngineArgs``, ``AsyncEngineArgs`` or ``LLM`` that make an engine one this package can update.

    To be called in the engine's own process, whose vLLM it imports; nothing needs to be installed beside this package being
    importable in the engine's workers. To use a worker extension of your own, derive it from
    `ray_weightsync.engines.plugin.WorkerExtension` and replace ``worker_extension_cls``.

    Returns:
        ``weight_transfer_config`` (a ``WeightTransferConfig`` for the backend ``"rws"``) and ``worker_extension_cls``.

    Raises:
        ImportError: if vLLM is not installed in this process.
    """
    from vllm.config import WeightTransferConfig

    from ray_weightsync.engines import plugin  # registers the backend here too, for engines that run inside this process

    return {"weight_transfer_config": WeightTransferConfig(backend=plugin.BACKEND), "worker_extension_cls": WORKER_EXTENSION}
