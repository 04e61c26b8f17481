"""Which device this process computes on, told so that two processes can see whether it is one and the same."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch


def told_device(device: torch.device) -> dict[str, str | None]:
    """``type`` (such as ``"cpu"`` or ``"cuda"``) and ``uuid``: of the GPU, the same in every process and on no other node.

    ``uuid`` is None on the CPU, and where it cannot be told. Must not be called with a GPU that this process has not begun to use.
    """
    return {"type": device.type, "uuid": _uuid(device)}


def has_nccl() -> bool:
    """Whether nccl4py is installed here, which a group of GPUs needs. It is not loaded."""
    return is_installed("nccl")


def is_installed(module: str) -> bool:
    """Whether a top-level module can be found. It is not imported."""
    return importlib.util.find_spec(module) is not None


def _uuid(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    cuda: Any = torch.cuda  # partly untyped
    index = cuda.current_device() if device.index is None else device.index
    uuid = getattr(cuda.get_device_properties(index), "uuid", None)  # not in every build of torch
    return None if uuid is None else str(uuid)
