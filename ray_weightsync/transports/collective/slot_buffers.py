"""The sender's buffers, one for each slot of a handover."""

from __future__ import annotations

import torch


class SlotBuffers:
    """A buffer of ``num_bytes`` on ``device`` for each slot: made when the slot is first reserved, and used again whenever it is."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._num_bytes = num_bytes
        self._device = device
        self._of_slot: dict[int, torch.Tensor] = {}

    def piece(self, slot: int, num_bytes: int) -> torch.Tensor:
        """The first ``num_bytes`` of the slot's buffer, flat uint8, with whatever was in them."""
        if slot not in self._of_slot:
            self._of_slot[slot] = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
        return self._of_slot[slot][:num_bytes]
