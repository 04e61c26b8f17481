"""Patches of some of a model's tensors, as vLLM's ``sparse_nccl`` sends them in place of all weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from ray_weightsync.errors import ConfigError
from ray_weightsync.transports.collective.stock_format import NCCL_DTYPES
from ray_weightsync.weights.copying import hash_only
from ray_weightsync.weights.packing import Packed
from ray_weightsync.weights.plan import ParamMeta
from ray_weightsync.weights.source_base import refuse_unsendable
from ray_weightsync.weights.tensor_spec import as_shape

NEEDS = "name, indices (flat, int32), values (as many) and full_shape, as vLLM's SparseWeightPatch has them"


@dataclass(frozen=True)
class Patch:
    """As vLLM's ``SparseWeightPatch``."""

    name: str
    indices: torch.Tensor
    values: torch.Tensor
    full_shape: tuple[int, ...]


def is_patches(given: object) -> bool:
    """Whether ``given`` is meant as patches: a list of anything but ``(name, tensor)`` pairs."""
    return isinstance(given, list | tuple) and not any(isinstance(each, list | tuple) for each in given)


class Patches:
    """One round's. Its metadata are the whole tensors that are patched; they cannot be iterated.

    Args:
        patches: Objects with a name, flat indices, as many values, and the full shape of the tensor.

    Raises:
        ConfigError: for anything else, for what the engines could not apply (see `_require_applicable`), or if nothing is to be changed.
    """

    def __init__(self, patches: Any) -> None:
        if not isinstance(patches, Iterable) or isinstance(patches, torch.nn.Module | dict | str):
            raise ConfigError(f"this backend sends a list of patches, each with {NEEDS}; not {type(patches).__name__}")
        given = tuple(patches)
        for index, patch in enumerate(given):
            values, indices = getattr(patch, "values", None), getattr(patch, "indices", None)
            fits = isinstance(values, torch.Tensor) and isinstance(indices, torch.Tensor) and values.shape == indices.shape
            if not fits or not isinstance(getattr(patch, "name", None), str) or getattr(patch, "full_shape", None) is None:
                raise ConfigError(f"patch {index} is {type(patch).__name__}; it needs {NEEDS}")
            _require_applicable(patch)
        self.patches = tuple(patch for patch in given if patch.indices.numel())
        if not self.patches:
            raise ConfigError("there is nothing to send: no patches were given, or none that changes anything")

    def on_device(self, device: torch.device | None) -> list[Any]:
        """The patches, on ``device``: copied there if they are elsewhere. None: where they are."""
        if device is None:
            return list(self.patches)
        return [Patch(each.name, each.indices.to(device), each.values.to(device), tuple(each.full_shape)) for each in self.patches]

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


def _require_applicable(patch: Any) -> None:
    """Refuse what a worker would refuse when its update is open already, and what would reach it as other values than were given.

    Raises:
        ConfigError: naming the tensor, for values or indices that are not plain, flat and contiguous (NCCL sends memory as it lies);
            indices that are not int32, outside of the tensor, or there twice; values that are not floats, or of a dtype that NCCL does not
            send, or NaN (which is how vLLM marks what stays as it is).
    """
    name, indices, values = patch.name, patch.indices, patch.values
    try:
        shape = as_shape(patch.full_shape)
    except ConfigError as error:
        raise ConfigError(f"the patch of {name!r}: {error.message}") from error
    for what, tensor in (("indices", indices), ("values", values)):
        refuse_unsendable(f"{name}, {what}", tensor)
        if tensor.ndim != 1:
            raise ConfigError(f"the patch of {name!r} has {what} of shape {list(tensor.shape)}; they have to be flat")
        if not tensor.is_contiguous():
            raise ConfigError(f"the patch of {name!r} has {what} that are not contiguous in memory", hint=f"{what}.contiguous()")
    if indices.dtype != torch.int32:
        raise ConfigError(f"the patch of {name!r} has indices of {_short(indices.dtype)}; vLLM reads int32", hint="indices.int()")
    if not values.dtype.is_floating_point:
        raise ConfigError(f"the patch of {name!r} has values of {_short(values.dtype)}; vLLM patches floats alone")
    if _short(values.dtype) not in NCCL_DTYPES:
        raise ConfigError(f"the patch of {name!r} has values of {_short(values.dtype)}, for which vLLM's NCCL has no type")
    if not indices.numel():
        return
    in_order, size = indices.sort().values, math.prod(shape)
    for index in (int(in_order[0]), int(in_order[-1])):
        if not 0 <= index < size:
            raise ConfigError(f"the patch of {name!r} has index {index}, and the tensor has {size} elements")
    if bool((in_order[1:] == in_order[:-1]).any()):
        raise ConfigError(f"the patch of {name!r} has the same index twice: which value stays would be left to chance")
    if bool((values.float() if values.element_size() == 1 else values).isnan().any()):  # torch looks for none in 8 bits
        raise ConfigError(f"the patch of {name!r} has NaN among its values, which vLLM takes for elements that stay as they are")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
