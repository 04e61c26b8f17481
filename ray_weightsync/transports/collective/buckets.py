"""Where a payload is cut: into buckets that receivers allocate, and those into pieces that are broadcast. Pure.

Sender and receivers derive the same cuts from the plan and ``bucket_bytes`` alone, so no sizes travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ray_weightsync.weights.plan import ALIGN, Plan, TensorSpec


@dataclass(frozen=True)
class Bucket:
    """Whole tensors that lie side by side in the payload.

    Attributes:
        tensors: At least one.
        start: First byte in the payload, a multiple of `ALIGN`.
        stop: First byte after the last tensor and its padding.
    """

    tensors: tuple[TensorSpec, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    def pieces(self, bucket_bytes: int) -> Iterator[tuple[int, int]]:
        """The ``(start, stop)`` of each broadcast, in order. One, unless the bucket is a single larger tensor; none if it is empty.

        Each holds at most ``bucket_bytes`` and starts at a multiple of `ALIGN`, so the sender never needs more than its own buffers.
        """
        step = bucket_bytes // ALIGN * ALIGN
        for start in range(self.start, self.stop, step):
            yield start, min(start + step, self.stop)


def cut(plan: Plan, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cut ``plan`` into buckets of at most ``bucket_bytes`` (at least `ALIGN`), as full as whole tensors in plan order make them.

    A larger tensor is a bucket by itself: a loader wants it in one piece, so a receiver needs its memory anyway. It is broadcast in
    pieces (see `Bucket.pieces`).
    """
    buckets: list[Bucket] = []
    tensors: list[TensorSpec] = []
    for spec in plan.tensors:
        if tensors and spec.end - tensors[0].offset > bucket_bytes:
            buckets.append(_bucket(tensors))
            tensors = []
        tensors.append(spec)
    buckets.append(_bucket(tensors))
    return tuple(buckets)


def _bucket(tensors: list[TensorSpec]) -> Bucket:
    return Bucket(tuple(tensors), tensors[0].offset, tensors[-1].end)
