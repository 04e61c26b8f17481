"""vLLM's own worker backends, made through its factory. vLLM is imported when the first one is asked for."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ray_weightsync.transports.native.backends import missing_module


class WorkerBackend(Protocol):
    """What is used of vLLM's ``WeightTransferEngine`` (0.28 to 0.32)."""

    def parse_init_info(self, init_dict: dict[str, Any], /) -> Any: ...
    def init_transfer_engine(self, init_info: Any, /) -> None: ...
    def start_weight_update(self) -> None: ...
    def parse_update_info(self, update_dict: dict[str, Any], /) -> Any: ...
    def update_weights(self, update_info: dict[str, Any], /) -> None: ...
    def receive_weights(self, update_info: Any, /) -> None: ...
    def finish_weight_update(self) -> None: ...
    def shutdown(self) -> None: ...


class Backends(Protocol):
    """Where `NativeReceiver` has its backends from."""

    def require(self, name: str) -> None:
        """Raise unless a backend of that name can be made here."""
        ...

    def make(self, name: str) -> WorkerBackend:
        """A new one. Raises whatever keeps it from being made."""
        ...


class VLLMBackends:
    """The backends that vLLM's factory knows in this worker, those of plugins included.

    Args:
        vllm_config: The worker's.
        device: Where ``model`` is.
        model: What they load into.
    """

    def __init__(self, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        self._vllm_config = vllm_config
        self._device = device
        self._model = model

    def require(self, name: str) -> None:
        """Find the class of the backend ``name``, and import what it needs.

        Raises:
            ValueError: if there is none, or it is this package's own.
            ImportError: if it needs what is not installed.
        """
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        from ray_weightsync.worker.backend import RwsBackend

        known: dict[str, Any] = WeightTransferEngineFactory._registry
        found = known[name]() if name in known else None
        if found is None or issubclass(found, RwsBackend):
            others = ", ".join(sorted(each for each in known if each != self._own)) or "none"
            raise ValueError(f"the vLLM in this worker has no weight-transfer backend {name!r} to delegate to; it has: {others}")
        if (module := missing_module(name, found)) is not None:
            raise ImportError(f"weight-transfer backend {name!r} needs {module!r}, which is not installed where this worker runs")

    def make(self, name: str) -> WorkerBackend:
        """A new backend over this worker's model.

        Raises:
            ValueError, ImportError: as `require`.
            Exception: whatever its own constructor raises.
        """
        from vllm.config import WeightTransferConfig
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        self.require(name)
        config = WeightTransferConfig(backend=name)
        made: WorkerBackend = WeightTransferEngineFactory.create_engine(config, self._vllm_config, self._device, self._model)
        return made

    @property
    def _own(self) -> str:
        return str(self._vllm_config.weight_transfer_config.backend)
