"""The trainer's part in a broadcast: it offers a place to meet, waits until the engines are about to receive, and sends.

Control calls go to the coordinator from here; the bytes go straight to the engines' workers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from ray_weightsync.config import Collective, Timeouts
from ray_weightsync.errors import WeightSyncError
from ray_weightsync.fleet.link import CoordinatorLink
from ray_weightsync.fleet.topology import Group
from ray_weightsync.transports.collective.rendezvous import Meeting, RendezvousServer
from ray_weightsync.transports.collective.sender import BroadcastSender
from ray_weightsync.transports.host.layout import SlotError
from ray_weightsync.weights.digest import weights_digest
from ray_weightsync.weights.packing import Packed, pack
from ray_weightsync.weights.plan import Plan
from ray_weightsync.weights.sources import WeightSource

logger = logging.getLogger(__name__)

LOOK_S = 0.1
"""How often it is looked whether the coordinator has given the round up, in seconds."""

END_S = 10.0


class Kept:
    """Where a broadcast's bytes are kept as well.

    Args:
        payload: Flat uint8, as large as the plan's payload.
        progress: Told how many bytes of it are final.
        progress_bytes: How often, where nothing is sent.
    """

    def __init__(self, payload: torch.Tensor, progress: Callable[[int], None], progress_bytes: int) -> None:
        self.payload = payload
        self.progress = progress
        self.progress_bytes = progress_bytes
        self._lost = False

    def keep(self, start: int, piece: torch.Tensor) -> None:
        """Keep the bytes that lie at ``start``."""
        if self._lost:
            return
        end = start + piece.numel()
        try:
            self.payload[start:end].copy_(piece)
            self.progress(end)
        except (SlotError, OSError) as error:  # the engines are not to lose it for the copy's sake; the store will not seal it
            self._lost = True
            logger.warning("what is broadcast is not kept: %s", error)


class Broadcasting:
    """One round's broadcast from this process. A context manager: it owns the place where the engines' workers meet the sender.

    Attributes:
        begun: Whether `send` was called.

    Args:
        link: The way to the coordinator.
        options: Buckets and network interface.
        timeouts: The session's deadlines.

    Raises:
        ConfigError: if the interface is not there.
        ModuleNotFoundError: for a trainer with a GPU, without what NCCL needs.
    """

    def __init__(self, link: CoordinatorLink, options: Collective, timeouts: Timeouts) -> None:
        self._link = link
        self._timeouts = timeouts
        self.begun = False
        self._watch: _Watch | None = None
        self._server = RendezvousServer(backend="nccl" if torch.cuda.is_available() else "gloo", options=options)

    @property
    def meeting(self) -> Meeting:
        """Where the sender is to be met."""
        return self._server.meeting

    def send(self, round_id: str, source: WeightSource, plan: Plan, *, kept: Kept | None = None) -> Packed:
        """Wait until the round's engines are about to receive, and send them everything.

        Args:
            round_id: From the `Ticket`.
            source: What is sent.
            plan: As the coordinator knows it.
            kept: Where the bytes are kept as well.

        Returns:
            What was sent. A version that the engines have already is not sent again: then it says what would have been.

        Raises:
            RoundAborted: if the round ended before.
            GroupError, TimeoutError: if a receiver was lost, or something took too long. The receivers were told.
            Exception: whatever the source raises. The receivers were told.
        """
        self.begun = True
        limit_s = self._timeouts.round_s(plan.num_bytes)
        group: Group | None = self._link.wait(self._link.submit("broadcast_group", round_id), "broadcast_group", limit_s=limit_s)
        if group is None:
            return _told(source, plan, kept)
        update_s = self._timeouts.for_bytes("update", plan.num_bytes)
        with BroadcastSender(self.meeting.of(group.world_size), limit_s=update_s) as sender:
            self._watch = _Watch(self._link.submit("broadcast_ended", round_id), sender)
            self._watch.start()
            return sender.send(source, plan, on_packed=None if kept is None else kept.keep)

    def close(self) -> None:
        """Nobody is met here any more. Idempotent."""
        self._server.close()
        if self._watch is not None:  # not before: the round is not to wait for it
            self._watch.stop()

    def __enter__(self) -> Broadcasting:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _told(source: WeightSource, plan: Plan, kept: Kept | None) -> Packed:
    if kept is not None:
        return pack(source, plan, kept.payload, on_progress=kept.progress, progress_bytes=kept.progress_bytes)
    return Packed(digest=weights_digest(source), num_bytes=plan.weight_bytes, num_tensors=len(plan.tensors))


class _Watch(threading.Thread):
    """Ends the broadcast as soon as the coordinator says that somebody will not receive: the others are not to wait for the deadline."""

    def __init__(self, ended: Any, sender: BroadcastSender) -> None:
        super().__init__(name="rws-broadcast-watch", daemon=True)
        self._ended = ended
        self._sender = sender
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End it, and wait until it has, which takes `LOOK_S` seconds at most unless this process gets no processor time."""
        self._stopped.set()
        self.join(END_S)

    def run(self) -> None:
        """Wait until the round needs no more bytes, for whichever reason."""
        while not self._stopped.is_set():
            if not ray.wait([self._ended], timeout=LOOK_S)[0]:
                continue
            try:
                why = ray.get(self._ended, timeout=END_S)  # it is there
            except (RayError, WeightSyncError) as error:  # its successor settles the engines; what was begun is sent
                logger.warning("the coordinator does not watch this broadcast any more: %s", error)
                return
            if why is not None:
                self._sender.abort(why)
            return
