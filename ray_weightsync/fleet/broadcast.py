"""One round's broadcast, as the coordinator knows it: where the sender is to be met, and by which ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray_weightsync.fleet.choosing import GPU, no_nccl_in
from ray_weightsync.fleet.live import Live
from ray_weightsync.fleet.topology import Group

if TYPE_CHECKING:
    from ray_weightsync.engines.facts import EngineFacts
    from ray_weightsync.fleet.replica import Replica
    from ray_weightsync.transports.collective.rendezvous import Meeting


class Broadcast(Live[Group]):
    """A group of the sender and every worker, for one round.

    Args:
        meeting: Where the sender is to be met.
        on_group: Told who has which ranks, when the group is made.
    """

    receiver = name = "collective"

    def __init__(self, meeting: Meeting, *, on_group: Callable[[str], None] = lambda table: None) -> None:
        super().__init__(on_group=on_group)
        self.meeting = meeting
        self.group_id = meeting.id

    def probe(self) -> dict[str, Any]:
        """Where the sender is to be met."""
        return self.meeting.probe()

    def refusal(self, facts: EngineFacts) -> str | None:
        """Workers that came since the way was chosen may be others."""
        if self.meeting.backend != "nccl":
            return None
        for worker in facts.workers:
            if worker.device is not None and worker.device.type != GPU:
                return f"worker {worker.rank} is not on a GPU, and the sender's bytes go from one"
            if not worker.nccl:
                return no_nccl_in(f"worker {worker.rank}")
        return None

    def _invite(self, group: Group, replicas: Sequence[Replica], common: Mapping[str, Any]) -> tuple[Group, dict[str, dict[str, Any]]]:
        rendezvous = self.meeting.of(group.world_size)
        places = {replica.id: rendezvous.payload(group.member(replica.id).rank_offset) for replica in replicas}
        return group, {name: {**common, "group": place} for name, place in places.items()}
