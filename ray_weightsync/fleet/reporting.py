"""The report of a round, put together from what is known when it ends. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.roster import Roster
from ray_weightsync.fleet.round import RoundLog
from ray_weightsync.fleet.snapshot import Snapshot
from ray_weightsync.fleet.stock import missing_of
from ray_weightsync.fleet.values import Settings
from ray_weightsync.protocol.channel import PAUSE, SET_VERSION
from ray_weightsync.report import ReplicaReport, SyncReport


def report_of(
    snapshot: Snapshot,
    log: RoundLog,
    roster: Roster,
    settings: Settings,
    replicas: Sequence[ReplicaReport],
    *,
    notes: Iterable[str],
    repeated: bool,
) -> SyncReport:
    """What the round did."""
    written, timeline = snapshot.written(), log.timeline
    counts = [replica.requests_recomputed for replica in replicas]
    guarantees, missing = promises(roster.members, snapshot, settings, log, first=roster.ordinal <= 1)
    return SyncReport(
        version=snapshot.version,
        ordinal=roster.ordinal,
        round_id=log.round_id,
        epoch=roster.epoch,
        plan_digest=snapshot.plan.digest,
        weights_digest=written.digest,
        transport=log.transport,
        transport_reason=log.transport_reason,
        num_bytes=written.num_bytes,
        num_tensors=written.num_tensors,
        phases_s={phase: timeline.span_s(phase) for phase in timeline.spans},
        apply_s=timeline.span_s("start", "update", "finish", "outcome"),
        replicas=tuple(replicas),
        pause_s=max((replica.pause_s for replica in replicas), default=0.0),
        trainer_blocked_s=written.stage_s,
        total_s=time.monotonic() - log.began,
        requests_recomputed=None if None in counts else sum(count for count in counts if count is not None),
        guarantees=guarantees,
        missing=missing,
        notes=(*log.notes, *notes),
        repeated=repeated,
    )


def promises(
    replicas: Iterable[Replica], snapshot: Snapshot, settings: Settings, log: RoundLog, *, first: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What was held for this fleet in its ``first`` round or a later one, and what could not be."""
    members = list(replicas)
    stock = [replica for replica in members if replica.engine.facts.is_stock]
    given: list[str] = []
    missing: list[str] = []
    if not log.attested:
        missing.append(f"{log.transport} goes past the workers' check of the bytes: only that the update was complete is attested")
    elif not stock:
        given.append("bytes attested by every worker")
    if not snapshot.kept and not stock:
        missing.append(
            "no snapshot is kept, so nobody can be healed or added without the trainer: Collective(keep_snapshot=True) keeps one, and host"
        )
    if log.grouped:
        missing.append("a replica that is lost while bytes move takes the others of its round with it")
    if settings.on_failure.after_start == "quarantine":
        if not log.grouped:
            given.append("a lost replica does not stop the others")
    elif first:
        missing.append("all or none: nothing was committed before that could be gone back to, so what failed would have been fenced")
    else:
        given.append("all or none")
    if settings.cache != "recompute":
        given.append(f"cache policy {settings.cache!r}")
    of_engines = [each for replica in stock for each in missing_of(replica)]
    for replica in members:
        facts, channel = replica.engine.facts, replica.engine.channel
        unjudged = {each for worker in facts.workers for each in worker.unjudged.get(snapshot.plan.digest, ())}
        of_engines.extend(f"{replica.id}: {each}" for each in sorted(unjudged))
        if facts.kind == "sync":
            of_engines.append(
                f"{replica.id}: a synchronous LLM has no pause; requests wait for the actor's turn, and a torn one is not fenced"
            )
        elif not channel.supports(PAUSE):
            of_engines.append(f"{replica.id}: it cannot be paused by its client; a request during the update may end the engine")
        if not channel.supports(SET_VERSION):
            of_engines.append(f"{replica.id}: it keeps no version label, so a torn state leaves no mark on it")
    if not of_engines:
        given.insert(0, "plan checked on a meta twin before anything changed")
        if settings.cache == "recompute":
            given.append("caches of old weights dropped before resume")
    return tuple(given), (*missing, *of_engines)
