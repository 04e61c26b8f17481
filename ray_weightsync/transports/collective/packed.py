"""Where vLLM's built-in ``nccl`` backend cuts what it receives in its packed format. Pure.

Its receivers take the cuts from the order and sizes in the metadata, so a sender has to cut at exactly the same places: tensors are
appended, without padding, until the running size *exceeds* ``packed_buffer_size_bytes``; what is together then is one broadcast of
uint8. (``pack_tensors`` and ``packed_nccl_broadcast_consumer`` in ``vllm.distributed.weight_transfer.packed_tensor``, vLLM 0.28 to 0.32;
tests hold the two together.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ray_weightsync.errors import ConfigError
from ray_weightsync.weights.plan import Plan, TensorSpec


def packed_cuts(plan: Plan, packed_buffer_size_bytes: int) -> tuple[tuple[TensorSpec, ...], ...]:
    """The tensors of each broadcast, in order. The offsets of a `TensorSpec` are those of our own layout and say nothing here."""
    cuts: list[tuple[TensorSpec, ...]] = []
    tensors: list[TensorSpec] = []
    num_bytes = 0
    for spec in plan.tensors:
        tensors.append(spec)
        num_bytes += spec.nbytes
        if num_bytes > packed_buffer_size_bytes:
            cuts.append(tuple(tensors))
            tensors, num_bytes = [], 0
    if tensors:
        cuts.append(tuple(tensors))
    return tuple(cuts)


def misaligned(cuts: Iterable[Sequence[TensorSpec]]) -> TensorSpec | None:
    """The first tensor that a receiver could not view under its dtype, because it starts at an odd place of its cut; None if all can.

    vLLM's receivers raise there, in the middle of an update, while the sender of a group waits for ever.
    """
    for tensors in cuts:
        offset = 0
        for spec in tensors:
            if offset % spec.torch_dtype.itemsize:
                return spec
            offset += spec.nbytes
    return None


def require_aligned(cuts: Iterable[Sequence[TensorSpec]]) -> None:
    """Refuse what is `misaligned`.

    Raises:
        ConfigError: naming the tensor, and saying what to do.
    """
    if (spec := misaligned(cuts)) is not None:
        raise ConfigError(
            f"tensor {spec.name!r}: in vLLM's packed format, which has no padding, it would start at a place that is no multiple of its "
            f"dtype's {spec.torch_dtype.itemsize} bytes, and the engine would fail on it",
            hint="cast all tensors to one dtype, or send each by itself (packed=False)",
        )
