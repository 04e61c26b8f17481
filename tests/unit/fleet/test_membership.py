"""Joins, leaves and sleep: what a replica counts as meanwhile, and what becomes of its engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ray_weightsync.config import FailurePolicy
from ray_weightsync.engines.ref import EngineRef
from ray_weightsync.engines.resolve import Engine
from ray_weightsync.errors import AttachError, ConfigError, FleetTorn, ReplicasLost, RoundAborted, SessionConflict, WeightSyncError
from ray_weightsync.fleet.parts import Parts
from ray_weightsync.fleet.replica import Replica
from tests.unit.fleet.fake_engine import FakeEngine
from tests.unit.fleet.fakes import FakeFleet
from tests.unit.fleet.test_repair import replica, state, with_one_fenced
from tests.unit.fleet.test_rounds import run

NO_HEAL = FailurePolicy(auto_heal=False)


async def resolved(engine: FakeEngine) -> Replica:
    from ray_weightsync.engines.inspect import ask

    facts = await ask(engine, "n", limit_s=1)
    ref = EngineRef(engine.label, id=engine.label)
    return Replica(Engine(id=engine.label, label=engine.label, channel=engine, facts=facts, ref=ref))


async def served(num: int = 2, **settings: Any) -> FakeFleet:
    fleet = await FakeFleet(num, **settings).attach()
    await fleet.send(1)
    fleet.forget_calls()
    return fleet


async def add(fleet: FakeFleet, new: str | FakeEngine) -> FakeEngine:
    engine = FakeEngine(new) if isinstance(new, str) else new
    assert await fleet.coordinator.membership.add([await resolved(engine)]) == (engine.label,)
    fleet.engines.append(engine)
    return engine


def claimed(fleet: FakeFleet) -> set[str]:
    """The identities of the engines that somebody claims."""
    return {key.removeprefix("claim:").partition("#")[0] for key in fleet.keys.values}


async def until(fleet: FakeFleet, name: str, wanted: str) -> None:
    status = fleet.coordinator.status()
    while {each.id: each.state for each in status.replicas}[name] != wanted:
        status = await fleet.coordinator.watch(status.sequence, limit_s=10)


class TestJoining:
    def test_a_new_replica_is_joining_until_the_committed_version_was_brought_to_it_and_nobody_else_is_asked(self) -> None:
        async def story() -> None:
            fleet = await served()
            joined = await add(fleet, "new")
            assert state(fleet, "new") == "JOINING"
            assert "new" not in fleet.coordinator.status().serving
            await until(fleet, "new", "SERVING")
            assert (joined.version, joined.weights, joined.paused) == ("1", fleet.sent["1"], False)
            assert fleet.engines[0].calls == fleet.engines[1].calls == []
            assert fleet.coordinator.status().serving == ("r0", "r1", "new")

        run(story)

    def test_before_the_first_commit_it_waits_for_the_next_round_and_takes_part_in_it(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(1).attach()
            joined = await add(fleet, "new")
            await asyncio.sleep(0.01)
            assert state(fleet, "new") == "JOINING"
            assert (await fleet.send(1)).committed == ("r0", "new")
            assert joined.weights == fleet.sent["1"]

        run(story)

    def test_asked_for_during_a_round_it_joins_after_it_from_what_that_round_committed(self) -> None:
        async def story() -> None:
            fleet = await served()
            gate = fleet.engines[0].gate("update")
            sending = asyncio.create_task(fleet.send(2))
            await fleet.engines[0].reached["update"].wait()
            joined = await add(fleet, "new")
            await asyncio.sleep(0.01)
            assert joined.calls == ["inspect"], "a round goes by the members that it found when it began"
            gate.set()
            assert (await sending).committed == ("r0", "r1")
            await until(fleet, "new", "SERVING")
            assert (joined.version, joined.weights) == ("2", fleet.sent["2"])

        run(story)

    def test_one_that_cannot_take_part_in_a_round_does_not_abort_it(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(1).attach()
            joined = await add(fleet, "new")
            joined.faults["plan"] = "raise"
            report = await fleet.send(1)
            assert report.committed == ("r0",)
            assert "new left out" in report.notes[0]

        run(story)

    def test_one_that_cannot_be_healed_in_is_fenced_with_the_reason_and_tried_again_by_the_next_check(self) -> None:
        async def story() -> None:
            fleet = await served()
            joined = await add(fleet, "new")
            joined.faults["plan"] = "raise"
            await until(fleet, "new", "QUARANTINED")
            assert "made to fail in plan" in str(replica(fleet, "new").error)
            while fleet.coordinator.status().phase != "idle":
                await asyncio.sleep(0)
            await fleet.coordinator.health.check()
            assert state(fleet, "new") == "SERVING"

        run(story)

    def test_an_engine_with_a_foreign_update_open_or_a_taken_id_is_refused_and_nothing_is_claimed(self) -> None:
        async def story() -> None:
            fleet = await served()
            busy = FakeEngine("busy")
            busy.update_open = True
            with pytest.raises(AttachError, match="update open"):
                await fleet.coordinator.membership.add([await resolved(busy)])
            taken = FakeEngine("r1")
            taken.incarnation = "another"
            with pytest.raises(ConfigError, match="r1 is the id of another replica"):
                await fleet.coordinator.membership.add([await resolved(taken)])
            assert claimed(fleet) == {"r0-1", "r1-1"}
            assert busy.calls == taken.calls == ["inspect"]

        run(story)

    def test_asked_again_by_a_caller_who_lost_the_answer_it_answers_the_same(self) -> None:
        async def story() -> None:
            fleet = await served()
            joined = await add(fleet, "new")
            assert await fleet.coordinator.membership.add([await resolved(joined)]) == ("new",)
            newer = FakeEngine("newer")
            for _ in range(2):
                assert await fleet.coordinator.membership.replace("new", await resolved(newer)) == "newer"
            assert [each.id for each in fleet.coordinator.status().replicas] == ["r0", "r1", "new", "newer"]

        run(story)

    @pytest.mark.parametrize("name", ["again", "new"], ids=["under another id", "under the same id"])
    def test_an_engine_that_joins_while_it_waits_to_replace_another_is_a_member_once(self, name: str) -> None:
        async def story() -> None:
            fleet = await served()
            engine = FakeEngine("new")
            waiting = await resolved(engine)
            engine.label = name
            ticket = await fleet.open(2)
            replacing = asyncio.create_task(fleet.coordinator.membership.replace("r1", waiting))
            await asyncio.sleep(0)
            assert await fleet.coordinator.membership.add([await resolved(engine)]) == (name,)
            await fleet.coordinator.rounds.abandon(ticket.snapshot, "not needed")
            if name == "new":
                assert await replacing == "new"
            else:
                with pytest.raises(AttachError, match="are the same engine"):
                    await replacing
            told = {each.id: each.state for each in fleet.coordinator.status().replicas}
            assert set(told) == {"r0", "r1", name}
            assert (told["r1"] == "RETIRED") is (name == "new")
            assert claimed(fleet) == {"r0-1", "new-1"} | ({"r1-1"} if name == "again" else set())

        run(story)

    def test_two_engines_that_join_at_once_under_one_id_leave_one_member_that_is_claimed(self) -> None:
        async def story() -> None:
            fleet = await served()
            engines = [FakeEngine("new"), FakeEngine("new")]
            engines[1].incarnation = "another"
            joins = [fleet.coordinator.membership.add([await resolved(engine)]) for engine in engines]
            outcomes = await asyncio.gather(*joins, return_exceptions=True)
            assert [type(each) for each in outcomes].count(ConfigError) == 1
            (member,) = [each for each in fleet.coordinator._roster.members if each.id == "new"]
            identity = member.engine.facts.incarnation
            assert fleet.coordinator._parts.claims.identity(member) == identity
            assert claimed(fleet) == {"r0-1", "r1-1", identity}

        run(story)

    def test_an_engine_of_another_session_is_refused(self) -> None:
        async def story() -> None:
            fleet = await served()
            other = FakeFleet(1)
            other.coordinator._parts.claims._keys = fleet.keys
            other.engines[0].incarnation = "elsewhere"
            other.coordinator._parts.claims.me = type(other.coordinator._parts.claims.me)(
                session="other", coordinator=other.coordinator._parts.claims.me.coordinator
            )
            await other.attach()
            with pytest.raises(SessionConflict, match="'other'"):
                await fleet.coordinator.membership.add([await resolved(other.engines[0])])

        run(story)

    def test_one_found_with_a_tombstone_is_resumed_by_its_first_commit(self) -> None:
        async def story() -> None:
            fleet = await served()
            left = FakeEngine("left")
            left.version, left.paused = "!rws:of a dead session", True
            await fleet.coordinator.membership.add([await resolved(left)])
            await until(fleet, "left", "SERVING")
            assert (left.version, left.paused) == ("1", False)

        run(story)


class TestLeaving:
    def test_it_is_out_of_the_serving_set_at_once_and_retired_after_the_round(self) -> None:
        async def story() -> None:
            fleet = await served(3)
            gate = fleet.engines[0].gate("update")
            sending = asyncio.create_task(fleet.send(2))
            await fleet.engines[0].reached["update"].wait()
            removing = asyncio.create_task(fleet.coordinator.membership.remove("r1"))
            await asyncio.sleep(0)
            assert fleet.coordinator.status().serving == ("r0", "r2")
            gate.set()
            await sending
            await removing
            assert state(fleet, "r1") == "RETIRED"
            assert (fleet.engines[1].version, fleet.engines[1].paused) == ("2", False), "left running as it is"
            fleet.forget_calls()
            assert (await fleet.send(3)).committed == ("r0", "r2")
            assert fleet.engines[1].calls == []
            assert not any(key.startswith(f"claim:{fleet.engines[1].incarnation}#") for key in fleet.keys.values)

        run(story)

    def test_the_last_replica_an_unknown_one_and_one_that_left_are_refused(self) -> None:
        async def story() -> None:
            fleet = await served(2)
            with pytest.raises(ConfigError, match="this session has r0, r1"):
                await fleet.coordinator.membership.remove("r9")
            await fleet.coordinator.membership.remove("r0")
            await fleet.coordinator.membership.remove("r0")  # asked again by a caller who lost the answer
            with pytest.raises(ConfigError, match="last replica"):
                await fleet.coordinator.membership.remove("r1")
            assert fleet.coordinator.status().serving == ("r1",)

        run(story)

    def test_one_staged_for_it_before_it_left_is_committed_without_it(self) -> None:
        async def story() -> None:
            from tests.unit.fleet.fakes import sealed

            fleet = await served(2)
            ticket = await fleet.open(2)
            await fleet.coordinator.rounds.seal(ticket.snapshot, sealed("d"))
            await fleet.coordinator.membership.remove("r1")
            fleet.forget_calls()
            assert (await fleet.coordinator.rounds.commit(ticket.snapshot)).committed == ("r0",)
            assert fleet.engines[1].calls == []

        run(story)

    def test_draining_ends_with_the_requests_or_the_deadline_and_does_not_wait_for_frozen_ones(self) -> None:
        async def story() -> None:
            fleet = await served(4)
            busy = fleet.engines[1]
            busy.unfinished = 2
            draining = asyncio.create_task(fleet.coordinator.membership.remove("r1", drain_s=10))
            while busy.calls.count("inspect") < 2:
                await asyncio.sleep(0.001)
            assert not draining.done()
            busy.unfinished = 0
            await draining
            fleet.engines[2].unfinished = 1
            await fleet.coordinator.membership.remove("r2", drain_s=0.01)
            fleet.engines[3].unfinished, fleet.engines[3].paused = 1, True
            await fleet.coordinator.membership.remove("r3", drain_s=10)

        run(story)

    def test_when_a_round_does_not_end_it_stays_and_serves_on(self) -> None:
        async def story() -> None:
            fleet = await served(2)
            ticket = await fleet.open(2)
            kept, Parts.longest_turn_s = Parts.longest_turn_s, 0.01  # type: ignore[assignment,method-assign]
            try:
                with pytest.raises(RoundAborted, match="still in progress"):
                    await fleet.coordinator.membership.remove("r1")
            finally:
                Parts.longest_turn_s = kept  # type: ignore[method-assign]
            assert fleet.coordinator.status().serving == ("r0", "r1")
            await fleet.coordinator.rounds.abandon(ticket.snapshot, "not needed")

        run(story)


class TestReplacing:
    def test_the_new_one_joins_and_the_old_one_is_retired(self) -> None:
        async def story() -> None:
            fleet = await with_one_fenced(on_failure=NO_HEAL)
            new = FakeEngine("r3")
            assert await fleet.coordinator.membership.replace("r1", await resolved(new)) == "r3"
            told = {each.id: each for each in fleet.coordinator.status().replicas}
            assert (told["r1"].state, told["r1"].replaced_by) == ("RETIRED", "r3")
            await until(fleet, "r3", "SERVING")
            assert fleet.coordinator.status().serving == ("r0", "r2", "r3")
            with pytest.raises(ConfigError, match="r3 is in its place"):
                await fleet.coordinator.membership.replace("r1", await resolved(FakeEngine("r4")))

        run(story)

    def test_a_lost_one_can_be_replaced_once_and_a_removed_one_not_at_all(self) -> None:
        async def story() -> None:
            fleet = await served(3)
            fleet.engines[1].dead = True
            await fleet.coordinator.health.check()
            await fleet.coordinator.membership.replace("r1", await resolved(FakeEngine("r3")))
            await fleet.coordinator.membership.remove("r0")
            with pytest.raises(ConfigError, match="r0 has left the fleet"):
                await fleet.coordinator.membership.replace("r0", await resolved(FakeEngine("r4")))

        run(story)

    def test_asked_again_while_the_first_call_waits_for_its_turn_it_answers_the_same(self) -> None:
        async def story() -> None:
            fleet = await served()
            engine = FakeEngine("new")
            ticket = await fleet.open(2)
            calls = [fleet.coordinator.membership.replace("r1", await resolved(engine)) for _ in range(2)]
            asked = asyncio.gather(*calls)
            await asyncio.sleep(0)
            await fleet.coordinator.rounds.abandon(ticket.snapshot, "not needed")
            assert await asked == ["new", "new"]
            assert [each.id for each in fleet.coordinator.status().replicas] == ["r0", "r1", "new"]

        run(story)

    def test_the_only_replica_may_be_replaced(self) -> None:
        async def story() -> None:
            fleet = await served(1)
            await fleet.coordinator.membership.replace("r0", await resolved(FakeEngine("r1")))
            await until(fleet, "r1", "SERVING")

        run(story)


class TestSleep:
    def test_whoever_did_not_sleep_and_whoever_did_are_named_and_not_those_of_whom_it_is_no_news(self) -> None:
        async def story() -> None:
            fleet = await with_one_fenced(on_failure=NO_HEAL)
            fleet.engines[1].dead = True
            fleet.engines[2].faults["sleep"] = "raise"
            with pytest.raises(WeightSyncError, match="Not every engine did sleep: r2 did not, r0 did"):
                await fleet.coordinator.sleep_mode.sleep(1)

        run(story)

    def test_level_1_takes_the_fleet_out_of_the_serving_set_and_waking_brings_it_back_with_its_weights(self) -> None:
        async def story() -> None:
            fleet = await served()
            await fleet.coordinator.sleep_mode.sleep(1)
            status = fleet.coordinator.status()
            assert status.serving == ()
            assert [(each.state, each.asleep, each.version, each.attested) for each in status.replicas] == [
                ("SERVING", True, "1", True)
            ] * 2
            await fleet.coordinator.sleep_mode.wake_up(["weights"])
            assert fleet.coordinator.status().serving == ()
            await fleet.coordinator.sleep_mode.wake_up(["kv_cache"])
            assert fleet.coordinator.status().serving == ("r0", "r1")
            assert [engine.weights for engine in fleet.engines] == [fleet.sent["1"]] * 2
            assert all(replica(fleet, name).attested for name in ("r0", "r1"))

        run(story)

    @pytest.mark.parametrize("woken_by", ["us", "its owner"])
    def test_an_engine_whose_workers_cannot_sleep_only_pauses_and_leaves_the_serving_set_too(self, woken_by: str) -> None:
        async def story() -> None:
            fleet = await served(1)
            fleet.engines[0].sleeps = False
            await fleet.coordinator.sleep_mode.sleep(1)
            await fleet.coordinator.health.check()
            assert fleet.coordinator.status().serving == ()
            if woken_by == "us":
                await fleet.coordinator.sleep_mode.wake_up(["weights"])
                assert fleet.coordinator.status().serving == ()
                await fleet.coordinator.sleep_mode.wake_up(["kv_cache"])
            else:
                fleet.engines[0].paused = False
                await fleet.coordinator.health.check()
            assert fleet.coordinator.status().serving == ("r0",)

        run(story)

    def test_after_level_2_the_colocated_cycle_brings_new_weights_and_leaves_the_kv_cache_asleep(self) -> None:
        async def story() -> None:
            fleet = await served()
            await fleet.coordinator.sleep_mode.sleep(2)
            assert all(engine.version.startswith("!rws:") for engine in fleet.engines), "no valid label without weights"
            assert [each.state for each in fleet.coordinator.status().replicas] == ["QUARANTINED"] * 2
            await fleet.coordinator.health.check()
            assert [each.state for each in fleet.coordinator.status().replicas] == ["QUARANTINED"] * 2, "who sleeps is not healed"
            await fleet.coordinator.sleep_mode.wake_up(["weights"])
            fleet.forget_calls()
            report = await fleet.send(2)
            assert report.committed == ("r0", "r1")
            assert fleet.coordinator.status().serving == (), "its KV cache is not in memory"
            for engine in fleet.engines:
                assert "resume" not in engine.calls
                assert engine.paused
            await fleet.coordinator.sleep_mode.wake_up(["kv_cache"])
            assert fleet.coordinator.status().serving == ("r0", "r1")
            assert [(engine.version, engine.paused) for engine in fleet.engines] == [("2", False)] * 2

        run(story)

    def test_fully_woken_after_level_2_it_does_not_run_before_it_was_healed(self) -> None:
        async def story() -> None:
            fleet = await served()
            await fleet.coordinator.sleep_mode.sleep(2)
            await fleet.coordinator.sleep_mode.wake_up(None)
            assert all(engine.paused and engine.version.startswith("!rws:") for engine in fleet.engines)
            report = await fleet.coordinator.repair.heal()
            assert report.committed == ("r0", "r1")
            assert [(engine.version, engine.weights, engine.paused) for engine in fleet.engines] == [("1", fleet.sent["1"], False)] * 2

        run(story)

    @pytest.mark.parametrize("woken", [None, ["kv_cache"]], ids=["asleep", "only the KV cache awake"])
    @pytest.mark.parametrize(
        ("level", "kind", "holds"),
        [(1, RoundAborted, "Nothing changed: version 1 sleeps everywhere."), (2, FleetTorn, "No replica serves")],
        ids=["level 1", "level 2"],
    )
    def test_a_round_while_the_weights_sleep_is_refused_and_nobody_is_touched(
        self, level: int, kind: type[WeightSyncError], holds: str, woken: list[str] | None
    ) -> None:
        async def story() -> None:
            fleet = await served()
            await fleet.coordinator.sleep_mode.sleep(level)
            if woken is not None:
                await fleet.coordinator.sleep_mode.wake_up(woken)
            fleet.forget_calls()
            with pytest.raises(kind, match=r"wake it up with tags=\['weights'\] first") as caught:
                await fleet.send(2)
            assert str(caught.value).startswith(holds)
            assert "replace the engines" not in str(caught.value.hint)
            assert [engine.calls for engine in fleet.engines] == [["inspect"]] * 2

        run(story)

    def test_one_put_to_sleep_by_its_owner_leaves_the_serving_set_and_is_left_as_found(self) -> None:
        async def story() -> None:
            fleet = await served()
            fleet.engines[1].paused, fleet.engines[1].asleep = True, {"kv_cache"}
            await fleet.coordinator.health.check()
            assert fleet.coordinator.status().serving == ("r0",)
            report = await fleet.send(2)
            assert report.committed == ("r0", "r1")
            assert "resume" not in fleet.engines[1].calls
            assert fleet.engines[1].paused

        run(story)

    def test_weights_that_somebody_else_put_to_sleep_are_not_attested_any_more(self) -> None:
        async def story() -> None:
            fleet = await served()
            fleet.engines[1].paused, fleet.engines[1].asleep = True, {"weights", "kv_cache"}
            await fleet.coordinator.health.check()
            fleet.engines[1].paused, fleet.engines[1].asleep = False, set()
            await fleet.coordinator.health.check()
            assert [each.attested for each in fleet.coordinator.status().replicas] == [True, False]
            fleet.forget_calls()
            await fleet.send(1)
            assert "start" in fleet.engines[1].calls, "a repeat brings it anew"
            assert "start" not in fleet.engines[0].calls

        run(story)

    def test_one_that_does_not_go_to_sleep_serves_on_and_is_nobodys_to_be_paused(self) -> None:
        async def story() -> None:
            fleet = await served()
            fleet.engines[0].faults["sleep"] = "raise"
            with pytest.raises(WeightSyncError, match="r0 did not"):
                await fleet.coordinator.sleep_mode.sleep(2)
            assert fleet.coordinator.status().serving == ("r0",)
            await fleet.coordinator.sleep_mode.wake_up(None)
            assert not fleet.engines[0].paused
            fleet.engines[0].faults["mark"] = "raise"
            with pytest.raises(RoundAborted):
                await fleet.send(2)
            assert (fleet.engines[0].version, fleet.engines[0].paused) == ("1", False)

        run(story)

    def test_one_that_restarts_as_its_sleep_fails_does_not_get_the_label_of_the_weights_before(self) -> None:
        async def story() -> None:
            fleet = await served(1)
            engine = fleet.engines[0]
            call = engine.call

            async def called(verb: str, *args: Any, **kwargs: Any) -> Any:
                try:
                    return await call(verb, *args, **kwargs)
                except RuntimeError:
                    engine.restart()
                    raise

            engine.call = called  # type: ignore[method-assign]
            engine.faults["sleep"] = "raise"
            with pytest.raises(WeightSyncError, match="r0 did not"):
                await fleet.coordinator.sleep_mode.sleep(2)
            assert (engine.version, engine.weights) == ("default", "initial")
            (told,) = fleet.coordinator.status().replicas
            assert (told.state, told.incarnation) == ("QUARANTINED", engine.incarnation)

        run(story)

    def test_one_that_fails_is_named_when_all_were_asked_and_a_dead_one_is_no_reason(self) -> None:
        async def story() -> None:
            fleet = await served(3, on_failure=NO_HEAL)
            fleet.engines[2].dead = True
            await fleet.coordinator.health.check()
            fleet.engines[0].faults["sleep"] = "raise"
            with pytest.raises(WeightSyncError, match="made to fail in sleep") as caught:
                await fleet.coordinator.sleep_mode.sleep(2)
            assert caught.value.replicas == ("r0",)
            assert (fleet.engines[0].version, state(fleet, "r0")) == ("1", "SERVING"), "it has its weights still"
            assert state(fleet, "r1") == "QUARANTINED"
            await fleet.coordinator.sleep_mode.wake_up(None)

        run(story)

    @pytest.mark.parametrize("level", [0, 3, "1"])
    def test_another_level_is_refused(self, level: Any) -> None:
        async def story() -> None:
            fleet = await FakeFleet(1).attach()
            with pytest.raises(ConfigError, match="level"):
                await fleet.coordinator.sleep_mode.sleep(level)

        run(story)


def test_a_lost_replica_does_not_come_back_by_itself() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2).attach()
        await fleet.send(1)
        fleet.engines[1].faults["update"] = "die"
        with pytest.raises(ReplicasLost):
            await fleet.send(2)
        await fleet.coordinator.health.check()
        fleet.engines[1].dead = False
        fleet.engines[1].restart()
        await fleet.coordinator.health.check()
        assert state(fleet, "r1") == "RETIRED"

    run(story)
