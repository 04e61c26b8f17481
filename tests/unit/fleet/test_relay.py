"""Rounds whose calls are given by a trainer engine of vLLM's: who carries them out, and what is left when one of them is lost."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from ray_weightsync.config import FailurePolicy, Native, Timeouts
from ray_weightsync.errors import ConfigError, FleetTorn, ReplicasLost, RoundAborted
from ray_weightsync.protocol.channel import FINISH, INIT, START, UPDATE
from ray_weightsync.weights.plan import ParamMeta, Plan
from tests.unit.fleet.fake_engine import FakeEngine
from tests.unit.fleet.fakes import QUICK, FakeFleet, FakeTrainerEngine, plan_of, sealed
from tests.unit.fleet.test_broadcast_rounds import Wide
from tests.unit.fleet.test_sync_engines import SyncEngine

PAUSE = ["found", "found", "pause", "mark"]
ROUND = ["inspect", *PAUSE, "native", "start", "update", "update", "finish", "outcome", "commit", "count", "cache", "resume"]

JOIN = {"master_address": "10.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 5, "packed": True}

GROUPED, ALONE = "nccl", "ipc"


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 30))  # type: ignore[arg-type]


def fleet_of(num_engines: int, **settings: Any) -> FakeFleet:
    return FakeFleet(num_engines, transport=Native("ipc"), **settings)


async def answered(fleet: FakeFleet) -> None:
    """Wait until nobody owes an answer."""
    for engine in fleet.engines:
        engine.release.set()
    while any(replica.unanswered for replica in fleet.coordinator._roster.replicas.values()):
        await asyncio.sleep(0.001)


class TestCalls:
    def test_every_member_carries_out_what_the_engine_asks_in_one_session_between_mark_and_outcome(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(3).attach()
            await fleet.relay(1)
            fleet.forget_calls()
            report = await fleet.relay(2, engine=FakeTrainerEngine(updates=[{"names": ["a"]}, {"names": ["b"]}]))
            assert [engine.calls for engine in fleet.engines] == [ROUND] * 3
            assert [engine.updates[1:] for engine in fleet.engines] == [[{"names": ["a"]}, {"names": ["b"]}]] * 3
            assert (report.committed, report.transport) == (("r0", "r1", "r2"), "native:ipc")
            assert [(engine.version, engine.paused) for engine in fleet.engines] == [("2", False)] * 3

        run(story)

    def test_a_backend_is_asked_for_once_in_an_engines_life_and_before_anything_is_touched(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2).attach()
            fleet.engines[1].faults["see"] = "raise"
            with pytest.raises(RoundAborted, match="made to fail in see"):
                await fleet.relay(1)
            assert not any("pause" in engine.calls for engine in fleet.engines)
            await fleet.relay(2)
            await fleet.relay(3)
            assert [engine.seen for engine in fleet.engines] == [["ipc"], ["ipc"]]

        run(story)

    def test_no_engine_is_set_up_before_all_are_paused_and_marked(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2).attach()
            gate = fleet.engines[1].gate("mark")
            sending = asyncio.ensure_future(fleet.relay(1))
            await fleet.engines[1].reached["mark"].wait()
            for _ in range(100):
                await asyncio.sleep(0)
            assert "native" not in fleet.engines[0].calls
            gate.set()
            assert (await sending).committed == ("r0", "r1")

        run(story)

    def test_none_starts_before_all_are_set_up_nor_receives_before_all_have_started(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2).attach()
            for call, after in (("native", "start"), ("start", "update"), ("update", "finish")):
                gate = fleet.engines[1].gate(call)
                sending = asyncio.ensure_future(fleet.relay(call))
                await fleet.engines[1].reached[call].wait()
                for _ in range(100):
                    await asyncio.sleep(0)
                assert after not in fleet.engines[0].calls
                gate.set()
                await sending
                fleet.engines[1].gates.clear()
                fleet.forget_calls()

        run(story)

    def test_each_engine_is_told_where_its_own_ranks_begin(self) -> None:
        async def story() -> None:
            fleet = fleet_of(3)
            fleet.engines[1] = Wide("r1")
            await fleet.attach()
            await fleet.relay(1, engine=FakeTrainerEngine(GROUPED, init=JOIN))
            assert [engine.inits[0]["rank_offset"] for engine in fleet.engines] == [1, 2, 4]
            assert all(engine.inits[0] | {"rank_offset": 1} == JOIN for engine in fleet.engines)
            assert fleet.coordinator.status().ranks == "group of 5: 0 sender | 1 r0 | 2-3 r1 (TP 2) | 4 r2"

        run(story)

    def test_what_no_round_can_carry_out_is_refused_before_anybody_has_a_part_of_it(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2).attach()
            engine = FakeTrainerEngine(GROUPED, init=JOIN)  # of a group of 5
            with pytest.raises(RoundAborted, match="world_size=5"):
                await fleet.relay(1, engine=engine)
            assert isinstance(engine.error, ConfigError)
            assert not any("native" in each.calls for each in fleet.engines)
            assert [(each.version, each.paused) for each in fleet.engines] == [("v0", False)] * 2

        run(story)

    def test_a_backend_of_one_mesh_is_refused_with_two_engines_before_anybody_is_paused(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2).attach()
            with pytest.raises(RoundAborted, match=r"native:nccl_m2n reaches one engine, or one data-parallel deployment, and here are 2"):
                await fleet.relay(1, engine=FakeTrainerEngine("nccl_m2n"))
            assert not any({"pause", "native"} & set(each.calls) for each in fleet.engines)
            assert [(each.version, each.paused) for each in fleet.engines] == [("v0", False)] * 2

        run(story)

    @pytest.mark.parametrize("verbs", [[UPDATE], [INIT, START, START], [INIT, START, INIT], [INIT, START, UPDATE, FINISH, UPDATE]])
    def test_verbs_out_of_order_are_refused(self, verbs: list[str]) -> None:
        async def story() -> None:
            class Confused(FakeTrainerEngine):
                def calls(self) -> Any:
                    return iter([(verb, {}) for verb in verbs])

            fleet = await fleet_of(1).attach()
            engine = Confused()
            with pytest.raises((RoundAborted, FleetTorn)):
                await fleet.relay(1, engine=engine)
            assert isinstance(engine.error, ConfigError)
            assert (await fleet.relay(2)).committed == ("r0",)

        run(story)

    def test_an_engine_that_sets_nothing_up_is_refused_before_anybody_starts(self) -> None:
        async def story() -> None:
            class Hasty(FakeTrainerEngine):
                def calls(self) -> Any:
                    return iter([(START, None), (UPDATE, {}), (FINISH, None)])

            fleet = await fleet_of(2).attach()
            with pytest.raises(RoundAborted, match="calls start_weight_update after nothing"):
                await fleet.relay(1, engine=Hasty())
            assert [(each.version, each.paused) for each in fleet.engines] == [("v0", False)] * 2
            assert not any("start" in each.calls for each in fleet.engines)

        run(story)


class TestKept:
    def test_an_engine_may_be_used_again_as_long_as_processes_plan_and_ranks_are_the_same(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2).attach()

            async def key_of(version: str, **changes: Any) -> str:
                engine = FakeTrainerEngine(**changes)
                await fleet.relay(version, engine=engine, plan=plan)
                assert engine.members.group.world_size == 3
                return str(engine.members.key)

            plan = plan_of()
            first = await key_of("1")
            assert await key_of("2") == first
            plan = plan_of("weight", "bias")
            other_plan = await key_of("3")
            assert await key_of("4", backend=GROUPED) != other_plan != first
            plan = plan_of()
            assert await key_of("5") == first
            fleet.engines[0].restart()
            assert await key_of("6") != first

        run(story)

    def test_one_that_does_not_tell_which_process_it_is_may_be_another_in_the_next_round(self) -> None:
        class Silent(FakeEngine):
            def _told(self, nonce: str) -> dict[str, Any]:
                return super()._told(nonce) | {"kind": "client", "workers": [], "instance_id": None}

            async def require_incarnation(self, incarnation: str) -> None:
                raise AssertionError("nobody knows it")

        async def story() -> None:
            fleet = fleet_of(1)
            fleet.engines[0] = Silent("r0")
            await fleet.attach()
            keys = set()
            for version in range(2):
                engine = FakeTrainerEngine(GROUPED)
                await fleet.relay(version, engine=engine)
                keys.add(engine.members.key)
            assert len(keys) == 2

        run(story)

    def test_what_an_earlier_round_set_up_is_used_again_without_its_init_info(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(1).attach()
            await fleet.relay(1, engine=FakeTrainerEngine(init={"packed": True}))
            await fleet.relay(2)
            assert fleet.engines[0].inits == [{"packed": True}, None]

        run(story)


class TestClosed:
    def test_what_was_set_up_in_engines_is_shut_down_with_the_session_and_one_that_cannot_keeps_nobody(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(3).attach()
            await fleet.relay(1)
            fleet.engines[1].restart()  # what was set up went with its process
            await fleet.coordinator._parts.staging.settled()
            for replica in fleet.coordinator._roster.members:
                if replica.id == "r1":
                    replica.forget_incarnation()
            fleet.forget_calls()
            fleet.engines[0].faults["shutdown"] = "raise"
            await fleet.coordinator.close()
            assert [engine.calls for engine in fleet.engines] == [["shutdown"], [], ["shutdown"]]
            assert fleet.stores.closed

        run(story)

    def test_one_whose_update_may_be_open_is_left(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2, on_failure=FailurePolicy(auto_heal=False)).attach()
            fleet.engines[1].faults["update"] = "raise"
            with pytest.raises(ReplicasLost):
                await fleet.relay(1)
            fleet.forget_calls()
            await fleet.coordinator.close()
            assert [engine.calls for engine in fleet.engines] == [["shutdown"], []]

        run(story)

    def test_engines_that_no_trainer_engine_set_up_are_not_touched(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(1).attach()
            await fleet.send(1)
            fleet.forget_calls()
            await fleet.coordinator.close()
            assert fleet.engines[0].calls == []

        run(story)


class TestEndsBeforeStart:
    @pytest.mark.parametrize("backend", [GROUPED, ALONE])
    @pytest.mark.parametrize("fault", ["raise", "die"])
    def test_one_that_cannot_be_set_up_puts_all_back(self, backend: str, fault: str) -> None:
        async def story() -> None:
            fleet = await fleet_of(3).attach()
            fleet.engines[1].faults["native"] = fault
            with pytest.raises(RoundAborted, match="r1") as caught:
                await fleet.relay(1, engine=FakeTrainerEngine(backend))
            assert caught.value.replicas == ("r1",)
            assert [(each.version, each.paused, each.weights) for each in fleet.engines if not each.dead] == [
                ("v0", False, "v0") for each in fleet.engines if not each.dead
            ]
            assert not any("start" in engine.calls for engine in fleet.engines)
            alive = tuple(each.label for each in fleet.engines if not each.dead)
            assert (await fleet.relay(2)).committed == alive

        run(story)

    def test_one_that_hangs_as_it_is_set_up_is_named_and_nobody_else_waits_longer_than_its_deadline(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2, timeouts=dataclasses.replace(QUICK, connect_s=0.2)).attach()
            fleet.engines[1].faults["native"] = "hang"
            with pytest.raises(RoundAborted, match="kill the engine if it stays stuck") as caught:
                await fleet.relay(1, engine=FakeTrainerEngine(GROUPED, init={"master_address": "10.0.0.1", "master_port": 7}))
            assert "at 10.0.0.1:7; if they have no way there, Native(..., options={'master_address': ...})" in str(caught.value)
            assert (caught.value.replicas, caught.value.phase, caught.value.limit_s) == (("r1",), "init", pytest.approx(0.2, abs=0.05))
            assert (fleet.engines[0].version, fleet.engines[0].paused) == ("v0", False)
            await answered(fleet)

        run(story)

    @pytest.mark.parametrize("verb", [INIT, START])
    def test_a_sender_that_cannot_make_its_engine_leaves_all_as_they_were(self, verb: str) -> None:
        async def story() -> None:
            fleet = await fleet_of(2).attach()
            with pytest.raises(RoundAborted, match="the source failed") as caught:
                await fleet.relay(1, engine=FakeTrainerEngine(fails_at=verb))
            assert caught.value.replicas == ("sender",)
            assert [(each.version, each.paused, each.weights) for each in fleet.engines] == [("v0", False, "v0")] * 2
            assert (await fleet.relay(2)).committed == ("r0", "r1")

        run(story)

    def test_a_sender_that_asks_for_nothing_ends_at_its_deadline(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2, timeouts=dataclasses.replace(QUICK, connect_s=0.2)).attach()
            rounds = fleet.coordinator.rounds
            ticket = await fleet.open(1, offer=Native("ipc"))
            with pytest.raises(RoundAborted, match="asked for nothing"):
                await rounds.commit(ticket.snapshot, holds_turn=True)
            assert [(each.version, each.paused) for each in fleet.engines] == [("v0", False)] * 2

        run(story)

    def test_a_synchronous_llm_is_refused_before_anything_is_touched(self) -> None:
        async def story() -> None:
            fleet = fleet_of(2)
            fleet.engines[1] = SyncEngine("r1")
            await fleet.attach()
            with pytest.raises(RoundAborted, match="hold an AsyncLLM in the actor, or choose transport='host'") as caught:
                await fleet.relay(1)
            assert caught.value.replicas == ("r1",)
            assert not any({"pause", "mark", "native"} & set(engine.calls) for engine in fleet.engines)

        run(story)

    @pytest.mark.parametrize("kind", ["http", "client"])
    def test_an_engine_that_no_handle_reaches_is_refused_before_anything_is_touched(self, kind: str) -> None:
        class Far(FakeEngine):
            def _told(self, nonce: str) -> dict[str, Any]:
                return super()._told(nonce) | {"kind": kind}

        async def story() -> None:
            fleet = fleet_of(2)
            fleet.engines[1] = Far("r1")
            await fleet.attach()
            with pytest.raises(RoundAborted, match="attach the engine by its actor") as caught:
                await fleet.relay(1)
            assert caught.value.replicas == ("r1",)
            assert not any("pause" in engine.calls for engine in fleet.engines)
            assert (await fleet.relay(2, engine=FakeTrainerEngine(GROUPED))).committed == ("r0", "r1")

        run(story)


class TestEndsAfterStart:
    @pytest.mark.parametrize("fault", ["raise", "die", "hang"])
    @pytest.mark.parametrize("call", ["start", "update", "finish"])
    def test_one_that_is_lost_is_fenced_and_the_others_go_on(self, call: str, fault: str) -> None:
        async def story() -> None:
            fleet = await fleet_of(3, timeouts=QUICK).attach()
            fleet.engines[1].faults[call] = fault
            with pytest.raises(ReplicasLost) as caught:
                await fleet.relay(1)
            assert (caught.value.replicas, caught.value.phase) == (("r1",), call)
            assert [fleet.engines[index].version for index in (0, 2)] == ["1", "1"]
            await answered(fleet)
            assert fleet.engines[1].dead or fleet.engines[1].version.startswith("!rws:")
            alive = tuple(each.label for each in fleet.engines if not each.dead)
            assert (await fleet.relay(2)).committed == alive

        run(story)

    @pytest.mark.parametrize("fault", ["raise", "die"])
    def test_one_that_is_lost_from_a_group_takes_the_others_with_it_until_the_next_round(self, fault: str) -> None:
        async def story() -> None:
            fleet = await fleet_of(3).attach()
            fleet.engines[1].faults["update"] = fault
            fleet.engines[2].faults["update"] = "late"  # inside the group, until its peer is killed
            engine = FakeTrainerEngine(GROUPED)
            with pytest.raises(FleetTorn, match="r1: update") as caught:
                await fleet.relay(1, engine=engine)
            assert isinstance(engine.error, RoundAborted), "the trainer is told at once"
            assert "kill the engine if it stays stuck" in str(caught.value)
            await answered(fleet)
            alive = tuple(each.label for each in fleet.engines if not each.dead)
            assert (await fleet.relay(2, engine=FakeTrainerEngine(GROUPED))).committed == alive

        run(story)

    @pytest.mark.parametrize("call", ["finish", "outcome", "commit"])
    def test_one_that_is_lost_from_a_group_when_all_was_received_costs_nobody_else_anything(self, call: str) -> None:
        async def story() -> None:
            fleet = await fleet_of(3).attach()
            fleet.engines[1].faults[call] = "raise"
            with pytest.raises(ReplicasLost) as caught:
                await fleet.relay(1, engine=FakeTrainerEngine(GROUPED))
            assert caught.value.replicas == ("r1",)
            assert [fleet.engines[index].version for index in (0, 2)] == ["1", "1"]

        run(story)

    def test_when_all_are_lost_the_trainer_is_told(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2).attach()
            for engine in fleet.engines:
                engine.faults["update"] = "raise"
            trainer = FakeTrainerEngine(ALONE)
            with pytest.raises(FleetTorn):
                await fleet.relay(1, engine=trainer)
            assert isinstance(trainer.error, RoundAborted)

        run(story)

    @pytest.mark.parametrize("verb", [UPDATE, FINISH])
    def test_a_sender_that_fails_half_way_tears_all(self, verb: str) -> None:
        async def story() -> None:
            fleet = await fleet_of(2).attach()
            with pytest.raises(FleetTorn, match="the source failed"):
                await fleet.relay(1, engine=FakeTrainerEngine(fails_at=verb))
            assert all(engine.version.startswith("!rws:") and engine.paused for engine in fleet.engines)
            assert (await fleet.relay(2)).committed == ("r0", "r1")

        run(story)

    def test_what_a_worker_finds_missing_is_never_committed(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2).attach()
            fleet.engines[0].loses_bytes = True
            with pytest.raises(ReplicasLost):
                await fleet.relay(1)
            assert fleet.engines[1].version == "1"

        run(story)


class TestSnapshots:
    def test_nobody_can_be_healed_without_the_trainer(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2, on_failure=FailurePolicy(auto_heal=False)).attach()
            fleet.engines[1].faults["update"] = "raise"
            with pytest.raises(ReplicasLost) as caught:
                await fleet.relay(1)
            assert caught.value.report is not None
            assert any("without the trainer" in each for each in caught.value.report.missing)
            assert "a lost replica does not stop the others" in caught.value.report.guarantees
            with pytest.raises(RoundAborted, match="went straight to the engines, and nobody kept it"):
                await fleet.coordinator.repair.heal("r1")

        run(story)

    def test_what_workers_cannot_attest_is_committed_and_the_report_says_so(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2).attach()
            report = await fleet.relay(1, engine=FakeTrainerEngine("sharded_rdt"))
            assert report.committed == ("r0", "r1")
            assert any("only that the update was complete" in each for each in report.missing)
            assert "bytes attested by every worker" not in report.guarantees
            status = fleet.coordinator.status()
            assert (status.version, status.serving) == ("1", ("r0", "r1"))
            assert [each.attested for each in status.replicas] == [False, False]
            assert (await fleet.relay(1, engine=FakeTrainerEngine("sharded_rdt"))).repeated

        run(story)

    def test_a_repeat_asks_the_engine_for_nothing_but_what_it_would_send(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2).attach()
            await fleet.relay(1)
            engine = FakeTrainerEngine()
            assert (await fleet.relay(1, engine=engine)).repeated
            assert engine.members is None
            with pytest.raises(RoundAborted, match="other bytes"):
                await fleet.relay(1, engine=FakeTrainerEngine(digest="another"))

        run(story)


class TestPatches:
    def test_only_engines_that_hold_the_version_before_are_patched(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2, on_failure=FailurePolicy(auto_heal=False)).attach()
            patch = Plan.from_metadata([ParamMeta("weight", torch.float32, (4,))], partial=True)
            assert (await fleet.relay(1, engine=FakeTrainerEngine("sparse_nccl"), plan=patch)).committed == ("r0", "r1")
            fleet.engines[1].faults["finish"] = "raise"
            with pytest.raises(ReplicasLost):
                await fleet.relay(2, engine=FakeTrainerEngine("sparse_nccl"), plan=patch)
            fleet.forget_calls()
            with pytest.raises(RoundAborted, match="is a patch of the version before, which r1 does not hold") as caught:
                await fleet.relay(3, engine=FakeTrainerEngine("sparse_nccl"), plan=patch)
            assert caught.value.replicas == ("r1",)
            assert not any("pause" in engine.calls for engine in fleet.engines)
            assert (await fleet.relay(4)).committed == ("r0", "r1")

        run(story)


class TestSuccessors:
    async def _dies_in(self, fleet: FakeFleet, call: str, backend: str = ALONE) -> str:
        for engine in fleet.engines:
            engine.gate(call)
        sending = asyncio.ensure_future(fleet.relay(1, engine=FakeTrainerEngine(backend)))
        for engine in fleet.engines:
            await engine.reached[call].wait()
        round_id = str(fleet.coordinator._roster.round_id)
        await asyncio.sleep(0.01)  # the seal is written beside the outcome
        for engine in fleet.engines:
            engine.gates.clear()
        await fleet.succeed()
        sending.cancel()
        await asyncio.wait({sending})
        return round_id

    def test_engines_that_were_being_set_up_are_put_back(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2, timeouts=Timeouts()).attach()
            round_id = await self._dies_in(fleet, "native")
            with pytest.raises(RoundAborted, match="the coordinator died"):
                await fleet.coordinator.settled(round_id)
            assert [(engine.version, engine.paused, engine.weights) for engine in fleet.engines] == [("v0", False, "v0")] * 2
            assert (await fleet.relay(2)).committed == ("r0", "r1")

        run(story)

    def test_engines_in_the_middle_of_an_update_are_fenced(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2, timeouts=Timeouts()).attach()
            round_id = await self._dies_in(fleet, "update")
            with pytest.raises(FleetTorn):
                await fleet.coordinator.settled(round_id)
            assert all(engine.version.startswith("!rws:") for engine in fleet.engines)
            assert (await fleet.relay(2)).committed == ("r0", "r1")

        run(story)

    def test_what_was_sealed_is_attested(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2, timeouts=Timeouts()).attach()
            round_id = await self._dies_in(fleet, "outcome")
            assert (await fleet.coordinator.settled(round_id)).committed == ("r0", "r1")
            assert [engine.version for engine in fleet.engines] == ["1", "1"]

        run(story)

    def test_its_report_is_of_the_round_as_it_was(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2, timeouts=Timeouts()).attach()
            round_id = await self._dies_in(fleet, "outcome", "sparse_nccl")
            report = await fleet.coordinator.settled(round_id)
            assert (report.transport, report.transport_reason) == ("native:sparse_nccl", "test")
            assert "bytes attested by every worker" not in report.guarantees
            assert any("only that the update was complete" in each for each in report.missing)
            assert any("takes the others of its round with it" in each for each in report.missing)
            assert [each.attested for each in fleet.coordinator.status().replicas] == [False, False]

        run(story)


def test_a_sender_of_a_round_that_is_over_is_told_so() -> None:
    async def story() -> None:
        fleet = await fleet_of(1).attach()
        rounds = fleet.coordinator.rounds
        ticket = await fleet.open(1, offer=Native("ipc"))
        await rounds.abandon(ticket.snapshot, "interrupted")
        with pytest.raises(RoundAborted, match="gone"):
            await rounds.live.call(ticket.snapshot, START, None)
        with pytest.raises(RoundAborted, match="gone"):
            await rounds.seal(ticket.snapshot, sealed("x"))

    run(story)
