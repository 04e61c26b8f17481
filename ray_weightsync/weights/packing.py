"""The payload: tensors laid end to end as a plan says. `pack` writes one, `view` reads a tensor out of it without copying.

Tensors start at multiples of `ALIGN` bytes; the padding between them is zero, so equal weights make equal payloads, and is not part
of the digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import xxhash

from ray_weightsync.config import Host
from ray_weightsync.errors import ConfigError
from ray_weightsync.weights.copying import BLOCK_BYTES, copy_hashed
from ray_weightsync.weights.digest import WeightsDigest, check_payload
from ray_weightsync.weights.plan import ALIGN, Plan, TensorSpec
from ray_weightsync.weights.source_base import checked

__all__ = ["ALIGN", "Packed", "join", "pack", "pack_each", "view"]


@dataclass(frozen=True, kw_only=True)
class Packed:
    """What a packed payload holds.

    Attributes:
        digest: The weights digest, 32 hex digits.
        num_bytes: Bytes of weights, without padding.
        num_tensors: Number of tensors.
    """

    digest: str
    num_bytes: int
    num_tensors: int


def view(raw: torch.Tensor, spec: TensorSpec, *, begins_at: int = 0) -> torch.Tensor:
    """The tensor ``spec`` inside the payload, or a part of one, ``raw``, sharing its memory.

    Args:
        raw: One-dimensional uint8 tensor on any device, at a storage offset that is a multiple of the dtype's size.
        spec: A tensor of the payload's plan.
        begins_at: Which byte of the payload is the first of ``raw``.

    Raises:
        ConfigError: if the payload ends before the tensor does.
    """
    start = spec.offset - begins_at
    stop = start + spec.nbytes
    if stop > raw.numel():
        raise ConfigError(f"tensor {spec.name!r} ends at byte {stop} of a payload that has only {raw.numel()}")
    return raw[start:stop].view(spec.torch_dtype).view(spec.shape)


def pack(
    pairs: Iterable[tuple[str, torch.Tensor]],
    plan: Plan,
    out: torch.Tensor,
    *,
    on_progress: Callable[[int], None] | None = None,
    progress_bytes: int = Host.bucket_bytes,
) -> Packed:
    """Copy what ``pairs`` yields into ``out``, once, and digest it on the way.

    ``pairs`` (a source is one) is checked against ``plan`` as bytes flow. After an error ``out`` holds part of the new weights.

    Args:
        pairs: ``(name, tensor)`` in plan order; tensors of any layout, on any device.
        plan: What ``pairs`` declared.
        out: One-dimensional, contiguous uint8 CPU tensor of at least ``plan.num_bytes`` bytes. What lies beyond is not touched.
        on_progress: Called with n when the first n bytes of the payload will not change any more: whenever another
            ``progress_bytes`` are complete, also within a tensor that is larger, and with ``plan.num_bytes`` at the end.
        progress_bytes: At least 1.

    Raises:
        ConfigError: naming the tensor, if iteration disagrees with the plan; or if ``out`` or ``progress_bytes`` is unfit.
    """
    check_payload(out, plan)
    if isinstance(progress_bytes, bool) or not isinstance(progress_bytes, int) or progress_bytes < 1:
        raise ConfigError(f"progress_bytes must be an int of at least 1, not {progress_bytes!r}")
    progress = _Progress(on_progress, progress_bytes)
    payload = out.numpy().data
    zeros = bytes(ALIGN)

    def place(spec: TensorSpec, tensor: torch.Tensor) -> bytes:
        start, stop, end = spec.offset, spec.offset + spec.nbytes, spec.end
        within = progress.starting_at(start) if spec.nbytes > progress_bytes else None
        digest = copy_hashed(tensor, payload[start:stop], within)
        if stop < end:
            payload[stop:end] = zeros[: end - stop]
        progress.reach(end)
        return digest

    packed = pack_each(pairs, plan, place)
    progress.finish(plan.num_bytes)
    return packed


def pack_each(pairs: Iterable[tuple[str, torch.Tensor]], plan: Plan, place: Callable[[TensorSpec, torch.Tensor], bytes]) -> Packed:
    """Give what ``pairs`` yields to ``place``, which copies each tensor to where it belongs and returns the digest of its bytes there.

    Raises:
        ConfigError: naming the tensor, if iteration disagrees with the plan.
    """
    digest = WeightsDigest(plan)
    for spec, tensor in checked(pairs, plan):
        digest.add(place(spec, tensor))
    return Packed(digest=digest.hexdigest(), num_bytes=plan.weight_bytes, num_tensors=len(plan.tensors))


def join(pieces: Iterable[memoryview], plan: Plan, out: torch.Tensor, *, on_progress: Callable[[int], None]) -> Packed:
    """Copy a payload that comes in pieces into ``out``, once, and digest what arrived on the way.

    Args:
        pieces: The payload's bytes in order, format ``"B"``, cut anywhere.
        plan: The plan it was packed by.
        out: As for `pack`.
        on_progress: As for `pack`; called after every piece.

    Raises:
        ConfigError: if there are fewer or more bytes than the plan has; or if ``out`` is unfit.
    """
    check_payload(out, plan)
    payload, digest, cursor = out.numpy().data, WeightsDigest(plan), _Cursor(pieces, on_progress)
    for spec in plan.tensors:
        state = xxhash.xxh3_128()
        for start, part in cursor.until(spec.offset + spec.nbytes):
            for at in range(0, len(part), BLOCK_BYTES):  # hashed while it is in the cache, as `copy_blocks` does
                block = payload[start + at : start + min(at + BLOCK_BYTES, len(part))]
                block[:] = part[at : at + BLOCK_BYTES]
                state.update(block)
            del part  # holds a piece, which is to go before the next one is waited for
        digest.add(state.digest())
        for start, part in cursor.until(spec.end):
            payload[start : start + len(part)] = part
            del part
    cursor.finish()
    return Packed(digest=digest.hexdigest(), num_bytes=plan.weight_bytes, num_tensors=len(plan.tensors))


class _Cursor:
    """Reads a payload that comes in pieces up to any position."""

    def __init__(self, pieces: Iterable[memoryview], on_progress: Callable[[int], None]) -> None:
        self._pieces = iter(pieces)
        self._rest = memoryview(b"")
        self._on_progress = on_progress
        self._position = 0

    def until(self, stop: int) -> Iterator[tuple[int, memoryview]]:
        """The bytes from here to ``stop``, each part with its position."""
        while self._position < stop:
            if not self._rest:
                self._rest = memoryview(b"")  # an empty slice, too, holds its piece
                try:
                    self._rest = next(self._pieces)
                except StopIteration:
                    raise ConfigError(f"the payload ended at byte {self._position}, before byte {stop}") from None
            size = min(len(self._rest), stop - self._position)
            start, part = self._position, self._rest[:size]
            self._rest = self._rest[size:]
            self._position += size
            yield start, part
            del part
            if not self._rest:
                self._on_progress(self._position)

    def finish(self) -> None:
        """The payload has to be over."""
        if self._rest or next(self._pieces, None) is not None:
            raise ConfigError(f"the payload goes on after byte {self._position}, where the plan ends")
        self._on_progress(self._position)


class _Progress:
    """Thins a growing position out to one call per ``step`` bytes."""

    def __init__(self, callback: Callable[[int], None] | None, step: int) -> None:
        self._callback = callback
        self._step = step
        self._told = 0

    def starting_at(self, offset: int) -> Callable[[int], None] | None:
        """For `copy_hashed`: reach ``offset + n``. None when nobody listens."""
        return None if self._callback is None else lambda num_bytes: self.reach(offset + num_bytes)

    def reach(self, position: int) -> None:
        if self._callback is not None and position - self._told >= self._step:
            self._told = position
            self._callback(position)

    def finish(self, position: int) -> None:
        if self._callback is not None and (position != self._told or position == 0):
            self._callback(position)
