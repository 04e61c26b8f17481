"""Two sessions on the same engines: one at a time, and the second gets them only from the first's hands."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from ray_weightsync.config import Timeouts
from ray_weightsync.errors import AttachError, RoundAborted, SessionConflict
from ray_weightsync.fleet.states import ReplicaState
from tests.unit.fleet.fakes import QUICK, FakeFleet, sealed


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 30))  # type: ignore[arg-type]


def serving(fleet: FakeFleet) -> list[str]:
    return [replica.id for replica in fleet.coordinator.status().replicas if replica.serving]


def test_a_second_session_is_refused_and_the_first_goes_on() -> None:
    async def story() -> None:
        first = await FakeFleet(2).attach()
        await first.send(1)
        claims = dict(first.keys.values)
        second = FakeFleet(name="second", other=first)
        with pytest.raises(SessionConflict, match="session 'fake' holds r0, r1") as caught:
            await second.attach()
        assert caught.value.replicas == ("r0", "r1")
        assert second.coordinator.status().replicas == ()
        assert first.keys.values == claims
        await first.send(2)
        assert serving(first) == ["r0", "r1"]

    run(story)


def test_after_a_close_the_next_session_adopts_what_serves() -> None:
    async def story() -> None:
        first = await FakeFleet(2).attach()
        await first.send(1)
        await first.coordinator.close()
        assert first.keys.values == {}
        second = await FakeFleet(name="second", other=first).attach()
        assert serving(second) == ["r0", "r1"]
        assert second.coordinator.status().version == "1"

    run(story)


def test_a_taken_over_session_ends_its_round_first_and_then_refuses_to_send() -> None:
    async def story() -> None:
        first = await FakeFleet(2, timeouts=Timeouts()).attach()
        gate = first.engines[1].gate("update")
        sending = asyncio.create_task(first.send(1))
        await first.engines[1].reached["update"].wait()
        second = FakeFleet(name="second", other=first, timeouts=Timeouts())
        taking = asyncio.create_task(second.attach(take_over=True))
        while first.coordinator._parts.turn.holder is None or not first.coordinator._parts.turn._lock._waiters:
            await asyncio.sleep(0)
        assert not taking.done()
        gate.set()
        assert (await sending).committed == ("r0", "r1")
        await taking
        assert serving(second) == ["r0", "r1"]
        assert second.coordinator.status().version == "1"  # learned after the round, not before
        assert serving(first) == []
        assert {replica.state for replica in first.coordinator.status().replicas} == {ReplicaState.RETIRED.value}
        assert all("session 'second' has this engine now" in str(each.error) for each in first.coordinator.status().replicas)
        with pytest.raises(SessionConflict, match=r"session 'fake' has no engine left\. Taken over: r0"):
            await first.send(2)
        await second.send(2)
        await first.coordinator.close()
        assert serving(second) == ["r0", "r1"]
        assert len(second.keys.values) == 2

    run(story)


def test_what_was_staged_before_the_hand_over_goes_to_nobody() -> None:
    async def story() -> None:
        first = await FakeFleet(2, timeouts=Timeouts()).attach()
        ticket = await first.open(1)
        await first.coordinator.rounds.seal(ticket.snapshot, sealed("d"))
        second = await FakeFleet(name="second", other=first, timeouts=Timeouts()).attach(take_over=True)
        with pytest.raises(SessionConflict, match="no engine left"):
            await first.coordinator.rounds.commit(ticket.snapshot)
        assert all(engine.calls == [] and engine.version == "v0" for engine in second.engines)
        assert first.stores.open == {}

    run(story)


def test_the_rest_of_the_fleet_goes_on_without_the_engines_taken() -> None:
    async def story() -> None:
        first = await FakeFleet(3, timeouts=Timeouts()).attach()
        await first.send(1)
        second = FakeFleet(name="second", other=first, timeouts=Timeouts())
        second.engines = first.engines[2:]
        await second.attach(take_over=True)
        assert (await first.send(2)).committed == ("r0", "r1")
        assert [engine.version for engine in first.engines] == ["2", "2", "1"]
        await second.send("other")
        assert [engine.version for engine in first.engines] == ["2", "2", "other"]

    run(story)


def test_a_session_whose_round_does_not_end_keeps_its_engines() -> None:
    async def story() -> None:
        first = await FakeFleet(1, timeouts=Timeouts()).attach()
        gate = first.engines[0].gate("update")
        sending = asyncio.create_task(first.send(1))
        await first.engines[0].reached["update"].wait()
        with pytest.raises(SessionConflict, match=r"did not hand over r0: its round .* is still in progress") as caught:
            await first.coordinator.hand_over(("r0-1",), to="second", limit_s=0.1)
        assert caught.value.limit_s == 0.1
        gate.set()
        assert (await sending).committed == ("r0",)
        await first.send(2)

    run(story)


def test_an_engine_that_owes_an_answer_is_not_handed_over() -> None:
    async def story() -> None:
        first = await FakeFleet(2, timeouts=QUICK).attach()
        first.engines[1].faults["pause"] = "late"
        with pytest.raises(RoundAborted):
            await first.send(1)
        with pytest.raises(SessionConflict, match="did not hand over r1: an engine has not answered an earlier call yet"):
            await first.coordinator.hand_over(("r1-1",), to="second", limit_s=0.1)
        second = FakeFleet(name="second", other=first)
        taking = asyncio.create_task(second.attach(take_over=True))
        while first.coordinator._parts.turn.holder is None:
            await asyncio.sleep(0)
        first.engines[1].release.set()
        await taking
        assert [(engine.paused, engine.version) for engine in second.engines] == [(False, "v0")] * 2
        await second.send("after")
        assert serving(second) == ["r0", "r1"]

    run(story)


def test_an_update_left_open_is_refused_and_no_claim_is_left() -> None:
    async def story() -> None:
        fleet = FakeFleet(2)
        fleet.engines[1].update_open = True
        with pytest.raises(AttachError, match="take_over"):
            await fleet.attach()
        assert fleet.keys.values == {}

    run(story)


@pytest.mark.parametrize(("verb", "fault", "words"), [("pause", "hang", "was not answered"), ("finish", "raise", "made to fail in finish")])
def test_an_open_update_that_cannot_be_flushed_says_what_failed_and_what_was_left(verb: str, fault: str, words: str) -> None:
    async def story() -> None:
        first = await FakeFleet(1, timeouts=Timeouts()).attach()
        second = FakeFleet(name="second", other=first, timeouts=QUICK)
        engine = first.engines[0]
        engine.update_open = True
        engine.faults[verb] = fault
        with pytest.raises(AttachError, match=rf"could not be flushed \({verb}\).*'!rws:flushed'") as caught:
            await second.attach(take_over=True)
        assert words in str(caught.value.engine_message)
        assert engine.version == "!rws:flushed"
        engine.release.set()

    run(story)


def test_engines_can_be_taken_back() -> None:
    async def story() -> None:
        first = await FakeFleet(2, timeouts=Timeouts()).attach()
        second = FakeFleet(name="second", other=first, timeouts=Timeouts())
        await second.attach(take_over=True)
        again = FakeFleet(name="third", other=second, timeouts=Timeouts())
        await again.attach(take_over=True)
        assert serving(again) == ["r0", "r1"]
        assert serving(second) == []

    run(story)


@pytest.mark.parametrize("look", ["a round", "a health check", "a heal", "a sleep"])
def test_an_engine_that_restarted_and_is_another_sessions_by_now_is_asked_and_not_touched(look: str) -> None:
    async def story() -> None:
        first = await FakeFleet(2).attach()
        await first.send(1)
        lost = first.engines[1]
        lost.restart()
        second = FakeFleet(name="second", other=first)
        second.engines = [lost]
        await second.attach()
        lost.version, lost.paused, lost.update_open = "!rws:a round of the second", True, True
        first.forget_calls()
        if look == "a round":
            assert (await first.send(2)).committed == ("r0",)
        elif look == "a health check":
            told = first.coordinator.status().sequence
            await first.coordinator.health.check()
            assert first.coordinator.status().sequence == told + 2, "watchers hear that it restarted, and whose it is"
        elif look == "a heal":
            await first.coordinator.repair.heal("r1")
        else:
            await first.coordinator.sleep_mode.sleep(1)
        assert lost.calls == ["inspect"]
        assert (lost.version, lost.update_open) == ("!rws:a round of the second", True)
        assert [replica.state for replica in first.coordinator.status().replicas] == ["SERVING", "RETIRED"]

    run(story)


def test_a_session_whose_last_engine_restarted_into_another_says_so() -> None:
    async def story() -> None:
        first = await FakeFleet(1).attach()
        first.engines[0].restart()
        await FakeFleet(name="second", other=first).attach()
        for _ in range(2):
            with pytest.raises(SessionConflict, match=r"session 'fake' has no engine left. Taken over: r0 \(by 'second'\)"):
                await first.send(1)
        assert first.engines[0].calls == ["inspect"]

    run(story)
