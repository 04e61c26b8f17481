"""Patches of some of a model's tensors, as vLLM's ``sparse_nccl`` sends them in place of all weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import xxhash

from ray_weightsync.errors import ConfigError
from ray_weightsync.weights.copying import hash_only
from ray_weightsync.weights.packing import Packed
from ray_weightsync.weights.plan import ParamMeta

NEEDS = "name, indices (flat, int32), values (as many) and full_shape, as vLLM's SparseWeightPatch has them"


class Patches:
    """One round's. Its metadata are the whole tensors that are patched; they cannot be iterated.

    Args:
        patches: Objects with a name, flat indices, as many values, and the full shape of the tensor.

    Raises:
        ConfigError: for anything else, or if there are none.
    """

    def __init__(self, patches: Any) -> None:
        if not isinstance(patches, Iterable) or isinstance(patches, torch.nn.Module | dict | str):
            raise ConfigError(f"this backend sends a list of patches, each with {NEEDS}; not {type(patches).__name__}")
        self.patches = tuple(patches)
        for index, patch in enumerate(self.patches):
            values, indices = getattr(patch, "values", None), getattr(patch, "indices", None)
            fits = isinstance(values, torch.Tensor) and isinstance(indices, torch.Tensor) and values.shape == indices.shape
            if not fits or not isinstance(getattr(patch, "name", None), str) or getattr(patch, "full_shape", None) is None:
                raise ConfigError(f"patch {index} is {type(patch).__name__}; it needs {NEEDS}")
        if not self.patches:
            raise ConfigError("there is nothing to send: no patches were given")

    def metadata(self) -> list[ParamMeta]:
        """The tensors that are patched, as they are in the checkpoint."""
        return [ParamMeta(patch.name, patch.values.dtype, tuple(patch.full_shape)) for patch in self.patches]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise ConfigError("patches are not weights: they can only be sent by a backend that patches a model in place")

    def packed(self) -> Packed:
        """A digest of what is changed where, and how many bytes that is."""
        digest, num_bytes = xxhash.xxh3_128(), 0
        for patch in self.patches:
            digest.update(repr((patch.name, str(patch.values.dtype), tuple(patch.full_shape))).encode())
            for tensor in (patch.indices, patch.values):
                digest.update(hash_only(tensor))
                num_bytes += tensor.nbytes
        return Packed(digest=digest.hexdigest(), num_bytes=num_bytes, num_tensors=len(self.patches))
