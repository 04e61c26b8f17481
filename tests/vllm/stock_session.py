"""A trainer's process that has a session, and what it takes to make one toward engines on vLLM's own ``nccl`` backend without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import ray
import torch

import ray_weightsync as rws
from ray_weightsync.report import FleetStatus, SyncReport
from ray_weightsync.weights.sources import StateDictSource
from tests.vllm import support

EXTENSION = "tests.vllm.stock_faults.FailingExtension"


class Midway(StateDictSource):
    """Does something in the middle, after so many tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor], act: Callable[[], None], *, after: int = 7) -> None:
        super().__init__(tensors)
        self._act = act
        self._after = after

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(super().__iter__()):
            if number == self._after:
                self._act()
            yield pair


def broken() -> None:
    raise ZeroDivisionError("the optimizer is broken")


class Owner:
    """Owns a session and sends checkpoints, from ``device``."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._session: rws.WeightSync | None = None

    def attach(self, handles: Sequence[Any], transport: Any, update_s: float = 120) -> None:
        refs = [rws.EngineRef(handle, attr="llm") for handle in handles]
        timeouts = rws.Timeouts(health_interval_s=3600, update_s=update_s)
        self._session = rws.WeightSync.attach(refs, transport=transport, timeouts=timeouts)

    @property
    def session(self) -> rws.WeightSync:
        assert self._session is not None
        return self._session

    def send(self, checkpoint: str, version: str, reshaped: str | None = None) -> SyncReport:
        """Send a checkpoint; with one more row in the tensor ``reshaped``."""
        pairs = self._placed(checkpoint)
        if reshaped is not None:
            pairs[reshaped] = torch.cat([pairs[reshaped], pairs[reshaped][:1]])
        return self.session.send_weights(pairs, version=version)

    def send_and_fail(self, checkpoint: str, version: str) -> SyncReport:
        """Send the first tensors of a checkpoint, and fail."""
        return self.session.send_weights(Midway(self._placed(checkpoint), broken), version=version)

    def send_and_kill(self, checkpoint: str, version: str, victim: Any) -> SyncReport:
        """Send a checkpoint, and kill an engine in the middle."""
        return self.session.send_weights(Midway(self._placed(checkpoint), partial(support.kill_engine, victim)), version=version)

    def send_patches(self, before: str, after: str, version: str) -> SyncReport:
        """Send of every tensor what is another value in the checkpoint ``after`` than in ``before``."""
        from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseWeightPatch

        patches, old = [], self._placed(before)
        for name, tensor in self._placed(after).items():
            changed = (tensor != old[name]).flatten().nonzero().flatten()
            patches.append(SparseWeightPatch(name, changed.to(torch.int32), tensor.flatten()[changed], tuple(tensor.shape)))
        return self.session.send_weights(patches, version=version)

    def _placed(self, checkpoint: str) -> support.Pairs:
        return {name: tensor.to(self._device) for name, tensor in support.checkpoint(checkpoint).items()}

    def status(self) -> FleetStatus:
        return self.session.status()

    def close(self) -> None:
        if self._session is not None:
            self._session.close()


class Trainer(Owner):
    """With vLLM's own trainer engines over gloo."""

    def __init__(self) -> None:
        from ray_weightsync.transports.collective import stock
        from tests.vllm import nccl_on_gloo

        nccl_on_gloo.stand_in_for_the_trainer()
        stock._current_gpu = lambda: torch.device("cpu")
        super().__init__()


def start_trainer() -> Any:
    """A handle to a `Trainer` that is starting."""
    env = {"env_vars": {"PYTHONPATH": support.REPOSITORY, "VLLM_LOGGING_LEVEL": "ERROR"}}
    return ray.remote(Trainer).options(num_cpus=0, runtime_env=env, max_concurrency=4).remote()


def start_engine(model: str, tensor_parallel_size: int) -> support.Driver:
    """An engine as a user starts one on vLLM's own backend, nothing of ours in it; it is starting."""
    handle = support.start_engine(model, tensor_parallel_size, extension=EXTENSION, weight_transfer_config={"backend": "nccl"})
    return support.Driver(handle, tensor_parallel_size)
