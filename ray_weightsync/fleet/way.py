"""How the next round can go, for the fleet as it was last seen. Asks no engine: the round's own preflight does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ray_weightsync.config import Collective, Host, Transport, transport_name
from ray_weightsync.errors import FleetTorn, RoundAborted
from ray_weightsync.fleet.choosing import MemberFacts, SenderFacts, choose, member_of, out_of_reach
from ray_weightsync.fleet.parts import Parts
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.states import ReplicaState
from ray_weightsync.fleet.values import Way

BY_LEAVE = (ReplicaState.JOINING, ReplicaState.QUARANTINED)
"""A round leaves out those of its members that are in these states and cannot take part; it ends for others."""


def way_of(parts: Parts, sender: SenderFacts) -> Way:
    """How the next round of ``sender`` is to go: as was asked for, or by what ``transport="auto"`` comes to.

    Raises:
        RoundAborted, FleetTorn: if no transport reaches those who serve, or not the one that was asked for.
    """
    candidates = parts.roster.members
    stock = {replica.engine.facts.is_stock for replica in candidates if replica.state not in BY_LEAVE}
    # One that restarted with another worker side than those who serve have will be left out, and is not to decide for them.
    members = [member_of(replica.engine) for replica in candidates if not stock or replica.engine.facts.is_stock in stock]
    if (asked := parts.settings.way) is not None:
        if (why := out_of_reach(asked.transport, sender, members)) is not None:
            raise _no_way(parts, members, f"transport={transport_name(asked.transport)!r} does not reach these engines.", why)
        return replace(asked, stock=_stock_backend(candidates))
    choice = choose(sender, members, all_or_none=parts.settings.on_failure.after_start == "all_or_none")
    if choice.transport is None:
        raise _no_way(parts, members, "transport='auto' finds no way to these engines.", choice.why)
    transport = _kept_as(parts.settings.host, choice.transport)
    return Way(transport=transport, reason=f"auto: {choice.why}", stock=_stock_backend(candidates))


def _kept_as(host: Host, chosen: Transport) -> Transport:
    """What was chosen, with what the session says of host memory."""
    if isinstance(chosen, Host):
        return host
    return replace(chosen, host=host) if isinstance(chosen, Collective) else chosen


def _stock_backend(candidates: Sequence[Replica]) -> str | None:
    """The backend of vLLM's own that engines of a fleet were started on; None if those who serve have our worker side."""
    needed = [replica for replica in candidates if replica.state not in BY_LEAVE] or candidates
    return next((replica.engine.facts.backend for replica in needed if replica.engine.facts.is_stock), None)


def _no_way(parts: Parts, members: Sequence[MemberFacts], what: str, why: str) -> RoundAborted | FleetTorn:
    return parts.roster.unchanged(
        what,
        phase="open",
        replicas=tuple(member.id for member in members),
        engine_message=why,
        hint="start engines with **ray_weightsync.vllm_engine_args(), to which host memory always reaches; or name another transport",
    )
