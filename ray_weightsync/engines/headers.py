"""Plans for engines that nothing of ours is in: compared with the headers of the checkpoint that the engine was started from.

That is less than a meta twin tells (see `ray_weightsync.worker.twin`): the engine may ignore a tensor of its checkpoint, and what its
loaders make of one is not seen. So a plan has to be the checkpoint's, tensor for tensor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray_weightsync.engines import told_headers
from ray_weightsync.engines.unreached import Unreached
from ray_weightsync.protocol.channel import Channel
from ray_weightsync.protocol.ray_channel import ActorChannel
from ray_weightsync.weights.dtype_names import SAFETENSORS_DTYPES
from ray_weightsync.weights.plan import Plan

HEAD = "lm_head.weight"
"""A model whose head is its embedding skips this one, whether its checkpoint has it or not."""

COMPUTED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Ends of names that old checkpoints have and vLLM's loaders skip."""

WIDE = frozenset({"float16", "bfloat16", "float32", "float64"})

MAX_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Headers:
    """What a checkpoint holds.

    Attributes:
        tensors: Dtype and shape, by name.
        dtype: What the engine computes in: as such it takes what its checkpoint has in another wide dtype.
        tied: The output head is the input embedding.
        problem: Why they could not be read, or None.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    dtype: str | None = None
    tied: bool = False
    problem: str | None = None


async def headers_of(channel: Channel, *, limit_s: float) -> Headers:
    """The headers of the checkpoint that the engine behind ``channel`` was started from.

    Raises:
        TimeoutError: if they are not read within ``limit_s`` seconds.
        Exception: if the engine's process cannot be reached.
    """
    async with asyncio.timeout(limit_s):
        reached = await channel.reached() if isinstance(channel, Unreached) else channel
        if not isinstance(reached, ActorChannel):
            return Headers(problem="its files cannot be read from here: it is not reached through its actor")
        return headers_from(await reached.run(told_headers.tell, reached.attr or ""))


def headers_from(told: Mapping[str, Any]) -> Headers:
    """Read what the engine's process told."""
    tensors = {
        name: (SAFETENSORS_DTYPES.get(dtype, str(dtype)), tuple(map(int, shape)))
        for name, (dtype, shape) in told.get("tensors", {}).items()
    }
    return Headers(tensors=tensors, dtype=told.get("dtype"), tied=bool(told.get("tied")), problem=told.get("problem"))


def problems_of(plan: Plan, headers: Headers) -> tuple[str, ...]:
    """What of ``plan`` is not as in the checkpoint, a sentence each; nothing if its headers could not be read. Pure."""
    if headers.problem is not None:
        return ()
    wrong: list[str] = []
    unknown: list[str] = []
    for spec in plan.tensors:
        if spec.name not in headers.tensors:
            if not _is_optional(spec.name, headers):
                unknown.append(repr(spec.name))
            continue
        dtype, shape = headers.tensors[spec.name]
        casts = dtype in WIDE and spec.dtype == headers.dtype
        if shape != spec.shape or (dtype != spec.dtype and not casts):
            there = f"{dtype} of shape {list(shape)}"
            wrong.append(f"{spec.name!r} is {there} there, and would be {spec.dtype} of shape {list(spec.shape)}")
    sent = {spec.name for spec in plan.tensors}
    expected = () if plan.partial else headers.tensors
    missing = [repr(name) for name in expected if name not in sent and not _is_optional(name, headers)]
    said = [_counted("", wrong)] if wrong else []
    said.extend([_counted("its checkpoint has no tensor ", unknown)] if unknown else [])
    said.extend([_counted("the plan lacks ", missing)] if missing else [])
    return tuple(said)


def _is_optional(name: str, headers: Headers) -> bool:
    return name.endswith(COMPUTED) or (headers.tied and name == HEAD)


def _counted(what: str, those: Sequence[str]) -> str:
    more = f", and {len(those) - MAX_NAMED} more" if len(those) > MAX_NAMED else ""
    return f"{what}{', '.join(those[:MAX_NAMED])}{more}"
