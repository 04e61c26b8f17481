"""What is handed from thread to thread, a few at a time."""

from __future__ import annotations

from typing import Any

import pytest

from ray_weightsync.transports.collective.handover import ABANDONED, Handover

LIMIT_S = 30.0


def test_a_slot_is_taken_from_before_an_item_is_made_until_after_it_is_used() -> None:
    handover: Handover[str] = Handover(1)
    slot = handover.reserve(0)
    assert slot is not None
    assert handover.reserve(0) is None
    handover.put(slot, "a")
    assert handover.reserve(0) is None
    assert handover.take(0) == (slot, "a")
    assert handover.reserve(0) is None
    handover.release(slot)
    assert handover.reserve(0) == slot


def test_each_side_learns_why_the_other_ended_and_the_first_reason_counts(aside: Any) -> None:
    handover: Handover[str] = Handover(1)
    handover.reserve(0)
    waiting = [aside(lambda: handover.reserve(LIMIT_S)), aside(lambda: handover.take(LIMIT_S)), aside(lambda: handover.wait_used(LIMIT_S))]
    handover.fail(RuntimeError("first"))
    handover.fail(RuntimeError("second"))
    for each in waiting:
        with pytest.raises(RuntimeError, match="first"):
            each.result()


def test_what_was_put_before_a_failure_still_comes() -> None:
    handover: Handover[str] = Handover(2)
    slot = handover.reserve(0)
    assert slot is not None
    handover.put(slot, "a")
    handover.fail(RuntimeError("gone"))
    assert handover.take(0) == (slot, "a")
    with pytest.raises(RuntimeError, match="gone"):
        handover.take(0)


def test_all_is_used_when_the_last_item_is_whatever_fails_then() -> None:
    handover: Handover[str] = Handover(2)
    slot = handover.reserve(0)
    assert slot is not None
    handover.put(slot, "a")
    handover.finish()
    assert handover.wait_used(0) is None
    handover.take(0)
    assert handover.wait_used(0) is None
    handover.release(slot)
    handover.fail(RuntimeError("late"))
    assert handover.wait_used(0) is True


def test_the_end_is_the_end() -> None:
    handover: Handover[str] = Handover(1)
    assert handover.take(0) is None
    handover.finish()
    with pytest.raises(EOFError):
        handover.take(0)


def test_who_makes_items_that_nobody_takes_is_told(aside: Any) -> None:
    handover: Handover[str] = Handover(1)
    slot = handover.reserve(0)
    assert slot is not None
    waiting = aside(lambda: handover.reserve(LIMIT_S))
    handover.abandon()
    assert waiting.result() == ABANDONED
    handover.put(slot, "dropped")
    assert handover.take(0) is None
