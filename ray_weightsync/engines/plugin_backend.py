"""The backend that vLLM creates in each worker: `RwsBackend` with this package's receivers. Imported in workers only."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ray_weightsync.engines.plugin import receivers
from ray_weightsync.transports.native.factory import VLLMBackends
from ray_weightsync.transports.native.receiver import NativeReceiver
from ray_weightsync.worker.backend import RwsBackend, VLLMModel
from ray_weightsync.worker.receiver import Receiver


class Backend(RwsBackend):
    """`RwsBackend` that receives from every transport of this package."""

    def receivers(self, into: VLLMModel) -> Mapping[str, Receiver]:
        """This package's receivers."""
        rank = partial(rank_in_replica, self.parallel_config)
        backends = VLLMBackends(self.vllm_config, self.device, self.model)
        return {**receivers(rank), "native": NativeReceiver(backends, self.model, into, rank)}


def rank_in_replica(parallel_config: Any) -> int:
    """A worker's place among all workers of its replica, data-parallel ones included: vLLM's own formula (``worker_init_process_group``).

    ``world_size`` is TP x PP, ``rank`` the worker's place within that.
    """
    return int(parallel_config.data_parallel_index * parallel_config.world_size + parallel_config.rank)
