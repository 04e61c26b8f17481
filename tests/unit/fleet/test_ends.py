"""What is still under way when a sender, a round or a session ends: who waits for it, how long, and that nothing is left."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ray_weightsync.config import Host, Timeouts
from ray_weightsync.errors import RoundAborted, SessionConflict
from ray_weightsync.fleet.parts import Parts
from tests.unit.fleet import virtual_time
from tests.unit.fleet.fakes import QUICK, FakeFleet, plan_of, sealed
from tests.unit.fleet.test_rounds import run


def test_a_sender_that_gives_up_does_not_wait_for_engines_and_the_next_one_does() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2, timeouts=Timeouts(status_s=0.05)).attach()
        gate = fleet.engines[0].gate("see")
        ticket = await fleet.open(1)
        await fleet.engines[0].reached["see"].wait()
        rounds = fleet.coordinator.rounds
        await asyncio.wait_for(rounds.give_up(ticket.snapshot, "its source failed"), 5)
        with pytest.raises(RoundAborted, match="given up"):
            await rounds.commit(ticket.snapshot, sealed=sealed("d"), holds_turn=True)
        following = asyncio.create_task(fleet.send(2))
        for _ in range(100):
            await asyncio.sleep(0)
        assert fleet.coordinator._parts.turn.holder == ticket.snapshot, "engines are still at its preflight"
        assert list(fleet.stores.open.values()) == ["writing"]
        gate.set()
        assert (await following).committed == ("r0", "r1")
        assert ticket.snapshot not in fleet.stores.open

    run(story)


def test_when_a_sender_that_gave_up_is_told_so_the_turn_is_free_unless_an_engine_hangs() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2, timeouts=Timeouts()).attach()
        ticket = await fleet.open(1)
        await fleet.coordinator.rounds.give_up(ticket.snapshot, "its source failed")
        assert fleet.coordinator._parts.turn.holder is None
        assert "writing" not in fleet.stores.open.values()

    run(story)


def test_commits_that_follow_one_another_at_once_have_one_slot_allotted_for_the_next_round() -> None:
    async def story() -> None:
        fleet = await FakeFleet(1, transport=Host(num_slots=4)).attach()
        rounds, staging = fleet.coordinator.rounds, fleet.coordinator._parts.staging
        tickets = [await fleet.open(1)]
        await rounds.seal(tickets[0].snapshot, sealed("1"))
        tickets.append(await fleet.open(2))
        await rounds.seal(tickets[1].snapshot, sealed("2"))
        allot, gate, allotting = fleet.stores.open_slot, asyncio.Event(), asyncio.Event()

        async def held(*args: Any, **kwargs: Any) -> Any:
            allotting.set()
            await gate.wait()
            return await allot(*args, **kwargs)

        fleet.stores.open_slot = held  # type: ignore[method-assign]
        await rounds.commit(tickets[0].snapshot)
        await allotting.wait()
        await rounds.commit(tickets[1].snapshot)
        await asyncio.sleep(0.05)  # longer than what is done behind a reply waits
        gate.set()
        await staging.settled()
        assert sorted(fleet.stores.open.values()) == ["committed", "former", "writing"]
        await fleet.send(3)
        assert sorted(fleet.stores.open.values()) == ["committed", "former", "former", "writing"]

    run(story)


def test_a_store_that_has_the_later_of_two_commits_is_not_closed_for_the_earlier_one_s_sake() -> None:
    async def story() -> None:
        fleet = await FakeFleet(1).attach()
        staging = fleet.coordinator._parts.staging
        await fleet.send(1)
        first = staging.committed
        assert first is not None
        ticket = await fleet.open(2)
        snapshot = staging.get(ticket.snapshot)
        assert snapshot is not None
        await fleet.coordinator.rounds.seal(ticket.snapshot, sealed("2"))
        fleet.stores.start("other")[snapshot.slot] = "sealed"
        snapshot.copies["other"] = type(snapshot.copies["node"])("other", "other-1", {}, sealed=True)
        staging.keep(first)
        staging.keep(snapshot)
        await staging.settled()
        assert fleet.stores.at["other"] == {snapshot.slot: "committed"} | {
            slot: state for slot, state in fleet.stores.at["other"].items() if state == "writing"
        }

    run(story)


def test_an_owner_that_dies_after_it_closed_the_session_costs_no_wait() -> None:
    async def story() -> None:
        fleet = await FakeFleet(1, timeouts=Timeouts()).attach()
        await fleet.send(1)
        await fleet.coordinator.close()
        await asyncio.wait_for(fleet.coordinator.leave(), 5)
        await asyncio.wait_for(fleet.coordinator.close(), 5)

    run(story)


def test_a_caller_of_close_that_goes_away_does_not_keep_it_from_being_done() -> None:
    async def story() -> None:
        fleet = await FakeFleet(1, timeouts=Timeouts()).attach()
        gate = fleet.engines[0].gate("update")
        sending = asyncio.create_task(fleet.send(1))
        await fleet.engines[0].reached["update"].wait()
        closing = asyncio.create_task(fleet.coordinator.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait({closing})
        gate.set()
        assert (await sending).committed == ("r0",)
        await asyncio.wait_for(fleet.coordinator.close(), 5)
        assert fleet.stores.closed

    run(story)


@pytest.mark.parametrize("closes", [False, True], ids=["its sender gives up", "its session is closed"])
def test_a_round_that_ends_while_its_slot_is_being_had_keeps_neither_turn_nor_slot(closes: bool) -> None:
    async def story() -> None:
        fleet = await FakeFleet(1, timeouts=Timeouts()).attach()
        turn, open_slot = fleet.coordinator._parts.turn, fleet.stores.open_slot
        gate, asked = asyncio.Event(), asyncio.Event()

        async def held(*args: Any, **kwargs: Any) -> Any:
            asked.set()
            await gate.wait()
            return await open_slot(*args, **kwargs)

        fleet.stores.open_slot = held  # type: ignore[method-assign]
        opening = asyncio.create_task(fleet.open(1))
        await asked.wait()
        assert turn.holder is not None
        closing = asyncio.create_task(fleet.coordinator.close() if closes else fleet.coordinator.rounds.abandon(turn.holder, "interrupted"))
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(RoundAborted, match="closed" if closes else "interrupted"):
            await asyncio.wait_for(opening, 5)
        await asyncio.wait_for(closing, 5)
        assert fleet.stores.open == {}
        assert closes or turn.holder is None

    run(story)


def test_claims_that_cannot_be_given_back_do_not_keep_the_shared_memory_of_a_closed_session() -> None:
    async def story() -> None:
        fleet = await FakeFleet(1, timeouts=Timeouts()).attach()
        await fleet.send(1)

        def unreachable(key: str) -> None:
            raise ConnectionError("the control plane does not answer")

        fleet.keys.delete = unreachable  # type: ignore[method-assign]
        with pytest.raises(ConnectionError):
            await fleet.coordinator.close()
        assert fleet.stores.closed

    run(story)


def test_how_a_round_ended_that_waits_for_its_turn_is_told_when_it_has_had_it() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2, timeouts=Timeouts(), transport=Host(num_slots=4)).attach()
        coordinator = fleet.coordinator
        staged = await fleet.open(1)
        await coordinator.rounds.seal(staged.snapshot, sealed("1"))
        other = await fleet.open(2)
        committing = asyncio.create_task(coordinator.rounds.commit(staged.snapshot))
        await asyncio.sleep(0)
        asked = asyncio.create_task(coordinator.settled(staged.snapshot))  # by a caller who lost the answer, not the coordinator
        await asyncio.sleep(0)
        await coordinator.rounds.abandon(other.snapshot, "not needed")
        assert (await asyncio.wait_for(asked, 10)).committed == ("r0", "r1")
        assert (await committing).version == 1

    run(story)


def test_who_asks_after_a_round_that_did_not_get_its_turn_is_not_told_that_a_coordinator_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Parts, "longest_turn_s", 60.0)

    async def story() -> None:
        fleet = await FakeFleet(1, timeouts=QUICK, transport=Host(num_slots=4)).attach()
        coordinator = fleet.coordinator
        staged = await fleet.open(1)
        await coordinator.rounds.seal(staged.snapshot, sealed("1"))
        await coordinator._parts.turn.take("another", busy="wait", limit_s=1)
        committing = asyncio.create_task(coordinator.rounds.commit(staged.snapshot))
        await asyncio.sleep(0)
        with pytest.raises(RoundAborted, match="did not get its turn") as told:
            await coordinator.settled(staged.snapshot)
        assert "died" not in str(told.value)
        with pytest.raises(RoundAborted, match="still in progress"):
            await committing

    virtual_time.run(story())


def test_a_slot_that_is_had_too_late_is_given_back() -> None:
    async def story() -> None:
        fleet = await FakeFleet(1, timeouts=Timeouts()).attach()
        open_slot = fleet.stores.open_slot

        async def late(*args: Any, **kwargs: Any) -> Any:
            fleet.stores.open_slot = open_slot  # type: ignore[method-assign]
            await open_slot(*args, **kwargs)
            raise TimeoutError("the snapshot store on node node did not answer open_slot within 120.0 s")

        fleet.stores.open_slot = late  # type: ignore[method-assign]
        with pytest.raises(RoundAborted, match="did not answer open_slot") as caught:
            await fleet.send(1)
        assert "one that hangs ends with the session" in str(caught.value.hint)
        await fleet.send(2)
        assert sorted(fleet.stores.open.values()) == ["committed", "writing"], "and the one for the next round"

    run(story)


def test_how_long_a_turn_may_take_grows_with_the_weights_that_are_on_their_way() -> None:
    async def story() -> None:
        timeouts = Timeouts(min_rate_bytes_per_s=1.0)
        fleet = await FakeFleet(1, timeouts=timeouts).attach()
        coordinator = fleet.coordinator
        assert coordinator.longest_turn_s == timeouts.staging_s(0) + timeouts.round_s(0)
        plan = plan_of("a", "b", "c")
        ticket = await fleet.open(1, plan)
        longest_s = timeouts.staging_s(plan.num_bytes) + timeouts.round_s(plan.num_bytes)
        assert coordinator.longest_turn_s == longest_s
        await coordinator.rounds.commit(ticket.snapshot, sealed=sealed("d"), holds_turn=True)
        assert coordinator.longest_turn_s == longest_s, "others are still brought to them"
        await fleet.send(2)
        assert coordinator.longest_turn_s < longest_s

    run(story)


def test_how_long_a_turn_may_take_is_known_before_its_slot_is_had_and_while_it_is_freed() -> None:
    async def story() -> None:
        fleet = await FakeFleet(1, timeouts=Timeouts(min_rate_bytes_per_s=1.0)).attach()
        coordinator, plan, open_slot = fleet.coordinator, plan_of("a", "b", "c"), fleet.stores.open_slot
        gate, asked = asyncio.Event(), asyncio.Event()
        idle_s = coordinator.longest_turn_s

        async def held(*args: Any, **kwargs: Any) -> Any:
            asked.set()
            await gate.wait()
            return await open_slot(*args, **kwargs)

        fleet.stores.open_slot = held  # type: ignore[method-assign]
        opening = asyncio.create_task(fleet.open(1, plan))
        await asked.wait()
        assert coordinator.longest_turn_s > idle_s
        judging = fleet.engines[0].gate("inspect")
        gate.set()
        ticket = await opening
        await fleet.engines[0].reached["inspect"].wait()
        giving_up = asyncio.create_task(coordinator.rounds.abandon(ticket.snapshot, "the sender gave up"))
        while coordinator._parts.staging.get(ticket.snapshot) is not None:
            await asyncio.sleep(0)
        assert coordinator.longest_turn_s > idle_s
        judging.set()
        await giving_up
        assert coordinator.longest_turn_s == idle_s

    run(story)


def test_the_turns_of_other_sessions_whose_engines_are_waited_for_add_up_until_they_were_had() -> None:
    async def story() -> None:
        first = await FakeFleet(1).attach()
        second = FakeFleet(name="second", other=first)
        idle_s = second.coordinator.longest_turn_s
        for _ in range(2):
            second.coordinator.waits_for_turn(1e6)
        assert second.coordinator.longest_turn_s == 2e6
        with pytest.raises(SessionConflict):
            await second.attach()
        assert second.coordinator.longest_turn_s == idle_s

    run(story)
