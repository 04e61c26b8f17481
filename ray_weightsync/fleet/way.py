"""How a round of ``transport="auto"`` goes, for the fleet as it was last seen. Asks no engine: the round's own preflight does."""

from __future__ import annotations

from ray_weightsync.errors import RoundAborted
from ray_weightsync.fleet.choosing import SenderFacts, choose, member_of
from ray_weightsync.fleet.parts import Parts
from ray_weightsync.fleet.states import ReplicaState
from ray_weightsync.fleet.values import Way

BY_LEAVE = (ReplicaState.JOINING, ReplicaState.QUARANTINED)
"""A round leaves out those of its members that are in these states and cannot take part; it ends for others."""


def way_of(parts: Parts, sender: SenderFacts) -> Way:
    """How the next round of ``sender`` is to go.

    Raises:
        RoundAborted: if no transport reaches those who serve.
    """
    candidates = parts.roster.members
    stock = {replica.engine.facts.is_stock for replica in candidates if replica.state not in BY_LEAVE}
    # One that restarted with another worker side than those who serve have will be left out, and is not to decide for them.
    members = [member_of(replica.engine) for replica in candidates if not stock or replica.engine.facts.is_stock in stock]
    choice = choose(sender, members, all_or_none=parts.settings.on_failure.after_start == "all_or_none")
    if choice.transport is None:
        raise RoundAborted(
            f"Nothing changed: {parts.roster.serves()}. transport='auto' finds no way to these engines.",
            phase="open",
            replicas=tuple(member.id for member in members),
            engine_message=choice.why,
            hint="start engines with **ray_weightsync.vllm_engine_args(), to which host memory always reaches; or name a transport",
        )
    return Way(transport=choice.transport, reason=f"auto: {choice.why}")
