"""An engine worker's end: joins the group, receives on a thread that owns the communicator, and hands over bucket by bucket.

Every bucket has fresh memory of its own: loaders keep views of what they are given until the update is finished, and some write into
it. It is freed when the loader lets go of the last view. Only buckets that the loader has not been through yet are held here, at
most ``num_buckets`` of them, so a slow loader slows the broadcast down for all.

A loader that fails on one engine does not take the group with it: what is still to come is received and dropped. So is all of it where
the model was not made ready for an update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ray_weightsync.transports.collective.buckets import Bucket, cut
from ray_weightsync.transports.collective.communicator import Communicator
from ray_weightsync.transports.collective.deadline import Deadline
from ray_weightsync.transports.collective.group_store import see
from ray_weightsync.transports.collective.handover import ABANDONED, Handover
from ray_weightsync.transports.collective.member import Member
from ray_weightsync.transports.collective.rendezvous import SENDER, GroupError, Rendezvous
from ray_weightsync.weights.copying import hash_only
from ray_weightsync.weights.digest import WeightsDigest
from ray_weightsync.weights.packing import view
from ray_weightsync.weights.plan import Plan
from ray_weightsync.worker import payload
from ray_weightsync.worker.receiver import Received

SEE_LIMIT_S = 10.0
"""Seconds that a worker tries to reach the sender's store when it is asked whether it can."""

_END_S = 2.0


class CollectiveReceiver:
    """The `Receiver` of the collective transport.

    Args:
        rank_in_replica: Tells this worker's place among the workers of its replica: ``data_parallel_index * TP * PP + rank``.
    """

    def __init__(self, rank_in_replica: Callable[[], int] = lambda: 0) -> None:
        self._rank_in_replica = rank_in_replica
        self._delivery: CollectiveDelivery | None = None

    def see(self, probe: Mapping[str, Any]) -> None:
        """Prove that this process reaches the sender's store, by reading its nonce there.

        Args:
            probe: What the sender's `Meeting` says (its ``probe``).

        Raises:
            GroupError: if it cannot be reached within `SEE_LIMIT_S`, or is another one.
            ValueError: if the probe is malformed.
        """
        see(payload.text(probe, "address"), payload.count(probe, "port"), payload.text(probe, "nonce"), SEE_LIMIT_S)

    def open(self, plan: Plan, update: Mapping[str, Any]) -> CollectiveDelivery:
        """Begin to join the group that ``update["group"]`` names (see `Rendezvous.payload`), on a thread; does not wait for it.

        Args:
            plan: The plan that the worker keeps for this update.
            update: An ``update_weights`` payload: ``group``, and ``limit_s``, seconds for everything from joining to the last byte.

        Raises:
            GroupError: if the group is malformed or has no place for this worker.
            ValueError: if ``limit_s`` is not a positive number.
        """
        rendezvous, offset = Rendezvous.from_payload(update.get("group"))
        rank = offset + self._rank_in_replica()
        if not offset <= rank < rendezvous.world_size:
            raise GroupError(f"a worker of rank {rank} (rank_offset {offset}) has no place in a group of {rendezvous.world_size}")
        self.close()
        self._delivery = CollectiveDelivery(plan, rendezvous, rank, Deadline(payload.limit_s(update)))
        return self._delivery

    def drain(self, plan: Plan, update: Mapping[str, Any]) -> None:
        """Join the group, receive what the others wait for to be received here, and drop it; raises as `open` does."""
        self.open(plan, update).close()

    def close(self) -> None:
        """Give up what is under way. Idempotent."""
        delivery, self._delivery = self._delivery, None
        if delivery is not None:
            delivery.halt()


class CollectiveDelivery:
    """One transfer, as one worker receives it. The thread behind it runs from the start.

    What was yielded stays valid as long as anybody keeps it.
    """

    def __init__(self, plan: Plan, rendezvous: Rendezvous, rank: int, deadline: Deadline) -> None:
        self._plan = plan
        self._rendezvous = rendezvous
        self._deadline = deadline
        self._buckets: Handover[tuple[Bucket, torch.Tensor]] = Handover(rendezvous.num_buckets)
        self._thread = _Receiving(plan, rendezvous, rank, deadline, self._buckets)
        self._iterated = False
        self._num_bytes = 0
        self._num_tensors = 0
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(name, tensor)`` in plan order, each bucket when it is complete. Once: a stream has no second pass.

        Raises:
            TimeoutError: if not everything is there in time, saying how far it came and what is missing.
            GroupError: if a member of the group is gone or failed, or this is a second pass.
        """
        if self._iterated:
            raise GroupError(f"what came through group {self._rendezvous.id} can be iterated only once")
        self._iterated = True
        while True:
            try:
                got = self._thread.heeding(self._buckets.take)
            except EOFError:
                return
            except GroupError as error:
                if error is self._buckets.failure:
                    raise
                raise GroupError(f"{error}; {self._thread.progress()}") from error
            if got is None:
                raise TimeoutError(f"waited {self._deadline.limit_s:.1f} s; {self._thread.progress()}")
            slot, (bucket, raw) = got
            del got
            if raw.is_cuda:  # allocated on the other thread's stream: its memory must outlive what this one's stream does with it
                raw.record_stream(torch.cuda.current_stream(raw.device))
            for spec in bucket.tensors:
                self._num_bytes += spec.nbytes
                self._num_tensors += 1
                yield spec.name, view(raw, spec, begins_at=bucket.start)
            del raw
            self._buckets.release(slot)

    def received(self) -> Received:
        """What was handed over; its digest was taken here, over what arrived, before anybody else saw it.

        Raises:
            GroupError: if not everything was.
        """
        digest = self._thread.digest
        if digest is None or self._num_tensors < len(self._plan.tensors):
            raise GroupError(f"not everything was handed over; {self._thread.progress()}")
        return Received(snapshot=self._rendezvous.id, digest=digest, num_bytes=self._num_bytes, num_tensors=self._num_tensors)

    def close(self) -> None:
        """Leave the group when everything was received, or at the deadline, or at once if it failed. Idempotent."""
        self._buckets.abandon()
        with contextlib.suppress(GroupError):  # nobody is left here to be told
            self._thread.heeding(self._ended)
        self.halt()

    def _ended(self, limit_s: float) -> bool | None:
        self._thread.join(limit_s)
        return True if not self._thread.is_alive() or self._buckets.failure is not None else None

    def halt(self) -> None:
        """Leave the group, as soon as the backend can be interrupted. Idempotent."""
        self._thread.halt()
        self._thread.join(_END_S)


class _Receiving(Member):
    """Receives bucket by bucket, digests each, and hands it over."""

    def __init__(
        self, plan: Plan, rendezvous: Rendezvous, rank: int, deadline: Deadline, buckets: Handover[tuple[Bucket, torch.Tensor]]
    ) -> None:
        super().__init__(rendezvous, rank, deadline, buckets)
        self.digest: str | None = None
        self._plan = plan
        self._cuts = cut(plan, rendezvous.bucket_bytes)
        self._buckets = buckets
        self._num_buckets = 0
        self._num_bytes = 0

    def work(self, communicator: Communicator) -> None:
        digest = WeightsDigest(self._plan)
        for bucket in self._cuts:
            slot = self.heeding(self._buckets.reserve)
            if slot is None:
                raise TimeoutError(f"waited {self._deadline.limit_s:.1f} s for the loader")
            if slot == ABANDONED:
                self._drop(communicator)
                return
            raw = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self.device)
            for start, stop in self._pieces(bucket):
                communicator.broadcast(raw[start - bucket.start : stop - bucket.start], SENDER)
                self._num_bytes += stop - start
            for spec in bucket.tensors:  # before the loader sees it, who may write into it
                digest.add(hash_only(raw[spec.offset - bucket.start :][: spec.nbytes]))
            self._num_buckets += 1
            if self._num_buckets == len(self._cuts):
                self.digest = digest.hexdigest()
            self._buckets.put(slot, (bucket, raw))
            del raw  # from here on it is the loader's
        self._buckets.finish()

    def _drop(self, communicator: Communicator) -> None:
        """Receive the rest for the others' sake."""
        pieces = [stop - start for bucket in self._cuts[self._num_buckets :] for start, stop in self._pieces(bucket)]
        scratch = torch.empty(max(pieces, default=0), dtype=torch.uint8, device=self.device)  # an engine has hardly any memory to spare
        for num_bytes in pieces:
            communicator.broadcast(scratch[:num_bytes], SENDER)

    def _pieces(self, bucket: Bucket) -> Iterator[tuple[int, int]]:
        return bucket.pieces(self._rendezvous.bucket_bytes)

    def progress(self) -> str:
        where = "waiting for the group to be complete"
        if self._communicator is not None:
            where = f"waiting for bucket {self._num_buckets + 1} of {len(self._cuts)}"
        return f"{self._num_bytes} of {self._plan.num_bytes} bytes were received, {where}"
