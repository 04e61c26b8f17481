"""One round at a time."""

from __future__ import annotations

import asyncio

import pytest

from ray_weightsync.errors import RoundAborted
from ray_weightsync.fleet.turns import Turn


def test_the_second_waits_until_the_first_has_ended() -> None:
    async def story() -> list[str]:
        turn, order = Turn(RoundAborted), []
        await turn.take("first", busy="wait", limit_s=1)
        second = asyncio.create_task(turn.take("second", busy="wait", limit_s=5))
        await asyncio.sleep(0)
        order.append("first ends")
        turn.release("first")
        await second
        order.append("second begins")
        assert turn.holder == "second"
        return order

    assert asyncio.run(story()) == ["first ends", "second begins"]


def test_who_does_not_want_to_wait_is_told_which_round_is_in_progress() -> None:
    async def story() -> None:
        turn = Turn(RoundAborted)
        await turn.take("abc", busy="wait", limit_s=1)
        with pytest.raises(RoundAborted, match="abc"):
            await turn.take("other", busy="raise", limit_s=1)

    asyncio.run(story())


def test_waiting_for_a_round_that_does_not_end_ends_at_the_deadline() -> None:
    async def story() -> None:
        turn = Turn(RoundAborted)
        await turn.take("abc", busy="wait", limit_s=1)
        with pytest.raises(RoundAborted, match="abc") as caught:
            await turn.take("other", busy="wait", limit_s=0.01)
        assert caught.value.limit_s == 0.01

    asyncio.run(story())


def test_a_late_release_does_not_free_somebody_elses_turn() -> None:
    async def story() -> None:
        turn = Turn(RoundAborted)
        await turn.take("old", busy="wait", limit_s=1)
        turn.release("old")
        await turn.take("new", busy="wait", limit_s=1)
        turn.release("old")
        assert turn.holder == "new"

    asyncio.run(story())


def test_who_does_not_want_to_wait_does_not_wait_for_one_that_is_about_to_begin_either() -> None:
    async def story() -> None:
        turn = Turn(RoundAborted)
        await turn.take("first", busy="wait", limit_s=1)
        second = asyncio.create_task(turn.take("second", busy="wait", limit_s=5))
        await asyncio.sleep(0)
        turn.release("first")
        with pytest.raises(RoundAborted, match="Round second is about to begin"):
            await turn.take("third", busy="raise", limit_s=0.1)
        await second
        assert turn.holder == "second"

    asyncio.run(story())
