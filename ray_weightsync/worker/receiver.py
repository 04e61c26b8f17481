"""What a receiver is: the worker's end of a transport. The receivers themselves live in `ray_weightsync.transports`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from ray_weightsync.weights.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Received:
    """What a receiver can attest after everything has been handed over.

    Attributes:
        snapshot: Id of the snapshot it read; None of bytes that came without one.
        digest: The snapshot's weights digest, as sealed by the sender.
        num_bytes: Bytes of weights handed over (no padding).
        num_tensors: Tensors handed over.
    """

    snapshot: str | None
    digest: str
    num_bytes: int
    num_tensors: int


class Delivery(Protocol):
    """One opened snapshot or stream. Tensors it yields stay valid as long as somebody keeps them, also after `close`."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(name, tensor)`` in plan order. A tensor may be written to by the loader; nobody else sees it.

        Raises:
            TimeoutError: if the sender does not make the next bytes available within the deadline the update named.
        """
        ...

    def received(self) -> Received:
        """What was handed over so far; to be asked after iteration ended."""
        ...

    def close(self) -> None:
        """Let go of everything that no yielded tensor needs. Idempotent."""
        ...


class Receiver(Protocol):
    """One per worker and transport, kept for the worker's life."""

    def see(self, probe: Mapping[str, Any]) -> None:
        """Prove that this worker sees what the sender's node put there, before anything depends on it.

        Raises:
            OSError, ValueError: saying what is not seen, and why.
        """
        ...

    def open(self, plan: Plan, update: Mapping[str, Any]) -> Delivery:
        """Open what an ``update_weights`` payload names and check it against ``plan``.

        Raises:
            OSError, ValueError: if it is not there, not ours, not sealed or not of this plan.
        """
        ...


@runtime_checkable
class Grouped(Protocol):
    """A `Receiver` without which the others of its round cannot receive."""

    def drain(self, plan: Plan, update: Mapping[str, Any]) -> None:
        """Take part in what an ``update_weights`` payload names for the others' sake, and keep nothing of it.

        Raises:
            OSError, ValueError: as of `Receiver.open`.
        """
        ...
