"""Every pair of state and event has one answer, and the promises that hang on it hold."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_weightsync.fleet.states import LEGAL_MOVES, IllegalMove, ReplicaEvent, ReplicaState, move

PAIRS = list(itertools.product(ReplicaState, ReplicaEvent))


@pytest.mark.parametrize(("state", "event"), PAIRS, ids=lambda each: each.value)
def test_a_pair_is_in_the_table_or_refused(state: ReplicaState, event: ReplicaEvent) -> None:
    if (state, event) in LEGAL_MOVES:
        assert move(state, event) is LEGAL_MOVES[state, event]
    else:
        with pytest.raises(IllegalMove, match=event.value):
            move(state, event)


@pytest.mark.parametrize(("state", "event"), PAIRS, ids=lambda each: each.value)
def test_only_a_commit_or_adopting_leads_to_serving(state: ReplicaState, event: ReplicaEvent) -> None:
    if LEGAL_MOVES.get((state, event)) is ReplicaState.SERVING:
        assert event in (ReplicaEvent.COMMIT, ReplicaEvent.ADOPT)


def test_only_an_update_in_progress_can_be_committed() -> None:
    assert [state for state, event in LEGAL_MOVES if event is ReplicaEvent.COMMIT] == [ReplicaState.UPDATING]


def test_nothing_leaves_retired() -> None:
    assert not [event for state, event in LEGAL_MOVES if state is ReplicaState.RETIRED]


@given(st.lists(st.sampled_from(list(ReplicaEvent)), max_size=40))
def test_after_a_failure_a_replica_serves_only_after_a_start_and_a_commit(events: list[ReplicaEvent]) -> None:
    state, since_failure = ReplicaState.JOINING, None
    for event in events:
        if (state, event) not in LEGAL_MOVES:
            continue
        state = move(state, event)
        if event is ReplicaEvent.FAIL:
            since_failure = []
        elif since_failure is not None:
            since_failure.append(event)
        if state is ReplicaState.SERVING and since_failure is not None:
            assert since_failure[-2:] == [ReplicaEvent.START, ReplicaEvent.COMMIT]
