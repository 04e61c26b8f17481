"""Tied weights: names that lead to one place in a model's memory have to bring one value; an engine keeps whichever it loads last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from ray_weightsync.weights.copying import hash_only

Ties = Mapping[str, frozenset[str]]
"""By a tensor's name, the names of those that go to the same place."""


Seen = dict[str, tuple[torch.dtype, torch.Size, bytes]]
"""What tied tensors were that came already: dtype, shape and digest, by name."""


def agreeing(pairs: Iterable[tuple[str, torch.Tensor]], ties: Ties, seen: Seen | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``pairs`` as long as those that ``ties`` names agree, bit for bit.

    Kept of each is its digest and not the tensor, which its loader may write to. What comes in several parts is given one ``seen``.

    Raises:
        ValueError: in place of the second of two that differ; it names both.
    """
    seen = {} if seen is None else seen
    for name, tensor in pairs:
        if name in ties:
            content = seen[name] = (tensor.dtype, tensor.shape, hash_only(tensor))
            for other in sorted(ties[name]):
                if seen.get(other, content) != content:
                    raise ValueError(f"{other} and {name} are one tensor in the engine's model, and different values were sent for them")
        yield name, tensor
