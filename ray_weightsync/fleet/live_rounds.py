"""What a sender whose bytes go straight to the engines asks for while its round goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray_weightsync.config import Collective, Native
from ray_weightsync.fleet.broadcast import Broadcast
from ray_weightsync.fleet.live import Live
from ray_weightsync.fleet.parts import Parts
from ray_weightsync.fleet.relay import NativeMembers, Relay
from ray_weightsync.fleet.topology import Group
from ray_weightsync.fleet.values import Way
from ray_weightsync.weights.plan import Plan

if TYPE_CHECKING:
    from ray_weightsync.protocol.messages import Payload
    from ray_weightsync.transports.collective.rendezvous import Meeting


class LiveRounds:
    """The rounds of one session in which nothing need be kept. One at a time, as all rounds."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def begin(self, offer: Meeting | Native, plan: Plan, way: Way) -> Live[Any]:
        """The sender is met at a `Meeting`, or has a trainer engine of vLLM's, or one that has the same face."""
        if isinstance(offer, Native):
            relay = Relay(offer, plan, self._parts.timeouts, on_group=self._grouped)
            if isinstance(way.transport, Collective):
                relay.name = "collective"  # of the sender's making, toward receivers of vLLM's
            return relay
        return Broadcast(offer, on_group=self._grouped)

    async def members(self, snapshot_id: str) -> Group | NativeMembers | None:
        """Whom a sender that made an offer is to expect, as soon as all of them are about to start; None if nobody.

        Raises:
            RoundAborted, FleetTorn: if the round ends before.
        """
        members: Group | NativeMembers | None = await self._of(snapshot_id).members()
        return members

    async def ended(self, snapshot_id: str) -> str | None:
        """Why a sender that made an offer is to stop, as soon as that is so; None if all was received.

        Raises:
            RoundAborted, FleetTorn: if there is no such round.
        """
        return await self._of(snapshot_id).ended()

    async def call(self, snapshot_id: str, verb: str, payload: Payload | None) -> None:
        """Have every member carry out a verb of the protocol; see `Relay.call`.

        Raises:
            RoundAborted, FleetTorn: if there is no such round, or it does not go on.
            ConfigError: for a call that no round can carry out.
        """
        relay = self._of(snapshot_id)
        assert isinstance(relay, Relay), "it was opened with a trainer engine"
        await relay.call(verb, payload)

    def _grouped(self, table: str) -> None:
        self._parts.roster.ranks = table

    def _of(self, snapshot_id: str) -> Live[Any]:
        live = self._parts.staging.require(snapshot_id).live
        assert live is not None, "it was opened with an offer"
        return live
