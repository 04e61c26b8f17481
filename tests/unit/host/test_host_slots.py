"""The pure decisions about slots."""

from __future__ import annotations

import itertools

import pytest

from ray_weightsync.transports.host.layout import SlotError
from ray_weightsync.transports.host.slots import Slot, SlotState, fitting, spare, surplus

S = SlotState
LEGAL = {
    (S.FREE, S.WRITING),
    (S.FREE, S.RETIRED),
    (S.WRITING, S.SEALED),
    (S.WRITING, S.FREE),
    (S.SEALED, S.COMMITTED),
    (S.SEALED, S.FREE),
    (S.COMMITTED, S.FORMER),
    (S.FORMER, S.COMMITTED),
    (S.FORMER, S.FREE),
    (S.FORMER, S.WRITING),
    (S.FORMER, S.RETIRED),
}


def slot(number: int, state: SlotState, *, num_bytes: int = 64, turn: int = 0) -> Slot:
    used = state not in (S.FREE, S.RETIRED)
    return Slot(
        name=f"rws-testtest-{number}",
        num_bytes=num_bytes,
        state=state,
        snapshot="a" * 32 if used else "",
        plan="b" * 32 if used else "",
        overlap=used,
        turn=turn,
    )


@pytest.mark.parametrize(("before", "after"), list(itertools.product(SlotState, SlotState)))
def test_exactly_the_legal_moves_are_made(before: SlotState, after: SlotState) -> None:
    start = slot(0, before)
    if (before, after) not in LEGAL:
        with pytest.raises(SlotError, match=f"is {before.value}; it cannot become {after.value}"):
            start.moved(after, 1)
        return
    moved = start.moved(after, 1)
    assert (moved.state, moved.turn, moved.name, moved.num_bytes) == (after, 1, start.name, start.num_bytes)
    kept = after in (S.WRITING, S.SEALED, S.COMMITTED, S.FORMER)
    assert (moved.snapshot, moved.plan, moved.overlap) == ((start.snapshot, start.plan, start.overlap) if kept else ("", "", False))


@pytest.mark.parametrize("state", SlotState)
def test_only_a_spare_slot_is_given_to_a_writer(state: SlotState) -> None:
    start = slot(0, state)
    if state not in (S.FREE, S.FORMER):
        with pytest.raises(SlotError, match="cannot become writing"):
            start.given(snapshot="c" * 32, plan="d" * 32, overlap=True, turn=2)
        return
    given = start.given(snapshot="c" * 32, plan="d" * 32, overlap=True, turn=2)
    assert (given.state, given.snapshot, given.plan, given.overlap, given.turn) == (S.WRITING, "c" * 32, "d" * 32, True, 2)


def test_free_slots_are_taken_before_former_ones_and_each_in_the_order_they_were_left() -> None:
    slots = [slot(n, state, turn=turn) for n, (state, turn) in enumerate([(S.FORMER, 1), (S.FREE, 9), (S.FORMER, 0), (S.FREE, 3)])]
    assert [each.turn for each in spare(slots)] == [3, 9, 0, 1]


def test_what_is_in_use_is_never_spare() -> None:
    assert {each.state for each in spare([slot(n, state) for n, state in enumerate(SlotState)])} == {S.FREE, S.FORMER}


def test_only_slots_of_exactly_the_size_fit() -> None:
    slots = [slot(0, S.FREE, num_bytes=128), slot(1, S.FORMER, num_bytes=64), slot(2, S.FREE, num_bytes=0), slot(3, S.SEALED, num_bytes=64)]
    assert [each.name for each in fitting(slots, 64)] == ["rws-testtest-1"]


def test_surplus_gives_up_the_least_missed_and_never_what_is_in_use() -> None:
    slots = [slot(0, S.FORMER, turn=1), slot(1, S.COMMITTED), slot(2, S.SEALED), slot(3, S.FREE, turn=5), slot(4, S.WRITING)]
    assert [each.state for each in surplus(slots, 4)] == [S.FREE]
    assert [each.state for each in surplus(slots, 3)] == [S.FREE, S.FORMER]
    assert [each.state for each in surplus(slots, 2)] == [S.FREE, S.FORMER]
    assert surplus(slots, 5) == surplus(slots, 6) == []
