"""What becomes of each replica when a coordinator died: pure decisions over what the journal says and what the engines say now.

::

    trace      how far the dead coordinator's round had come on a replica that it may have touched
    endings    what is done with it: the round goes on for whom it can, and is undone where nobody has the new weights
    standing   what a replica outside of any round counts as
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from ray_weightsync.config import is_tombstone, tombstone
from ray_weightsync.engines.facts import EngineFacts
from ray_weightsync.fleet.journal import MemberRecord, RoundRecord
from ray_weightsync.fleet.states import ReplicaState


class Trace(StrEnum):
    """What a round left on one of its members."""

    UNREACHED = "it could not be reached after the coordinator had died"
    RESTARTED = "the engine restarted; it holds no weights of this session"
    UNTOUCHED = "the round had not marked it"
    MARKED = "the round had marked it and not begun the update"
    OPEN = "an update of the round is open"
    CLOSED = "the round's update is closed, and nobody has asked what came of it"
    ATTESTED = "the round's weights are complete and attested"
    COMMITTED = "the round had committed it"
    TORN = "its weights may be torn: the coordinator died during the update"
    BUSY = "a call of the coordinator that died is still under way in it"
    FOREIGN = "it carries the mark of another round: torn or not committed"


class Ending(StrEnum):
    """What is done with a member."""

    COMMIT = "commit"
    """It serves the round's version."""
    PUT_BACK = "put back"
    """It is left as the round found it."""
    FENCE = "fence"
    """Marked, paused, out of the serving set, its requests released."""
    LOSE = "lose"
    """Out of the serving set; there is no process of ours to be fenced."""


def trace(found: EngineFacts | None, member: MemberRecord, round_id: str, label: str) -> Trace:
    """How far the round ``round_id`` had come on a member.

    Args:
        found: What the engine says now that no call of the dead coordinator is under way in it; None if it could not be asked.
        member: How the round found it.
        round_id: The round.
        label: The version that it brought.
    """
    if found is None:
        return Trace.UNREACHED
    if found.incarnation != member.incarnation:
        return Trace.RESTARTED
    marked = found.version == tombstone(round_id)
    begun = any(worker.round == round_id for worker in found.workers)
    if any(worker.update_open for worker in found.workers):
        return Trace.OPEN if begun or marked else Trace.FOREIGN
    if found.version == label and (all(worker.round == round_id for worker in found.workers) if found.workers else member.label != label):
        return Trace.COMMITTED
    if begun:
        return Trace.CLOSED
    if marked:
        # One that started and failed before it knew the round has a failure on record and no round; one that tells nothing may have.
        unproved = not found.workers or any(worker.round is None and worker.failure for worker in found.workers)
        return Trace.TORN if unproved else Trace.MARKED
    return Trace.FOREIGN if is_tombstone(found.version) else Trace.UNTOUCHED


def endings(traces: Mapping[str, Trace], members: Mapping[str, MemberRecord], *, all_or_none: bool) -> dict[str, Ending]:
    """What is done with each member, once open updates are closed and the closed ones asked for.

    The round goes on if somebody serves its version already, or holds it attested; for all or none, only if all do. Whoever then still
    holds the weights before is fenced as well: two versions must not serve.
    """
    attested = [name for name, each in traces.items() if each is Trace.ATTESTED]
    committed = any(each is Trace.COMMITTED for each in traces.values())
    forward = committed or (bool(attested) and (not all_or_none or len(attested) == len(traces)))
    return {name: _ending(each, forward, torn_as_found=members[name].torn) for name, each in traces.items()}


def _ending(trace: Trace, forward: bool, *, torn_as_found: bool) -> Ending:
    match trace:
        case Trace.UNREACHED | Trace.RESTARTED:
            return Ending.LOSE
        case Trace.COMMITTED:
            return Ending.COMMIT
        case Trace.ATTESTED:
            return Ending.COMMIT if forward else Ending.FENCE
        case Trace.UNTOUCHED | Trace.MARKED:
            return Ending.FENCE if forward or torn_as_found else Ending.PUT_BACK
        case Trace.OPEN | Trace.CLOSED:
            raise ValueError(f"a replica has to be asked first: {trace.value}")
        case Trace.TORN | Trace.FOREIGN | Trace.BUSY:
            return Ending.FENCE


def why(trace: Trace, round_: RoundRecord) -> str:
    """In words, why a member is out of the serving set."""
    if trace in (Trace.UNTOUCHED, Trace.MARKED):
        return f"it holds the weights before version {round_.snapshot.label}, which serves on others: the coordinator died before its turn"
    if trace is Trace.ATTESTED:
        return f"it holds version {round_.snapshot.label}, which not all hold: the coordinator died during the update, all_or_none"
    return trace.value


class Standing(StrEnum):
    """What a replica outside of any round counts as."""

    AS_BEFORE = "as before"
    FENCED = "fenced"
    LOST = "lost"


def standing(state: ReplicaState, version: str | None, incarnation: str | None, found: EngineFacts | None) -> tuple[Standing, str]:
    """What a replica counts as that no round had touched, and why.

    Args:
        state: Its state in the journal.
        version: The label whose weights it held then.
        incarnation: Its incarnation then.
        found: What it says now; None if it could not be asked.
    """
    if state is ReplicaState.RETIRED:
        return Standing.AS_BEFORE, ""
    if found is None:
        return Standing.LOST, Trace.UNREACHED.value
    if found.incarnation != incarnation:
        return Standing.LOST, Trace.RESTARTED.value
    if is_tombstone(found.version):
        return Standing.FENCED, f"found with the label {found.version}: torn or not committed"
    if any(worker.update_open for worker in found.workers):
        return Standing.LOST, "another client has a weight update open in it"
    if state is ReplicaState.SERVING and found.version is not None and found.version != version:
        return Standing.LOST, f"its label is {found.version}, not {version}: somebody else has sent weights to it"
    return Standing.AS_BEFORE, ""
