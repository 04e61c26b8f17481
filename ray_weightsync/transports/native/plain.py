"""What vLLM's ``ipc`` puts into an update - handles of GPU memory, with dtypes and classes of torch among them - as plain values.

An ``AsyncLLM`` hands its engine core plain values alone; anything else vLLM pickles, for which that process would have to unpickle whatever
reaches it (``VLLM_ALLOW_INSECURE_SERIALIZATION=1``). Only the names below can be named, so nothing that a payload says is run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

NAMED = "rws.torch"
"""The only key of a mapping that stands for one of torch's dtypes or classes."""


@cache
def _meant() -> dict[str, Any]:
    import torch

    classes: dict[str, Any] = {
        "Tensor": torch.Tensor,
        "nn.Parameter": torch.nn.Parameter,
        "TypedStorage": torch.storage.TypedStorage,
        "UntypedStorage": torch.UntypedStorage,
    }
    return {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)} | classes


@cache
def _names() -> dict[Any, str]:
    return {meant: name for name, meant in _meant().items()}


def to_plain(value: Any) -> Any:
    """``value`` with its dtypes and classes of torch named, and its tuples as lists. What else there is stays."""
    if "torch" in sys.modules:  # otherwise there is nothing of it in the value, and a coordinator would import it for nothing
        import torch

        if isinstance(value, torch.dtype | type) and value in _names():
            return {NAMED: _names()[value]}
    if isinstance(value, Mapping):
        return {key: to_plain(each) for key, each in value.items()}
    return [to_plain(each) for each in value] if isinstance(value, list | tuple) else value


def from_plain(value: Any) -> Any:
    """The value of which `to_plain` made ``value``; what were tuples are lists.

    Raises:
        ValueError: for a name that stands for nothing.
    """
    if isinstance(value, Mapping):
        if value.keys() != {NAMED}:
            return {key: from_plain(each) for key, each in value.items()}
        if value[NAMED] not in _meant():
            raise ValueError(f"{value[NAMED]!r} is none of the dtypes and classes of torch that an update may name")
        return _meant()[value[NAMED]]
    return [from_plain(each) for each in value] if isinstance(value, list | tuple) else value
