"""Rounds in which the sender is met by the engines: who is in the group, when it is made, and what ends it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ray_weightsync.config import Collective, Host, Timeouts
from ray_weightsync.errors import AttachError, FleetTorn, ReplicasLost, RoundAborted
from tests.unit.fleet.fake_engine import FakeEngine
from tests.unit.fleet.fakes import QUICK, FakeFleet, meeting_of
from tests.unit.fleet.test_sync_engines import SyncEngine

ROUND = ["inspect", "see", "found", "found", "pause", "mark", "start", "update", "finish", "outcome", "commit", "count", "cache", "resume"]


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 30))  # type: ignore[arg-type]


def fleet_of(num_engines: int, *, kept: bool = False, **settings: Any) -> FakeFleet:
    return FakeFleet(num_engines, transport=Collective(keep_snapshot=kept), **settings)


def group_of(engine: FakeEngine) -> dict[str, Any]:
    assert engine._received is not None
    assert engine._received["transport"] == "collective"
    group: dict[str, Any] = engine._received["group"]
    return group


class Wide(FakeEngine):
    """An engine of two workers; or one that does not say of how many."""

    num_workers: int | None = 2

    def _told(self, nonce: str) -> dict[str, Any]:
        told = super()._told(nonce)
        (worker,) = told["workers"]
        if self.num_workers is None:
            return {key: value for key, value in told.items() if not key.endswith("_size")} | {"num_workers": None}
        return told | {"num_workers": 2, "tensor_parallel_size": 2, "workers": [worker, worker | {"rank": 1}]}


class TestGroup:
    def test_every_engine_gets_ranks_of_its_own_in_one_group_that_the_sender_learns_of(self) -> None:
        async def story() -> None:
            fleet = fleet_of(3)
            fleet.engines[1] = Wide("r1")
            await fleet.attach()
            await fleet.broadcast(1)
            groups = [group_of(engine) for engine in fleet.engines]
            assert [(group["rank_offset"], group["world_size"]) for group in groups] == [(1, 5), (2, 5), (4, 5)]
            assert len({group["id"] for group in groups}) == 1
            assert fleet.coordinator.status().ranks == "group of 5: 0 sender | 1 r0 | 2-3 r1 (TP 2) | 4 r2"
            assert [engine.weights for engine in fleet.engines] == [groups[0]["id"]] * 3

        run(story)

    def test_it_is_made_when_all_are_paused_and_marked_and_not_before(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2).attach()
            gate = fleet.engines[1].gate("mark")
            sending = asyncio.ensure_future(fleet.broadcast(1))
            await fleet.engines[1].reached["mark"].wait()
            for _ in range(100):
                await asyncio.sleep(0)
            assert fleet.coordinator.status().ranks is None
            gate.set()
            assert (await sending).committed == ("r0", "r1")

        run(story)

    def test_each_round_is_another_group_that_each_engine_proves_to_reach_first(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(1).attach()
            await fleet.broadcast(1)
            fleet.forget_calls()
            await fleet.broadcast(2)
            assert fleet.engines[0].calls == ROUND
            assert len(set(fleet.engines[0].seen)) == 2

        run(story)

    def test_an_engine_left_out_of_the_round_has_no_rank_in_it(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(3).attach()
            fleet.engines[0].dead = True
            with pytest.raises(RoundAborted):
                await fleet.broadcast(1)
            assert (await fleet.broadcast(2)).committed == ("r1", "r2")
            assert [group_of(engine)["rank_offset"] for engine in fleet.engines[1:]] == [1, 2]

        run(story)

    def test_an_engine_that_does_not_say_how_many_workers_it_has_is_refused_before_anything_is_touched(self) -> None:
        async def story() -> None:
            fleet = fleet_of(2)
            silent = fleet.engines[1] = Wide("r1")
            silent.num_workers = None
            await fleet.attach()
            with pytest.raises(RoundAborted, match=r"EngineRef\(\.\.\., world_size=N\)"):
                await fleet.broadcast(1)
            assert not any("pause" in engine.calls for engine in fleet.engines)

        run(story)


class TestEnds:
    @pytest.mark.parametrize("call", ["pause", "mark"])
    def test_before_start_it_is_put_back_and_no_group_is_made(self, call: str) -> None:
        async def story() -> None:
            fleet = await fleet_of(2).attach()
            fleet.engines[1].faults[call] = "raise"
            with pytest.raises(RoundAborted, match=f"made to fail in {call}"):
                await fleet.broadcast(1)
            assert fleet.coordinator.status().ranks is None
            assert [(engine.version, engine.paused) for engine in fleet.engines] == [("v0", False)] * 2

        run(story)

    @pytest.mark.parametrize("fault", ["raise", "die", "hang"])
    def test_a_member_that_does_not_receive_ends_it_and_all_are_fenced_until_the_next_round(self, fault: str) -> None:
        async def story() -> None:
            fleet = await fleet_of(3).attach()
            await fleet.broadcast("good")
            fleet.engines[1].faults["update"] = fault
            with pytest.raises(FleetTorn, match="r1"):
                await fleet.broadcast("torn")
            assert all(engine.version.startswith("!rws:") for engine in fleet.engines if not engine.dead)
            fleet.engines[1].release.set()
            while any(replica.unanswered for replica in fleet.coordinator._roster.replicas.values()):
                await asyncio.sleep(0.001)
            alive = tuple(engine.label for engine in fleet.engines if not engine.dead)
            assert (await fleet.broadcast("whole")).committed == alive

        run(story)

    @pytest.mark.parametrize("call", ["finish", "outcome", "commit"])
    def test_a_member_that_fails_after_it_received_costs_nobody_else_anything(self, call: str) -> None:
        async def story() -> None:
            fleet = await fleet_of(3).attach()
            fleet.engines[1].faults[call] = "raise"
            with pytest.raises(ReplicasLost) as caught:
                await fleet.broadcast(1)
            assert caught.value.replicas == ("r1",)
            assert [engine.version for engine in (fleet.engines[0], fleet.engines[2])] == ["1", "1"]

        run(story)

    def test_a_sender_that_gives_up_while_engines_are_paused_leaves_them_as_they_were(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2, timeouts=QUICK).attach()
            gate = fleet.engines[1].gate("mark")
            rounds = fleet.coordinator.rounds
            ticket = await fleet.open(1, offer=meeting_of())
            committing = asyncio.ensure_future(rounds.commit(ticket.snapshot, holds_turn=True))
            await fleet.engines[1].reached["mark"].wait()
            abandoning = asyncio.ensure_future(rounds.abandon(ticket.snapshot, "interrupted"))
            for _ in range(10):
                await asyncio.sleep(0)
            gate.set()
            with pytest.raises(RoundAborted, match="interrupted"):
                await committing
            await abandoning
            assert [(engine.version, engine.paused, engine.weights) for engine in fleet.engines] == [("v0", False, "v0")] * 2

        run(story)

    def test_a_sender_that_fails_half_way_tears_all(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2).attach()
            with pytest.raises(FleetTorn, match="the sender gave up"):
                await fleet.broadcast(1, fails=True)
            assert (await fleet.broadcast(2)).committed == ("r0", "r1")

        run(story)

    def test_a_sender_that_gives_up_while_the_plan_is_judged_leaves_nothing_behind(self) -> None:
        async def story(**settings: Any) -> None:
            fleet = await FakeFleet(2, timeouts=QUICK, **settings).attach()
            gate = fleet.engines[1].gate("plan")
            rounds = fleet.coordinator.rounds
            meeting = meeting_of() if isinstance(settings["transport"], Collective) else None
            ticket = await fleet.open(1, offer=meeting)
            fleet.coordinator._parts.staging.get(ticket.snapshot).log.began -= 10  # type: ignore[union-attr]  # a look is stale by then
            committing = asyncio.ensure_future(rounds.commit(ticket.snapshot, holds_turn=True))
            await fleet.engines[1].reached["plan"].wait()
            abandoning = asyncio.ensure_future(rounds.abandon(ticket.snapshot, "the source failed"))
            await asyncio.sleep(0.01)
            gate.set()
            with pytest.raises(RoundAborted, match="the source failed"):
                await committing
            await abandoning
            assert not any("pause" in engine.calls for engine in fleet.engines)
            assert not any(fleet.stores.at.values()), "no slot is left"

        for transport in (Host(overlap=True), Collective(), Collective(keep_snapshot=True)):
            run(lambda transport=transport: story(transport=transport))  # type: ignore[misc]

    def test_it_may_take_as_long_as_its_phases_may_and_not_as_packing_may(self) -> None:
        async def story() -> None:
            timeouts = dataclasses.replace(QUICK, stage_s=0.05, gather_s=0.05, update_s=30)
            fleet = await fleet_of(2, timeouts=timeouts).attach()
            gate = fleet.engines[1].gate("update")
            sending = asyncio.ensure_future(fleet.broadcast(1))
            await fleet.engines[1].reached["update"].wait()
            await asyncio.sleep(0.3)
            gate.set()
            assert (await sending).committed == ("r0", "r1")

        run(story)


class TestSuccessors:
    @pytest.mark.parametrize("kept", [False, True])
    def test_what_all_have_received_is_attested_by_a_successor(self, kept: bool) -> None:
        async def story() -> None:
            fleet = await fleet_of(2, kept=kept, timeouts=Timeouts()).attach()
            for engine in fleet.engines:
                engine.gate("outcome")
            sending = asyncio.ensure_future(fleet.broadcast(1))
            for engine in fleet.engines:
                await engine.reached["outcome"].wait()
            await asyncio.sleep(0.01)  # written beside the outcome
            round_id = str(fleet.coordinator._roster.round_id)
            await fleet.succeed()
            assert sending.cancelled() or sending.exception() is not None
            assert (await fleet.coordinator.settled(round_id)).committed == ("r0", "r1")
            assert [engine.version for engine in fleet.engines] == ["1", "1"]

        run(story)

    def test_a_version_stays_what_it_was_after_the_coordinator_was_succeeded(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2).attach()
            await fleet.broadcast(1)
            await fleet.coordinator.chronicle.noted()
            await fleet.succeed()
            with pytest.raises(RoundAborted, match="other bytes"):
                await fleet.broadcast(1, digest="another")
            with pytest.raises(RoundAborted, match=r"Collective\(keep_snapshot=True\)"):
                await fleet.coordinator.repair.heal("r1")
            assert (await fleet.broadcast(1)).repeated

        run(story)


class TestSnapshots:
    def test_a_repeat_that_finds_fenced_replicas_is_no_success(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2).attach()
            await fleet.broadcast(1)
            with pytest.raises(FleetTorn):
                await fleet.broadcast(2, fails=True)
            with pytest.raises(FleetTorn, match="is not sent a second time"):
                await fleet.broadcast(1)
            assert (await fleet.broadcast(3)).committed == ("r0", "r1")

        run(story)

    def test_a_store_that_cannot_keep_it_costs_the_engines_nothing(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2, kept=True).attach()
            fleet.stores.refuse_seal = True
            report = await fleet.broadcast(1)
            assert report.committed == ("r0", "r1")
            assert any("is not kept" in each for each in report.notes)
            assert not any(fleet.stores.at.values())
            with pytest.raises(RoundAborted, match="so nobody can be healed"):
                await fleet.coordinator.repair.heal("r1")

        run(story)

    def test_nothing_is_kept_and_heal_says_how_it_could_be(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2).attach()
            report = await fleet.broadcast(1)
            assert report.transport == "collective"
            assert fleet.stores.at == {}
            with pytest.raises(RoundAborted, match=r"Collective\(keep_snapshot=True\)"):
                await fleet.coordinator.repair.heal("r1")

        run(story)

    def test_what_is_kept_heals_by_the_host_transport(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2, kept=True).attach()
            fleet.engines[1].faults["outcome"] = "raise"
            with pytest.raises(ReplicasLost):
                await fleet.broadcast(1)
            report = await fleet.coordinator.repair.heal("r1")
            assert report.transport == "host"
            assert [engine.version for engine in fleet.engines] == ["1", "1"]
            assert fleet.engines[1].weights == fleet.stores.committed

        run(story)

    def test_the_version_that_is_committed_already_is_told_and_not_sent(self) -> None:
        async def story() -> None:
            fleet = await fleet_of(2).attach()
            await fleet.broadcast(1)
            fleet.forget_calls()
            report = await fleet.broadcast(1)
            assert report.repeated
            assert not any("pause" in engine.calls for engine in fleet.engines)
            with pytest.raises(RoundAborted, match="other bytes"):
                await fleet.broadcast(1, digest="another")

        run(story)


def test_a_synchronous_engine_is_not_attached_as_all_would_wait_for_its_requests() -> None:
    async def story() -> None:
        fleet = fleet_of(2)
        fleet.engines[1] = SyncEngine("r1")
        with pytest.raises(AttachError, match=r"(?s)synchronous LLM.*transport='host'") as caught:
            await fleet.attach()
        assert caught.value.replicas == ("r1",)

    run(story)
