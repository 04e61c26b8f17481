"""What in a vLLM engine's configuration speaks against updating its weights, or is lost by it. Pure: reads attributes, needs no vLLM."""

from __future__ import annotations

from typing import Any


def refusals(vllm_config: Any) -> list[str]:
    """Why no update may be brought to an engine of this configuration."""
    if getattr(getattr(vllm_config, "parallel_config", None), "enable_eplb", False):
        return [
            "this engine rebalances its experts while it runs (enable_eplb=True): after that, experts would be loaded into slots of other "
            "experts; start it with enable_eplb=False"
        ]
    return []


def losses(vllm_config: Any) -> list[str]:
    """What an update takes away from an engine of this configuration."""
    if getattr(vllm_config, "lora_config", None) is not None:
        return ["LoRA adapters: vLLM drops those that are loaded when an update finishes; load them again after each round"]
    return []
