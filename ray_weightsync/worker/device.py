"""Which device this process computes on, told so that two processes can see whether it is one and the same."""

from __future__ import annotations

import importlib
import logging
from functools import cache
from typing import Any

import torch

from ray_weightsync.worker.identity import is_installed

logger = logging.getLogger(__name__)

LEAST_NCCL = (2, 23)
"""The first libnccl with ``ncclCommInitRankScalable``, by which nccl4py makes every communicator."""


def told_device(device: torch.device) -> dict[str, str | None]:
    """``type`` (such as ``"cpu"`` or ``"cuda"``) and ``uuid``: of the GPU, the same in every process and on no other node.

    ``uuid`` is None on the CPU, and where it cannot be told. Must not be called with a GPU that this process has not begun to use.
    """
    return {"type": device.type, "uuid": _uuid(device)}


@cache
def has_nccl() -> bool:
    """Whether nccl4py can be used in this process, which a group of GPUs needs: it loads, and so does a libnccl that is new enough.

    It is tried once, and logged why not. To be asked only where there is a GPU: elsewhere nothing of it should be loaded.
    """
    if not is_installed("nccl"):
        return False
    try:
        core = importlib.import_module("nccl.core")
        try:
            libnccl = core.get_version().libnccl
            release = None if libnccl is None else libnccl.version.release
        except AttributeError:  # a release that tells it in another way is no reason to do without
            return True
        if release is None:
            why = "it finds no libnccl"
        elif release < LEAST_NCCL:
            why = f"it finds libnccl {libnccl}, and needs {'.'.join(map(str, LEAST_NCCL))} or later"
        else:
            return True
    except Exception as error:  # whatever loading libraries raises
        why = f"{type(error).__name__}: {error}"
    logger.warning("nccl4py is installed here and cannot be used, so nothing is broadcast from or to this GPU: %s", why)
    return False


def _uuid(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    cuda: Any = torch.cuda  # partly untyped
    index = cuda.current_device() if device.index is None else device.index
    uuid = getattr(cuda.get_device_properties(index), "uuid", None)  # not in every build of torch
    return None if uuid is None else str(uuid)
