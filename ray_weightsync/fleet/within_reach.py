"""Before a round touches engines: can the bytes get to each of its members?"""

from __future__ import annotations

import contextlib
from typing import Any

from ray_weightsync.fleet.live import Live
from ray_weightsync.fleet.parts import Parts
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.snapshot import Snapshot
from ray_weightsync.fleet.states import ReplicaState
from ray_weightsync.fleet.steps import StepFailed
from ray_weightsync.fleet.verdicts import aborted


async def within_reach(parts: Parts, snapshot: Snapshot, members: list[Replica]) -> list[Replica]:
    """Those of ``members`` that the bytes can get to.

    A sender that is itself at it needs ranks for all of them. Otherwise their nodes must have the bytes: these go to other nodes while
    engines generate, as a pause is not to wait for them. With overlap, engines are paused long before there is anything to send; those
    on other nodes read behind their own node's relay.

    Raises:
        RoundAborted, FleetTorn: if they cannot get to a replica that is not fenced.
    """
    if snapshot.live is not None:
        _require_ranks(parts, snapshot.live, members)
        _require_what_is_patched(parts, snapshot, members)
        return members
    away = [replica for replica in members if not snapshot.complete_on(str(replica.home)) and replica.home != snapshot.node_id]
    if not away:
        return members
    if parts.settings.host.overlap and not snapshot.sealed.done():
        names = ", ".join(replica.id for replica in away)
        snapshot.log.notes.append(f"{names} waited, paused, for bytes that cross to other nodes only when all are written (overlap)")
        parts.spawn(_spread_beside(parts, snapshot, away))
        return members
    await parts.staging.sealed(snapshot)
    failures = await parts.staging.spread(snapshot, away, snapshot.log.timeline)
    fenced = {replica.id for replica in away if replica.id in failures and replica.state is ReplicaState.QUARANTINED}
    culprits = {name: failed for name, failed in failures.items() if name not in fenced or len(fenced) == len(members)}
    if culprits:
        raise aborted(
            parts.roster,
            f"The bytes of version {snapshot.label} did not reach every node.",
            culprits=culprits,
            hint="call again: a store that has died is started anew, and replicas that are gone are left out",
        )
    snapshot.log.notes.extend(f"{name} left out: {failures[name]}" for name in fenced)
    return [replica for replica in members if replica.id not in fenced]


async def _spread_beside(parts: Parts, snapshot: Snapshot, away: list[Replica]) -> None:
    with contextlib.suppress(StepFailed):  # it was not sealed: whoever reads finds the slot given up
        await parts.staging.spread(snapshot, away, snapshot.log.timeline)


def _require_what_is_patched(parts: Parts, snapshot: Snapshot, members: list[Replica]) -> None:
    """Patches make a version only of the version before."""
    label = parts.roster.label
    without = [replica.id for replica in members if label is None or not replica.whole or replica.version != label]
    if snapshot.plan.partial and without:
        raise parts.roster.unchanged(
            f"Version {snapshot.label} is a patch of the version before, which "
            f"{', '.join(without)} {'does' if len(without) == 1 else 'do'} not hold.",
            phase="preflight",
            replicas=tuple(without),
            hint="send all weights first (send_weights takes them in place of patches); or remove these replicas",
        )


def _require_ranks(parts: Parts, live: Live[Any], members: list[Replica]) -> None:
    try:
        live.ranks(members)
    except StepFailed as failed:
        raise parts.roster.unchanged(
            "The replicas cannot be given ranks in a group.",
            phase="preflight",
            engine_message=failed.failure.message,
            hint="say of the engines what cannot be seen, or choose the host transport",
        ) from failed
