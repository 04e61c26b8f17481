"""The trainer's part in a broadcast: it offers a place to meet, waits until the engines are about to receive, and sends.

The bytes go straight from here to the engines' workers.
"""

from __future__ import annotations

import torch

from ray_weightsync.config import Collective, Timeouts
from ray_weightsync.errors import ConfigError
from ray_weightsync.fleet.choosing import no_nccl_in
from ray_weightsync.fleet.link import CoordinatorLink
from ray_weightsync.fleet.topology import Group
from ray_weightsync.trainer.live import Kept, LiveSending
from ray_weightsync.transports.collective.rendezvous import Meeting, RendezvousServer
from ray_weightsync.transports.collective.sender import BroadcastSender
from ray_weightsync.weights.packing import Packed
from ray_weightsync.weights.plan import Plan
from ray_weightsync.weights.sources import WeightSource
from ray_weightsync.worker.device import has_nccl


class Broadcasting(LiveSending):
    """One round's broadcast from this process. It owns the place where the engines' workers meet the sender.

    Args:
        link: The way to the coordinator.
        options: Buckets and network interface.
        timeouts: The session's deadlines.

    Raises:
        ConfigError: if the interface is not there; or for a trainer with a GPU, without what NCCL needs.
    """

    def __init__(self, link: CoordinatorLink, options: Collective, timeouts: Timeouts) -> None:
        super().__init__(link, timeouts)
        on_gpu = torch.cuda.is_available()
        if on_gpu and not has_nccl():
            raise ConfigError(f"a broadcast from a GPU needs NCCL: {no_nccl_in('the trainer')}")
        self._server = RendezvousServer(backend="nccl" if on_gpu else "gloo", options=options)

    @property
    def offer(self) -> Meeting:
        """Where the sender is to be met."""
        return self._server.meeting

    def _send(self, round_id: str, members: Group, source: WeightSource, plan: Plan, kept: Kept | None) -> Packed:
        update_s = self._timeouts.for_bytes("update", plan.num_bytes)
        with BroadcastSender(self.offer.of(members.world_size), limit_s=update_s) as sender:
            # Without a coordinator its successor settles the engines; what was begun is sent.
            self._watch_for(round_id, sender.abort)
            return sender.send(source, plan, on_packed=None if kept is None else kept.keep)

    def close(self) -> None:
        """Nobody is met here any more. Idempotent."""
        self._server.close()
        super().close()
