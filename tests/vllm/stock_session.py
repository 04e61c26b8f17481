"""A session toward engines on vLLM's own ``nccl`` backend, in a trainer's process that has no GPU; and a fault for their workers."""

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
from tests.vllm.stock_trainer import kill_engine

EXTENSION = "tests.vllm.stock_faults.FailingExtension"


class Midway(StateDictSource):
    """Does something in the middle."""

    def __init__(self, tensors: dict[str, torch.Tensor], act: Callable[[], None]) -> None:
        super().__init__(tensors)
        self._act = act

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(super().__iter__()):
            if number == 7:
                self._act()
            yield pair


def broken() -> None:
    raise ZeroDivisionError("the optimizer is broken")


class Trainer:
    """Owns a session and sends checkpoints."""

    def __init__(self) -> None:
        from ray_weightsync.transports.collective import stock
        from tests.vllm import nccl_on_gloo

        nccl_on_gloo.stand_in_for_the_trainer()
        stock._current_gpu = lambda: torch.device("cpu")
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
        pairs = support.checkpoint(checkpoint)
        if reshaped is not None:
            pairs[reshaped] = torch.cat([pairs[reshaped], pairs[reshaped][:1]])
        return self.session.send_weights(pairs, version=version)

    def send_and_fail(self, checkpoint: str, version: str) -> SyncReport:
        """Send the first tensors of a checkpoint, and fail."""
        return self.session.send_weights(Midway(support.checkpoint(checkpoint), broken), version=version)

    def send_and_kill(self, checkpoint: str, version: str, victim: Any) -> SyncReport:
        """Send a checkpoint, and kill an engine in the middle."""
        return self.session.send_weights(Midway(support.checkpoint(checkpoint), partial(kill_engine, victim)), version=version)

    def status(self) -> FleetStatus:
        return self.session.status()

    def close(self) -> None:
        if self._session is not None:
            self._session.close()


def start_trainer() -> Any:
    """A handle to a `Trainer` that is starting."""
    env = {"env_vars": {"PYTHONPATH": support.REPOSITORY, "VLLM_LOGGING_LEVEL": "ERROR"}}
    return ray.remote(Trainer).options(num_cpus=0, runtime_env=env, max_concurrency=4).remote()


def start_engine(model: str, tensor_parallel_size: int) -> support.Driver:
    """An engine as a user starts one on vLLM's own backend, nothing of ours in it; it is starting."""
    handle = support.start_engine(model, tensor_parallel_size, extension=EXTENSION, weight_transfer_config={"backend": "nccl"})
    return support.Driver(handle, tensor_parallel_size)
