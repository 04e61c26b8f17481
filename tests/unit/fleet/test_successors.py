"""A coordinator dies at some point of a round; its successor settles every replica and goes on."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from ray_weightsync.config import FailurePolicy, Host, Timeouts
from ray_weightsync.errors import FleetTorn, ReplicasLost, RoundAborted, WeightSyncError
from ray_weightsync.fleet.parts import Parts
from ray_weightsync.report import SyncReport
from tests.unit.fleet.fake_engine import FakeEngine, restarts_after_a_look
from tests.unit.fleet.fakes import QUICK, FakeFleet, plan_of, sealed
from tests.unit.fleet.test_rounds import run

PHASES = ("see", "judge", "plan", "pause", "mark", "start", "update", "finish", "outcome", "commit", "cache", "resume")
NO_HEALING = FailurePolicy(auto_heal=False)
PATIENT = Timeouts(**{f"{phase}_s": 5 for phase in ("preflight", "pause", "start", "update", "finish", "attest", "commit", "resume")})
"""Deadlines that no gate of these tests reaches."""


def fleet_of(num_engines: int, **settings: Any) -> FakeFleet:
    return FakeFleet(num_engines, **{"on_failure": NO_HEALING, "timeouts": PATIENT, **settings})


def check(fleet: FakeFleet) -> None:
    """What holds at any time: a label that is no tombstone stands for the weights, and whoever serves has the fleet's version and runs."""
    status = fleet.coordinator.status()
    for engine, replica in zip(fleet.engines, status.replicas, strict=True):
        if not engine.version.startswith("!rws:") and engine.version in fleet.sent:
            assert engine.weights == fleet.sent[engine.version], engine.label
        if replica.serving:
            assert (engine.version, engine.paused, engine.update_open) == (status.version, False, False), engine.label
        else:
            assert (engine.paused, engine.version[:5]) == (True, "!rws:"), engine.label
    assert (status.phase, status.round_id) == ("idle", None)


async def killed_in(phase: str, *, at: tuple[int, ...] = (0,), fleet: FakeFleet | None = None, **settings: Any) -> tuple[FakeFleet, str]:
    """A fleet that serves 1, whose coordinator died in the round of version 2 while the engines ``at`` were in ``phase``."""
    if fleet is None:
        fleet = await fleet_of(3, **settings).attach()
        await fleet.send(1)
    held = [fleet.engines[index] for index in at]
    for engine in held:
        engine.gate(phase)
    if phase == "see":
        for replica in fleet.coordinator._roster.replicas.values():
            replica.stores.clear()
    ticket = await fleet.open(2, plan_of("another") if phase in ("judge", "plan") else None)
    fleet.sent["2"] = ticket.address["snapshot"]
    sending = asyncio.create_task(fleet.coordinator.rounds.commit(ticket.snapshot, sealed=sealed("2"), holds_turn=True))
    for engine in held:
        await engine.reached[phase].wait()
    await still(fleet.engines)
    await fleet.succeed()
    assert sending.cancelled() or (await asyncio.wait({sending}))[0]
    return fleet, ticket.snapshot


async def still(engines: list[FakeEngine]) -> None:
    """Wait until none of the engines is asked anything more."""
    calls = -1
    while calls != (now := sum(len(engine.calls) for engine in engines)):
        calls = now
        await asyncio.sleep(0.02)  # no order depends on it: where it is too short, another point of the round is tested


@pytest.mark.parametrize("at", [(0,), (0, 1), (0, 1, 2)], ids=["one", "two", "all"])
@pytest.mark.parametrize("phase", PHASES)
def test_wherever_it_dies_the_successor_settles_all_and_the_next_round_or_heal_makes_them_whole(phase: str, at: tuple[int, ...]) -> None:
    async def story() -> None:
        fleet, round_id = await killed_in(phase, at=at)
        check(fleet)
        serving = {engine.version for engine in fleet.engines if not engine.version.startswith("!rws:")}
        assert len(serving) <= 1
        outcome = await outcome_of(fleet, round_id)
        status = fleet.coordinator.status()
        if status.version == "2":
            assert isinstance(outcome, SyncReport if len(status.serving) == 3 else ReplicasLost)
        else:
            assert isinstance(outcome, RoundAborted if status.serving else FleetTorn)
        await fleet.coordinator.repair.heal()
        check(fleet)
        assert len(fleet.coordinator.status().serving) == 3
        await fleet.send(3)
        check(fleet)
        assert fleet.coordinator.status().serving == ("r0", "r1", "r2")

    run(story)


async def outcome_of(fleet: FakeFleet, round_id: str) -> SyncReport | WeightSyncError:
    try:
        return await fleet.coordinator.settled(round_id)
    except WeightSyncError as error:
        return error


@pytest.mark.parametrize("phase", ["pause", "mark"])
def test_before_start_all_is_put_back_and_the_old_version_serves(phase: str) -> None:
    async def story() -> None:
        fleet, round_id = await killed_in(phase)
        assert [(each.version, each.paused, each.weights) for each in fleet.engines] == [("1", False, fleet.sent["1"])] * 3
        assert isinstance(await outcome_of(fleet, round_id), RoundAborted)
        assert fleet.coordinator.status().serving == ("r0", "r1", "r2")

    run(story)


@pytest.mark.parametrize("phase", ["outcome", "commit", "cache", "resume"])
def test_what_is_complete_is_brought_to_its_end(phase: str) -> None:
    async def story() -> None:
        fleet, round_id = await killed_in(phase, at=(0, 1, 2))
        report = await outcome_of(fleet, round_id)
        assert isinstance(report, SyncReport)
        assert report.committed == ("r0", "r1", "r2")
        assert any("coordinator died" in note for note in report.notes)
        status = fleet.coordinator.status()
        assert (status.version, status.ordinal) == ("2", 2)
        assert fleet.stores.committed == fleet.sent["2"]

    run(story)


def test_an_update_cut_short_is_torn_and_the_others_go_on() -> None:
    async def story() -> None:
        fleet, round_id = await killed_in("update")
        lost = await outcome_of(fleet, round_id)
        assert isinstance(lost, ReplicasLost)
        assert lost.replicas == ("r0",)
        assert fleet.engines[0].paused
        assert fleet.engines[0].version.startswith("!rws:")
        assert fleet.coordinator.status().serving == ("r1", "r2")

    run(story)


def test_all_or_none_goes_back_where_not_all_are_attested() -> None:
    async def story() -> None:
        policy = FailurePolicy(after_start="all_or_none", auto_heal=False)
        fleet, round_id = await killed_in("update", on_failure=policy)
        assert fleet.coordinator.status().version == "1"
        assert isinstance(await outcome_of(fleet, round_id), WeightSyncError)
        await fleet.coordinator.repair.heal()
        assert [(each.version, each.weights) for each in fleet.engines] == [("1", fleet.sent["1"])] * 3

    run(story)


def test_a_pause_that_was_its_users_is_left() -> None:
    async def story() -> None:
        fleet = await fleet_of(3).attach()
        await fleet.send(1)
        fleet.engines[1].paused = True
        await killed_in("mark", fleet=fleet)
        assert [each.paused for each in fleet.engines] == [False, True, False]
        assert [each.version for each in fleet.engines] == ["1"] * 3

    run(story)


def test_one_that_died_or_restarted_with_the_coordinator_is_named_and_never_counts_as_serving() -> None:
    async def story() -> None:
        fleet = await fleet_of(3).attach()
        await fleet.send(1)
        fleet.engines[1].gate("commit")
        fleet.engines[2].gate("commit")
        sending = asyncio.create_task(fleet.send(2))
        await fleet.engines[1].reached["commit"].wait()
        await fleet.engines[2].reached["commit"].wait()
        await still(fleet.engines)
        fleet.engines[1].dead = True
        fleet.engines[2].restart()
        await fleet.succeed()
        await asyncio.wait({sending})
        status = fleet.coordinator.status()
        assert (status.version, status.serving) == ("2", ("r0",))
        assert "could not be reached" in str(status.replicas[1].error)
        assert "restarted" in str(status.replicas[2].error)
        await fleet.coordinator.repair.heal("r2")
        assert fleet.coordinator.status().serving == ("r0", "r2")

    run(story)


def test_one_in_which_a_call_of_the_dead_one_goes_on_is_waited_for() -> None:
    async def story() -> None:
        fleet = await fleet_of(2).attach()
        await fleet.send(1)
        fleet.engines[0].under_way = 1
        killed = asyncio.create_task(killed_in("finish", at=(0, 1), fleet=fleet))
        fleet._others.add(killed)  # it is no part of the coordinator's
        while fleet.engines[0].calls.count("halt") < 3:
            await asyncio.sleep(0.01)
        assert fleet.coordinator.status().phase == "recovering"
        fleet.engines[0].under_way = 0
        _, round_id = await killed
        assert isinstance(await outcome_of(fleet, round_id), SyncReport)
        check(fleet)

    run(story)


def test_one_that_does_not_come_to_rest_is_fenced_when_it_does_and_the_others_go_on() -> None:
    async def story() -> None:
        fleet = await fleet_of(2, timeouts=QUICK).attach()
        await fleet.send(1)
        busy = fleet.engines[0]
        busy.under_way = 1
        _, round_id = await killed_in("resume", at=(1,), fleet=fleet)
        assert isinstance(await outcome_of(fleet, round_id), ReplicasLost)
        status = fleet.coordinator.status()
        assert status.serving == ("r1",)
        assert "still under way" in str(status.replicas[0].error)
        assert busy.version == "2"  # not touched yet
        busy.under_way = 0
        while not busy.paused:
            await asyncio.sleep(0.01)
        assert busy.version.startswith("!rws:")
        while fleet.coordinator._roster.replicas["r0"].unanswered:
            await asyncio.sleep(0.01)
        assert (await fleet.coordinator.repair.heal()).committed == ("r0",)
        check(fleet)

    run(story)


def test_between_rounds_nothing_of_the_engines_is_changed() -> None:
    async def story() -> None:
        fleet = await fleet_of(2).attach()
        await fleet.send(1)
        await fleet.coordinator.chronicle.noted()
        before = fleet.coordinator.status()
        fleet.forget_calls()
        await fleet.succeed()
        after = fleet.coordinator.status()
        assert [engine.calls for engine in fleet.engines] == [["halt", "inspect"], ["halt", "inspect"]]
        assert (after.version, after.ordinal, after.ordinals) == (before.version, before.ordinal, before.ordinals)
        assert after.replicas == before.replicas
        assert (await fleet.send(2)).ordinal == 2

    run(story)


def test_a_version_that_was_committed_before_stays_taken() -> None:
    async def story() -> None:
        fleet = await fleet_of(2).attach()
        await fleet.send(1)
        await fleet.send(2)
        await fleet.coordinator.chronicle.noted()
        await fleet.succeed()
        with pytest.raises(WeightSyncError, match="committed before"):
            await fleet.send(1)
        assert (await fleet.send(2, digest="digest of 2")).repeated

    run(story)


def test_an_answer_that_was_lost_after_the_round_had_ended_is_told_again() -> None:
    async def story() -> None:
        fleet = await fleet_of(2).attach()
        report = await fleet.send(1)
        await fleet.coordinator.chronicle.noted()
        await fleet.succeed()
        assert await fleet.coordinator.settled(report.round_id) == report

    run(story)


def test_whoever_asks_how_a_round_ended_is_not_kept_waiting_longer_than_one_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        names = [each.name for each in dataclasses.fields(Timeouts) if each.name != "min_rate_bytes_per_s"]
        tiny = Timeouts(min_rate_bytes_per_s=1e12, **dict.fromkeys(names, 0.002))
        fleet = await fleet_of(1).attach()
        ticket = await fleet.open(1)
        fleet.coordinator._timeouts = tiny
        monkeypatch.setattr(Parts, "longest_turn_s", 0.01)
        with pytest.raises(WeightSyncError, match="still in progress") as caught:
            await fleet.coordinator.settled(ticket.snapshot)
        assert caught.value.limit_s == 0.01
        await fleet.coordinator.rounds.abandon(ticket.snapshot, "over")

    run(story)


def test_of_a_round_that_was_only_being_staged_nothing_is_left() -> None:
    async def story() -> None:
        fleet = await fleet_of(2).attach()
        await fleet.send(1)
        ticket = await fleet.open(2)
        await fleet.succeed()
        with pytest.raises(RoundAborted, match="version 1 still serves"):
            await fleet.coordinator.settled(ticket.snapshot)
        with pytest.raises(RoundAborted, match="gone"):
            await fleet.coordinator.rounds.commit(ticket.snapshot, sealed=sealed("2"), holds_turn=True)
        assert fleet.sent["1"] in fleet.stores.open
        assert ticket.address["snapshot"] not in fleet.stores.open
        assert [engine.paused for engine in fleet.engines] == [False, False]

    run(story)


def test_a_staged_snapshot_that_nobody_can_commit_any_more_frees_its_slot() -> None:
    async def story() -> None:
        fleet = await fleet_of(2).attach()
        await fleet.send(1)
        ticket = await fleet.open(2)
        await fleet.coordinator.rounds.seal(ticket.snapshot, sealed("2"), keep_turn=True)
        await fleet.succeed()
        assert [state for slot, state in fleet.stores.open.items() if slot == ticket.address["snapshot"]] == []

    run(story)


def test_while_engines_read_behind_the_sender_the_death_is_settled_too() -> None:
    async def story() -> None:
        fleet = await fleet_of(2, transport=Host(overlap=True)).attach()
        await fleet.send(1)
        fleet.forget_calls()
        ticket = await fleet.open(2)
        sending = asyncio.create_task(fleet.coordinator.rounds.commit(ticket.snapshot, holds_turn=True))
        while any("finish" not in engine.calls for engine in fleet.engines):
            await asyncio.sleep(0)
        await fleet.succeed()
        await asyncio.wait({sending})
        fleet.sent["2"] = ticket.address["snapshot"]
        check(fleet)
        assert isinstance(await outcome_of(fleet, ticket.snapshot), FleetTorn)

    run(story)


def test_a_successor_that_dies_while_it_settles_leaves_the_rest_to_the_next() -> None:
    async def story() -> None:
        fleet, round_id = await killed_in("outcome", at=(0, 1, 2), fleet=await again_at_resume())
        assert isinstance(await outcome_of(fleet, round_id), SyncReport)
        check(fleet)

    async def again_at_resume() -> FakeFleet:
        fleet = await fleet_of(3).attach()
        await fleet.send(1)
        settle = fleet.succeed

        async def twice() -> Any:
            await fleet.kill_coordinator()
            gate = fleet.engines[1].gate("resume")
            fleet.coordinator = fleet.coordinator_of()
            recovering = asyncio.create_task(fleet.coordinator.recover())
            await fleet.engines[1].reached["resume"].wait()
            await still(fleet.engines)
            assert fleet.coordinator.status().phase == "recovering"
            await settle()
            await asyncio.wait({recovering})
            gate.set()

        fleet.succeed = twice  # type: ignore[method-assign]
        return fleet

    run(story)


def test_a_pause_of_the_dead_one_that_comes_late_ends_with_the_next_version() -> None:
    async def story() -> None:
        fleet = await fleet_of(2, timeouts=QUICK).attach()
        await fleet.send(1)
        await fleet.coordinator.chronicle.noted()
        late = fleet.engines[1]
        late.under_way = 1
        await fleet.succeed()
        assert fleet.coordinator.status().serving == ("r0",)
        late.paused, late.under_way = True, 0
        while fleet.coordinator._roster.replicas["r1"].unanswered:
            await asyncio.sleep(0.01)
        assert (await fleet.send(2)).committed == ("r0", "r1")
        assert not late.paused

    run(story)


def test_a_removal_that_the_journal_knows_only_as_begun_is_brought_to_its_end() -> None:
    async def story() -> None:
        fleet = await fleet_of(2).attach()
        await fleet.send(1)
        await fleet.coordinator.repair.turn("another")
        removing = asyncio.create_task(fleet.coordinator.membership.remove("r1"))
        while not fleet.coordinator._parts.turn._lock._waiters:
            await asyncio.sleep(0)
        await fleet.coordinator.chronicle.write()
        await fleet.succeed()
        assert removing.cancelled()
        status = fleet.coordinator.status()
        assert [(each.id, each.state) for each in status.replicas] == [("r0", "SERVING"), ("r1", "RETIRED")]
        assert len(fleet.keys.values) == 1
        await fleet.coordinator.membership.remove("r1")
        assert (await fleet.send(2)).committed == ("r0",)

    run(story)


def test_no_engine_is_touched_if_the_round_cannot_be_written_down() -> None:
    async def story() -> None:
        fleet = await fleet_of(2).attach()
        await fleet.send(1)
        await fleet.coordinator.chronicle.noted()
        fleet.forget_calls()

        def refuse(record: object) -> None:
            raise OSError("the control plane is away")

        fleet.journal.write = refuse  # type: ignore[method-assign]
        with pytest.raises(RoundAborted, match="the control plane is away"):
            await fleet.send(2)
        assert [engine.calls for engine in fleet.engines] == [["inspect"], ["inspect"]]

    run(story)


def test_a_successor_that_cannot_learn_the_plan_says_that_the_snapshot_is_lost_not_that_there_was_none() -> None:
    async def story() -> None:
        fleet = await fleet_of(2).attach()
        await fleet.send(1)
        await fleet.coordinator.chronicle.noted()
        fleet.journal.plans.clear()
        await fleet.succeed()
        with pytest.raises(RoundAborted, match=r"version 1 still serves\. The snapshot of version 1 is lost"):
            await fleet.coordinator.repair.heal()
        assert (await fleet.send(2)).committed == ("r0", "r1")

    run(story)


def test_a_session_that_was_closed_has_no_successor() -> None:
    async def story() -> None:
        fleet = await fleet_of(2).attach()
        await fleet.send(1)
        await fleet.coordinator.close()
        assert fleet.journal.read() is None
        assert fleet.keys.values == {}
        assert fleet.stores.closed

    run(story)


class TestAnOwnerThatDies:
    def test_in_a_commit_it_is_carried_to_its_end_first(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2).attach()
            gate = fleet.engines[0].gate("update")
            sending = asyncio.create_task(fleet.send(1))
            await fleet.engines[0].reached["update"].wait()
            leaving = asyncio.create_task(fleet.coordinator.leave())
            gate.set()
            await leaving
            assert (await sending).committed == ("r0", "r1")
            assert [(each.version, each.paused) for each in fleet.engines] == [("1", False)] * 2
            assert fleet.journal.read() is None

        run(story)

    @pytest.mark.parametrize("overlap", [False, True])
    def test_while_it_stages_nothing_of_the_round_is_left(self, overlap: bool) -> None:
        async def story() -> None:
            fleet = await fleet_of(2, transport=Host(overlap=overlap)).attach()
            await fleet.send(1)
            fleet.forget_calls()
            ticket = await fleet.open(2)
            if overlap:
                committing = asyncio.create_task(fleet.coordinator.rounds.commit(ticket.snapshot, holds_turn=True))
                while any("finish" not in engine.calls for engine in fleet.engines):
                    await asyncio.sleep(0)
            await fleet.coordinator.leave()
            assert fleet.journal.read() is None
            assert fleet.stores.closed
            for engine in fleet.engines:
                whole = (engine.version, engine.paused, engine.weights) == ("1", False, fleet.sent["1"])
                assert whole or (overlap and engine.paused and engine.version.startswith("!rws:"))
            if overlap:
                with pytest.raises(FleetTorn):
                    await committing

        run(story)


def test_a_process_that_came_since_the_successor_looked_is_not_fenced_for_the_mark_of_the_one_before() -> None:
    async def story() -> None:
        fleet = await fleet_of(2).attach()
        await fleet.send(1)
        await fleet.coordinator.chronicle.noted()
        fleet.engines[1].version = "!rws:other"
        restarts_after_a_look(fleet.engines[1])
        await fleet.succeed()
        assert (fleet.engines[1].version, fleet.engines[1].paused) == ("default", False)
        assert fleet.coordinator.status().serving == ("r0",)

    run(story)
