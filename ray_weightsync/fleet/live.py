"""What a round knows of a sender that is itself at it: bytes that go straight to the engines, while all of them receive.

No byte passes through here. Whom the sender is to reach is known when all are paused and marked, directly before they start; should one
of them be lost, the sender is told, who can then end the others' waiting at once. `Broadcast` and `Relay` say how the bytes go.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ray_weightsync.errors import ConfigError, RoundAborted
from ray_weightsync.fleet.steps import StepFailed
from ray_weightsync.fleet.topology import Group, group_of, shape_of

if TYPE_CHECKING:
    from ray_weightsync.engines.facts import EngineFacts
    from ray_weightsync.fleet.replica import Replica

Invited = TypeVar("Invited")


class Live(ABC, Generic[Invited]):
    """The sender and every member, for one round.

    Attributes:
        receiver: The workers' receiver, by its name on the wire.
        name: How the bytes go, for the report.
        seen_once: A member that has proved to be able to take part need not do so again in its present incarnation: under this name.
            None for what is new in every round.
        attested: Every worker can attest the bytes.
        grouped: A member that is lost while bytes move takes the others with it.
        stock_backend: The backend of vLLM's own whose engines can receive without our worker side, if any.
        group_id: The receivers know the bytes by this, if not by the round's own id.

    Args:
        on_group: Told who has which ranks, when that is known.
    """

    receiver: str
    name: str
    seen_once: str | None = None
    attested: bool = True
    grouped: bool = True
    stock_backend: str | None = None
    group_id: str | None = None

    def __init__(self, *, on_group: Callable[[str], None] = lambda table: None) -> None:
        self._on_group = on_group
        loop = asyncio.get_running_loop()
        self._invited: asyncio.Future[Invited | None] = loop.create_future()
        self._ended: asyncio.Future[str | None] = loop.create_future()

    @abstractmethod
    def probe(self) -> dict[str, Any]:
        """What a worker is shown before the round, to prove that it can receive."""

    def refusal(self, facts: EngineFacts) -> str | None:
        """Why an engine cannot receive in this way, or None."""
        return None

    def ranks(self, replicas: Sequence[Replica]) -> Group:
        """The group that these replicas would be in.

        Raises:
            StepFailed: if there can be none.
        """
        return ranks_of(replicas)

    def payloads(self, replicas: Sequence[Replica], common: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Make the group of these replicas, and tell the sender.

        Args:
            replicas: Who is about to start.
            common: What every ``update_weights`` payload of the round holds.

        Returns:
            By replica, its ``update_weights`` payload.

        Raises:
            StepFailed: if they cannot be given ranks, or the sender is gone.
        """
        if self._ended.done():
            raise StepFailed.refused("stage", str(self._ended.result()))
        group = self.ranks(replicas)
        self._on_group(group.table())
        invited, payloads = self._invite(group, replicas, common)
        if not self._invited.done():
            self._invited.set_result(invited)
        return payloads

    @abstractmethod
    def _invite(self, group: Group, replicas: Sequence[Replica], common: Mapping[str, Any]) -> tuple[Invited, dict[str, dict[str, Any]]]:
        """What the sender is told, and the payloads."""

    def invite_nobody(self) -> None:
        """Every member has these weights already, if they are the same: the sender is only to say which they are."""
        if not self._invited.done():
            self._invited.set_result(None)

    async def members(self) -> Invited | None:
        """Whom the sender is to reach, as soon as they are about to start; None if nobody is to receive anything.

        Raises:
            RoundAborted: if the round ends before.
        """
        either: set[asyncio.Future[Any]] = {self._invited, self._ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._invited.done():
            raise RoundAborted("The round ended before any engine was to receive anything.", phase="update")
        return self._invited.result()

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
        raise StepFailed.refused("preflight", str(error)) from error
