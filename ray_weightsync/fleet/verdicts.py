"""What a round's outcome means for the caller: pure functions from reports to the error, if any, that says what holds now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ray_weightsync.config import FailurePolicy
from ray_weightsync.errors import FleetTorn, ReplicasLost, RoundAborted, WeightSyncError
from ray_weightsync.fleet.steps import StepFailed
from ray_weightsync.report import SyncReport


def verdict(
    report: SyncReport, policy: FailurePolicy, log_hints: Mapping[str, str | None], *, serving: Sequence[str]
) -> WeightSyncError | None:
    """The error to raise for a round that passed *start*, or None. ``serving``: all replicas that serve its version now."""
    lost = [replica for replica in report.replicas if replica.failed_phase is not None]
    if not lost:
        return None
    first = lost[0]
    fields = {
        "phase": first.failed_phase,
        "replicas": tuple(replica.id for replica in lost),
        "elapsed_s": first.phases_s.get(first.failed_phase or ""),
        "engine_message": "; ".join(f"{replica.id}, {replica.failed_phase}: {replica.error}" for replica in lost),
        "log_hint": _logs(report, log_hints),
        "report": report,
    }
    names = ", ".join(replica.id for replica in lost)
    if not serving:
        return FleetTorn(
            f"No replica serves: version {report.version} was proved on none. Fenced, with a label that starts with '!rws:': {names}.",
            hint="none may serve until healed: mend or replace the engines, then send_weights again (a complete round makes one whole)",
            **fields,  # type: ignore[arg-type]
        )
    if policy.min_serving is not None and len(serving) >= policy.min_serving:
        return None
    return ReplicasLost(
        f"Version {report.version} serves on {', '.join(serving)}. Fenced, out of the serving set: {names}.",
        hint="send_weights again brings back fenced replicas that answer; FailurePolicy(min_serving=...) goes on without an error",
        **fields,  # type: ignore[arg-type]
    )


def aborted(
    what: str,
    *,
    old: str | None,
    culprits: Mapping[str, StepFailed],
    stuck: Mapping[str, StepFailed] | None = None,
    log_hints: Mapping[str, str | None] | None = None,
    hint: str,
) -> RoundAborted:
    """The error for a round that ended before *start*."""
    first = next(iter(culprits.values()), None)
    gone = [name for name, failed in culprits.items() if failed.failure.kind in ("died", "out_of_step")]
    where = f"on the rest; {', '.join(gone)} is gone or to be replaced" if gone else "everywhere"
    holds = f"Nothing changed: {'version ' + old if old is not None else 'what the engines had before'} still serves {where}"
    if stuck:
        holds += f", except on {', '.join(stuck)}, which could not be put back and is fenced"
    hints = [f"{name}: {where}" for name, where in (log_hints or {}).items() if name in culprits and where]
    return RoundAborted(
        f"{holds}. {what}",
        phase=first.phase if first else None,
        replicas=tuple(culprits),
        elapsed_s=first.failure.elapsed_s if first else None,
        limit_s=first.limit_s if first else None,
        engine_message="; ".join(f"{name}: {failed.failure.message}" for name, failed in culprits.items()) or None,
        log_hint="; ".join(hints) or None,
        hint=hint,
    )


def _logs(report: SyncReport, log_hints: Mapping[str, str | None]) -> str | None:
    hints = [f"{name}: {where}" for name in report.lost if (where := log_hints.get(name))]
    return "; ".join(hints) or None
