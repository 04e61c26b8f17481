"""Brings `tests.vllm.nccl_on_gloo` into an engine's workers, and a load that fails there as one without memory does."""

from __future__ import annotations

from typing import Any

from tests.vllm import nccl_on_gloo


class FailingExtension(nccl_on_gloo.Extension):
    """Methods that vLLM adds to each of its workers."""

    weight_transfer_engine: Any

    def fail_to_load(self, name: str) -> None:
        """The next load that includes the tensor ``name`` fails."""
        model = self.weight_transfer_engine.model
        load = model.load_weights

        def failing(weights: Any) -> Any:
            pairs = list(weights)
            if all(each != name for each, _ in pairs):
                return load(pairs)
            del model.__dict__["load_weights"]
            raise RuntimeError(f"no memory is left for {name}")

        model.__dict__["load_weights"] = failing
