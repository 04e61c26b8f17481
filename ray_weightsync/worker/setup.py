"""What in a vLLM engine's configuration speaks against updating its weights, or is lost by it. Pure: reads attributes, needs no vLLM."""

from __future__ import annotations

from typing import Any

GUESSES_WITHOUT_A_MODEL = frozenset({"ngram", "[ngram]", "ngram_gpu", "suffix"})
"""vLLM's methods of speculative decoding that have no weights."""


def refusals(vllm_config: Any) -> list[str]:
    """Why no update may be brought to an engine of this configuration."""
    if getattr(getattr(vllm_config, "parallel_config", None), "enable_eplb", False):
        return [
            "this engine rebalances its experts while it runs (enable_eplb=True): after that, experts would be loaded into slots of other "
            "experts; start it with enable_eplb=False"
        ]
    return []


def losses(vllm_config: Any) -> list[str]:
    """What an update takes away from an engine of this configuration, or leaves as it was."""
    lost = []
    if getattr(vllm_config, "lora_config", None) is not None:
        lost.append("LoRA adapters: vLLM drops those that are loaded when an update finishes; load them again after each round")
    method = getattr(getattr(vllm_config, "speculative_config", None), "method", None)
    if method is not None and method not in GUESSES_WITHOUT_A_MODEL:
        lost.append(
            f"the draft model of its speculative decoding ({method}) keeps the weights it has: answers are the main model's all the same, "
            "and fewer of the guesses are accepted the further the two drift apart"
        )
    return lost
