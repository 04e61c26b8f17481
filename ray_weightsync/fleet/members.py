"""Who takes part in a round: everyone who can. One that serves and cannot is a reason to abort."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from ray_weightsync.errors import CallFailure, FleetTorn
from ray_weightsync.fleet.homes import home_of
from ray_weightsync.fleet.parts import Parts
from ray_weightsync.fleet.preflight import PHASE, Source, check, judging_s
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.round import RoundLog
from ray_weightsync.fleet.snapshot import Snapshot
from ray_weightsync.fleet.states import ReplicaEvent, ReplicaState
from ray_weightsync.fleet.steps import StepFailed
from ray_weightsync.fleet.stock import mixed
from ray_weightsync.fleet.verdicts import aborted
from ray_weightsync.protocol.fanout import fan_out
from ray_weightsync.protocol.reading import words


async def members_of(snapshot: Snapshot, log: RoundLog, parts: Parts) -> list[Replica]:
    """Look at every replica, have the plan judged and the memory seen where that was not done before.

    Raises:
        RoundAborted: if a replica that is not fenced cannot take part.
        FleetTorn: if nobody can, or so nobody serves any more.
        SessionConflict: because other sessions have taken all engines.
    """
    roster = parts.roster
    log.notes.clear()
    candidates = roster.members
    joining = {replica.id for replica in candidates if replica.state is ReplicaState.JOINING}
    failures = await unable(candidates, snapshot, log, parts)
    culprits = {}
    for name, failed in failures.items():
        replica = roster.replicas[name]
        if replica.state in (ReplicaState.QUARANTINED, ReplicaState.RETIRED) or name in joining:
            log.notes.append(f"{name} left out: {failed}")
            continue
        culprits[name] = failed
        if failed.failure.kind in ("died", "out_of_step"):  # neither can be mended: the next call leaves it out
            replica.happen(ReplicaEvent.FAIL, error=str(failed))
    if failures:
        roster.changed()
    if culprits:
        raise aborted(
            roster,
            f"Version {snapshot.label} was refused before anything was touched.",
            culprits=culprits,
            hint="mend what the engines named; replicas that are gone are left out when the call is repeated",
        )
    members = [replica for replica in candidates if replica.id not in failures]
    if (why := mixed(members)) is not None:
        raise roster.unchanged(
            f"{why}.",
            phase=PHASE,
            replicas=tuple(replica.id for replica in members),
            hint="remove() those of one kind",
        )
    for replica in members:
        if replica.state is ReplicaState.JOINING:
            replica.happen(ReplicaEvent.INSPECT)
    if not members:
        parts.claims.require_any(roster.replicas.values())
        hopeless = all(failed.failure.kind in ("died", "out_of_step") for failed in failures.values())
        raise FleetTorn(
            f"No replica serves: version {snapshot.label} can be brought to none. {'; '.join(log.notes)}",
            phase=PHASE,
            replicas=tuple(roster.replicas),
            hint="replace the engines and attach again" if hopeless else "mend what keeps them from it and call again",
        )
    return members


async def unable(replicas: Iterable[Replica], snapshot: Snapshot, log: RoundLog, parts: Parts) -> dict[str, StepFailed]:
    """Which of ``replicas`` cannot take part in a round that brings ``snapshot`` to them, and why. Retires one that another session has."""
    timeouts = parts.timeouts
    failures: dict[str, StepFailed] = {}
    asked: list[Replica] = []
    for replica in replicas:
        if replica.unanswered:
            failure = CallFailure(message="it has not answered an earlier call yet", kind="unanswered", elapsed_s=0.0)
            failures[replica.id] = StepFailed(PHASE, failure, timeouts.preflight_s)
        else:
            asked.append(replica)
    ask = partial(
        check,
        plan=snapshot.plan,
        source_for=await _sources(snapshot, parts),
        served=snapshot.live.stock_backend if snapshot.live is not None else None,
        claims=parts.claims,
        timeouts=timeouts,
        timeline=log.timeline,
    )
    outcomes = await fan_out(
        {replica.id: partial(ask, replica) for replica in asked},
        what="preflight",
        limit_s=6 * timeouts.preflight_s
        + judging_s(snapshot.plan)
        + timeouts.finish_s
        + timeouts.for_bytes("stage", snapshot.plan.num_bytes),
        warn_every_s=timeouts.warn_every_s,
    )
    for name, failure in outcomes.failures.items():
        raised = outcomes.errors.get(name)
        if raised is not None and not isinstance(raised, StepFailed):
            raise raised
        failures[name] = raised if isinstance(raised, StepFailed) else StepFailed(PHASE, failure, timeouts.preflight_s)
    return failures


async def _sources(snapshot: Snapshot, parts: Parts) -> Callable[[Replica], Awaitable[Source]]:
    """Finds where a replica is to have the bytes from: the sender itself, or its own node, where a copy is begun if there is none."""
    nodes = await _nodes(parts) if snapshot.kept else {}
    copies, live = parts.staging.copies, snapshot.live

    async def source_for(replica: Replica) -> Source:
        # Of a live round, too: should it fail, this is where the replica would be brought back from.
        replica.home = home_of(replica.engine.facts, nodes, origin=snapshot.origin)
        if live is not None:
            if (why := live.refusal(replica.engine.facts)) is not None:
                raise StepFailed.refused(PHASE, why, parts.timeouts.preflight_s)
            return Source(live.receiver, live.probe(), live.seen_once)
        copy = await copies.allotted(snapshot, replica.home)
        return Source("host", partial(copies.probe, copy.node_id), copy.store)

    return source_for


async def _nodes(parts: Parts) -> dict[str, str]:
    limit_s = parts.timeouts.preflight_s
    try:
        return await asyncio.wait_for(parts.staging.copies.stores.nodes(), limit_s)
    except Exception as error:
        raise parts.roster.unchanged(
            "Ray did not tell which nodes there are.",
            phase=PHASE,
            limit_s=limit_s,
            engine_message=words(error) or type(error).__name__,
            hint="look after Ray's head node and call again",
        ) from error
