"""Health checks: what dies, restarts or is resumed between rounds is noticed, and no check stands in a round's way."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from ray_weightsync.config import FailurePolicy, Timeouts
from ray_weightsync.errors import ReplicasLost
from tests.unit.fleet.fake_engine import restarts_after_a_look
from tests.unit.fleet.fakes import QUICK, FakeFleet
from tests.unit.fleet.test_repair import replica, state, with_one_fenced
from tests.unit.fleet.test_rounds import run

NO_HEAL = FailurePolicy(auto_heal=False)


async def served(num: int = 2, **settings: Any) -> FakeFleet:
    fleet = await FakeFleet(num, **{"on_failure": NO_HEAL, **settings}).attach()
    await fleet.send(1)
    fleet.forget_calls()
    return fleet


def test_a_healthy_fleet_is_asked_one_question_each_and_nothing_changes() -> None:
    async def story() -> None:
        fleet = await served()
        before = fleet.coordinator.status()
        await fleet.coordinator.health.check()
        assert [engine.calls for engine in fleet.engines] == [["inspect"], ["inspect"]]
        assert fleet.coordinator.status() == before, "nobody is told of a check that found nothing"

    run(story)


@pytest.mark.parametrize("auto_heal", [True, False])
def test_an_engine_that_restarted_behind_its_handle_does_not_serve_and_is_healed_if_the_policy_says_so(auto_heal: bool) -> None:
    async def story() -> None:
        fleet = await served(on_failure=FailurePolicy(auto_heal=auto_heal))
        fleet.engines[1].restart()
        await fleet.coordinator.health.check()
        status = fleet.coordinator.status()
        if auto_heal:
            assert status.serving == ("r0", "r1")
            assert (fleet.engines[1].version, fleet.engines[1].weights) == ("1", fleet.sent["1"])
        else:
            assert status.serving == ("r0",)
            assert "restarted" in str(status.replicas[1].error)
            assert not fleet.engines[1].paused, "it holds honest weights under its own label"
        assert status.replicas[1].incarnation == fleet.engines[1].incarnation

    run(story)


def test_the_claim_follows_an_engine_that_restarted() -> None:
    async def story() -> None:
        fleet = await served(on_failure=FailurePolicy())
        fleet.engines[1].restart()
        await fleet.coordinator.health.check()
        assert any(key.startswith(f"claim:{fleet.engines[1].incarnation}#") for key in fleet.keys.values)

    run(story)


def test_a_dead_process_is_given_up_and_the_next_round_goes_on_without_it() -> None:
    async def story() -> None:
        fleet = await served(on_failure=FailurePolicy())
        fleet.engines[1].dead = True
        await fleet.coordinator.health.check()
        told = fleet.coordinator.status().replicas[1]
        assert (told.state, told.lost) == ("RETIRED", True)
        assert "process is gone" in str(told.error)
        report = await fleet.send(2)
        assert report.committed == ("r0",)
        assert report.notes == ()

    run(story)


def test_a_process_that_may_come_back_is_waited_for() -> None:
    async def story() -> None:
        fleet = await served(on_failure=FailurePolicy())
        fleet.engines[1].faults["inspect"] = "die"
        fleet.coordinator.health._is_gone = lambda facts: asyncio.sleep(0, False)
        await fleet.coordinator.health.check()
        assert state(fleet, "r1") == "QUARANTINED"
        fleet.engines[1].dead = False
        fleet.engines[1].restart()
        await fleet.coordinator.health.check()
        assert fleet.coordinator.status().serving == ("r0", "r1")

    run(story)


def test_an_engine_out_of_step_is_given_up_and_never_healed() -> None:
    async def story() -> None:
        fleet = await served(on_failure=FailurePolicy())
        fleet.engines[1].out_of_step = True
        await fleet.coordinator.health.check()
        assert state(fleet, "r1") == "RETIRED"
        assert "out of step" in str(fleet.coordinator.status().replicas[1].error)
        assert "pause" not in fleet.engines[1].calls

    run(story)


@pytest.mark.parametrize("what", ["resumed", "woken up"])
def test_a_pause_that_its_owner_has_ended_is_not_theirs_any_more(what: str) -> None:
    async def story() -> None:
        fleet = await served()
        theirs = fleet.engines[1]
        theirs.paused, theirs.faults["update"] = True, "raise"
        with pytest.raises(ReplicasLost):
            await fleet.send(2)
        if what == "resumed":
            theirs.paused = False
            await fleet.coordinator.health.check()
        else:
            await fleet.coordinator.sleep_mode.wake_up(None)
        assert theirs.paused, "it is fenced"
        await fleet.send(3)
        assert not theirs.paused

    run(story)


@pytest.mark.parametrize("what", ["resumed", "relabelled"])
def test_a_fenced_replica_that_somebody_lets_go_is_fenced_again(what: str) -> None:
    async def story() -> None:
        fleet = await with_one_fenced(on_failure=NO_HEAL)
        loose = fleet.engines[1]
        if what == "resumed":
            loose.paused = False
        else:
            loose.version = "1"
        await fleet.coordinator.health.check()
        assert loose.paused
        assert loose.version.startswith("!rws:")
        fleet.forget_calls()
        await fleet.coordinator.health.check()
        assert loose.calls == ["inspect"], "once is enough"

    run(story)


def test_a_process_that_came_since_the_look_is_not_fenced_for_the_one_that_was_let_go() -> None:
    async def story() -> None:
        fleet = await with_one_fenced(on_failure=NO_HEAL)
        loose = fleet.engines[1]
        loose.paused = False
        restarts_after_a_look(loose)
        await fleet.coordinator.health.check()
        assert (loose.version, loose.paused) == ("default", False)

    run(story)


@pytest.mark.parametrize(("label", "words"), [("!rws:other", "another session"), ("2", "another client changed its weights")])
def test_a_label_that_is_not_ours_takes_a_replica_out_of_the_serving_set(label: str, words: str) -> None:
    async def story() -> None:
        fleet = await served()
        fleet.engines[1].version = label
        await fleet.coordinator.health.check()
        assert fleet.coordinator.status().serving == ("r0",)
        assert words in str(fleet.coordinator.status().replicas[1].error)

    run(story)


def test_an_update_that_another_client_began_takes_a_replica_out_of_the_serving_set() -> None:
    async def story() -> None:
        fleet = await served()
        fleet.engines[0].update_open = True
        await fleet.coordinator.health.check()
        assert fleet.coordinator.status().serving == ("r1",)

    run(story)


def test_an_engine_that_its_owner_paused_goes_on_counting_as_serving() -> None:
    async def story() -> None:
        fleet = await served()
        fleet.engines[1].paused = True
        await fleet.coordinator.health.check()
        assert fleet.coordinator.status().serving == ("r0", "r1")
        assert fleet.engines[1].calls == ["inspect"]

    run(story)


@pytest.mark.parametrize("ended", [True, False])
def test_an_answer_that_arrives_when_a_round_has_the_turn_or_had_it_is_dropped(ended: bool) -> None:
    async def story() -> None:
        fleet = await served(2, timeouts=dataclasses.replace(QUICK, preflight_s=5, health_interval_s=10))
        gate = fleet.engines[1].gate("inspect")
        checking = asyncio.create_task(fleet.coordinator.health.check())
        await fleet.engines[1].reached["inspect"].wait()
        del fleet.engines[1].gates["inspect"]
        ticket = await fleet.open(2)
        if ended:
            await fleet.coordinator.rounds.abandon(ticket.snapshot, "not needed")
        fleet.engines[1].restart()
        gate.set()
        await checking
        assert state(fleet, "r1") == "SERVING"
        if not ended:
            await fleet.coordinator.rounds.abandon(ticket.snapshot, "not needed")
        await fleet.coordinator.health.check()
        assert state(fleet, "r1") == "QUARANTINED"

    run(story)


def test_an_engine_that_does_not_answer_is_asked_one_question_at_a_time_and_stays_what_it_is() -> None:
    async def story() -> None:
        fleet = await served(2, timeouts=Timeouts(health_interval_s=0.01, min_rate_bytes_per_s=1e12))
        gate = fleet.engines[1].gate("inspect")
        for _ in range(5):
            await fleet.coordinator.health.check()
        assert fleet.engines[1].calls == ["inspect"]
        assert fleet.coordinator.status().serving == ("r0", "r1")
        gate.set()

    run(story)


def test_checks_go_on_by_themselves() -> None:
    async def story() -> None:
        fleet = await served(2, timeouts=dataclasses.replace(QUICK, health_interval_s=0.01))
        fleet.coordinator.health.start()
        fleet.coordinator.health.start()
        fleet.engines[1].restart()
        status = fleet.coordinator.status()
        while status.serving != ("r0",):
            status = await fleet.coordinator.watch(status.sequence, limit_s=10)
        await fleet.coordinator.close()

    run(story)


def test_a_replica_lost_in_a_round_is_found_dead_by_the_next_check() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2).attach()
        await fleet.send(1)
        fleet.engines[1].faults["update"] = "die"
        with pytest.raises(ReplicasLost):
            await fleet.send(2)
        await fleet.coordinator.health.check()
        assert replica(fleet, "r1").lost

    run(story)
