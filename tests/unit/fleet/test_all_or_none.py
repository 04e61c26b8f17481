"""Under ``after_start="all_or_none"`` a failure after *start* takes the version back from every replica that it touched."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ray_weightsync.config import FailurePolicy, Host
from ray_weightsync.errors import ReplicasLost, RoundAborted
from tests.unit.fleet.fakes import FakeFleet, sealed
from tests.unit.fleet.test_rounds import run

ALL_OR_NONE = FailurePolicy(after_start="all_or_none", auto_heal=False)
INSIDE = ["start", "update", "finish", "outcome"]


async def served(**settings: Any) -> FakeFleet:
    """A fleet of three that serves version 1, committed."""
    fleet = await FakeFleet(3, on_failure=ALL_OR_NONE, **settings).attach()
    await fleet.send(1)
    return fleet


def whole(fleet: FakeFleet, *names: str) -> None:
    for engine in fleet.engines:
        if engine.label in (names or ("r0", "r1", "r2")):
            assert (engine.version, engine.weights, engine.paused) == ("1", fleet.sent["1"], False), engine.label


@pytest.mark.parametrize("phase", INSIDE)
def test_one_that_fails_takes_the_version_back_from_all_and_is_brought_back_too(phase: str) -> None:
    async def story() -> None:
        fleet = await served()
        fleet.engines[1].faults[phase] = "raise"
        with pytest.raises(RoundAborted, match="taken back from all") as caught:
            await fleet.send(2)
        assert (caught.value.phase, caught.value.replicas) == (phase, ("r1",))
        assert "version 1 still serves everywhere" in str(caught.value)
        whole(fleet)
        status = fleet.coordinator.status()
        assert (status.version, status.ordinal, status.serving) == ("1", 1, ("r0", "r1", "r2"))
        assert (await fleet.send(2)).committed == ("r0", "r1", "r2")

    run(story)


@pytest.mark.parametrize("fault", ["die", "hang"])
def test_one_that_cannot_be_brought_back_is_fenced_and_named_while_the_others_serve_the_old_version(fault: str) -> None:
    async def story() -> None:
        fleet = await served()
        fleet.engines[1].faults["update"] = fault
        with pytest.raises(RoundAborted, match="except on r1") as caught:
            await fleet.send(2)
        assert caught.value.replicas == ("r1",)
        whole(fleet, "r0", "r2")
        assert fleet.coordinator.status().serving == ("r0", "r2")
        fleet.engines[1].release.set()

    run(story)


@pytest.mark.parametrize("phase", ["pause", "start", "update", "finish", "outcome", "commit", "cache", "resume"])
@pytest.mark.parametrize("fault", ["raise", "die", "hang"])
def test_a_fault_while_it_is_taken_back_never_leaves_a_torn_engine_with_a_valid_label(phase: str, fault: str) -> None:
    async def story() -> None:
        fleet = await served()
        first, second = fleet.engines[0], fleet.engines[1]
        second.faults["outcome"] = "raise"
        gate = second.gate("outcome")
        sending = asyncio.create_task(fleet.send(2))
        await second.reached["outcome"].wait()
        while first.calls[-1] != "outcome":
            await asyncio.sleep(0)
        first.faults["unmark" if phase == "commit" else phase] = fault  # hits its way back, whose label is the one before
        gate.set()
        with pytest.raises(RoundAborted, match="except on r0"):
            await sending
        whole(fleet, "r1", "r2")
        assert fleet.coordinator.status().serving == ("r1", "r2")
        first.release.set()
        while any(replica.unanswered for replica in fleet.coordinator._parts.roster.replicas.values()):
            await asyncio.sleep(0)
        if not first.dead:
            assert first.version.startswith("!rws:")
            assert first.paused
            assert (await fleet.send(3)).committed == ("r0", "r1", "r2")

    run(story)


def test_of_the_first_round_nothing_can_be_taken_back_and_its_report_says_so() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2, on_failure=ALL_OR_NONE).attach()
        fleet.engines[1].faults["update"] = "raise"
        with pytest.raises(ReplicasLost) as caught:
            await fleet.send(1)
        assert any(each.startswith("all or none") for each in caught.value.report.missing)
        report = await fleet.send(2)
        assert "all or none" in report.guarantees

    run(story)


def test_an_engine_that_its_owner_had_paused_is_left_paused() -> None:
    async def story() -> None:
        fleet = await served()
        fleet.engines[0].paused = fleet.engines[1].paused = True
        fleet.engines[1].faults["update"] = "raise"
        with pytest.raises(RoundAborted):
            await fleet.send(2)
        assert [engine.paused for engine in fleet.engines] == [True, True, False]
        assert [engine.version for engine in fleet.engines] == ["1"] * 3

    run(story)


def test_with_overlap_the_way_back_needs_no_sender() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2, on_failure=ALL_OR_NONE, transport=Host(overlap=True)).attach()
        first = await fleet.open(1)
        fleet.sent["1"] = first.address["snapshot"]
        await fleet.coordinator.rounds.commit(first.snapshot, sealed=sealed("one"), holds_turn=True)
        ticket = await fleet.open(2)
        fleet.engines[1].faults["finish"] = "raise"
        committing = asyncio.create_task(fleet.coordinator.rounds.commit(ticket.snapshot, holds_turn=True))
        while fleet.engines[0].calls[-1] != "finish":
            await asyncio.sleep(0)
        await fleet.coordinator.rounds.seal(ticket.snapshot, sealed("two"), keep_turn=True)
        with pytest.raises(RoundAborted, match="taken back"):
            await committing
        whole(fleet, "r0", "r1")

    run(story)
