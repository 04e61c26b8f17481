"""Answers that come late, engines that restart in the middle of a round, owners who act beside us: nothing unproved gets a valid label."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ray_weightsync.config import Host, Timeouts
from ray_weightsync.errors import ConfigError, FleetTorn, ReplicasLost, RoundAborted
from ray_weightsync.fleet.steps import StepFailed
from tests.unit.fleet import virtual_time
from tests.unit.fleet.fake_engine import PLAN, FakeEngine
from tests.unit.fleet.fakes import QUICK, FakeFleet, opening_of, sealed
from tests.unit.fleet.test_membership import resolved


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 30))  # type: ignore[arg-type]


class RestartsBefore(FakeEngine):
    """Is a new process, with the weights it was started with, by the time it is asked ``restarts_before``."""

    restarts_before = ""

    async def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        if self._name(verb, args) == self.restarts_before:
            self.restarts_before = ""
            self.incarnation += "'"
            self.version, self.weights, self.paused, self.plans, self.update_open = "default", "initial", False, [], False
        return await super().call(verb, *args, **kwargs)


async def with_one_that_restarts(before: str) -> tuple[FakeFleet, RestartsBefore]:
    fleet = FakeFleet(2)
    restarting = RestartsBefore("r1")
    fleet.engines[1] = restarting
    await fleet.attach()
    restarting.restarts_before = before
    return fleet, restarting


def test_an_engine_that_restarts_before_its_label_is_not_committed_with_its_initial_weights() -> None:
    async def story() -> None:
        fleet, restarted = await with_one_that_restarts("commit")
        with pytest.raises(ReplicasLost, match="another process answers") as caught:
            await fleet.send(1)
        assert caught.value.replicas == ("r1",)
        assert fleet.coordinator.status().serving == ("r0",)
        assert (await fleet.send(2)).committed == ("r0", "r1")
        assert restarted.weights == fleet.stores.committed

    run(story)


def test_an_engine_that_restarts_before_it_is_put_back_does_not_serve_under_the_old_label() -> None:
    async def story() -> None:
        fleet, _ = await with_one_that_restarts("unmark")
        fleet.engines[0].faults["pause"] = "raise"
        with pytest.raises(RoundAborted, match="r1"):
            await fleet.send(1)
        assert fleet.coordinator.status().serving == ("r0",)

    run(story)


def test_a_mark_that_takes_effect_late_is_taken_off_and_its_engine_does_not_count_as_serving_meanwhile() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2).attach()
        late = fleet.engines[1]
        gate = late.gate("mark")
        with pytest.raises(RoundAborted):
            await fleet.send(1)
        assert fleet.coordinator.status().serving == ("r0",)
        gate.set()
        while late.calls[-1] != "resume" or late.version != "v0":
            await asyncio.sleep(0)
        assert (late.version, late.paused) == ("v0", False)

    run(story)


def test_a_serving_replica_that_owes_an_answer_is_not_silently_left_behind() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2).attach()
        gate = fleet.engines[1].gate("pause")
        with pytest.raises(RoundAborted):
            await fleet.send(1)
        with pytest.raises(RoundAborted, match="not answered an earlier call") as caught:
            await fleet.send(2)
        assert caught.value.replicas == ("r1",)
        assert [engine.version for engine in fleet.engines] == ["v0", "v0"]
        gate.set()

    run(story)


def test_the_undo_of_a_late_pause_is_owed_too_so_no_round_begins_beside_it() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2).attach()
        late = fleet.engines[1]
        pause, resume = late.gate("pause"), late.gate("resume")
        resume.set()
        with pytest.raises(RoundAborted):
            await fleet.send(1)
        resume.clear()
        late.reached["resume"].clear()
        pause.set()
        await late.reached["resume"].wait()
        with pytest.raises(RoundAborted, match="not answered an earlier call"):
            await fleet.send(2)
        assert not late.update_open
        resume.set()

    run(story)


def test_a_replica_that_failed_is_out_of_the_serving_set_before_the_slowest_has_loaded() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2, timeouts=Timeouts()).attach()
        gate = fleet.engines[0].gate("update")
        fleet.engines[1].faults["update"] = "raise"
        sending = asyncio.create_task(fleet.send(1))
        while fleet.engines[1].calls.count("pause") < 2:  # the round's own, and the fence's
            await asyncio.sleep(0)
        assert fleet.coordinator.status().serving == ("r0",)
        gate.set()
        with pytest.raises(ReplicasLost):
            await sending

    run(story)


def test_a_label_that_lands_after_its_replica_was_fenced_is_replaced_by_the_tombstone() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2).attach()
        late = fleet.engines[1]
        gate = late.gate("commit")
        with pytest.raises(ReplicasLost):
            await fleet.send(1)
        gate.set()
        while not late.version.startswith("!rws:") or late.calls[-1] != "mark":
            await asyncio.sleep(0)
        assert late.paused

    run(story)


def test_an_owner_who_resumes_its_engine_while_we_pack_does_not_get_a_running_engine_updated() -> None:
    async def story() -> None:
        fleet = await FakeFleet(1).attach()
        engine = fleet.engines[0]
        engine.paused = True
        ticket = await fleet.open(1)
        await asyncio.sleep(0)
        engine.paused = False
        report = await fleet.coordinator.rounds.commit(ticket.snapshot, sealed=sealed("d"), holds_turn=True)
        assert report.committed == ("r0",)
        assert not engine.paused, "it ran when the round began"

    run(story)


def test_an_owner_who_pauses_its_engine_while_we_pack_finds_it_paused() -> None:
    async def story() -> None:
        fleet = await FakeFleet(1).attach()
        ticket = await fleet.open(1)
        while fleet.engines[0].calls != ["inspect", "see", *PLAN]:
            await asyncio.sleep(0)
        fleet.engines[0].paused = True
        await fleet.coordinator.rounds.commit(ticket.snapshot, sealed=sealed("d"), holds_turn=True)
        assert fleet.engines[0].paused

    run(story)


def test_taking_over_an_open_update_marks_and_pauses_before_it_flushes() -> None:
    async def story() -> None:
        fleet = FakeFleet(2)
        taken = fleet.engines[0]
        taken.update_open = True
        orders: list[list[str]] = []
        forget, fleet.forget_calls = fleet.forget_calls, lambda: orders.append(list(taken.calls))
        await fleet.attach(take_over=True)
        fleet.forget_calls = forget
        assert orders[0][1:4] == ["mark", "pause", "finish"]
        assert taken.version.startswith("!rws:")
        status = fleet.coordinator.status()
        assert (status.serving, status.version) == (("r1",), "v0")

    run(story)


def test_a_version_staged_before_another_of_its_name_was_committed_is_refused() -> None:
    async def story() -> None:
        fleet = await FakeFleet(1, transport=Host(num_slots=4)).attach()
        staged = await fleet.open("13")
        await fleet.coordinator.rounds.seal(staged.snapshot, sealed("a"))
        await fleet.send("13", digest="b")
        await fleet.send("14")
        with pytest.raises(ConfigError, match="committed meanwhile"):
            await fleet.coordinator.rounds.commit(staged.snapshot)
        assert fleet.engines[0].version == "14"

    run(story)


def test_a_sender_that_gave_up_while_it_waited_for_its_turn_does_not_get_it_later() -> None:
    async def story() -> None:
        fleet = await FakeFleet(1).attach()
        first = await fleet.open(1)
        waiting = asyncio.create_task(fleet.coordinator.rounds.open(opening_of(2, snapshot="f" * 32)))
        await asyncio.sleep(0)
        await fleet.coordinator.rounds.abandon("f" * 32, "interrupted")
        await fleet.coordinator.rounds.commit(first.snapshot, sealed=sealed("d"), holds_turn=True)
        with pytest.raises(RoundAborted, match="given up before it had begun"):
            await waiting
        assert (await fleet.send(3)).version == 3

    run(story)


def test_a_store_that_cannot_keep_the_version_does_not_undo_what_the_engines_hold() -> None:
    async def story() -> None:
        fleet = await FakeFleet(1).attach()

        async def broken(*args: Any, **kwargs: Any) -> int:
            raise TimeoutError

        fleet.stores.mark_committed = broken  # type: ignore[method-assign]
        assert (await fleet.send(1)).committed == ("r0",)
        assert fleet.coordinator.status().version == "1"
        report = await fleet.send(2)  # the store is told beside what follows the round; the next one's report says what came of it
        assert any("did not keep version 1" in note for note in report.notes)

    run(story)


def test_a_repeat_whose_repair_fails_says_who_serves_the_version() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2).attach()
        fleet.engines[1].faults["update"] = "raise"
        with pytest.raises(ReplicasLost):
            await fleet.send(1)
        fleet.engines[1].faults["update"] = "raise"
        with pytest.raises(ReplicasLost, match="serves on r0"):
            await fleet.send(1)

    run(story)


def test_a_slow_preflight_aborts_and_fences_nobody() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2).attach()
        fleet.engines[1].faults["inspect"] = "late"
        with pytest.raises(RoundAborted):
            await fleet.send(1)
        fleet.engines[1].release.set()
        assert fleet.coordinator.status().serving == ("r0", "r1")

    run(story)


def test_closing_during_a_staging_gives_it_up_and_does_not_wait_for_its_sender() -> None:
    async def story() -> None:
        fleet = await FakeFleet(1).attach()
        await fleet.open(1)
        await fleet.coordinator.close()
        assert fleet.stores.closed
        assert fleet.stores.open == {}

    run(story)


def test_when_the_only_replica_is_gone_the_error_says_so() -> None:
    async def story() -> None:
        fleet = await FakeFleet(1).attach()
        fleet.engines[0].dead = True
        with pytest.raises(FleetTorn, match="No replica serves; r0 is gone or to be replaced"):
            await fleet.send(1)
        with pytest.raises(FleetTorn):
            await fleet.send(1)

    run(story)


def test_an_engine_out_of_step_aborts_once_and_is_then_left_out_and_never_healed() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2).attach()
        fleet.engines[1].out_of_step = True
        with pytest.raises(RoundAborted, match="out of step") as caught:
            await fleet.send(1)
        assert caught.value.replicas == ("r1",)
        assert fleet.coordinator.status().serving == ("r0",)
        fleet.forget_calls()
        assert (await fleet.send(1)).committed == ("r0",)
        assert set(fleet.engines[1].calls) == {"inspect"}

    run(story)


def test_a_failed_step_survives_pickling() -> None:
    from ray_weightsync.errors import CallFailure

    failed = StepFailed("update", CallFailure(message="no", kind="raised", elapsed_s=1.0), 2.0)
    copy = pickle.loads(pickle.dumps(failed))
    assert (copy.phase, copy.failure, copy.limit_s, str(copy)) == (failed.phase, failed.failure, failed.limit_s, str(failed))


def test_a_process_that_came_after_the_look_is_neither_paused_nor_marked_when_the_round_is_put_back() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2, timeouts=QUICK).attach()
        ticket = await fleet.open(1)
        await fleet.coordinator.rounds.seal(ticket.snapshot, sealed("1"), keep_turn=True)
        fleet.engines[1].restart()  # and may be another session's by now
        fleet.forget_calls()
        with pytest.raises(RoundAborted):
            await fleet.coordinator.rounds.commit(ticket.snapshot, holds_turn=True)
        while any(replica.unanswered for replica in fleet.coordinator._roster.replicas.values()):
            await asyncio.sleep(0.001)
        assert not {"pause", "mark", "resume"} & set(fleet.engines[1].calls)
        assert fleet.coordinator.status().serving == ("r0",)

    virtual_time.run(story())  # a look is fresh for a quarter of a second


@pytest.mark.parametrize("meanwhile", ["joined", "fails"])
def test_what_a_staged_version_knows_of_the_fleet_is_learned_anew_after_another_ones_round(meanwhile: str) -> None:
    async def story() -> None:
        fleet = await FakeFleet(2, timeouts=QUICK, transport=Host(num_slots=3)).attach()
        ticket = await fleet.open("staged")
        fleet.sent["staged"] = ticket.address["snapshot"]
        await fleet.coordinator.rounds.seal(ticket.snapshot, sealed("staged"))
        if meanwhile == "joined":
            fleet.engines.append(FakeEngine("new"))
            await fleet.coordinator.membership.add([await resolved(fleet.engines[-1])])
        await fleet.send("other")
        if meanwhile == "joined":
            assert (await fleet.coordinator.rounds.commit(ticket.snapshot)).committed == ("r0", "r1", "new")
            return
        fleet.engines[1].faults["mark"] = "hang"
        with pytest.raises(RoundAborted):
            await fleet.coordinator.rounds.commit(ticket.snapshot)
        fleet.engines[1].release.set()
        while any(replica.unanswered for replica in fleet.coordinator._roster.replicas.values()):
            await asyncio.sleep(0.001)
        assert [(engine.version, engine.weights) for engine in fleet.engines] == [("other", fleet.sent["other"])] * 2

    virtual_time.run(story())  # a look is fresh for a quarter of a second
