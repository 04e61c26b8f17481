"""One tensor's bytes, copied once and hashed while they are in the cache. Which tensor goes where is `packing`'s business.

The digest is always taken over the *destination*: what it attests is what lies in the payload, also when somebody writes to the
source meanwhile.

Two measured facts shape this file (torch 2.13, numpy 2.3, xxhash 4.1; ratios hold, absolute numbers are of one machine):

* Whoever gives up the GIL for each block has to win it back from any busy Python thread, 5 ms at a time. Blocks that are copied and
  hashed without releasing it: 8 GB/s beside a busy thread, 17 GB/s alone; blocks just large enough for xxhash to release it: 0.3;
  numpy block copies, which always do: 0.05. A thread that needs the GIL still gets it at the interpreter's switch interval.
* torch copies more than 32,767 elements with all intra-op threads, and waiting for a second thread on a busy machine costs 1 ms a
  copy. Its thread setting is global, and a thread that starts meanwhile inherits it for good, so it is not touched: contiguous
  memory goes through memoryviews, strided memory through numpy, and a transposed matrix through torch's blocked copy, which is
  serial and 4 to 10 times faster than numpy's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy
import torch
import xxhash

BLOCK_BYTES = 64 << 10
"""The largest block that `xxhash` hashes without releasing the GIL; small enough for any L2 cache."""

SLAB_BYTES = 16 << 20
"""Tensors on a device are brought over in pieces of this size, so that the last one is still in the cache when it is hashed."""

DIGEST_BYTES = 16

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_hashed(tensor: torch.Tensor, destination: memoryview, on_bytes: Callable[[int], None] | None = None) -> bytes:
    """Copy the logical, row-major values of ``tensor`` to ``destination`` and return their digest.

    Args:
        tensor: Strided, any dtype, any device, any layout in memory; conjugate and negative views are resolved.
        destination: Writable, one-dimensional, format ``"B"``, exactly as many bytes as the tensor has.
        on_bytes: Called with n while copying, when the first n bytes of ``destination`` will not change any more.

    Returns:
        The 16 bytes of the destination's xxh3_128.
    """
    if destination.nbytes == 0:
        return xxhash.xxh3_128_digest(b"")
    tensor = _resolved(tensor)
    if not tensor.is_cpu:
        return _copy_from_device(tensor, destination, on_bytes)
    if not tensor.is_contiguous():
        _copy_strided(tensor, destination)
        return xxhash.xxh3_128_digest(destination)
    source = flat_bytes(tensor).numpy().data
    if destination.nbytes <= BLOCK_BYTES:
        destination[:] = source
        return xxhash.xxh3_128_digest(destination)
    return copy_blocks(source, destination, on_bytes)


def copy_hashed_into(tensor: torch.Tensor, place: torch.Tensor) -> bytes:
    """Copy the logical, row-major values of ``tensor`` to ``place``, on whichever device that is, and return their digest.

    Args:
        tensor: As for `copy_hashed`.
        place: Flat, contiguous uint8, exactly as many bytes as the tensor has.

    Returns:
        The 16 bytes of the place's xxh3_128.
    """
    return copy_hashed(tensor, place.numpy().data) if place.is_cpu else copy_hashed_in_pieces(tensor, [place])


def copy_hashed_in_pieces(tensor: torch.Tensor, pieces: Iterable[torch.Tensor]) -> bytes:
    """Copy the logical, row-major values of ``tensor`` to ``pieces``, one after the other, and return their digest.

    Extra memory: the tensor's, if it is not contiguous and there is more than one piece or it is not in CPU memory; 16 MiB on the
    host for pieces on a device, from where each is brought back to be hashed.

    Args:
        tensor: As for `copy_hashed`.
        pieces: Flat, contiguous uint8 tensors, together exactly as many bytes as the tensor has. The next one is asked for when the
            one before is complete.

    Returns:
        The 16 bytes of the xxh3_128 over all pieces.
    """
    source = flat_bytes(_as_integers(_resolved(tensor)).contiguous())
    state = xxhash.xxh3_128()
    start = 0
    for piece in pieces:
        part = source[start : start + piece.numel()]
        if piece.is_cpu and part.is_cpu:
            _copy_blocks(part.numpy().data, piece.numpy().data, state)
        else:
            piece.copy_(part)
            hash_slabs(piece, state)
        start += piece.numel()
    return state.digest()


def hash_slabs(raw: torch.Tensor, state: xxhash.xxh3_128) -> None:
    """Hash flat uint8 on any device; from a device it is brought over in pieces of `SLAB_BYTES`."""
    for start in range(0, raw.numel(), SLAB_BYTES):
        state.update(raw[start : start + SLAB_BYTES].cpu().numpy().data)


def hash_only(tensor: torch.Tensor) -> bytes:
    """The digest that `copy_hashed` returns, without a destination. Tensors that are not contiguous in CPU memory are copied on the way."""
    if tensor.numel() == 0:
        return xxhash.xxh3_128_digest(b"")
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return xxhash.xxh3_128_digest(flat_bytes(tensor.detach()).numpy().data)
    return copy_hashed(tensor, memoryview(bytearray(tensor.numel() * tensor.element_size())))


def copy_blocks(source: memoryview, destination: memoryview, on_bytes: Callable[[int], None] | None = None) -> bytes:
    """Copy and hash block by block, without ever releasing the GIL on the way (see the top of this file)."""
    state = xxhash.xxh3_128()
    _copy_blocks(source, destination, state, on_bytes)
    return state.digest()


def _copy_blocks(
    source: memoryview, destination: memoryview, state: xxhash.xxh3_128, on_bytes: Callable[[int], None] | None = None
) -> None:
    stop = destination.nbytes
    for start in range(0, stop, BLOCK_BYTES):
        end = min(start + BLOCK_BYTES, stop)
        block = destination[start:end]
        block[:] = source[start:end]
        state.update(block)
        if on_bytes is not None:
            on_bytes(end)


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    # Both are lazy bits on top of the memory: reading the bytes without resolving them would send the unconjugated values.
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as a one-dimensional uint8 tensor."""
    # Not view(-1): that keeps the stride of a dimension of size 1, which may be odd though the tensor counts as contiguous, and
    # torch refuses to view such a tensor as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers of the same size: many dtypes have no copy kernel, and float copies need not keep NaN payloads."""
    dtype = _SAME_SIZE.get(tensor.element_size())
    return tensor if dtype is None else tensor.view(dtype)  # complex128 has no integer of its size, and copies as two words


def _copy_strided(tensor: torch.Tensor, destination: memoryview) -> None:
    source = _as_integers(tensor)
    values = source.numpy()
    target = numpy.frombuffer(destination, dtype=values.dtype).reshape(values.shape)
    if source.dim() == 2 and source.stride(0) == 1 and source.stride(1) == source.size(0):
        torch.from_numpy(target).copy_(source)
    else:
        numpy.copyto(target, values)


def _copy_from_device(tensor: torch.Tensor, destination: memoryview, on_bytes: Callable[[int], None] | None) -> bytes:
    source = flat_bytes(_as_integers(tensor).contiguous())
    target = torch.from_numpy(numpy.frombuffer(destination, dtype=numpy.uint8))
    state = xxhash.xxh3_128()
    stop = destination.nbytes
    for start in range(0, stop, SLAB_BYTES):
        end = min(start + SLAB_BYTES, stop)
        target[start:end].copy_(source[start:end])  # to pageable memory: complete on return
        state.update(destination[start:end])
        if on_bytes is not None:
            on_bytes(end)
    return state.digest()
