"""What the callers of a round are told who lost the answer with its coordinator, once its successor has settled every replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ray_weightsync.errors import FleetTorn
from ray_weightsync.fleet.reporting import report_of
from ray_weightsync.fleet.verdicts import aborted, failures_in, taken_back, verdict

if TYPE_CHECKING:
    from ray_weightsync.fleet.journal import Outcome, RoundRecord
    from ray_weightsync.fleet.parts import Parts
    from ray_weightsync.fleet.snapshot import Snapshot
    from ray_weightsync.report import ReplicaReport

PHASE = "recovery"


def outcomes_of(
    parts: Parts, round_: RoundRecord, snapshot: Snapshot | None, reports: Sequence[ReplicaReport], serving: Sequence[str]
) -> dict[str, Outcome]:
    """How a round ended that a successor settled, by the round that was asked for: a roll-back is the end of the one before, too.

    Args:
        parts: The session's, as they stand now.
        round_: What the journal says of it.
        snapshot: What it brought, if its plan is known.
        reports: How each member fared.
        serving: Those of them that serve its version.
    """
    outcomes = {round_.id: _outcome(parts, round_, snapshot, reports, serving)}
    if round_.undone is not None:
        outcomes[round_.undone.id] = taken_back(parts.roster, round_.undone, reports)
    return outcomes


def _outcome(
    parts: Parts, round_: RoundRecord, snapshot: Snapshot | None, reports: Sequence[ReplicaReport], serving: Sequence[str]
) -> Outcome:
    label, roster, lost = round_.snapshot.label, parts.roster, failures_in(reports)
    if not serving and (roster.serves or not lost):
        why = f"Version {label} was not committed: the coordinator died."
        return aborted(roster, why, culprits=lost, stuck=lost, hint="call again")
    if snapshot is None:
        return FleetTorn(
            f"No replica serves: the coordinator died in the round of version {label}, and its plan is lost.",
            phase=PHASE,
            replicas=tuple(round_.members),
            hint="send_weights again (a complete round makes one whole)",
        )
    note = "the coordinator died during this round; its successor brought it to an end"
    report = report_of(snapshot, snapshot.log, roster, parts.settings, reports, notes=[note], repeated=False)
    return verdict(report, parts.settings.on_failure, roster.log_hints(), serving=serving) or report
