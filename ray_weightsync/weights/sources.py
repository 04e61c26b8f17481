"""The sources users meet: a module, a state dict, safetensors files, pairs, one of their own; `as_source` tells them apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from ray_weightsync.errors import ConfigError
from ray_weightsync.weights.module_source import ModuleSource
from ray_weightsync.weights.plan import ParamMeta
from ray_weightsync.weights.safetensors_source import SafetensorsSource
from ray_weightsync.weights.source_base import SourceBase as _SourceBase
from ray_weightsync.weights.source_base import WeightSource, checked, gather, matching
from ray_weightsync.weights.transforms import Transform

__all__ = ["ModuleSource", "ParamMeta", "SafetensorsSource", "SourceLike", "StateDictSource", "WeightSource", "as_source", "checked"]

SourceLike: TypeAlias = torch.nn.Module | Mapping[str, torch.Tensor] | WeightSource | Sequence[tuple[str, torch.Tensor]]
"""What `as_source` takes."""

_ACCEPTED = (
    "a torch.nn.Module, a mapping of names to tensors (a state dict), a list of (name, tensor) pairs, "
    "or a WeightSource (an object with metadata() and __iter__)"
)


class StateDictSource(_SourceBase):
    """The tensors of a mapping, read anew each round, in its order and under its names. `DTensor` values are gathered.

    Args:
        mapping: Names to tensors. The mapping is kept, not copied: later rounds send what it holds then.
        transform: ``(name, tensor) -> iterable of (name, tensor)``, see `ray_weightsync.weights.transforms`.
        skip: Names or `fnmatch` patterns that are not sent; the values under them may be anything.
        reject_nonfinite: Raise for NaN and infinite values, naming the tensor. By default they are sent as they are.

    Raises:
        ConfigError: when made and again each round, naming the entry: for a value that is not a tensor or cannot be sent, a name that
            is not a str, a pattern that fits nothing.
    """

    def __init__(
        self,
        mapping: Mapping[str, torch.Tensor],
        *,
        transform: Transform | None = None,
        skip: str | Iterable[str] = (),
        reject_nonfinite: bool = False,
    ) -> None:
        super().__init__(transform=transform, skip=skip, reject_nonfinite=reject_nonfinite)
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"StateDictSource takes a mapping of names to tensors, not {type(mapping).__name__}", hint=_hint_for(mapping))
        self._mapping = mapping
        self._entries()

    @property
    def device(self) -> torch.device | None:
        """Where the mapping's first tensor is; None if it has none."""
        return next((value.device for value in self._mapping.values() if isinstance(value, torch.Tensor)), None)

    def _entries(self) -> dict[str, torch.Tensor]:
        entries = dict(self._mapping)
        for name in entries:
            if not isinstance(name, str):
                raise ConfigError(f"the mapping has the key {name!r}; names must be str")
        if self._skip:
            skipped = matching("skip", self._skip, entries)
            entries = {name: value for name, value in entries.items() if name not in skipped}
        for name, value in entries.items():
            if not isinstance(value, torch.Tensor):
                inner = isinstance(value, Mapping)
                raise ConfigError(
                    f"the value of {name!r} is a {type(value).__name__}, not a tensor",
                    hint=f"send what is under {name!r}" if inner else f"leave it out: StateDictSource(mapping, skip=[{name!r}])",
                )
            self._refuse(name, value)
        return entries

    def _declared(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._entries().items()]

    def _values(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        for name, tensor in self._entries().items():
            yield name, lambda tensor=tensor: gather(tensor.detach())  # type: ignore[misc]


def as_source(obj: SourceLike) -> WeightSource:
    """A source of what ``obj`` holds.

    A module becomes a `ModuleSource`, a mapping or a list of pairs a `StateDictSource`; an object that has ``metadata()`` and
    ``__iter__`` is returned as it is.

    Raises:
        ConfigError: for anything else, saying what was given and what is accepted; for a one-shot iterator or generator; for pairs
            with a name twice; and as the sources do.
    """
    if isinstance(obj, Iterator):
        raise ConfigError(f"weights are read anew each round, but a {type(obj).__name__} can be iterated only once", hint=_hint_for(obj))
    if isinstance(obj, torch.nn.Module):
        return ModuleSource(obj)
    if not isinstance(obj, type) and callable(getattr(obj, "metadata", None)) and callable(getattr(obj, "__iter__", None)):
        return obj  # type: ignore[return-value]
    if isinstance(obj, Mapping):
        return StateDictSource(obj)
    if isinstance(obj, list | tuple):
        return StateDictSource(_unique_pairs(obj))
    raise ConfigError(f"weights must be {_ACCEPTED}, not {_shown(obj)}", hint=_hint_for(obj))


def _unique_pairs(pairs: Sequence[object]) -> dict[str, torch.Tensor]:
    entries: dict[str, torch.Tensor] = {}
    for position, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ConfigError(
                f"entry {position} of the list must be a (name, tensor) pair, not {_shown(pair)}; weights must be {_ACCEPTED}"
            )
        if pair[0] in entries:
            raise ConfigError(f"tensor name {pair[0]!r} is there twice")
        entries[pair[0]] = pair[1]
    return entries


def _shown(obj: object) -> str:
    return f"the class {obj.__name__} itself" if isinstance(obj, type) else type(obj).__name__


def _hint_for(obj: object) -> str | None:
    if isinstance(obj, Iterator):
        return "pass dict(...) or list(...) of the pairs, or an object with metadata() and an __iter__ that starts a fresh pass each time"
    if isinstance(obj, str):
        return "for safetensors files use SafetensorsSource(path)"
    return None
