"""How a vLLM engine comes by the ``"rws"`` backend: as an entry point, or as a worker extension that needs no installation.

vLLM imports this module in every process that names it, so it must stay light: the backend itself is imported by vLLM when a
worker creates it. It also owns the fixed table of receivers; a transport's name on the wire only ever picks from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ray_weightsync.worker.identity import package_version
from ray_weightsync.worker.payload import words_of
from ray_weightsync.worker.updates import MARKER

if TYPE_CHECKING:
    from ray_weightsync.worker.receiver import Receiver

BACKEND = "rws"

_registered = False


def register() -> None:
    """Make ``WeightTransferConfig(backend="rws")`` valid in this process. The entry point in vLLM's group of general plugins.

    Raises:
        ValueError: if another package has registered a backend of that name.
    """
    global _registered
    if _registered:  # by the entry point and the worker extension both; vLLM refuses a second registration
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, f"{__package__}.plugin_backend", "Backend")
    _registered = True


def receivers(rank_in_replica: Callable[[], int] = lambda: 0) -> Mapping[str, Receiver]:
    """New receivers for one worker, by their transport's name on the wire.

    Args:
        rank_in_replica: Tells the worker's place among all workers of its replica, from 0; asked when an update needs it.
    """
    from ray_weightsync.transports.collective.receiver import CollectiveReceiver
    from ray_weightsync.transports.host.receiver import HostReceiver

    return {"host": HostReceiver(), "collective": CollectiveReceiver(rank_in_replica)}


class WorkerExtension:
    """Methods that vLLM adds to each of its workers: ``worker_extension_cls="ray_weightsync.engines.plugin.WorkerExtension"``."""

    def rws_describe(self, nonce: str) -> dict[str, Any]:
        """What this worker is and holds; see `WorkerUpdates.describe`.

        Never raises: one worker's exception would put the engine out of step.
        """
        try:
            engine = getattr(self, "weight_transfer_engine", None)
            describe = getattr(engine, "describe", None)
            if describe is not None:
                return dict(describe(nonce))
            failure = f"{MARKER}this worker's weight-transfer backend is {type(engine).__name__}, not {BACKEND!r}"
        except Exception as error:
            failure = f"{MARKER}this worker cannot describe itself: {words_of(error)}"
        return {"nonce": nonce, "package_version": package_version(), "failure": failure}


register()
