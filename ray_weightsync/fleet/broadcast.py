"""One round's broadcast, as the coordinator knows it: where the sender is to be met, who is in the group, and who fell out of it.

No byte passes through here. The sender offers a place to meet when it opens the round; the group is made of whoever is paused and marked,
directly before they start; and should one of them be lost, the sender is told, who can then end the others' waiting at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ray_weightsync.errors import CallFailure, ConfigError, RoundAborted
from ray_weightsync.fleet.steps import StepFailed
from ray_weightsync.fleet.topology import Group, group_of, shape_of

if TYPE_CHECKING:
    from ray_weightsync.fleet.replica import Replica
    from ray_weightsync.transports.collective.rendezvous import Meeting


class Broadcast:
    """A group of the sender and every worker, for one round.

    Args:
        meeting: Where the sender is to be met.
        on_group: Told who has which ranks, when the group is made.
    """

    def __init__(self, meeting: Meeting, *, on_group: Callable[[str], None] = lambda table: None) -> None:
        self.meeting = meeting
        self._on_group = on_group
        loop = asyncio.get_running_loop()
        self._group: asyncio.Future[Group | None] = loop.create_future()
        self._ended: asyncio.Future[str | None] = loop.create_future()

    def payloads(self, replicas: Sequence[Replica]) -> dict[str, dict[str, Any]]:
        """Make the group of these replicas, and say to each what it needs to join.

        Returns:
            By replica, the ``group`` of its ``update_weights`` payload.

        Raises:
            StepFailed: if they cannot be given ranks, or the sender is gone.
        """
        if self._ended.done():
            raise StepFailed("stage", CallFailure(message=str(self._ended.result()), kind="raised", elapsed_s=0.0), 0.0)
        group = ranks_of(replicas)
        self._on_group(group.table())
        rendezvous = self.meeting.of(group.world_size)
        if not self._group.done():
            self._group.set_result(group)
        return {replica.id: rendezvous.payload(group.member(replica.id).rank_offset) for replica in replicas}

    def invite_nobody(self) -> None:
        """Every member has these weights already, if they are the same: the sender is only to say which they are."""
        if not self._group.done():
            self._group.set_result(None)

    async def group(self) -> Group | None:
        """The group, as soon as its members are about to start; None if nobody is to receive anything.

        Raises:
            RoundAborted: if the round ends before.
        """
        either: set[asyncio.Future[Any]] = {self._group, self._ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._group.done():
            raise RoundAborted("The round ended before any engine was to receive anything.", phase="update")
        return self._group.result()

    def lose(self, replica: str, why: str) -> None:
        """A member will not receive: nobody is to wait for it."""
        self.end(f"{replica}: {why}")

    def end(self, why: str | None = None) -> None:
        """Nothing more is to be sent. Idempotent: the first reason stays."""
        if not self._ended.done():
            self._ended.set_result(why)

    async def ended(self) -> str | None:
        """Why nothing more is to be sent, as soon as that is so; None if all was."""
        return await asyncio.shield(self._ended)


def ranks_of(replicas: Sequence[Replica]) -> Group:
    """The ranks of the sender and of every worker of these replicas.

    Raises:
        StepFailed: if they cannot be told.
    """
    try:
        return group_of([shape_of(replica.engine) for replica in replicas])
    except ConfigError as error:
        raise StepFailed("preflight", CallFailure(message=str(error), kind="raised", elapsed_s=0.0), 0.0) from error
