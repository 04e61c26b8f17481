"""Tied weights: names that stand for one tensor. Which names share memory, and which a model only *declares* to be tied.

A tied tensor is sent under each of its names, because engines differ in which they load (on CPU, vLLM keeps a repacked copy of a tied
head, so the embedding alone would leave it stale). That is honest while the names agree; if a model declares a tie and the values
differ, an engine would keep whichever came last, so that is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import torch

from ray_weightsync.errors import ConfigError
from ray_weightsync.weights.copying import flat_bytes


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether ``a`` and ``b`` are the same elements in the same layout.

    Sharded tensors count only if they are one object: whether local shards coincide may differ between ranks (empty ones do), and
    what follows from the answer is a collective.
    """
    if a is b:
        return True
    if callable(getattr(a, "full_tensor", None)) or callable(getattr(b, "full_tensor", None)):
        return False
    return (
        a.dtype == b.dtype
        and a.device == b.device
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.data_ptr() == b.data_ptr()
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


def shared_names(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, ...]]:
    """Groups of two or more names whose tensors are the same elements in the same layout, found by storage."""
    by_place: dict[tuple[object, ...], list[list[str]]] = {}
    for name, tensor in tensors.items():
        sharded = callable(getattr(tensor, "full_tensor", None))
        place = (id(tensor),) if sharded else (tensor.data_ptr(), tensor.shape, tensor.dtype)
        groups = by_place.setdefault(place, [])
        # Empty tensors all have the address 0, so equal places are only candidates.
        for group in groups:
            if same_memory(tensors[group[0]], tensor) and (tensor.numel() > 0 or tensors[group[0]] is tensor):
                group.append(name)
                break
        else:
            groups.append([name])
    return [tuple(group) for groups in by_place.values() for group in groups if len(group) > 1]


def declared_ties(modules: Iterable[tuple[str, torch.nn.Module]], tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, str]]:
    """Pairs of names that a module declares tied by ``_tied_weights_keys``, the convention of transformers.

    A dict maps a tied name to its source (transformers 5); a list holds tied names or patterns, whose source is the input embedding
    (transformers 4). A model whose config says ``tie_word_embeddings=False`` declares nothing.

    Args:
        modules: ``(path, module)`` as `torch.nn.Module.named_modules` yields them.
        tensors: What is to be sent, by full name; pairs with other names are left out.
    """
    pairs: dict[tuple[str, str], None] = {}
    for path, module in modules:
        keys = getattr(module, "_tied_weights_keys", None)
        if not keys or getattr(getattr(module, "config", None), "tie_word_embeddings", True) is False:
            continue
        prefix = f"{path}." if path else ""
        for tied, source in _pairs_of(module, keys, prefix, tensors):
            if prefix + tied in tensors and prefix + source in tensors and tied != source:
                pairs[prefix + tied, prefix + source] = None
    return list(pairs)


def _pairs_of(module: torch.nn.Module, keys: object, prefix: str, tensors: Mapping[str, torch.Tensor]) -> Iterable[tuple[str, str]]:
    if isinstance(keys, Mapping):
        # Keys may be patterns or whole modules; the model knows how to expand them.
        expand = getattr(module, "get_expanded_tied_weights_keys", None)
        return list((expand(all_submodels=False) if callable(expand) else keys).items())
    if not isinstance(keys, list | tuple | set | frozenset):
        raise ConfigError(f"{type(module).__name__}._tied_weights_keys must be a dict or a list of names, not {type(keys).__name__}")
    get_embedding = getattr(module, "get_input_embeddings", None)
    weight = getattr(get_embedding(), "weight", None) if callable(get_embedding) else None
    source = next((name for name, parameter in module.named_parameters(remove_duplicate=False) if parameter is weight), None)
    if weight is None or source is None:
        return []
    names = [
        name
        for name in (full.removeprefix(prefix) for full in tensors if full.startswith(prefix))
        if any(re.search(str(key), name) for key in keys)
    ]
    # A list also names ties to something other than the embedding (a decoder's bias); another shape tells those apart.
    return [(name, source) for name in names if tensors[prefix + name].shape == weight.shape]


def refuse_disagreement(
    tied: str, source: str, tensors: Mapping[str, torch.Tensor], bring: Callable[[torch.Tensor], torch.Tensor], shown: Callable[[str], str]
) -> None:
    """Raise `ConfigError` unless the tensors of two names that are declared tied hold the same bits.

    Args:
        tied, source: The two names.
        tensors: The tensors by name.
        bring: Makes a full, detached tensor of one that may be sharded.
        shown: The name as it is sent.
    """
    a, b = tensors[tied], tensors[source]
    if same_memory(a, b):
        return
    if a.dtype == b.dtype and a.shape == b.shape and _same_bits(bring(a), bring(b)):
        return
    raise ConfigError(
        f"{shown(tied)!r} and {shown(source)!r} are declared tied (_tied_weights_keys) but differ; "
        "an engine that ties them would keep whichever it loads last",
        hint="tie them again (model.tie_weights()), set config.tie_word_embeddings=False if they are meant to differ, or skip one of them",
    )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    # As bytes: NaN equals itself, and every dtype can be compared.
    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return flat_bytes(tensor.resolve_conj().resolve_neg().contiguous())

    return torch.equal(bits(a), bits(b).to(a.device))
