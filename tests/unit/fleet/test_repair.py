"""Repair: who is healed, from what, at whose cost; and who is given up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ray_weightsync.config import FailurePolicy
from ray_weightsync.errors import ConfigError, FleetTorn, ReplicasLost, RoundAborted
from ray_weightsync.fleet.journal import MAX_OUTCOMES
from tests.unit.fleet.fakes import FakeFleet
from tests.unit.fleet.test_rounds import run

HEAL = ["pause", "mark", "start", "update", "finish", "outcome", "commit", "cache", "resume"]


async def with_one_fenced(phase: str = "update", **settings: Any) -> FakeFleet:
    """A fleet of three at version 1, of which r1 failed in ``phase`` and is fenced."""
    fleet = await FakeFleet(3, **settings).attach()
    await fleet.send("first")
    fleet.engines[1].faults[phase] = "raise"
    with pytest.raises(ReplicasLost):
        await fleet.send(1)
    fleet.forget_calls()
    return fleet


def state(fleet: FakeFleet, name: str) -> str:
    return fleet.coordinator._roster.replicas[name].state.value


def replica(fleet: FakeFleet, name: str) -> Any:
    return fleet.coordinator._roster.replicas[name]


class TestHeal:
    @pytest.mark.parametrize("phase", ["start", "update", "finish", "outcome", "commit", "cache", "resume"])
    def test_a_fenced_replica_is_brought_to_the_committed_version_and_nobody_else_is_asked_anything(self, phase: str) -> None:
        async def story() -> None:
            fleet = await with_one_fenced(phase)
            assert state(fleet, "r1") == "QUARANTINED"
            report = await fleet.coordinator.repair.heal()
            assert (report.version, report.ordinal, report.committed) == (1, 2, ("r1",))
            assert report.trainer_blocked_s == 0
            healed = fleet.engines[1]
            assert (healed.version, healed.weights, healed.paused) == ("1", fleet.stores.committed, False)
            assert fleet.engines[0].calls == fleet.engines[2].calls == []
            assert fleet.coordinator.status().serving == ("r0", "r1", "r2")
            assert fleet.coordinator.status().phase == "idle"

        run(story)

    def test_without_a_committed_snapshot_it_is_said_and_nothing_is_touched(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(2).attach()
            fleet.engines[1].faults["update"] = "raise"
            fleet.engines[0].faults["update"] = "raise"
            with pytest.raises(FleetTorn):
                await fleet.send(1)
            fleet.forget_calls()
            with pytest.raises(FleetTorn, match="nothing to heal from"):
                await fleet.coordinator.repair.heal()
            assert fleet.engines[0].calls == fleet.engines[1].calls == []
            await fleet.send(2)  # the turn was given back

        run(story)

    def test_a_named_replica_alone_is_healed_and_an_unknown_or_retired_one_is_refused(self) -> None:
        async def story() -> None:
            fleet = await with_one_fenced()
            fleet.engines[2].dead = True
            await fleet.coordinator.health.check()
            assert state(fleet, "r2") == "RETIRED"
            with pytest.raises(ConfigError, match="there is no replica 'r7'; this session has r0, r1, r2"):
                await fleet.coordinator.repair.heal("r7")
            with pytest.raises(ConfigError, match="r2 is retired for good"):
                await fleet.coordinator.repair.heal("r2")
            fleet.forget_calls()
            assert (await fleet.coordinator.repair.heal("r0")).committed == ("r0",), "one that serves may be brought anew"
            assert fleet.engines[1].calls == []

        run(story)

    def test_one_that_cannot_be_healed_does_not_stop_the_others_and_is_named(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(4).attach()
            await fleet.send("first")
            for index in (1, 2, 3):
                fleet.engines[index].faults["update"] = "raise"
            with pytest.raises(ReplicasLost):
                await fleet.send(1)
            fleet.engines[1].faults["inspect"] = "raise"
            fleet.engines[2].faults["pause"] = "raise"
            with pytest.raises(ReplicasLost) as caught:
                await fleet.coordinator.repair.heal()
            assert caught.value.replicas == ("r1", "r2")
            assert caught.value.report is not None
            assert caught.value.report.committed == ("r3",)
            assert fleet.coordinator.status().serving == ("r0", "r3")
            assert (await fleet.coordinator.repair.heal()).committed == ("r1", "r2")

        run(story)

    def test_when_nobody_serves_and_nobody_can_be_healed_the_fleet_is_torn(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(1).attach()
            await fleet.send("first")
            fleet.engines[0].faults["update"] = "raise"
            with pytest.raises(FleetTorn):
                await fleet.send(1)
            fleet.engines[0].faults["start"] = "raise"
            with pytest.raises(FleetTorn):
                await fleet.coordinator.repair.heal()
            report = await fleet.coordinator.repair.heal()
            assert (report.version, report.committed) == ("first", ("r0",)), "what was committed last, not what failed"
            assert fleet.engines[0].weights == fleet.sent["first"]

        run(story)

    def test_it_waits_for_the_round_in_progress_and_heals_what_that_round_left(self) -> None:
        async def story() -> None:
            fleet = await with_one_fenced()
            gate = fleet.engines[0].gate("update")
            fleet.engines[1].faults["update"] = "raise"
            sending = asyncio.create_task(fleet.send(2))
            await fleet.engines[0].reached["update"].wait()
            healing = asyncio.create_task(fleet.coordinator.repair.heal())
            gate.set()
            with pytest.raises(ReplicasLost):
                await sending
            assert (await healing).version == 2
            assert fleet.coordinator.status().serving == ("r0", "r1", "r2")
            assert {engine.weights for engine in fleet.engines} == {fleet.sent["2"]}

        run(story)

    def test_with_nothing_to_heal_it_says_so_by_a_report_of_nobody(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(1).attach()
            await fleet.send(1)
            report = await fleet.coordinator.repair.heal()
            assert report.repeated
            assert report.replicas == ()

        run(story)


class TestUnasked:
    def test_repairs_that_nobody_asked_for_do_not_make_the_coordinator_forget_how_a_sender_s_round_ended(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(2).attach()
            report = await fleet.send(1)
            fleet.engines[1].restart()
            fleet.stores.kill("node")
            for _ in range(MAX_OUTCOMES + 1):
                await fleet.coordinator.health.check()
            assert state(fleet, "r1") == "QUARANTINED", "its snapshot is lost"
            assert await fleet.coordinator.settled(report.round_id) == report

        run(story)

    def test_a_fenced_replica_is_healed_and_the_next_round_clears_its_count(self) -> None:
        async def story() -> None:
            fleet = await with_one_fenced()
            await fleet.coordinator.health.check()
            assert fleet.coordinator.status().serving == ("r0", "r1", "r2")
            assert replica(fleet, "r1").heals == 1
            await fleet.send(2)
            assert replica(fleet, "r1").heals == 0

        run(story)

    def test_it_is_off_when_the_policy_says_so(self) -> None:
        async def story() -> None:
            fleet = await with_one_fenced(on_failure=FailurePolicy(auto_heal=False))
            await fleet.coordinator.health.check()
            assert state(fleet, "r1") == "QUARANTINED"
            assert fleet.engines[1].calls == ["inspect"]
            fleet.engines[1].dead = True
            await fleet.coordinator.health.check()
            assert state(fleet, "r1") == "QUARANTINED", "nor is it given up"

        run(story)

    @pytest.mark.parametrize("healed", [True, False])
    def test_one_that_gets_through_no_round_is_healed_max_heals_times_and_then_given_up(self, healed: bool) -> None:
        async def story() -> None:
            fleet = await with_one_fenced(on_failure=FailurePolicy(max_heals=2))
            for version in range(2, 4):
                if not healed:
                    fleet.engines[1].faults["start"] = "raise"
                await fleet.coordinator.health.check()
                assert state(fleet, "r1") == ("SERVING" if healed else "QUARANTINED")
                if healed:
                    fleet.engines[1].faults["update"] = "raise"
                    with pytest.raises(ReplicasLost):
                        await fleet.send(version)
            await fleet.coordinator.health.check()
            assert state(fleet, "r1") == "RETIRED"
            told = {each.id: each for each in fleet.coordinator.status().replicas}["r1"]
            assert told.lost
            assert "healed 2 times" in str(told.error)
            fleet.forget_calls()
            await fleet.send("last")
            assert fleet.engines[1].calls == [], "out of the fleet for good"

        run(story)

    def test_the_last_replica_is_given_up_too_but_not_retired_so_a_round_may_bring_it_back(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(1, on_failure=FailurePolicy(max_heals=1)).attach()
            await fleet.send(1)
            fleet.engines[0].faults["update"] = "raise"
            with pytest.raises(FleetTorn):
                await fleet.send(2)
            fleet.engines[0].faults["start"] = "raise"
            for _ in range(3):
                await fleet.coordinator.health.check()
            assert (state(fleet, "r0"), replica(fleet, "r0").lost, replica(fleet, "r0").heals) == ("QUARANTINED", True, 1)
            assert (await fleet.send(3)).committed == ("r0",)
            assert not replica(fleet, "r0").lost

        run(story)

    def test_the_last_replica_is_retired_when_its_process_is_gone(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(1).attach()
            await fleet.send(1)
            fleet.engines[0].dead = True
            await fleet.coordinator.health.check()
            assert state(fleet, "r0") == "RETIRED"
            assert not fleet.keys.keys("claim:"), "nor is it claimed any more"

        run(story)

    @pytest.mark.parametrize("store", ["dead", "another", "forgetful"])
    def test_a_snapshot_that_is_lost_costs_no_replica_a_try_and_is_named(self, store: str) -> None:
        async def story() -> None:
            fleet = await with_one_fenced()
            if store == "dead":
                fleet.stores.dead = True
            elif store == "another":
                fleet.stores.kill("node")
                fleet.stores.start("node")
            else:
                committed = fleet.coordinator._parts.staging.committed
                assert committed is not None
                committed.copies.clear()
            for _ in range(5):
                await fleet.coordinator.health.check()
            assert (state(fleet, "r1"), replica(fleet, "r1").heals) == ("QUARANTINED", 0)
            assert "start" not in fleet.engines[1].calls
            with pytest.raises(RoundAborted, match="snapshot of version 1 is lost"):
                await fleet.coordinator.repair.heal()
            fleet.stores.dead = False
            await fleet.send(2)
            assert fleet.coordinator.status().serving == ("r0", "r1", "r2")

        run(story)

    def test_max_heals_of_zero_gives_up_at_once(self) -> None:
        async def story() -> None:
            fleet = await with_one_fenced(on_failure=FailurePolicy(max_heals=0))
            await fleet.coordinator.health.check()
            assert state(fleet, "r1") == "RETIRED"

        run(story)

    def test_it_never_waits_for_a_round_and_a_round_that_is_staging_keeps_it_away(self) -> None:
        async def story() -> None:
            fleet = await with_one_fenced()
            ticket = await fleet.open(2)
            fleet.forget_calls()
            await fleet.coordinator.repair.heal_unasked()
            await fleet.coordinator.health.check()
            assert replica(fleet, "r1").heals == 0
            assert "pause" not in fleet.engines[1].calls
            await fleet.coordinator.rounds.abandon(ticket.snapshot, "not needed")

        run(story)

    def test_one_that_failed_its_probe_is_left_alone_until_it_is_asked_for(self) -> None:
        async def story() -> None:
            fleet = await with_one_fenced()
            replica(fleet, "r1").refused_in = "round"
            for _ in range(5):
                await fleet.coordinator.health.check()
            assert state(fleet, "r1") == "QUARANTINED"
            assert (await fleet.coordinator.repair.heal("r1")).committed == ("r1",)
            assert not replica(fleet, "r1").refused_in

        run(story)

    def test_one_that_owes_an_answer_is_not_used_before_it_came(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(2).attach()
            await fleet.send(1)
            fleet.engines[1].faults["update"] = "hang"
            with pytest.raises(ReplicasLost):
                await fleet.send(2)
            fleet.forget_calls()
            await fleet.coordinator.health.check()
            assert "start" not in fleet.engines[1].calls
            fleet.engines[1].release.set()
            while replica(fleet, "r1").unanswered:
                await asyncio.sleep(0.001)
            await fleet.coordinator.health.check()
            assert fleet.coordinator.status().serving == ("r0", "r1")

        run(story)


def test_one_that_serves_and_cannot_be_paused_for_a_repair_goes_on_serving() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2).attach()
        await fleet.send(1)
        fleet.engines[1].faults["pause"] = "raise"
        with pytest.raises(RoundAborted, match="made to fail in pause") as caught:
            await fleet.coordinator.repair.heal("r1")
        assert caught.value.replicas == ("r1",)
        assert fleet.coordinator.status().serving == ("r0", "r1")
        assert (fleet.engines[1].version, fleet.engines[1].paused) == ("1", False)

    run(story)
