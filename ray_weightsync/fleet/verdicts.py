"""What a round's outcome means for the caller: pure functions from reports to the error, if any, that says what holds now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING

from ray_weightsync.config import FailurePolicy
from ray_weightsync.errors import CallFailure, FleetTorn, ReplicasLost, RoundAborted, WeightSyncError
from ray_weightsync.fleet.states import ReplicaState
from ray_weightsync.fleet.steps import StepFailed
from ray_weightsync.report import ReplicaReport, SyncReport

if TYPE_CHECKING:
    from ray_weightsync.fleet.journal import Undone
    from ray_weightsync.fleet.roster import Roster
    from ray_weightsync.fleet.round import Aborted


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
            f"No replica serves: version {report.version} was proved on none. Fenced: {names}; those that can be reached are paused, with "
            "a label that starts with '!rws:'.",
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
    roster: Roster, what: str, *, culprits: Mapping[str, StepFailed], stuck: Mapping[str, StepFailed] | None = None, hint: str
) -> RoundAborted | FleetTorn:
    """The error for a round that ended before *start*, or was taken back: of the type that says whether anybody serves now.

    Args:
        roster: The fleet, as the round left it.
        what: What was not done, in a sentence.
        culprits: Who kept it from being done.
        stuck: Those that could not be put back.
        hint: What to do.
    """
    first = next(iter(culprits.values()), None)
    stuck = stuck or {}
    fenced = [each.id for each in roster.members if each.state is ReplicaState.QUARANTINED]
    gone = [name for name in fenced if name in culprits and culprits[name].failure.kind in ("died", "out_of_step") and name not in stuck]
    before = [name for name in fenced if name not in gone and name not in stuck]
    told = [f"{', '.join(gone)} {_is(gone)} gone or to be replaced"] if gone else []
    told += [f"{', '.join(before)} {_is(before)} fenced"] if gone and before and roster.serves else []
    if roster.serves:
        old = f"version {roster.label}" if roster.label is not None else "what the engines had before"
        holds = f"Nothing changed: {old} {roster.stands} {'; '.join(['on the rest', *told]) if gone else 'everywhere'}"
        holds += f", except on {', '.join(stuck)}, which could not be put back and {_is(stuck)} fenced" if stuck else ""
        holds += f", except on {', '.join(before)}, which {_is(before)} fenced" if before and not gone else ""
    else:
        told += [f"{', '.join(stuck)} could not be put back and {_is(stuck)} fenced"] if stuck else []
        holds = "; ".join(["No replica serves", *told])
        hint = f"{hint}; none may serve until a complete round makes it whole"
    hints = [f"{name}: {where}" for name, where in roster.log_hints().items() if name in culprits and where]
    kind = RoundAborted if roster.serves else FleetTorn
    return kind(
        f"{holds}. {what}",
        phase=first.phase if first else None,
        replicas=tuple(culprits),
        elapsed_s=first.failure.elapsed_s if first else None,
        limit_s=first.limit_s if first else None,
        engine_message="; ".join(f"{name}: {failed.failure.message}" for name, failed in culprits.items()) or None,
        log_hint="; ".join(hints) or None,
        hint=hint,
    )


def not_committed(roster: Roster, label: str, end: Aborted) -> RoundAborted | FleetTorn:
    """The error for a round whose members were put back before *start*."""
    hint = "call again; raise Timeouts.pause_s if the engines are slow to pause"
    if any(failed.phase == "init" for failed in end.failures.values()):
        hint = "mend what keeps the trainer engine or its ends in the engines from being set up, and call again"
    return aborted(roster, f"Version {label} was not committed.", culprits=end.failures, stuck=end.stuck, hint=hint)


def taken_back(roster: Roster, undone: Undone, reports: Sequence[ReplicaReport]) -> RoundAborted | FleetTorn:
    """The error for a round that was for all or none, when each replica that could be brought back was; ``reports`` say how that went."""
    back = {each.id for each in reports if each.failed_phase is None}
    stuck = {name: failed for name, failed in undone.failures.items() if name not in back}
    stuck |= {name: failed for name, failed in failures_in(reports).items() if name not in stuck}
    how = ("was taken back from all" if not stuck else "was taken back from the rest") if roster.serves else "could be taken back from none"
    return aborted(
        roster,
        f"Version {undone.label} failed on {', '.join(undone.failures)}, and {how}.",
        culprits=undone.failures if roster.serves else stuck,
        stuck=stuck,
        hint="mend or replace what failed and call again",
    )


def failures_in(reports: Iterable[ReplicaReport]) -> dict[str, StepFailed]:
    """Who failed, by id, as reports tell it."""
    return {each.id: _failure(each) for each in reports if each.failed_phase is not None}


def _failure(report: ReplicaReport) -> StepFailed:
    phase = report.failed_phase or "commit"
    elapsed_s = report.phases_s.get(phase, 0.0)
    return StepFailed(phase, CallFailure(message=report.error or "", kind="raised", elapsed_s=elapsed_s), elapsed_s)


def _is(names: Sized) -> str:
    return "is" if len(names) == 1 else "are"


def _logs(report: SyncReport, log_hints: Mapping[str, str | None]) -> str | None:
    hints = [f"{name}: {where}" for name in report.lost if (where := log_hints.get(name))]
    return "; ".join(hints) or None
