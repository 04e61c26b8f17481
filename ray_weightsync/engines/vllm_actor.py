"""`VLLMEngineActor`: a ready-made Ray actor around vLLM's `AsyncLLM`, started with this package's worker side.

vLLM is imported in the actor's own process only. Requests and answers are plain data, so the caller needs no vLLM either.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import ray
from ray.actor import ActorClass

from ray_weightsync.engines.mixin import EngineMixin

MAX_REQUESTS = 1000
"""Requests in flight per actor, frozen ones included; Ray's own default for an asynchronous actor."""


Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]


class VLLMEngine(EngineMixin):
    """The class behind `VLLMEngineActor`. It holds the engine in ``llm``.

    Args:
        engine_args: Keyword arguments of vLLM's ``AsyncEngineArgs``; this package's own (`vllm_engine_args`) are added.

    Raises:
        ImportError: if vLLM is not installed in this process.
        Exception: whatever vLLM raises when the engine cannot start. "Engine core initialization failed" has its cause in the actor's log.
    """

    def __init__(self, engine_args: Mapping[str, Any]) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from ray_weightsync.engines.vllm_args import vllm_engine_args

        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**{**vllm_engine_args(), **engine_args}))

    async def generate(self, prompt: Prompt, sampling: Mapping[str, Any] | None = None, *, request_id: str | None = None) -> dict[str, Any]:
        """Run one request to its end. While generation is paused it waits.

        Args:
            prompt: Text, token ids, or one of vLLM's own prompt dicts.
            sampling: Keyword arguments of vLLM's ``SamplingParams``.
            request_id: By default a fresh one.

        Returns:
            ``request_id``, ``prompt_token_ids``, ``num_cached_tokens``, and ``outputs``: one dict per sequence with ``token_ids``,
            ``text``, ``finish_reason`` (``"abort"`` if a pause aborted it) and ``weight_versions``, the spans ``(version, start, end)`` of
            output tokens that each version made (empty before vLLM 0.28).
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(**{"output_kind": RequestOutputKind.FINAL_ONLY, **(sampling or {})})
        given: Any = {"prompt_token_ids": list(prompt)} if isinstance(prompt, list | tuple) else prompt
        final: Any = None
        async for output in self.llm.generate(given, params, request_id=request_id or uuid.uuid4().hex):
            final = output
        return plain_output(final)


def plain_output(output: Any) -> dict[str, Any]:
    """vLLM's ``RequestOutput`` as plain data; see `VLLMEngine.generate`."""
    return {
        "request_id": output.request_id,
        "prompt_token_ids": list(output.prompt_token_ids or ()),
        "num_cached_tokens": getattr(output, "num_cached_tokens", None),
        "outputs": [
            {
                "token_ids": list(each.token_ids),
                "text": each.text,
                "finish_reason": each.finish_reason,
                "weight_versions": [(span.version, span.start, span.end) for span in getattr(each, "weight_versions", None) or ()],
            }
            for each in output.outputs
        ],
    }


_remote: Any = ray.remote  # its overloads do not know concurrency_groups

VLLMEngineActor: ActorClass[VLLMEngine] = _remote(
    concurrency_groups=EngineMixin.concurrency_groups,
    max_concurrency=MAX_REQUESTS,
    max_restarts=0,
    # A repeated data-plane call would be a second update; nothing here may be retried behind our back.
    max_task_retries=0,
)(VLLMEngine)
"""``VLLMEngineActor.remote({"model": path})`` starts one; `VLLMEngineSpec` starts several."""
