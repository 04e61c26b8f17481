"""The engine arguments of a vLLM engine whose workers can have faults."""

from __future__ import annotations

from typing import Any

from ray_weightsync.engines import vllm_args

FAULTY_EXTENSION = "ray_weightsync.testing.extension.FaultyExtension"
"""For engines that take their arguments elsewhere: ``VLLMEngineSpec(model, engine_args={"worker_extension_cls": FAULTY_EXTENSION})``."""


def vllm_engine_args() -> dict[str, Any]:
    """`ray_weightsync.vllm_engine_args`, with a worker extension that `Faults` can reach (``inject(..., rank=...)`` needs it).

    To be called in the engine's own process. The engine is the product's in everything else.

    Raises:
        ImportError: if vLLM is not installed in this process.
    """
    return {**vllm_args.vllm_engine_args(), "worker_extension_cls": FAULTY_EXTENSION}
