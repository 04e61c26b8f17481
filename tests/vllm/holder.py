"""An actor that holds an engine, as a user writes it.

In a file of its own without torch: whoever is handed such an actor, as a session's coordinator is, imports the class.
"""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any

EXTENSION = "tests.vllm.extension.FaultyExtension"


class Holder:
    """Nothing of ours but the engine arguments."""

    def __init__(self, model: str, tensor_parallel_size: int, extension: str = EXTENSION, **overrides: Any) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from ray_weightsync.engines.vllm_args import vllm_engine_args

        args: dict[str, Any] = {
            "model": model,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "bfloat16",
            "max_model_len": 256,
            "tensor_parallel_size": tensor_parallel_size,
            **vllm_engine_args(),
            "worker_extension_cls": extension,
        }
        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**(args | overrides)))

    async def generate(self, prompt: list[int], num_tokens: int) -> tuple[list[int], list[tuple[str, int, int]] | None]:
        """Greedy tokens, and the ``(version, first, end)`` spans of the weights that made them (None: vLLM 0.28 has none)."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=num_tokens, temperature=0, detokenize=False, ignore_eos=True)
        async for out in self.llm.generate({"prompt_token_ids": prompt}, sampling, request_id=uuid.uuid4().hex):
            last = out.outputs[0]
        spans = getattr(last, "weight_versions", None)
        return list(last.token_ids), None if spans is None else [(span.version, span.start, span.end) for span in spans]

    async def cached_tokens(self, prompt: list[int], cache_salt: str | None = None) -> int:
        """How many tokens of ``prompt`` a request takes from the prefix cache."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        request: dict[str, Any] = {"prompt_token_ids": prompt} | ({} if cache_salt is None else {"cache_salt": cache_salt})
        async for out in self.llm.generate(request, sampling, request_id=uuid.uuid4().hex):
            last = out
        return int(last.num_cached_tokens)

    async def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """One of the engine's own methods, with the payload objects that it expects."""
        if verb == "init_weight_transfer_engine":
            args = (SimpleNamespace(init_info=args[0]),)
        elif verb == "update_weights":
            args = (SimpleNamespace(update_info=args[0]),)
        return await getattr(self.llm, verb)(*args, **kwargs)

    def supports(self, verb: str) -> bool:
        return hasattr(self.llm, verb)
