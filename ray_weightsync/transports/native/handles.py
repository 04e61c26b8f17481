"""The handles that come with an update of vLLM's ``ipc`` backend, looked at before one is opened: its errors name no tensor. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NUM_ARGS = 7
"""Of a handle, as torch makes it, at least: vLLM puts the worker's own device in the seventh place."""


def require_handles(update_info: Mapping[str, Any], gpu: str | None) -> None:
    """Refuse an update whose tensors this worker could not all open.

    Args:
        update_info: As `vllm.distributed.weight_transfer.ipc_engine.IPCWeightTransferUpdateInfo` has it. Without ``ipc_handles`` it is
            left to the backend.
        gpu: UUID of the worker's GPU; None on the CPU.

    Raises:
        ValueError: naming the first tensor that has no handle, none for this GPU, or one that is none.
    """
    handles, names = update_info.get("ipc_handles"), update_info.get("names")
    if handles is None or not isinstance(names, list):
        return
    if isinstance(handles, Mapping):  # one buffer with all of them
        handles = [handles] * len(names)
    for name, handle in zip(names, handles, strict=False):
        if not isinstance(handle, Mapping):
            raise ValueError(f"{name!r} has {type(handle).__name__} in place of its handles, which come by the UUID of a GPU")
        if gpu is not None and gpu not in handle:
            raise ValueError(f"{name!r} has no handle for this worker's GPU {gpu}, only for {', '.join(map(str, handle)) or 'none'}")
        for args in handle.values():
            if not isinstance(args, list | tuple) or len(args) < NUM_ARGS:
                raise ValueError(f"{name!r} has a handle that is none: {NUM_ARGS} values or more were expected")
    if len(handles) < len(names):
        raise ValueError(f"{names[len(handles)]!r} has no handle: there are {len(handles)} for {len(names)} tensors")
