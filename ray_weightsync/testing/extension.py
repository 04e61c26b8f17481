"""The worker extension of engines that are to have faults inside their workers. Imported in engine workers: it brings vLLM with it."""

from __future__ import annotations

from typing import Any

from ray_weightsync.engines.plugin import WorkerExtension
from ray_weightsync.testing.worker import WorkerFaults
from ray_weightsync.worker.payload import words_of


class FaultyExtension(WorkerExtension):
    """`WorkerExtension`, and the way in for `ray_weightsync.testing.Faults`. Without an order it does nothing.

    To use a worker extension of your own beside it, derive from this class and pass yours as ``worker_extension_cls``.
    """

    def rws_fault(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry out an order of the kit (see `WorkerFaults.obey`).

        Never raises: one worker's exception would put the engine out of step. What goes wrong is in ``error``.
        """
        try:
            return {"error": None, **self._rws_faults().obey(order)}
        except Exception as error:  # told to whoever gave the order
            return {"error": words_of(error)}

    def _rws_faults(self) -> WorkerFaults:
        kept = vars(self)
        if "_rws_faults_kept" not in kept:
            updates = self.weight_transfer_engine.updates  # type: ignore[attr-defined]  # vLLM's worker, which this class is mixed into
            kept["_rws_faults_kept"] = WorkerFaults(updates, flush=updates._model.reload.flush)
        faults: WorkerFaults = kept["_rws_faults_kept"]
        return faults
