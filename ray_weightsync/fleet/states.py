"""The legal moves of a replica, as one pure function over values.

Only a commit (or, at attach, adopting what the engines report) leads to SERVING; RETIRED is the end.
"""

from __future__ import annotations

from enum import StrEnum


class ReplicaState(StrEnum):
    """Where a replica stands in its life."""

    JOINING = "JOINING"
    """Attached, nothing known of its weights yet."""
    STALE = "STALE"
    """Holds whole weights, but no version of this session's."""
    UPDATING = "UPDATING"
    """Between *start* and commit: its weights may be torn."""
    SERVING = "SERVING"
    """Holds a committed version."""
    QUARANTINED = "QUARANTINED"
    """Fenced: torn, unproved, restarted or not answering."""
    RETIRED = "RETIRED"
    """Out of the fleet for good."""


class ReplicaEvent(StrEnum):
    """What may happen to a replica."""

    INSPECT = "inspect"
    """Its facts were learned: whole weights of a version that this session did not commit."""
    ADOPT = "adopt"
    """At attach: the whole fleet reports one version and runs; it is taken as served, unattested."""
    START = "start"
    """The round passed the point after which only a complete update makes it whole."""
    COMMIT = "commit"
    """Its weights are complete and attested, and its label is the version."""
    FAIL = "fail"
    """It broke, died, restarted, or may be torn."""
    RETIRE = "retire"
    """It was removed or replaced."""


_S, _E = ReplicaState, ReplicaEvent

LEGAL_MOVES: dict[tuple[ReplicaState, ReplicaEvent], ReplicaState] = {
    (_S.JOINING, _E.INSPECT): _S.STALE,
    (_S.JOINING, _E.ADOPT): _S.SERVING,
    (_S.JOINING, _E.FAIL): _S.QUARANTINED,
    (_S.JOINING, _E.RETIRE): _S.RETIRED,
    (_S.STALE, _E.START): _S.UPDATING,
    (_S.STALE, _E.FAIL): _S.QUARANTINED,
    (_S.STALE, _E.RETIRE): _S.RETIRED,
    (_S.UPDATING, _E.START): _S.UPDATING,  # rolled back: another complete update on top
    (_S.UPDATING, _E.COMMIT): _S.SERVING,
    (_S.UPDATING, _E.FAIL): _S.QUARANTINED,
    (_S.SERVING, _E.START): _S.UPDATING,
    (_S.SERVING, _E.FAIL): _S.QUARANTINED,
    (_S.SERVING, _E.RETIRE): _S.RETIRED,
    (_S.QUARANTINED, _E.START): _S.UPDATING,
    (_S.QUARANTINED, _E.FAIL): _S.QUARANTINED,
    (_S.QUARANTINED, _E.RETIRE): _S.RETIRED,
}


class IllegalMove(RuntimeError):
    """A bug of ours: an event that the state does not allow."""


def move(state: ReplicaState, event: ReplicaEvent) -> ReplicaState:
    """The state that ``event`` leads to.

    Raises:
        IllegalMove: if ``state`` does not allow ``event``.
    """
    try:
        return LEGAL_MOVES[state, event]
    except KeyError:
        raise IllegalMove(f"a {state.value} replica cannot {event.value}") from None
