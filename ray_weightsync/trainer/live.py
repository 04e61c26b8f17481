"""The trainer's part in a round whose bytes go straight from here to the engines: it waits until these are about to receive, and sends.

Control calls go to the coordinator from here. How the bytes go is said by `Broadcasting` and `Relaying`.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.exceptions import RayError

from ray_weightsync.config import Native, Timeouts
from ray_weightsync.errors import WeightSyncError
from ray_weightsync.fleet.link import CoordinatorLink
from ray_weightsync.transports.host.layout import SlotError
from ray_weightsync.weights.digest import weights_digest
from ray_weightsync.weights.packing import Packed, pack
from ray_weightsync.weights.plan import Plan
from ray_weightsync.weights.sources import SourceLike, WeightSource, as_source

if TYPE_CHECKING:
    from ray_weightsync.transports.collective.rendezvous import Meeting

logger = logging.getLogger(__name__)

LOOK_S = 0.1
"""How often it is looked whether the coordinator has given the round up, in seconds."""

END_S = 10.0


class Kept:
    """Where the bytes are kept as well.

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
            logger.warning("what is sent is not kept: %s", error)


class LiveSending(ABC):
    """One round's sending from this process. A context manager.

    Attributes:
        offer: What the coordinator is told when the round is opened.
        begun: Whether `send` was called.

    Args:
        link: The way to the coordinator.
        timeouts: The session's deadlines.
    """

    def __init__(self, link: CoordinatorLink, timeouts: Timeouts) -> None:
        self._link = link
        self._timeouts = timeouts
        self.begun = False
        self._watch: _Watch | None = None

    @property
    @abstractmethod
    def offer(self) -> Meeting | Native: ...

    def source(self, given: SourceLike) -> WeightSource:
        """A source of what the caller gave."""
        return as_source(given)

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
        members = self._link.wait(self._link.submit("live_members", round_id), "live_members", limit_s=limit_s)
        if members is None:
            return self._told(source, plan, kept)
        return self._send(round_id, members, source, plan, kept)

    @abstractmethod
    def _send(self, round_id: str, members: Any, source: WeightSource, plan: Plan, kept: Kept | None) -> Packed: ...

    def _told(self, source: WeightSource, plan: Plan, kept: Kept | None) -> Packed:
        if kept is not None:
            return pack(source, plan, kept.payload, on_progress=kept.progress, progress_bytes=kept.progress_bytes)
        return Packed(digest=weights_digest(source), num_bytes=plan.weight_bytes, num_tensors=len(plan.tensors))

    def _watch_for(self, round_id: str, on_end: Callable[[str], None], on_lost: Callable[[Exception], None] = lambda error: None) -> None:
        """Have ``on_end`` called as soon as the coordinator says that somebody will not receive; ``on_lost`` if it is gone."""
        self._watch = _Watch(self._link.submit("live_ended", round_id), on_end, on_lost)
        self._watch.start()

    def close(self) -> None:
        """Nothing more is sent in this round. Idempotent."""
        if self._watch is not None:  # not before: the round is not to wait for it
            self._watch.stop()

    def __enter__(self) -> LiveSending:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Watch(threading.Thread):
    """The others are not to wait for the deadline when one will not receive."""

    def __init__(self, ended: Any, on_end: Callable[[str], None], on_lost: Callable[[Exception], None]) -> None:
        super().__init__(name="rws-live-watch", daemon=True)
        self._ended = ended
        self._on_end = on_end
        self._on_lost = on_lost
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
            except (RayError, WeightSyncError) as error:
                logger.warning("the coordinator does not watch this round any more: %s", error)
                self._on_lost(error)
                return
            if why is not None:
                self._on_end(why)
            return
