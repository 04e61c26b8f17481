"""In which form vLLM's own trainer engines can carry a plan. Pure.

Their packed forms have no padding: a tensor that starts at a place which is no multiple of its dtype's size makes the engine fail in the
middle of an update, while the sender of a group waits for ever. So it is found before an engine is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ray_weightsync.errors import ConfigError
from ray_weightsync.transports.collective.packed import require_aligned
from ray_weightsync.transports.collective.stock_format import OLDEST, StockFormat, check, form_for
from ray_weightsync.weights.plan import Plan, TensorSpec

_FORM = ("packed", "packed_buffer_size_bytes", "packed_num_buffers")


def fitting(backend: str, options: Mapping[str, Any], plan: Plan, *, vllm: tuple[int, int] = OLDEST) -> dict[str, Any]:
    """``options``, and the form in which ``plan`` is sent where they leave it open.

    Args:
        backend: vLLM's name of it.
        options: Fields of its ``TrainerInitInfo``.
        plan: What is sent.
        vllm: Version of the oldest vLLM that takes part, major and minor.

    Raises:
        ConfigError: if the form that they ask for cannot carry it; it names the tensor, or the option.
    """
    given = {name: value for name, value in options.items() if name in _FORM}
    if backend == "nccl":
        form = StockFormat(**given)
        if "packed" in given:
            check(plan, form, vllm=vllm)
        else:
            form = form_for(plan, buffer_bytes=form.packed_buffer_size_bytes, num_buffers=form.packed_num_buffers, vllm=vllm)
        return {**options, "packed": form.packed}
    if backend == "ipc":
        form = StockFormat(**{"packed": False, **given})
        if form.packed:
            _require_fits_buffer(plan, form.packed_buffer_size_bytes)
    return dict(options)


def _require_fits_buffer(plan: Plan, buffer_bytes: int) -> None:
    """``ipc`` packs into one buffer, whose size is a limit: what does not fit begins it anew."""
    largest = max(plan.tensors, key=lambda spec: spec.nbytes)
    if largest.nbytes > buffer_bytes:
        raise ConfigError(
            f"tensor {largest.name!r} has {largest.nbytes} bytes, and vLLM's ipc packs into a buffer of {buffer_bytes}",
            hint=f"packed_buffer_size_bytes of {largest.nbytes} or more, or packed=False",
        )
    require_aligned(_ipc_cuts(plan, buffer_bytes))


def _ipc_cuts(plan: Plan, buffer_bytes: int) -> Iterator[list[TensorSpec]]:
    cut: list[TensorSpec] = []
    num_bytes = 0
    for spec in plan.tensors:
        if num_bytes + spec.nbytes > buffer_bytes:
            yield cut
            cut, num_bytes = [], 0
        cut.append(spec)
        num_bytes += spec.nbytes
    yield cut
