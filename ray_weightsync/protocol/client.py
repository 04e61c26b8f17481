"""The four calls that vLLM's trainer engines make, as a structural protocol: whatever has them is a client, ours and vLLM's own alike."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from ray_weightsync.protocol.messages import Payload


@runtime_checkable
class VLLMWeightSyncClient(Protocol):
    """Trainer-side control plane of one or more engines; the shape of vLLM's own protocol of this name, without importing vLLM.

    Every call blocks until all engines behind the client have answered. ``isinstance`` looks at method names only.
    """

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Set up the engines' end of the data plane. ``init_info`` holds the backend's fields."""
        ...

    def start_weight_update(self) -> None:
        """Open an update session on every engine."""
        ...

    def update_weights(self, update_info: Payload) -> None:
        """Have every engine receive one chunk. A list has one entry per global worker rank."""
        ...

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the session on every engine and, if given, label the weights ``weight_version``."""
        ...
