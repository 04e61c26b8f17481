"""The backend that vLLM creates in each worker: `RwsBackend` with this package's receivers. Imported in workers only."""

from __future__ import annotations

from collections.abc import Mapping

from ray_weightsync.engines.plugin import receivers
from ray_weightsync.worker.backend import RwsBackend
from ray_weightsync.worker.receiver import Receiver


class Backend(RwsBackend):
    """`RwsBackend` that receives from every transport of this package."""

    def receivers(self) -> Mapping[str, Receiver]:
        """This package's receivers."""
        return receivers()
