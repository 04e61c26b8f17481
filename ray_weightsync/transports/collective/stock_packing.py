"""How a plan's bytes get from the thread that reads the source to the one that broadcasts, laid out as vLLM's ``nccl`` receiver wants."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from ray_weightsync.transports.collective.communicator import Communicator
from ray_weightsync.transports.collective.deadline import Deadline
from ray_weightsync.transports.collective.group_store import Answer
from ray_weightsync.transports.collective.handover import Handover
from ray_weightsync.transports.collective.rendezvous import SENDER, GroupError
from ray_weightsync.transports.collective.slot_buffers import SlotBuffers
from ray_weightsync.transports.collective.stock_format import StockFormat, largest_cut
from ray_weightsync.weights.copying import copy_hashed_into
from ray_weightsync.weights.plan import Plan, TensorSpec
from ray_weightsync.worker.payload import words_of


class StockPacker:
    """Lays tensors end to end into buffers, and hands each buffer on when it is full. Called once a tensor, in plan order."""

    def __init__(self, pieces: Handover[torch.Tensor], plan: Plan, form: StockFormat, device: torch.device, deadline: Deadline) -> None:
        self._pieces = pieces
        self._deadline = deadline
        self._buffers = SlotBuffers(largest_cut(plan, form), device)
        self._left = deque((sum(each.nbytes for each in cut), spec, spec is cut[-1]) for cut in form.cuts(plan) for spec in cut)
        self._open: tuple[int, torch.Tensor] | None = None
        self._used = 0
        self._num_bytes = plan.weight_bytes
        self.num_sent = 0

    def place(self, spec: TensorSpec, tensor: torch.Tensor) -> bytes:
        """Copy one tensor to its place, and return the digest of the bytes there."""
        return self._next(lambda room: copy_hashed_into(tensor, room))

    def fill(self) -> None:
        """Zeros for every tensor that was not placed, until all receivers have what they wait for.

        Raises:
            TimeoutError, GroupError: if they have not.
        """
        while self._left:
            self._next(lambda room: room.zero_())
        self.finish()

    def finish(self) -> None:
        """Wait until everything is sent.

        Raises:
            TimeoutError, GroupError: if it is not.
        """
        self._pieces.finish()
        self._wait(self._pieces.wait_used)

    def _next(self, put: Callable[[torch.Tensor], Answer]) -> Answer:
        if self._deadline.passed:
            raise self._late("the source")
        cut_bytes, spec, is_last = self._left[0]
        if self._open is None:
            self._open, self._used = self._buffer(cut_bytes), 0
        slot, piece = self._open
        answer = put(piece[self._used : self._used + spec.nbytes])
        self._left.popleft()
        self._used += spec.nbytes
        if is_last:
            self._open = None
            self._pieces.put(slot, piece)
        return answer

    def _buffer(self, num_bytes: int) -> tuple[int, torch.Tensor]:
        slot = self._wait(self._pieces.reserve)
        return slot, self._buffers.piece(slot, num_bytes)

    def _wait(self, wait: Callable[[float], Answer | None]) -> Answer:
        answer = wait(self._deadline.left_s)
        if answer is None:
            raise self._late("the slowest receiver")
        return answer

    def _late(self, whom: str) -> TimeoutError:
        return TimeoutError(f"waited {self._deadline.limit_s:.1f} s for {whom}; {self.num_sent} of {self._num_bytes} bytes were sent")


def broadcast_all(communicator: Communicator, pieces: Handover[torch.Tensor], packer: StockPacker) -> None:
    """Broadcast what is handed over; on the thread that owns the communicator."""
    try:
        while True:
            got = pieces.take(1.0)
            if got is None:
                continue  # whoever packs minds the deadline
            slot, piece = got
            communicator.broadcast(piece, SENDER)
            packer.num_sent += piece.numel()
            pieces.release(slot)
    except EOFError:
        return
    except BaseException as error:
        told = f"a broadcast failed after {packer.num_sent} bytes: {words_of(error)}"
        failure = error if isinstance(error, GroupError) else GroupError(told)
        failure.__cause__ = None if failure is error else error
        pieces.fail(failure)
