"""A version is taken back from the replicas whose outputs the user's probe refused, and from no others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ray_weightsync.config import FailurePolicy
from ray_weightsync.errors import FleetTorn, ReplicasLost, RoundAborted
from ray_weightsync.fleet.parts import Parts
from ray_weightsync.fleet.probes import refuse
from ray_weightsync.fleet.states import ReplicaState
from tests.unit.fleet.fakes import QUICK, FakeFleet, sealed
from tests.unit.fleet.test_rounds import run

WRONG = "the probe answered False"


def test_who_is_refused_is_fenced_and_the_error_says_who_serves() -> None:
    async def story() -> None:
        fleet = await FakeFleet(3).attach()
        report = await fleet.send(1)
        with pytest.raises(ReplicasLost, match="serves on r0, r2") as caught:
            await refuse(fleet.coordinator._parts, report, {"r1": WRONG})
        error = caught.value
        assert (error.replicas, error.phase) == (("r1",), "probe")
        assert WRONG in str(error)
        assert error.report.committed == ("r0", "r2")
        refused = fleet.engines[1]
        assert (refused.version, refused.paused) == (f"!rws:{report.round_id}", True)
        assert fleet.coordinator.status().serving == ("r0", "r2")
        assert (await fleet.send(2)).committed == ("r0", "r1", "r2")

    run(story)


def test_when_all_are_refused_no_replica_may_serve() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2).attach()
        report = await fleet.send(1)
        with pytest.raises(FleetTorn):
            await refuse(fleet.coordinator._parts, report, {"r0": WRONG, "r1": WRONG})
        assert fleet.coordinator.status().serving == ()
        assert all(engine.version.startswith("!rws:") for engine in fleet.engines)

    run(story)


def test_with_enough_left_the_report_tells_and_nothing_is_raised() -> None:
    async def story() -> None:
        fleet = await FakeFleet(3, on_failure=FailurePolicy(min_serving=2)).attach()
        report = await refuse(fleet.coordinator._parts, await fleet.send(1), {"r1": WRONG})
        assert (report.committed, report.lost) == (("r0", "r2"), ("r1",))

    run(story)


def test_a_complaint_of_a_version_that_is_not_served_any_more_is_noted_and_fences_nobody() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2).attach()
        old = await fleet.send(1)
        await fleet.send(2)
        report = await refuse(fleet.coordinator._parts, old, {"r1": WRONG, "gone": WRONG})
        assert any("r1, gone" in note for note in report.notes)
        assert fleet.coordinator.status().serving == ("r0", "r1")
        assert [engine.paused for engine in fleet.engines] == [False, False]

    run(story)


def test_asked_again_it_answers_the_same() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2).attach()
        report = await fleet.send(1)
        for _ in range(2):
            with pytest.raises(ReplicasLost, match="serves on r1") as caught:
                await refuse(fleet.coordinator._parts, report, {"r0": WRONG})
            assert caught.value.report.lost == ("r0",)

    run(story)


def test_asked_again_by_a_caller_who_lost_the_answer_with_the_coordinator_it_answers_the_same() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2, on_failure=FailurePolicy(auto_heal=False)).attach()
        report = await fleet.send(1)
        await fleet.coordinator.chronicle.noted()
        with pytest.raises(ReplicasLost):
            await refuse(fleet.coordinator._parts, report, {"r0": WRONG})
        await fleet.succeed()
        with pytest.raises(ReplicasLost, match="serves on r1") as caught:
            await refuse(fleet.coordinator._parts, report, {"r0": WRONG})
        assert caught.value.report.lost == ("r0",)

    run(story)


def test_a_complaint_of_a_version_that_is_not_served_any_more_says_nothing_of_who_is_fenced_for_another_reason() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2, on_failure=FailurePolicy(auto_heal=False)).attach()
        old = await fleet.send(1)
        with pytest.raises(ReplicasLost):
            await refuse(fleet.coordinator._parts, old, {"r0": WRONG})
        fleet.engines[0].faults["update"] = "raise"
        with pytest.raises(ReplicasLost):
            await fleet.send(2)
        report = await refuse(fleet.coordinator._parts, old, {"r0": WRONG})
        assert any("refused r0" in note for note in report.notes)
        assert fleet.coordinator.status().serving == ("r1",)

    run(story)


def test_one_that_its_owner_had_resumed_before_it_was_refused_runs_again_with_the_next_version() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2, on_failure=FailurePolicy(auto_heal=False)).attach()
        fleet.engines[0].paused = True
        report = await fleet.send(1)
        fleet.engines[0].paused = False
        with pytest.raises(ReplicasLost):
            await refuse(fleet.coordinator._parts, report, {"r0": WRONG})
        await fleet.send(2)
        assert not fleet.engines[0].paused

    run(story)


def test_a_refusal_is_known_to_a_successor_also_where_the_mark_was_not_answered() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2, timeouts=QUICK, on_failure=FailurePolicy(auto_heal=False)).attach()
        report = await fleet.send(1)
        await fleet.coordinator.chronicle.noted()
        fleet.engines[0].faults["mark"] = "hang"
        with pytest.raises(ReplicasLost):
            await refuse(fleet.coordinator._parts, report, {"r0": WRONG})
        await fleet.succeed()
        assert fleet.coordinator.status().serving == ("r1",)

    run(story)


def test_a_process_that_came_since_the_look_is_neither_paused_nor_marked_for_what_the_one_before_answered() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2, on_failure=FailurePolicy(auto_heal=False)).attach()
        report = await fleet.send(1)
        await fleet.coordinator.chronicle.noted()
        write = fleet.journal.write

        def restarting(record: Any) -> None:
            fleet.journal.write = write  # type: ignore[method-assign]
            fleet.engines[0].restart()  # and may be another session's by now
            write(record)

        fleet.journal.write = restarting  # type: ignore[method-assign]
        with pytest.raises(ReplicasLost):
            await refuse(fleet.coordinator._parts, report, {"r0": WRONG})
        assert (fleet.engines[0].version, fleet.engines[0].paused) == ("default", False)
        assert fleet.coordinator.status().serving == ("r1",)

    run(story)


async def refused_during_a_round(**settings: Any) -> tuple[FakeFleet, Any, str, asyncio.Task[Any]]:
    """A fleet that serves 1, which the probe refused on r0 while another sender has the turn."""
    fleet = await FakeFleet(2, **settings).attach()
    report = await fleet.send(1)
    ticket = await fleet.open(2)
    refusing = asyncio.ensure_future(refuse(fleet.coordinator._parts, report, {"r0": WRONG}))
    await asyncio.sleep(0)
    return fleet, report, ticket.snapshot, refusing


def test_who_is_refused_during_a_round_is_sent_nothing_from_now_on_and_fenced_after_it() -> None:
    async def story() -> None:
        fleet, _, round_id, refusing = await refused_during_a_round()
        assert fleet.coordinator.status().serving == ("r1",)
        assert not fleet.engines[0].paused
        await fleet.coordinator.rounds.abandon(round_id, "the sender gave up")
        with pytest.raises(ReplicasLost, match="serves on r1"):
            await refusing
        assert fleet.engines[0].paused

    run(story)


def test_who_was_brought_another_version_by_that_round_serves_it() -> None:
    async def story() -> None:
        fleet, _, round_id, refusing = await refused_during_a_round()
        await fleet.coordinator.rounds.commit(round_id, sealed=sealed("2"), holds_turn=True)
        assert any("not served there any more" in note for note in (await refusing).notes)
        assert fleet.coordinator.status().serving == ("r0", "r1")

    run(story)


def test_when_that_round_does_not_end_the_error_says_what_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        fleet = await FakeFleet(2).attach()
        report, parts = await fleet.send(1), fleet.coordinator._parts
        ticket = await fleet.open(2)
        as_long_as_a_sender_may_keep_it_s = parts.timeouts.staging_s(16) + parts.timeouts.round_s(16)
        assert parts.longest_turn_s == pytest.approx(as_long_as_a_sender_may_keep_it_s)
        monkeypatch.setattr(Parts, "longest_turn_s", 0.01)
        with pytest.raises(ReplicasLost, match=r"Version 1 serves on r1.* r0: out of the serving set, but neither paused nor marked"):
            await refuse(parts, report, {"r0": WRONG})
        assert fleet.coordinator.status().serving == ("r1",)
        with pytest.raises(FleetTorn, match="No replica serves"):
            await refuse(parts, report, {"r0": WRONG, "r1": WRONG})
        assert fleet.coordinator.status().serving == ()
        await fleet.coordinator.rounds.commit(ticket.snapshot, sealed=sealed("2"), holds_turn=True)
        assert fleet.coordinator.status().serving == ("r0", "r1")

    run(story)


@pytest.mark.parametrize("serving", [("r1",), ()])
def test_when_that_round_ends_only_after_its_caller_was_told_they_are_fenced_all_the_same(
    serving: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        fleet = await FakeFleet(2).attach()
        report, ticket, parts = await fleet.send(1), await fleet.open(2), fleet.coordinator._parts
        monkeypatch.setattr(Parts, "longest_turn_s", 0.01)
        complaints = {engine.label: WRONG for engine in fleet.engines if engine.label not in serving}
        with pytest.raises((ReplicasLost, FleetTorn), match="fenced as soon as it ends") as caught:
            await refuse(parts, report, complaints)
        assert caught.value.replicas == tuple(complaints)
        monkeypatch.undo()
        await fleet.coordinator.rounds.abandon(ticket.snapshot, "the sender gave up")
        refused = [parts.roster.named(name) for name in complaints]
        while any(replica.state is not ReplicaState.QUARANTINED for replica in refused):
            await fleet.coordinator.watch(parts.roster.sequence, limit_s=1)
        assert fleet.coordinator.status().serving == serving
        assert (await fleet.coordinator.repair.heal()).committed == tuple(complaints), "it waits for its turn, and finds them"
        assert fleet.coordinator.status().serving == ("r0", "r1")

    run(story)


@pytest.mark.parametrize("fails", [0, 1])
def test_a_round_that_is_taken_back_sends_nobody_to_whom_the_probe_refused(fails: int) -> None:
    async def story() -> None:
        fleet, _, round_id, refusing = await refused_during_a_round(on_failure=FailurePolicy(after_start="all_or_none"))
        roster, served = fleet.coordinator._roster, []
        note, roster.on_change = roster.on_change, lambda: served.append(roster.status().serving)
        fleet.engines[fails].faults["update"] = "raise"
        with pytest.raises(RoundAborted, match="taken back from all"):
            await fleet.coordinator.rounds.commit(round_id, sealed=sealed("2"), holds_turn=True)
        roster.on_change = note
        with pytest.raises(ReplicasLost, match="serves on r1"):
            await refusing
        assert ("r1",) in served
        assert not any("r0" in each for each in served)

    run(story)


def test_who_is_torn_by_a_round_that_brings_the_others_another_version_is_healed_to_that_one() -> None:
    async def story() -> None:
        fleet, _, round_id, refusing = await refused_during_a_round()
        fleet.engines[0].faults["update"] = "raise"
        with pytest.raises(ReplicasLost):
            await fleet.coordinator.rounds.commit(round_id, sealed=sealed("2"), holds_turn=True)
        assert (await refusing).notes
        await fleet.coordinator.repair.heal_unasked()
        assert fleet.coordinator.status().serving == ("r0", "r1")

    run(story)


def test_who_could_not_be_put_back_to_what_the_probe_refused_is_healed_to_it_only_if_asked() -> None:
    async def story() -> None:
        fleet, _, round_id, refusing = await refused_during_a_round(on_failure=FailurePolicy(after_start="all_or_none"))
        fleet.engines[0].faults = {"update": "raise", "resume": "raise"}
        with pytest.raises(RoundAborted, match="r0, which could not be put back"):
            await fleet.coordinator.rounds.commit(round_id, sealed=sealed("2"), holds_turn=True)
        with pytest.raises(ReplicasLost, match="serves on r1"):
            await refusing
        await fleet.coordinator.repair.heal_unasked()
        assert fleet.coordinator.status().serving == ("r1",)
        assert (await fleet.coordinator.repair.heal()).committed == ("r0",)
        assert fleet.coordinator.status().serving == ("r0", "r1")

    run(story)


def test_a_successor_fences_whom_its_predecessor_was_to_fence() -> None:
    async def story() -> None:
        fleet, report, _, _ = await refused_during_a_round()
        await fleet.coordinator.chronicle.write()
        coordinator = await fleet.succeed()
        await coordinator._parts.turn.take("after", busy="wait", limit_s=1)
        assert coordinator.status().serving == ("r1",)
        assert fleet.engines[0].version == f"!rws:{report.round_id}"

    run(story)
