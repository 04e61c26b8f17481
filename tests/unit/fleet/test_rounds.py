"""A round on fake engines: its order, its barriers, and what every failure in every phase leads to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ray_weightsync.config import FailurePolicy, Host, Timeouts
from ray_weightsync.errors import AttachError, ConfigError, FleetTorn, ReplicasLost, RoundAborted
from tests.unit.fleet.fake_engine import PLAN, FakeEngine
from tests.unit.fleet.fakes import QUICK, FakeFleet, plan_of, sealed

ROUND = ["inspect", "found", "found", "pause", "mark", "start", "update", "finish", "outcome", "commit", "count", "cache", "resume"]
"""What one engine is asked in a round: five trips, to an engine whose actor carries out chains."""

BEFORE_START = ["inspect", "see", "judge", "plan", "pause", "mark"]
AFTER_START = ["start", "update", "finish", "outcome", "commit", "cache", "resume"]


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 30))  # type: ignore[arg-type]


async def all_reach(call: str, engines: list[FakeEngine]) -> None:
    """Wait until the latest call of each engine is ``call``."""
    while [engine.calls[-1:] for engine in engines] != [[call]] * len(engines):
        await asyncio.sleep(0)


class TestOrder:
    def test_the_first_round_proves_sight_and_plan_and_the_next_ones_ask_once(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(1).attach()
            await fleet.send(1)
            assert fleet.engines[0].calls == ["inspect", "see", *PLAN, *ROUND[1:]]
            fleet.forget_calls()
            await fleet.send(2)
            assert fleet.engines[0].calls == ROUND
            fleet.forget_calls()
            await fleet.send(3, plan=plan_of("another", "model"))
            assert fleet.engines[0].calls == ["inspect", *PLAN, *ROUND[1:]]

        run(story)

    def test_a_plan_is_judged_between_looks_until_no_worker_is_still_at_it(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(1).attach()
            fleet.engines[0].pieces_left = 3
            await fleet.send(1)
            assert fleet.engines[0].calls == ["inspect", "see", "judge", *["inspect"] * 4, "plan", *ROUND[1:]]

        run(story)

    def test_a_worker_that_never_comes_to_a_judgement_is_named_and_nothing_changed(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(2, timeouts=QUICK).attach()
            fleet.engines[1].pieces_left = 1 << 60
            with pytest.raises(RoundAborted, match=r"workers \[0\] are still judging the plan") as caught:
                await fleet.send(1)
            assert (caught.value.replicas, caught.value.phase) == (("r1",), "preflight")
            assert [engine.weights for engine in fleet.engines] == ["v0", "v0"]

        run(story)

    @pytest.mark.parametrize("held_in", ["pause", "mark"])
    def test_no_engine_starts_before_all_are_paused_and_marked(self, held_in: str) -> None:
        async def story() -> None:
            fleet = await FakeFleet(3, timeouts=Timeouts()).attach()
            gate = fleet.engines[1].gate(held_in)
            sending = asyncio.create_task(fleet.send(1))
            await fleet.engines[1].reached[held_in].wait()
            await all_reach("mark", [fleet.engines[0], fleet.engines[2]])
            assert not any("start" in engine.calls for engine in fleet.engines)
            gate.set()
            await sending

        run(story)

    @pytest.mark.parametrize("held_in", ["update", "outcome"])
    def test_no_engine_commits_before_all_have_attested(self, held_in: str) -> None:
        async def story() -> None:
            fleet = await FakeFleet(3, timeouts=Timeouts()).attach()
            gate = fleet.engines[1].gate(held_in)
            sending = asyncio.create_task(fleet.send(1))
            await fleet.engines[1].reached[held_in].wait()
            await all_reach("outcome", [fleet.engines[0], fleet.engines[2]])
            assert all(engine.version.startswith("!rws:") for engine in fleet.engines)
            gate.set()
            await sending
            assert [engine.version for engine in fleet.engines] == ["1"] * 3

        run(story)

    @pytest.mark.parametrize("cache", ["keep", "salt"])
    def test_caches_are_touched_only_by_the_policy_that_says_so(self, cache: str) -> None:
        async def story() -> None:
            fleet = await FakeFleet(1, cache=cache).attach()
            await fleet.send(1)
            assert "cache" not in fleet.engines[0].calls

        run(story)

    def test_an_engine_found_paused_is_not_resumed(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(2).attach()
            fleet.engines[0].paused = True
            report = await fleet.send(1)
            assert "resume" not in fleet.engines[0].calls
            assert [engine.paused for engine in fleet.engines] == [True, False]
            assert report.replicas[0].pause_s == 0

        run(story)


class TestBeforeStart:
    @pytest.mark.parametrize("fault", ["raise", "die", "hang"])
    @pytest.mark.parametrize("phase", BEFORE_START)
    def test_a_failure_changes_nothing_anywhere_and_names_the_culprit(self, phase: str, fault: str) -> None:
        async def story() -> None:
            fleet = await FakeFleet(3).attach()
            fleet.engines[1].faults[phase] = fault
            with pytest.raises(RoundAborted) as caught:
                await fleet.send("new")
            assert caught.value.replicas == ("r1",)
            assert caught.value.phase == (phase if phase in ("pause", "mark") else "preflight")
            if fault == "hang":
                assert caught.value.limit_s == 0.2
            for engine in (fleet.engines[0], fleet.engines[2]):
                assert (engine.version, engine.paused, engine.weights) == ("v0", False, "v0")
            assert not any(call in ("start", "cache") for engine in fleet.engines for call in engine.calls)
            assert {"r0", "r2"} <= set(fleet.coordinator.status().serving)
            assert fleet.stores.open == {}, "the snapshot was freed"
            fleet.engines[1].release.set()

        run(story)

    def test_a_pause_that_takes_effect_after_its_deadline_is_undone_when_it_has(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(2).attach()
            late = fleet.engines[1]
            gate = late.gate("pause")
            with pytest.raises(RoundAborted):
                await fleet.send(1)
            assert late.calls[-1] == "resume"
            gate.set()
            while late.calls[-2:] != ["resume", "resume"]:
                await asyncio.sleep(0.001)
            assert (late.paused, late.version) == (False, "v0")

        run(story)

    def test_a_replica_that_cannot_be_put_back_is_named_and_fenced(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(2).attach()
            fleet.engines[0].faults["resume"] = "raise"
            fleet.engines[1].faults["pause"] = "raise"
            with pytest.raises(RoundAborted, match="r0, which could not be put back"):
                await fleet.send(1)
            assert fleet.coordinator.status().serving == ("r1",)

        run(story)

    def test_no_room_for_the_snapshot_aborts_and_gives_the_turn_back(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(1).attach()
            fleet.stores.full = {"node"}
            with pytest.raises(RoundAborted, match="no space left"):
                await fleet.send(1)
            fleet.stores.full = set()
            assert (await fleet.send(1)).committed == ("r0",)

        run(story)

    def test_a_snapshot_that_its_store_does_not_seal_is_committed_nowhere(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(1).attach()
            fleet.stores.refuse_seal = True
            engine = fleet.engines[0]
            with pytest.raises(RoundAborted, match="watermark") as caught:
                await fleet.send(1)
            assert (caught.value.phase, caught.value.replicas) == ("stage", ("sender",))
            assert not {"start", "cache"} & set(engine.calls)
            assert (engine.version, engine.paused) == ("v0", False), "sealing runs beside the pause, which was undone"

        run(story)

    def test_a_sender_that_never_seals_loses_slot_and_turn_at_its_deadline(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(1, timeouts=Timeouts(stage_s=0.05, gather_s=0.05)).attach()
            ticket = await fleet.open(1)
            assert (await fleet.send(2)).version == 2, "the turn came free"
            with pytest.raises(RoundAborted, match="gone"):
                await fleet.coordinator.rounds.commit(ticket.snapshot, sealed=sealed("d"), holds_turn=True)

        run(story)


class TestAfterStart:
    @pytest.mark.parametrize("fault", ["raise", "die", "hang", "late"])
    @pytest.mark.parametrize("phase", AFTER_START)
    def test_a_failure_fences_its_replica_and_the_others_commit(self, phase: str, fault: str) -> None:
        async def story() -> None:
            fleet = await FakeFleet(3).attach()
            culprit = fleet.engines[1]
            culprit.faults[phase] = fault
            with pytest.raises(ReplicasLost) as caught:
                await fleet.send("new")
            error = caught.value
            assert (error.replicas, error.phase) == (("r1",), phase)
            assert error.report is not None
            assert error.report.committed == ("r0", "r2")
            for engine in (fleet.engines[0], fleet.engines[2]):
                assert (engine.version, engine.paused) == ("new", False)
                assert engine.weights == fleet.stores.committed
            status = fleet.coordinator.status()
            assert status.serving == ("r0", "r2")
            assert status.version == "new"
            assert status.replicas[1].state == "QUARANTINED"
            if fault == "raise":
                assert culprit.version.startswith("!rws:")
                assert culprit.paused
            culprit.release.set()

        run(story)

    @pytest.mark.parametrize("phase", AFTER_START)
    def test_one_more_round_makes_a_fenced_replica_whole(self, phase: str) -> None:
        async def story() -> None:
            fleet = await FakeFleet(2).attach()
            fleet.engines[1].faults[phase] = "raise"
            with pytest.raises(ReplicasLost):
                await fleet.send(1)
            report = await fleet.send(2)
            assert report.committed == ("r0", "r1")
            assert [(engine.version, engine.paused) for engine in fleet.engines] == [("2", False)] * 2

        run(story)

    def test_a_replica_with_an_unanswered_call_is_left_out_until_it_has_answered(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(2).attach()
            late = fleet.engines[1]
            late.faults["update"] = "late"
            with pytest.raises(ReplicasLost):
                await fleet.send(1)
            late.calls.clear()
            report = await fleet.send(2)
            assert late.calls == []
            assert report.committed == ("r0",)
            assert "r1" in report.notes[0]
            late.release.set()
            await asyncio.sleep(0.01)
            assert (await fleet.send(3)).committed == ("r0", "r1")

        run(story)

    def test_an_engine_that_says_ok_and_received_nothing_is_not_committed(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(2).attach()
            fleet.engines[0].loses_bytes = True
            with pytest.raises(ReplicasLost, match="nothing was transferred"):
                await fleet.send(1)
            assert fleet.engines[0].version.startswith("!rws:")

        run(story)

    @pytest.mark.parametrize("answer", [False, None, "ok", 1])
    def test_a_cache_reset_that_answers_anything_but_true_is_a_failure(self, answer: Any) -> None:
        async def story() -> None:
            fleet = await FakeFleet(2).attach()
            fleet.engines[0].cache_answer = answer
            with pytest.raises(ReplicasLost) as caught:
                await fleet.send(1)
            assert caught.value.phase == "cache"
            assert fleet.engines[0].version.startswith("!rws:")
            assert fleet.engines[0].paused

        run(story)

    def test_when_none_is_left_nothing_is_committed(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(2).attach()
            for engine in fleet.engines:
                engine.faults["finish"] = "raise"
            with pytest.raises(FleetTorn):
                await fleet.send(1)
            status = fleet.coordinator.status()
            assert (status.version, status.ordinal, status.serving) == ("v0", 0, ())
            assert (await fleet.send(1)).committed == ("r0", "r1")

        run(story)

    def test_a_policy_may_allow_losses(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(3, on_failure=FailurePolicy(min_serving=2)).attach()
            fleet.engines[2].faults["update"] = "die"
            report = await fleet.send(1)
            assert report.lost == ("r2",)

        run(story)


class TestFleet:
    def test_a_restarted_engine_is_noticed_and_made_whole_by_the_round_that_notices(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(2).attach()
            await fleet.send(1)
            restarted = fleet.engines[1]
            restarted.incarnation, restarted.version, restarted.weights, restarted.plans = "r1-2", "default", "?", []
            fleet.forget_calls()
            report = await fleet.send(2)
            assert report.committed == ("r0", "r1")
            assert restarted.calls[:5] == ["inspect", "see", *PLAN], "what it had proved before counts no more"
            assert restarted.weights == fleet.stores.committed

        run(story)

    def test_tombstones_of_an_earlier_session_are_not_adopted_and_their_pauses_are_ended_by_a_commit(self) -> None:
        async def story() -> None:
            fleet = FakeFleet(2)
            fleet.engines[0].version, fleet.engines[0].paused = "!rws:dead", True
            await fleet.attach()
            assert [each.state for each in fleet.coordinator.status().replicas] == ["QUARANTINED", "SERVING"]
            await fleet.send(1)
            assert [(engine.version, engine.paused) for engine in fleet.engines] == [("1", False)] * 2

        run(story)

    def test_engines_that_disagree_or_are_paused_are_not_adopted(self) -> None:
        async def story() -> None:
            fleet = FakeFleet(2)
            fleet.engines[0].version = "other"
            await fleet.attach()
            assert fleet.coordinator.status().serving == ()

        run(story)

    def test_an_update_left_open_by_another_client_refuses_the_attach_unless_it_may_be_flushed(self) -> None:
        async def story() -> None:
            fleet = FakeFleet(1)
            fleet.engines[0].update_open = True
            with pytest.raises(AttachError, match="take_over"):
                await fleet.attach()
            assert fleet.engines[0].calls == ["inspect"]
            await FakeFleet.attach(fleet, take_over=True)
            assert not fleet.engines[0].update_open
            assert (await fleet.send(1)).committed == ("r0",)

        run(story)

    def test_an_update_opened_by_another_client_between_rounds_aborts(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(2).attach()
            fleet.engines[0].update_open = True
            with pytest.raises(RoundAborted, match="another client"):
                await fleet.send(1)
            assert not any(call in ("pause", "start") for engine in fleet.engines for call in engine.calls)

        run(story)

    def test_epochs_go_on_above_what_workers_have_seen_in_earlier_sessions(self) -> None:
        async def story() -> None:
            fleet = FakeFleet(2)
            fleet.engines[1].epoch = 41
            await fleet.attach()
            assert (await fleet.send(1)).epoch == 42

        run(story)

    def test_a_version_is_unique_and_a_repeat_is_one_only_with_the_same_bytes(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(1).attach()
            await fleet.send(1, digest="a")
            await fleet.send(2, digest="b")
            with pytest.raises(ConfigError, match="'1'"):
                await fleet.send(1, digest="a")
            fleet.forget_calls()
            assert (await fleet.send(2, digest="b")).repeated
            assert fleet.engines[0].calls == ["inspect"]
            with pytest.raises(RoundAborted, match="other bytes"):
                await fleet.send(2, digest="c")

        run(story)

    def test_a_repeat_brings_the_replicas_that_missed_the_version(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(2).attach()
            fleet.engines[1].faults["update"] = "raise"
            with pytest.raises(ReplicasLost):
                await fleet.send(1)
            fleet.forget_calls()
            report = await fleet.send(1)
            assert [replica.id for replica in report.replicas] == ["r1"]
            assert fleet.engines[0].calls == ["inspect"], "whoever has it is not touched"
            assert fleet.coordinator.status().serving == ("r0", "r1")
            assert fleet.coordinator.status().ordinal == 1

        run(story)

    def test_closing_frees_the_stores(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(1).attach()
            await fleet.coordinator.close()
            assert fleet.stores.closed

        run(story)


class TestOverlap:
    def test_engines_load_while_the_sender_writes_and_attest_after_the_seal(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(2, transport=Host(overlap=True), timeouts=Timeouts()).attach()
            ticket = await fleet.open(1)
            committing = asyncio.create_task(fleet.coordinator.rounds.commit(ticket.snapshot, holds_turn=True))
            await all_reach("finish", fleet.engines)
            assert not committing.done()
            await fleet.coordinator.rounds.seal(ticket.snapshot, sealed("d"), keep_turn=True)
            assert (await committing).committed == ("r0", "r1")

        run(story)

    def test_a_sender_that_gives_up_fences_whoever_had_started(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(2, transport=Host(overlap=True), timeouts=Timeouts()).attach()
            ticket = await fleet.open(1)
            committing = asyncio.create_task(fleet.coordinator.rounds.commit(ticket.snapshot, holds_turn=True))
            await all_reach("finish", fleet.engines)
            await fleet.coordinator.rounds.abandon(ticket.snapshot, "its source failed")
            with pytest.raises(FleetTorn, match="its source failed"):
                await committing
            assert all(engine.version.startswith("!rws:") for engine in fleet.engines)
            assert (await _sent(fleet)).committed == ("r0", "r1")

        async def _sent(fleet: FakeFleet) -> Any:
            ticket = await fleet.open(2)
            committing = asyncio.create_task(fleet.coordinator.rounds.commit(ticket.snapshot, holds_turn=True))
            await fleet.coordinator.rounds.seal(ticket.snapshot, sealed("d"), keep_turn=True)
            return await committing

        run(story)


class TestWatching:
    def test_a_watcher_hears_of_a_change_and_of_nothing_else(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(1).attach()
            before = fleet.coordinator.status()
            assert await fleet.coordinator.watch(before.sequence, limit_s=0.01) == before
            watching = asyncio.create_task(fleet.coordinator.watch(before.sequence, limit_s=10))
            await fleet.send(1)
            assert (await watching).sequence > before.sequence

        run(story)


def test_a_missing_replica_is_named_in_the_log_while_it_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        fleet = await FakeFleet(2, timeouts=Timeouts(warn_every_s=0.02)).attach()
        held: FakeEngine = fleet.engines[1]
        gate = held.gate("update")
        sending = asyncio.create_task(fleet.send(1))
        while "waiting for r1" not in caplog.text:
            await asyncio.sleep(0.005)
        gate.set()
        await sending

    with caplog.at_level("WARNING"):
        run(story)


@pytest.mark.parametrize("phase", ["pause", "mark"])
@pytest.mark.parametrize("fault", ["raise", "die", "hang"])
def test_a_fenced_replica_that_still_cannot_be_paused_keeps_nobody_from_the_next_version(phase: str, fault: str) -> None:
    async def story() -> None:
        fleet = await FakeFleet(3).attach()
        fenced = fleet.engines[1]
        fenced.faults["update"] = "raise"
        with pytest.raises(ReplicasLost):
            await fleet.send(1)
        fenced.faults[phase] = fault
        report = await fleet.send(2)
        assert report.committed == ("r0", "r2")
        assert any("r1 left out" in note and phase in note for note in report.notes)
        assert fleet.coordinator.status().serving == ("r0", "r2")
        fenced.release.set()

    run(story)


def test_to_be_asked_again_before_the_pause_may_take_as_long_as_in_the_preflight() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2, timeouts=Timeouts(preflight_s=5, pause_s=0.05, commit_s=0.05, warn_every_s=0.05)).attach()
        gate = fleet.engines[1].gate("found")
        sending = asyncio.create_task(fleet.send(1))
        await fleet.engines[1].reached["found"].wait()
        await asyncio.sleep(0.4)
        gate.set()
        assert (await sending).committed == ("r0", "r1")

    run(story)
