"""What runs in an engine's actor, through ``__ray_call__``, to reach faults inside its workers. It travels there by value.

The files are the only way to and from a worker that hangs; see `ray_weightsync.testing.worker`.
"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
import time
from typing import Any

from ray_weightsync.protocol.remote import config_of, source

METHOD = "rws_fault"
"""The worker extension's method for this kit."""


def order_torch_engine(actor: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Give an order to the only worker of a `TorchEngine`."""
    from ray_weightsync.testing.worker import WorkerFaults

    kept = vars(actor)
    if "_testing_faults" not in kept:
        kept["_testing_faults"] = WorkerFaults(actor._updates)
    answer: dict[str, Any] = kept["_testing_faults"].obey(order)
    return answer


def extension_of(actor: Any, path: str) -> tuple[str | None, bool]:
    """The name of the engine's worker extension, and whether it has this kit's method. Looks, and calls nothing."""
    parallel = getattr(config_of(source(actor, path)), "parallel_config", None)
    name = getattr(parallel, "worker_extension_cls", None)
    if not isinstance(name, str) or "." not in name:
        return None, False
    module, _, cls = name.rpartition(".")
    return name, callable(getattr(getattr(importlib.import_module(module), cls), METHOD, None))


def make_directory(actor: Any) -> str:
    """A fresh directory for the files of one kit, on this node."""
    return tempfile.mkdtemp(prefix="rws-faults-")


def remove_directory(actor: Any, directory: str) -> None:
    """Remove what `make_directory` made."""
    shutil.rmtree(directory)


def release(actor: Any, directory: str, fault_id: str) -> None:
    """Open the gate of a fault."""
    with open(os.path.join(directory, f"{fault_id}.released"), "w"):
        pass


def struck(actor: Any, directory: str, fault_id: str, wait_s: float) -> int:
    """How often a fault struck; waits for the first time for up to ``wait_s`` seconds."""
    path, until = os.path.join(directory, f"{fault_id}.struck"), time.monotonic() + wait_s
    while not os.path.exists(path) and time.monotonic() < until:
        time.sleep(0.005)
    return os.path.getsize(path) if os.path.exists(path) else 0
