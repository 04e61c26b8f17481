"""A program that owns a session, to be killed: ``python -m tests.ray.life.driver ADDRESS NAME ENGINES WHAT``.

It says on stdout what it is at. ``WHAT`` is a phase at which the first replica is slow in the round of version 2, ``"staging"`` for a
source that does not come to an end, or ``"idle"``.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import ray
import torch

import ray_weightsync as rws
from ray_weightsync.testing import Faults
from tests.ray.conftest import NAMESPACE
from tests.ray.session.conftest import make_module

LIMIT_S = 60


class Endless:
    """A source whose second tensor does not come."""

    def __init__(self) -> None:
        self._tensors = {name: tensor.detach() for name, tensor in make_module().named_parameters()}

    def metadata(self) -> list[Any]:
        return [rws.ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(self._tensors.items()))
        print("REACHED", flush=True)
        threading.Event().wait()


def main(address: str, name: str, engines: str, what: str) -> None:
    ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    sync = rws.WeightSync.attach(engines.split(","), name=name)
    torch.manual_seed(1)
    sync.send_weights(make_module(), version=1)
    print("READY", flush=True)
    if what == "staging":
        sync.send_weights(Endless(), version=2)
    elif what != "idle":
        faults = Faults(sync)
        fault = faults.inject(f"{engines.split(',')[0]}", what, "slow", seconds=2.0)
        torch.manual_seed(2)
        threading.Thread(target=lambda: sync.send_weights(make_module(), version=2), daemon=True).start()
        fault.wait_reached(timeout_s=LIMIT_S)
        print("REACHED", flush=True)
    else:
        print("REACHED", flush=True)
    time.sleep(10 * LIMIT_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
