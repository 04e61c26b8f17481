"""What becomes of a replica whose coordinator died: every row of the decision."""

from __future__ import annotations

from typing import Any

import pytest

from ray_weightsync.engines.facts import EngineFacts, WorkerFacts
from ray_weightsync.fleet.journal import MemberRecord
from ray_weightsync.fleet.settlement import Ending, Standing, Trace, endings, standing, trace
from ray_weightsync.fleet.states import ReplicaState

R = "round"
MARK = f"!rws:{R}"
MEMBER = MemberRecord(incarnation="a", paused=False, label="v1", torn=False)


def worker(**fields: Any) -> WorkerFacts:
    return WorkerFacts(**{"nonce": "n", "rank": 0, "world_size": 1, "package_version": "0", "round": "before", **fields})


def facts(version: str | None, *workers: WorkerFacts, incarnation: str | None = "a", **fields: Any) -> EngineFacts:
    return EngineFacts(kind="async", incarnation=incarnation, version=version, workers=workers, **fields)


HALF = (worker(round=R), worker(rank=1))
TRACES = {
    "it cannot be asked": (None, Trace.UNREACHED),
    "another process answers": (facts("v1", worker(), incarnation="b"), Trace.RESTARTED),
    "another process answers, which carries the mark": (facts(MARK, worker(round=R), incarnation="b"), Trace.RESTARTED),
    "nothing of the round": (facts("v1", worker()), Trace.UNTOUCHED),
    "paused only": (facts("v1", worker(), paused=True), Trace.UNTOUCHED),
    "somebody set another label meanwhile": (facts("other", worker()), Trace.UNTOUCHED),
    "marked": (facts(MARK, worker()), Trace.MARKED),
    "marked, and never updated before": (facts(MARK, worker(round=None)), Trace.MARKED),
    "marked, and its start failed": (facts(MARK, worker(round=None, failure="start_weight_update: no")), Trace.TORN),
    "marked, and it tells nothing of its workers": (facts(MARK), Trace.TORN),
    "started": (facts(MARK, worker(round=None, update_open=True)), Trace.OPEN),
    "in the middle of the update": (facts(MARK, worker(round=R, update_open=True)), Trace.OPEN),
    "its mark was overwritten in the middle of the update": (facts("other", worker(round=R, update_open=True)), Trace.OPEN),
    "one rank of two started": (facts(MARK, worker(), worker(rank=1, update_open=True)), Trace.OPEN),
    "somebody else's update is open": (facts("v1", worker(round="other", update_open=True)), Trace.FOREIGN),
    "finished": (facts(MARK, worker(round=R)), Trace.CLOSED),
    "one rank of two finished": (facts(MARK, *HALF), Trace.CLOSED),
    "finished, its mark overwritten": (facts("other", worker(round=R)), Trace.CLOSED),
    "labelled": (facts("v2", worker(round=R)), Trace.COMMITTED),
    "labelled, and it tells nothing of its workers": (facts("v2"), Trace.COMMITTED),
    "labelled by somebody else": (facts("v2", worker()), Trace.UNTOUCHED),
    "one rank of two, labelled": (facts("v2", *HALF), Trace.CLOSED),
    "another round's mark": (facts("!rws:other", worker(round="other")), Trace.FOREIGN),
}


@pytest.mark.parametrize("case", TRACES)
def test_how_far_the_round_had_come_is_told_from_what_the_engine_says(case: str) -> None:
    found, expected = TRACES[case]
    assert trace(found, MEMBER, R, "v2") is expected


def test_the_version_that_it_had_before_does_not_tell_that_it_was_committed() -> None:
    same = MemberRecord(incarnation="a", paused=False, label="v2", torn=False)
    assert trace(facts("v2", worker()), same, R, "v2") is Trace.UNTOUCHED
    assert trace(facts("v2"), same, R, "v2") is Trace.UNTOUCHED
    assert trace(facts("v2", worker(round=R)), same, R, "v2") is Trace.COMMITTED


ASKED = [each for each in Trace if each not in (Trace.OPEN, Trace.CLOSED)]
ALONE = {
    Trace.UNREACHED: Ending.LOSE,
    Trace.RESTARTED: Ending.LOSE,
    Trace.UNTOUCHED: Ending.PUT_BACK,
    Trace.MARKED: Ending.PUT_BACK,
    Trace.ATTESTED: Ending.COMMIT,
    Trace.COMMITTED: Ending.COMMIT,
    Trace.TORN: Ending.FENCE,
    Trace.BUSY: Ending.FENCE,
    Trace.FOREIGN: Ending.FENCE,
}


def ends(*traces: Trace, all_or_none: bool = False, torn: bool = False) -> list[Ending]:
    member = MemberRecord(incarnation="a", paused=False, label="v1", torn=torn)
    named = {f"r{index}": each for index, each in enumerate(traces)}
    return list(endings(named, dict.fromkeys(named, member), all_or_none=all_or_none).values())


@pytest.mark.parametrize("left", ASKED, ids=lambda each: each.name)
@pytest.mark.parametrize("all_or_none", [False, True])
def test_what_is_done_with_a_replica_on_its_own(left: Trace, all_or_none: bool) -> None:
    assert ends(left, all_or_none=all_or_none) == [ALONE[left]]


@pytest.mark.parametrize("left", ASKED, ids=lambda each: each.name)
@pytest.mark.parametrize("other", [Trace.ATTESTED, Trace.COMMITTED], ids=lambda each: each.name)
def test_next_to_one_that_has_the_new_weights_nobody_serves_the_old_ones(left: Trace, other: Trace) -> None:
    behind = left in (Trace.UNTOUCHED, Trace.MARKED)
    assert ends(left, other) == [Ending.FENCE if behind else ALONE[left], Ending.COMMIT]


@pytest.mark.parametrize("left", [each for each in ASKED if each not in (Trace.ATTESTED, Trace.COMMITTED)], ids=lambda each: each.name)
def test_all_or_none_does_not_go_on_unless_all_are_attested(left: Trace) -> None:
    assert ends(left, Trace.ATTESTED, all_or_none=True) == [ALONE[left], Ending.FENCE]


@pytest.mark.parametrize("left", ASKED, ids=lambda each: each.name)
def test_all_or_none_goes_on_once_somebody_is_committed(left: Trace) -> None:
    """All were attested then; that one of them died since does not take the version back from the others."""
    assert ends(left, Trace.COMMITTED, all_or_none=True)[1] is Ending.COMMIT
    assert ends(Trace.ATTESTED, Trace.COMMITTED, left, all_or_none=True)[:2] == [Ending.COMMIT, Ending.COMMIT]


def test_all_or_none_goes_on_if_all_are_attested() -> None:
    assert ends(Trace.ATTESTED, Trace.ATTESTED, all_or_none=True) == [Ending.COMMIT, Ending.COMMIT]


@pytest.mark.parametrize("left", [Trace.UNTOUCHED, Trace.MARKED], ids=lambda each: each.name)
def test_one_that_the_round_found_torn_stays_fenced(left: Trace) -> None:
    assert ends(left, torn=True) == [Ending.FENCE]


@pytest.mark.parametrize("left", [Trace.OPEN, Trace.CLOSED], ids=lambda each: each.name)
def test_one_that_was_not_asked_is_not_decided_upon(left: Trace) -> None:
    with pytest.raises(ValueError, match="has to be asked first"):
        ends(left)


STANDS = {
    "as it was": (ReplicaState.SERVING, facts("v1", worker()), Standing.AS_BEFORE),
    "paused by its user": (ReplicaState.SERVING, facts("v1", worker(), paused=True), Standing.AS_BEFORE),
    "gone": (ReplicaState.SERVING, None, Standing.LOST),
    "restarted": (ReplicaState.SERVING, facts("v1", worker(), incarnation="b"), Standing.LOST),
    "marked": (ReplicaState.SERVING, facts("!rws:x", worker()), Standing.FENCED),
    "fenced before": (ReplicaState.QUARANTINED, facts("!rws:x", worker()), Standing.FENCED),
    "quarantined and whole": (ReplicaState.QUARANTINED, facts("default", worker()), Standing.AS_BEFORE),
    "another label": (ReplicaState.SERVING, facts("v7", worker()), Standing.LOST),
    "another label where none was ours": (ReplicaState.STALE, facts("v7", worker()), Standing.AS_BEFORE),
    "an update is open": (ReplicaState.SERVING, facts("v1", worker(update_open=True)), Standing.LOST),
    "retired and gone": (ReplicaState.RETIRED, None, Standing.AS_BEFORE),
}


@pytest.mark.parametrize("case", STANDS)
def test_what_a_replica_counts_as_that_no_round_had_touched(case: str) -> None:
    state, found, expected = STANDS[case]
    assert standing(state, "v1", "a", found)[0] is expected
