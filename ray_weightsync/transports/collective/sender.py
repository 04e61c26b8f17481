"""The trainer's end: packs bucket k+1 while bucket k is broadcast.

The calling thread reads the source (whose gathers may be collectives of the trainer's own, so they stay on the thread that the trainer
calls from) and packs; a daemon thread owns the communicator, joins the group and broadcasts. Bytes are digested as they are packed, the
same way as everywhere else: on the CPU while they are in the cache; bytes that stay on a GPU are brought over once more to be hashed, in
pieces, and beside the broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from ray_weightsync.transports.collective.buckets import Bucket, cut
from ray_weightsync.transports.collective.communicator import Communicator
from ray_weightsync.transports.collective.deadline import Deadline
from ray_weightsync.transports.collective.group_store import FAREWELL_S, Answer
from ray_weightsync.transports.collective.handover import Handover
from ray_weightsync.transports.collective.member import FAILED_FAREWELL_S, Member
from ray_weightsync.transports.collective.rendezvous import SENDER, GroupError, Rendezvous
from ray_weightsync.transports.collective.slot_buffers import SlotBuffers
from ray_weightsync.weights.copying import copy_hashed_in_pieces, copy_hashed_into
from ray_weightsync.weights.packing import Packed, pack_each
from ray_weightsync.weights.plan import Plan, TensorSpec

OnPacked = Callable[[int, torch.Tensor], None]
"""Called with the place of the first byte in the payload, and the bytes: flat uint8, lent for the call only."""


class BroadcastSender:
    """Broadcasts one plan's bytes to one group, once. A context manager: close it when the receivers have answered.

    Memory: ``num_buckets`` buffers of at most ``bucket_bytes``, in host memory for gloo, on the current GPU for NCCL.

    Args:
        rendezvous: The group, met at a `RendezvousServer` of this process. Close that one after the sender.
        limit_s: Seconds from now for everything: for the others to join, for the source, for the slowest receiver.
    """

    def __init__(self, rendezvous: Rendezvous, *, limit_s: float) -> None:
        self._rendezvous = rendezvous
        self._deadline = Deadline(limit_s)
        self._pieces: Handover[torch.Tensor] = Handover(rendezvous.num_buckets)
        self._thread: _Broadcasting | None = None
        self._sent = False

    def send(self, pairs: Iterable[tuple[str, torch.Tensor]], plan: Plan, *, on_packed: OnPacked | None = None) -> Packed:
        """Join the group and send everything.

        To be called before the receivers join or while they do, which is in ``update_weights``; they and the sender wait for each
        other. On return every byte has been sent, which says nothing yet of what the engines made of it. When this raises, the
        receivers have been told why.

        Args:
            pairs: ``(name, tensor)`` in plan order; a source is one. Read on the calling thread.
            plan: What ``pairs`` declared, and what the receivers keep.
            on_packed: Sees the whole payload, padding included, piece by piece and in order, each before it is broadcast.

        Returns:
            What was sent. Its digest is the one that every receiver has to attest.

        Raises:
            TimeoutError: at the limit, saying how far it got and for whom it waited.
            GroupError: if a receiver is gone or failed, `abort` was called, or the group was used before.
            ConfigError: if ``pairs`` disagrees with ``plan``.
            Exception: whatever ``pairs`` or ``on_packed`` raises.
        """
        if self._thread is not None:
            raise GroupError(f"group {self._rendezvous.id} was used before; every transfer needs a new one")
        self._thread = thread = _Broadcasting(self._rendezvous, plan, self._pieces, self._deadline)
        thread.start()
        try:
            packed = pack_each(pairs, plan, _Packer(self._pieces, plan, thread, self._rendezvous, on_packed).place)
            self._pieces.finish()
            thread.wait(self._pieces.wait_used)
            self._sent = True
            return packed
        except BaseException as error:
            self._pieces.fail(error)
            thread.give_up(error)
            raise

    def abort(self, reason: str) -> None:
        """End `send`, from another thread. The receivers are told ``reason``. What was sent completely stays sent. Idempotent."""
        if self._sent:
            return
        error = GroupError(reason)
        self._pieces.fail(error)
        if self._thread is not None:
            self._thread.give_up(error)

    def close(self) -> None:
        """Wait until every receiver has all it needs, at most a few seconds, and free everything. Idempotent.

        A pending broadcast of gloo cannot be interrupted: its thread then lives on until the limit, and ends by itself.
        """
        if self._thread is not None:
            self._thread.close()

    def __enter__(self) -> BroadcastSender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Packer:
    """Lays tensors into buffers as `buckets` cuts them, and hands each buffer on when it is full. Called once a tensor, in plan order."""

    def __init__(
        self, pieces: Handover[torch.Tensor], plan: Plan, thread: _Broadcasting, rendezvous: Rendezvous, on_packed: OnPacked | None
    ) -> None:
        self._pieces = pieces
        self._thread = thread
        self._on_packed = on_packed
        self._bucket_bytes = rendezvous.bucket_bytes
        self._buffers = SlotBuffers(min(rendezvous.bucket_bytes, plan.num_bytes), thread.device)
        self._places = iter([(bucket, spec is bucket.tensors[-1]) for bucket in cut(plan, self._bucket_bytes) for spec in bucket.tensors])
        self._open: tuple[int, torch.Tensor] | None = None

    def place(self, spec: TensorSpec, tensor: torch.Tensor) -> bytes:
        """Copy one tensor to its place, and return the digest of the bytes there."""
        bucket, is_last = next(self._places)
        pieces = list(bucket.pieces(self._bucket_bytes))
        if len(pieces) > 1:
            return copy_hashed_in_pieces(tensor, self._one_by_one(spec, pieces))
        if not pieces:
            return copy_hashed_in_pieces(tensor, ())
        if self._open is None:
            self._open = self._buffer(bucket.num_bytes)
        slot, piece = self._open
        digest = _copied(tensor, piece, spec, bucket)
        if is_last:
            self._open = None
            self._hand_on(slot, piece, bucket.start)
        return digest

    def _one_by_one(self, spec: TensorSpec, pieces: list[tuple[int, int]]) -> Iterator[torch.Tensor]:
        for start, stop in pieces:
            slot, piece = self._buffer(stop - start)
            used = min(stop, spec.offset + spec.nbytes) - start
            piece[used:].zero_()
            yield piece[:used]
            self._hand_on(slot, piece, start)

    def _buffer(self, num_bytes: int) -> tuple[int, torch.Tensor]:
        slot = self._thread.wait(self._pieces.reserve)
        return slot, self._buffers.piece(slot, num_bytes)

    def _hand_on(self, slot: int, piece: torch.Tensor, start: int) -> None:
        if self._on_packed is not None:
            self._on_packed(start, piece)
        self._pieces.put(slot, piece)


def _copied(tensor: torch.Tensor, piece: torch.Tensor, spec: TensorSpec, bucket: Bucket) -> bytes:
    start, stop = spec.offset - bucket.start, spec.end - bucket.start
    piece[start + spec.nbytes : stop].zero_()
    place = piece[start : start + spec.nbytes]
    return copy_hashed_into(tensor, place)


class _Broadcasting(Member):
    """Broadcasts the pieces that the packing thread hands over, and keeps that one from waiting for a group that failed."""

    def __init__(self, rendezvous: Rendezvous, plan: Plan, pieces: Handover[torch.Tensor], deadline: Deadline) -> None:
        super().__init__(rendezvous, SENDER, deadline, pieces)
        self._pieces = pieces
        self._num_bytes = plan.num_bytes
        self._num_sent = 0

    def work(self, communicator: Communicator) -> None:
        while True:
            try:
                got = self.heeding(self._pieces.take)
            except EOFError:
                return
            if got is None:
                raise TimeoutError(f"waited {self._deadline.limit_s:.1f} s for the source")
            slot, piece = got
            communicator.broadcast(piece, SENDER)
            self._num_sent += piece.numel()
            self._pieces.release(slot)

    def progress(self) -> str:
        return f"{self._num_sent} of {self._num_bytes} bytes were sent"

    def wait(self, wait: Callable[[float], Answer | None]) -> Answer:
        """For the packing thread: what ``wait`` gives.

        Raises:
            TimeoutError: at the deadline.
            GroupError: if the group failed.
            BaseException: what ended this thread.
        """
        try:
            got = self.heeding(wait)
            if got is not None:
                return got
            failure: Exception = TimeoutError(f"waited {self._deadline.limit_s:.1f} s for the slowest receiver; {self.progress()}")
        except GroupError as error:
            failure = error
            self.halt()  # at the deadline it ends by itself, and knows for whom it waited
        wait(2 * FAILED_FAREWELL_S)  # raises what this thread makes of it, which says more
        raise failure

    def close(self) -> None:
        """Wait, not long, until the receivers need neither this rank nor the store; then end it."""
        self.join(FAREWELL_S if self._pieces.failure is None else FAILED_FAREWELL_S)
        self.halt()
        self.join(FAILED_FAREWELL_S)
