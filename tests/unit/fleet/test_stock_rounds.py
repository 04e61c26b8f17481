"""Rounds toward engines on vLLM's own backends: what they are told, and what becomes of each that fails."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ray_weightsync.config import Collective, Native
from ray_weightsync.engines.headers import Headers
from ray_weightsync.errors import ConfigError, FleetTorn, ReplicasLost, RoundAborted, WeightSyncError
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.states import ReplicaState
from ray_weightsync.protocol.channel import FINISH, INIT, START, UPDATE
from tests.unit.fleet.fake_engine import FakeEngine
from tests.unit.fleet.fakes import FakeFleet, sealed
from tests.unit.fleet.stock_fakes import StockEngine
from tests.unit.fleet.test_stock import run

BEFORE = ["inspect", "found", "found", "pause", "mark"]
AFTER = ["start", "update", "finish", "commit", "count", "cache", "resume"]
FLUSH = ["start", "finish"]


class StockFleet(FakeFleet):
    """A coordinator over stock engines of so many workers each, and a sender whose engine gives the calls."""

    def __init__(self, *num_workers: int, transport: Any = None) -> None:
        super().__init__(0, transport=transport or Native("nccl"))
        self.engines = [StockEngine(f"r{index}", num_workers=size) for index, size in enumerate(num_workers)]
        self._made_for: str | None = None

    def __getitem__(self, index: int) -> StockEngine:
        engine = self.engines[index]
        assert isinstance(engine, StockEngine)
        return engine

    def replica(self, name: str) -> Replica:
        return self.coordinator._roster.replicas[name]

    async def relay(self, version: int | str, *, digest: str | None = None, gives_up: bool = False) -> Any:
        """A round; with ``gives_up`` the source fails when all have received."""
        rounds = self.coordinator.rounds
        ticket = await self.open(version, offer=Native("nccl"))
        committing = asyncio.ensure_future(rounds.commit(ticket.snapshot, holds_turn=True))
        try:
            await self._give(ticket.snapshot, gives_up=gives_up)
            await rounds.seal(ticket.snapshot, sealed(digest or f"digest of {version}"), keep_turn=True)
        except WeightSyncError as error:
            self._made_for = None
            await rounds.abandon(ticket.snapshot, str(error))
        try:
            return await committing
        finally:
            await self.coordinator._parts.staging.settled()

    async def _give(self, snapshot: str, *, gives_up: bool) -> None:
        rounds = self.coordinator.rounds
        members: Any = await rounds.live.members(snapshot)
        if members is None:
            return
        assert members.stock
        if members.key != self._made_for:
            await rounds.live.call(snapshot, INIT, {"rank_offset": 1, "world_size": members.group.world_size})
            self._made_for = members.key
        await rounds.live.call(snapshot, START, None)
        await rounds.live.call(snapshot, UPDATE, {"names": ["weight"]})
        if gives_up:
            raise RoundAborted("the source has failed", phase="stage")
        await rounds.live.call(snapshot, FINISH, None)


class TestWhole:
    def test_each_joins_with_ranks_of_its_own_and_is_told_nothing_that_vllm_does_not_know(self) -> None:
        async def story() -> None:
            fleet = await StockFleet(1, 2).attach()
            assert (await fleet.relay(1)).committed == ("r0", "r1")
            for engine in (fleet[0], fleet[1]):
                assert engine.calls == [*BEFORE, "shutdown", "init", *AFTER]
                assert engine.version == "1"
                assert engine.updates == [{"names": ["weight"]}]
            assert [fleet[index].infos for index in (0, 1)] == [[{"rank_offset": offset, "world_size": 4}] for offset in (1, 2)]

        run(story)

    def test_the_next_round_uses_the_same_group(self) -> None:
        async def story() -> None:
            fleet = await StockFleet(1).attach()
            await fleet.relay(1)
            fleet.forget_calls()
            await fleet.relay(2)
            assert fleet[0].calls == [*BEFORE, *AFTER]

        run(story)

    def test_an_engine_that_cannot_shut_its_end_down_is_not_asked_to(self) -> None:
        async def story() -> None:
            fleet = await StockFleet(1).attach()
            fleet[0].can_shut_down = False
            await fleet.relay(1)
            assert "shutdown" not in fleet[0].calls

        run(story)

    def test_a_session_in_which_nothing_was_transferred_is_never_committed(self) -> None:
        async def story() -> None:
            fleet = await StockFleet(1).attach()
            rounds = fleet.coordinator.rounds
            ticket = await fleet.open(1, offer=Native("nccl"))
            committing = asyncio.ensure_future(rounds.commit(ticket.snapshot, holds_turn=True))
            await rounds.live.members(ticket.snapshot)
            await rounds.live.call(ticket.snapshot, START, None)
            with pytest.raises(ConfigError, match="finish_weight_update after start_weight_update"):
                await rounds.live.call(ticket.snapshot, FINISH, None)
            await rounds.abandon(ticket.snapshot, "it cannot go on")
            with pytest.raises(FleetTorn):
                await committing

        run(story)

    @pytest.mark.parametrize("transport", [Native("nccl"), Collective()])
    def test_it_serves_the_version_unattested_and_the_report_says_so(self, transport: Any) -> None:
        async def story() -> None:
            fleet = await StockFleet(1, transport=transport).attach()
            report = await fleet.relay(1)
            (replica,) = fleet.coordinator.status().replicas
            assert (replica.state, replica.version, replica.serving, replica.attested) == ("SERVING", "1", True, False)
            assert fleet.coordinator.status().version == "1"
            assert report.transport == ("collective" if isinstance(transport, Collective) else "native:nccl")
            assert not any("attested" in each for each in report.guarantees)
            assert any("do not attest" in each for each in report.missing)

        run(story)

    def test_the_same_version_again_is_a_repeat_and_touches_nobody(self) -> None:
        async def story() -> None:
            fleet = await StockFleet(1, 2).attach()
            await fleet.relay(1)
            fleet.forget_calls()
            assert (await fleet.relay(1)).repeated
            assert [engine.calls for engine in fleet.engines] == [["inspect"]] * 2

        run(story)

    def test_a_round_by_another_way_refuses_it(self) -> None:
        async def story() -> None:
            fleet = await StockFleet(1).attach()
            with pytest.raises(RoundAborted, match="its weight-transfer backend is 'nccl'"):
                await fleet.broadcast(1)
            assert "pause" not in fleet[0].calls

        run(story)


class TestHeaders:
    def test_a_plan_that_is_not_the_checkpoints_is_refused_before_anything_changes(self) -> None:
        async def story() -> None:
            fleet = await StockFleet(1).attach()
            fleet.replica("r0").headers = Headers(tensors={"weight": ("float32", (5,))})
            with pytest.raises(RoundAborted, match=r"'weight' is float32 of shape \[5\] there, and would be float32 of shape \[4\]"):
                await fleet.relay(1)
            assert fleet[0].calls == ["inspect"]
            assert fleet[0].version == "v0"

        run(story)

    def test_they_are_asked_for_once_in_a_process_life(self) -> None:
        async def story() -> None:
            fleet = await StockFleet(1).attach()
            await fleet.relay(1)
            found = fleet.replica("r0").headers
            assert found is not None
            await fleet.relay(2)
            assert fleet.replica("r0").headers is found
            fleet[0].restart()
            await fleet.coordinator.health.check()
            assert fleet.replica("r0").headers is None

        run(story)


class TestFailures:
    def test_one_worker_is_flushed_and_the_next_round_commits(self) -> None:
        async def story() -> None:
            fleet = await StockFleet(1).attach()
            fleet[0].faults["update"] = "raise"
            with pytest.raises(FleetTorn, match="made to fail in update"):
                await fleet.relay(1)
            assert fleet[0].version.startswith("!rws:")
            assert fleet[0].paused
            fleet.forget_calls()
            assert (await fleet.relay(2)).committed == ("r0",)
            assert fleet[0].calls == ["inspect", *FLUSH, *BEFORE[1:], "shutdown", "init", *AFTER]

        run(story)

    def test_a_source_that_fails_leaves_updates_open_that_are_finished_also_in_several_workers(self) -> None:
        async def story() -> None:
            fleet = await StockFleet(1, 2).attach()
            with pytest.raises(FleetTorn, match="the source has failed"):
                await fleet.relay(1, gives_up=True)
            assert fleet[1].update_open
            await fleet.coordinator.health.check()
            fleet.forget_calls()
            assert (await fleet.relay(2)).committed == ("r0", "r1")
            assert [engine.calls[:2] for engine in fleet.engines] == [["inspect", "finish"]] * 2

        run(story)

    def test_one_whose_own_calls_went_well_outlives_another_that_failed(self) -> None:
        async def story() -> None:
            fleet = await StockFleet(2, 1).attach()
            await fleet.relay(1)
            fleet[1].faults["start"] = "raise"
            with pytest.raises(FleetTorn):
                await fleet.relay(2)
            fleet.forget_calls()
            assert (await fleet.relay(3)).committed == ("r0", "r1")
            assert fleet[0].calls[:2] == ["inspect", "finish"]

        run(story)

    def test_one_of_several_workers_is_not_told_anything_again_and_is_given_up(self) -> None:
        async def story() -> None:
            fleet = await StockFleet(1, 2).attach()
            await fleet.relay(1)
            fleet[1].faults["update"] = "raise"
            with pytest.raises(FleetTorn, match="r1"):
                await fleet.relay(2)
            fleet.forget_calls()
            report = await fleet.relay(3)
            assert report.committed == ("r0",)
            assert any("r1 left out" in note and "only a new engine in its place helps" in note for note in report.notes)
            assert fleet[1].calls == ["inspect"]
            await fleet.coordinator.health.check()
            lost = fleet.replica("r1")
            assert (lost.state, lost.lost) == (ReplicaState.RETIRED, True)

        run(story)

    @pytest.mark.parametrize(("num_workers", "serves"), [(1, ("r0", "r1")), (2, ("r0",))])
    def test_one_that_cannot_join_is_left_as_it_was_if_that_can_be_relied_upon(self, num_workers: int, serves: tuple[str, ...]) -> None:
        async def story() -> None:
            fleet = await StockFleet(1, num_workers).attach()
            fleet[1].faults["init"] = "raise"
            with pytest.raises(RoundAborted, match="made to fail in init"):
                await fleet.relay(1)
            assert fleet.coordinator.status().serving == serves
            assert (fleet[0].version, fleet[0].paused) == ("v0", False)
            assert fleet[1].version.startswith("!rws:") is (num_workers == 2)
            assert (await fleet.relay(2)).committed == serves

        run(story)

    def test_one_that_owes_an_answer_is_not_used_before_it_came(self) -> None:
        async def story() -> None:
            fleet = await StockFleet(1, 1).attach()
            await fleet.relay(1)
            fleet[1].faults["update"] = "hang"
            with pytest.raises(FleetTorn):
                await fleet.relay(2)
            fleet.forget_calls()
            assert (await fleet.relay(3)).committed == ("r0",)
            assert fleet[1].calls == []
            fleet[1].release.set()
            while fleet.replica("r1").unanswered:
                await asyncio.wait(fleet.replica("r1").unanswered)
            assert (await fleet.relay(4)).committed == ("r0", "r1")

        run(story)

    def test_one_that_dies_between_rounds_costs_the_others_nothing(self) -> None:
        async def story() -> None:
            fleet = await StockFleet(1, 2).attach()
            fleet[0].dead = True
            with pytest.raises(RoundAborted):
                await fleet.relay(1)
            assert (await fleet.relay(2)).committed == ("r1",)

        run(story)

    def test_one_that_fails_its_commit_is_lost_alone(self) -> None:
        async def story() -> None:
            fleet = await StockFleet(1, 1).attach()
            fleet[1].faults["commit"] = "raise"
            with pytest.raises(ReplicasLost) as caught:
                await fleet.relay(1)
            assert caught.value.replicas == ("r1",)
            assert (await fleet.relay(2)).committed == ("r0", "r1")

        run(story)

    def test_a_coordinator_that_dies_inside_an_update_leaves_one_that_its_successor_flushes(self) -> None:
        async def story() -> None:
            fleet = await StockFleet(1).attach()
            await fleet.relay(1)
            fleet[0].gate("update")
            relaying = asyncio.ensure_future(fleet.relay(2))
            await fleet[0].reached["update"].wait()
            await fleet.succeed()
            await asyncio.wait({relaying})
            assert fleet.coordinator.status().serving == ()
            fleet._made_for = None
            fleet.forget_calls()
            assert (await fleet.relay(3)).committed == ("r0",)
            assert fleet[0].calls[:3] == ["inspect", *FLUSH]

        run(story)


class TestBetweenRounds:
    def test_a_fenced_one_waits_for_the_next_round_and_is_not_given_up_for_it(self) -> None:
        async def story() -> None:
            fleet = await StockFleet(1).attach()
            await fleet.relay(1)
            fleet[0].faults["update"] = "raise"
            with pytest.raises(FleetTorn):
                await fleet.relay(2)
            for _ in range(5):
                await fleet.coordinator.health.check()
            replica = fleet.replica("r0")
            assert (replica.state, replica.heals, replica.lost) == (ReplicaState.QUARANTINED, 0, False)

        run(story)

    def test_weights_that_another_client_sent_are_noticed(self) -> None:
        async def story() -> None:
            fleet = await StockFleet(1).attach()
            await fleet.relay(1)
            fleet[0].version = "somebody's"
            await fleet.coordinator.health.check()
            assert "its label is \"somebody's\" instead of '1'" in str(fleet.replica("r0").error)
            assert (await fleet.relay(2)).committed == ("r0",)

        run(story)

    def test_one_that_joins_waits_for_the_next_round_without_an_error(self, caplog: pytest.LogCaptureFixture) -> None:
        async def story() -> None:
            fleet = await StockFleet(1).attach()
            await fleet.relay(1)
            late = await StockFleet(1, 1).attach()
            joining = Replica(late.replica("r1").engine)
            fleet.engines.append(late[1])
            await fleet.coordinator.membership.add([joining])
            await fleet.coordinator.health.check()
            assert joining.state is ReplicaState.JOINING
            assert not [each for each in caplog.records if each.levelname == "ERROR"]
            assert (await fleet.relay(2)).committed == ("r0", "r1")

        run(story)

    def test_one_that_comes_back_as_another_kind_is_told_apart(self) -> None:
        async def story() -> None:
            fleet = await StockFleet(1, 1).attach()
            await fleet.relay(1)
            guarded = FakeEngine("r1")
            guarded.restart()
            fleet.replica("r1").engine.channel._told, fleet[1].incarnation = guarded._told, guarded.incarnation  # type: ignore[attr-defined]
            with pytest.raises(RoundAborted, match=r"r0 \('nccl'\) were started on vLLM's own backend, r1 with vllm_engine_args"):
                await fleet.relay(2)

        run(story)
