"""Rounds and repairs over several nodes: who reads which copy, and what becomes of it when a node fails."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ray_weightsync.config import FailurePolicy, Host, Timeouts
from ray_weightsync.errors import FleetTorn, ReplicasLost, RoundAborted
from tests.unit.fleet.fake_cluster import FakeStores
from tests.unit.fleet.fake_engine import FakeEngine
from tests.unit.fleet.fakes import FakeFleet, plan_of, sealed
from tests.unit.fleet.test_membership import add, until
from tests.unit.fleet.test_repair import replica, state
from tests.unit.fleet.test_rounds import run

NO_HEAL = FailurePolicy(auto_heal=False)


async def fleet_on(*nodes: str, **settings: Any) -> FakeFleet:
    """Engines r0, r1, ... on these nodes; the sender is on the node "node"."""
    settings.setdefault("on_failure", NO_HEAL)
    fleet = FakeFleet(len(nodes), **settings)
    for engine, node_id in zip(fleet.engines, nodes, strict=True):
        engine.node_id = node_id
    return await fleet.attach()


def states_of(stores: FakeStores, slot: str) -> dict[str, str]:
    return {node_id: held[slot] for node_id, held in stores.at.items() if slot in held}


async def stage(fleet: FakeFleet, version: int) -> Any:
    ticket = await fleet.open(version)
    fleet.sent[str(version)] = ticket.address["snapshot"]
    await fleet.coordinator.rounds.seal(ticket.snapshot, sealed(f"digest of {version}"))
    return ticket


class TestARound:
    def test_each_replica_sees_and_reads_the_store_of_its_own_node_and_one_snapshot_is_attested(self) -> None:
        async def story() -> None:
            fleet = await fleet_on("node", "other", "other", "third")
            report = await fleet.send(1)
            assert [engine.read_from for engine in fleet.engines] == ["node", "other", "other", "third"]
            assert [engine.seen for engine in fleet.engines] == [["node"], ["other"], ["other"], ["third"]]
            assert {engine.weights for engine in fleet.engines} == {fleet.sent["1"]}
            assert sorted(fleet.stores.relays) == [("node", "other"), ("node", "third")]
            assert states_of(fleet.stores, fleet.sent["1"]) == dict.fromkeys(("node", "other", "third"), "committed")
            assert "relay" in report.phases_s
            assert ["relay" in each.phases_s for each in report.replicas] == [False, True, True, True]

        run(story)

    def test_a_fleet_beside_its_trainer_relays_nothing(self) -> None:
        async def story() -> None:
            fleet = await fleet_on("node", "node")
            report = await fleet.send(1)
            assert (list(fleet.stores.at), fleet.stores.relays) == (["node"], [])
            assert "relay" not in report.phases_s

        run(story)

    def test_nobody_is_paused_before_the_bytes_are_on_every_node(self) -> None:
        async def story() -> None:
            fleet = await fleet_on("node", "other", timeouts=Timeouts())
            gate = fleet.stores.gates["other"] = asyncio.Event()
            sending = asyncio.create_task(fleet.send(1))
            while not fleet.stores.relays:
                await asyncio.sleep(0.001)
            assert not any("pause" in engine.calls for engine in fleet.engines)
            gate.set()
            await sending
            assert [engine.version for engine in fleet.engines] == ["1", "1"]

        run(story)

    def test_staging_returns_when_every_node_has_the_bytes_and_the_commit_moves_none(self) -> None:
        async def story() -> None:
            fleet = await fleet_on("node", "other")
            ticket = await stage(fleet, 1)
            assert states_of(fleet.stores, fleet.sent["1"]) == {"node": "sealed", "other": "sealed"}
            fleet.stores.torn = {"other"}
            await fleet.coordinator.rounds.commit(ticket.snapshot)
            assert [engine.weights for engine in fleet.engines] == [fleet.sent["1"]] * 2

        run(story)

    def test_a_staged_snapshot_that_gives_way_is_freed_on_every_node(self) -> None:
        async def story() -> None:
            fleet = await fleet_on("node", "other")
            await stage(fleet, 1)
            await stage(fleet, 2)
            assert states_of(fleet.stores, fleet.sent["1"]) == {}
            assert states_of(fleet.stores, fleet.sent["2"]) == {"node": "sealed", "other": "sealed"}

        run(story)

    def test_the_slots_of_the_next_round_are_had_ahead_on_every_node(self) -> None:
        async def story() -> None:
            fleet = await fleet_on("node", "other")
            await fleet.send(1)
            (ahead,) = [slot for slot, each in fleet.stores.at["other"].items() if each == "writing"]
            await fleet.send(2)
            assert fleet.sent["2"] == ahead
            await fleet.send(3, plan=plan_of("another", "model"))
            kept = {fleet.sent["1"], fleet.sent["2"], fleet.sent["3"]}
            assert all(sum(slot not in kept for slot in held) == 1 for held in fleet.stores.at.values()), "one ahead, none left over"

        run(story)

    def test_slots_had_ahead_are_given_back_when_there_is_none_beside_the_sender(self) -> None:
        async def story() -> None:
            fleet = await fleet_on("node", "other")
            await fleet.send(1)
            fleet.stores.kill("node")
            fleet.stores.full.add("node")
            with pytest.raises(RoundAborted, match="could be had"):
                await fleet.send(2)
            assert set(fleet.stores.at["other"]) == {fleet.sent["1"]}

        run(story)

    def test_of_several_staged_snapshots_that_are_committed_in_turn_no_slot_is_left_over(self) -> None:
        async def story() -> None:
            fleet = await fleet_on("node", "other", transport=Host(num_slots=3))
            for first in (1, 3, 5):
                for ticket in [await stage(fleet, first), await stage(fleet, first + 1)]:
                    await fleet.coordinator.rounds.commit(ticket.snapshot)
                    await fleet.coordinator._parts.staging.settled()
            known = {fleet.sent[version] for version in fleet.sent}
            assert all(sum(slot not in known for slot in held) <= 1 for held in fleet.stores.at.values()), "at most the one ahead"

        run(story)

    def test_a_node_that_nobody_reads_on_any_more_gives_its_memory_back(self) -> None:
        async def story() -> None:
            fleet = await fleet_on("node", "other", "third")
            await fleet.send(1)
            await fleet.coordinator.membership.remove("r1")
            await fleet.send(2)
            assert set(fleet.stores.at) == {"node", "third"}

        run(story)

    def test_with_overlap_engines_on_other_nodes_read_a_slot_that_is_filled_after_the_seal(self) -> None:
        async def story() -> None:
            fleet = await fleet_on("node", "other", transport=Host(overlap=True), timeouts=Timeouts())
            ticket = await fleet.open(1)
            gate = fleet.engines[1].gate("update")
            committing = asyncio.create_task(fleet.coordinator.rounds.commit(ticket.snapshot, holds_turn=True))
            await fleet.engines[1].reached["update"].wait()
            assert fleet.stores.relays == []
            await fleet.coordinator.rounds.seal(ticket.snapshot, sealed("digest"), keep_turn=True)
            gate.set()
            report = await committing
            assert fleet.engines[1].read_from == "other"
            assert any("r1 waited, paused" in note for note in report.notes)
            assert [engine.version for engine in fleet.engines] == ["1", "1"]

        run(story)


class TestANodeFails:
    @pytest.mark.parametrize("how", ["torn", "full", "gone"])
    def test_before_start_it_aborts_the_round_and_node_and_replicas_are_named(self, how: str) -> None:
        async def story() -> None:
            fleet = await fleet_on("node", "other", "other", "third")
            await fleet.send(1)
            before = [engine.weights for engine in fleet.engines]
            fleet.forget_calls()
            fleet.stores.torn = {"other"} if how == "torn" else set()
            fleet.stores.full = {"other"} if how != "torn" else set()
            if how != "torn":
                fleet.stores.kill("other")  # the slot that was had ahead as well
            if how == "gone":
                del fleet.stores.addresses["other"]
                fleet.stores.addresses["fourth"] = "10.0.0.4"
                for engine in fleet.engines[1:3]:
                    engine.node_id = "fourth"
                fleet.stores.full = {"fourth"}
            with pytest.raises(RoundAborted, match="version 1 still serves everywhere") as caught:
                await fleet.send(2)
            assert caught.value.replicas == ("r1", "r2")
            assert ("node fourth" if how == "gone" else "node other") in str(caught.value)
            assert [engine.weights for engine in fleet.engines] == before
            assert not any("pause" in engine.calls for engine in fleet.engines)
            assert states_of(fleet.stores, fleet.sent["2"]) == {}
            fleet.stores.full, fleet.stores.torn = set(), set()
            await fleet.send(3)
            assert [engine.version for engine in fleet.engines] == ["3"] * 4

        run(story)

    def test_the_only_source_that_dies_while_bytes_cross_aborts_the_round_and_the_next_one_gets_through(self) -> None:
        async def story() -> None:
            fleet = await fleet_on("node", "other", "other", "other")
            await fleet.send(1)
            fleet.stores.breaks = {"other": "node"}
            with pytest.raises(RoundAborted, match="store that they came from has died") as caught:
                await fleet.send(2)
            assert caught.value.replicas == ("r1", "r2", "r3")
            assert states_of(fleet.stores, fleet.sent["2"]) == {}
            assert [engine.version for engine in fleet.engines] == ["1"] * 4
            await fleet.send(3)
            assert [engine.version for engine in fleet.engines] == ["3"] * 4

        run(story)

    def test_a_target_that_dies_while_bytes_come_to_it_costs_the_others_nothing(self) -> None:
        async def story() -> None:
            fleet = await fleet_on("node", "other", "third")
            await fleet.send(1)
            fleet.stores.breaks = {"other": "other"}
            with pytest.raises(RoundAborted, match="did not reach every node") as caught:
                await fleet.send(2)
            assert caught.value.replicas == ("r1",)
            await fleet.send(3)
            assert [engine.version for engine in fleet.engines] == ["3"] * 3

        run(story)

    def test_staging_that_does_not_reach_every_node_is_an_error_and_leaves_nothing(self) -> None:
        async def story() -> None:
            fleet = await fleet_on("node", "other")
            fleet.stores.torn = {"other"}
            with pytest.raises(RoundAborted, match="did not reach every node"):
                await stage(fleet, 1)
            assert states_of(fleet.stores, fleet.sent["1"]) == {}

        run(story)

    def test_the_store_of_a_node_that_died_between_rounds_costs_nothing(self) -> None:
        async def story() -> None:
            fleet = await fleet_on("node", "other")
            await fleet.send(1)
            fleet.stores.kill("other")
            await fleet.send(2)
            assert [engine.version for engine in fleet.engines] == ["2", "2"]
            assert fleet.engines[1].seen == ["other", "other"], "another store has to be seen anew"

        run(story)

    def test_one_that_was_fenced_before_is_left_out(self) -> None:
        async def story() -> None:
            fleet = await fleet_on("node", "other")
            fleet.engines[1].faults["update"] = "raise"
            with pytest.raises(ReplicasLost):
                await fleet.send(1)
            fleet.stores.torn = {"other"}
            report = await fleet.send(2)
            assert report.committed == ("r0",)
            assert any("r1 left out: relay" in note for note in report.notes)
            assert state(fleet, "r1") == "QUARANTINED"

        run(story)

    def test_with_overlap_it_costs_its_own_replica(self) -> None:
        async def story() -> None:
            fleet = await fleet_on("node", "other", transport=Host(overlap=True), timeouts=Timeouts())
            fleet.stores.torn = {"other"}
            ticket = await fleet.open(1)
            committing = asyncio.create_task(fleet.coordinator.rounds.commit(ticket.snapshot, holds_turn=True))
            gate = fleet.engines[1].gate("update")
            await fleet.engines[1].reached["update"].wait()
            await fleet.coordinator.rounds.seal(ticket.snapshot, sealed("digest"), keep_turn=True)
            while fleet.stores.at["other"]:  # given up: a real receiver fails by that
                await asyncio.sleep(0.001)
            fleet.engines[1].loses_bytes = True
            gate.set()
            with pytest.raises(ReplicasLost) as caught:
                await committing
            assert caught.value.replicas == ("r1",)
            assert fleet.engines[0].version == "1"

        run(story)


class TestRepair:
    async def fenced_on_other(self) -> FakeFleet:
        fleet = await fleet_on("node", "other", "third")
        fleet.engines[1].faults["update"] = "raise"
        with pytest.raises(ReplicasLost):
            await fleet.send(1)
        await fleet.coordinator._parts.staging.settled()
        fleet.stores.relays.clear()
        return fleet

    def test_it_reads_the_copy_that_is_on_its_node(self) -> None:
        async def story() -> None:
            fleet = await self.fenced_on_other()
            await fleet.coordinator.repair.heal()
            assert (state(fleet, "r1"), fleet.engines[1].read_from, fleet.stores.relays) == ("SERVING", "other", [])

        run(story)

    def test_the_store_beside_the_sender_may_have_died(self) -> None:
        async def story() -> None:
            fleet = await self.fenced_on_other()
            fleet.stores.kill("node")
            fleet.stores.kill("other")
            await fleet.coordinator.repair.heal()
            assert (state(fleet, "r1"), fleet.stores.relays) == ("SERVING", [("third", "other")])
            assert states_of(fleet.stores, fleet.sent["1"]) == {"third": "committed", "other": "committed"}
            await fleet.send(2)
            assert [engine.version for engine in fleet.engines] == ["2"] * 3

        run(story)

    def test_a_source_that_dies_while_bytes_cross_gives_way_to_another_one(self) -> None:
        async def story() -> None:
            fleet = await self.fenced_on_other()
            fleet.stores.kill("other")
            fleet.stores.breaks = {"other": "node"}
            await fleet.coordinator.repair.heal()
            assert (state(fleet, "r1"), fleet.stores.relays) == ("SERVING", [("node", "other"), ("third", "other")])
            assert states_of(fleet.stores, fleet.sent["1"]) == {"third": "committed", "other": "committed"}

        run(story)

    def test_with_every_copy_lost_a_round_that_is_for_all_or_none_ends_and_says_what_holds(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(2, on_failure=FailurePolicy(after_start="all_or_none", auto_heal=False)).attach()
            await fleet.send(1)
            committed = fleet.coordinator._parts.staging.committed
            assert committed is not None
            committed.copies.clear()
            fleet.engines[1].faults["outcome"] = "raise"
            with pytest.raises(FleetTorn, match="could be taken back from none"):
                await fleet.send(2)
            assert (await fleet.send(3)).committed == ("r0", "r1")

        run(story)

    def test_with_every_store_dead_the_snapshot_is_lost(self) -> None:
        async def story() -> None:
            fleet = await self.fenced_on_other()
            for node_id in ("node", "other", "third"):
                fleet.stores.kill(node_id)
            with pytest.raises(RoundAborted, match="snapshot of version 1 is lost"):
                await fleet.coordinator.repair.heal()

        run(story)

    def test_a_relay_that_fails_leaves_the_replica_fenced_and_nothing_on_its_node(self) -> None:
        async def story() -> None:
            fleet = await self.fenced_on_other()
            fleet.stores.kill("other")
            fleet.stores.torn = {"other"}
            with pytest.raises(ReplicasLost, match="relay"):
                await fleet.coordinator.repair.heal()
            assert state(fleet, "r1") == "QUARANTINED"
            assert states_of(fleet.stores, fleet.sent["1"]) == {"node": "committed", "third": "committed"}

        run(story)

    def test_a_replica_that_joins_on_a_new_node_has_the_bytes_relayed_there_first(self) -> None:
        async def story() -> None:
            fleet = await fleet_on("node")
            await fleet.send(1)
            joined = FakeEngine("new")
            joined.node_id = "third"
            await add(fleet, joined)
            await until(fleet, "new", "SERVING")
            assert (joined.weights, joined.read_from) == (fleet.sent["1"], "third")
            assert states_of(fleet.stores, fleet.sent["1"]) == {"node": "committed", "third": "committed"}

        run(story)

    def test_an_engine_that_was_restarted_on_another_node_is_healed_from_there(self) -> None:
        async def story() -> None:
            fleet = await fleet_on("node", "other")
            await fleet.send(1)
            fleet.engines[1].restart()
            fleet.engines[1].node_id = "third"
            await fleet.coordinator.health.check()
            await fleet.coordinator.repair.heal()
            assert (state(fleet, "r1"), fleet.engines[1].read_from) == ("SERVING", "third")
            assert replica(fleet, "r1").home == "third"

        run(story)

    def test_a_rolled_back_fleet_reads_the_version_before_on_each_node(self) -> None:
        async def story() -> None:
            fleet = await fleet_on("node", "other", on_failure=FailurePolicy(after_start="all_or_none", auto_heal=False))
            await fleet.send(1)
            fleet.engines[0].faults["finish"] = "raise"
            with pytest.raises(RoundAborted, match="taken back from all"):
                await fleet.send(2)
            assert {engine.weights for engine in fleet.engines} == {fleet.sent["1"]}
            assert [engine.read_from for engine in fleet.engines] == ["node", "other"]

        run(story)


class TestSuccessors:
    def test_a_successor_finds_the_copies_on_all_nodes_and_heals_from_any(self) -> None:
        async def story() -> None:
            fleet = await fleet_on("node", "other", "third")
            fleet.engines[1].faults["update"] = "raise"
            with pytest.raises(ReplicasLost):
                await fleet.send(1)
            await fleet.succeed()
            assert states_of(fleet.stores, fleet.sent["1"]) == dict.fromkeys(("node", "other", "third"), "committed")
            fleet.stores.kill("node")
            await fleet.coordinator.repair.heal()
            assert (state(fleet, "r1"), fleet.engines[1].read_from) == ("SERVING", "other")

        run(story)

    def test_what_was_being_relayed_is_given_up_on_every_node(self) -> None:
        async def story() -> None:
            fleet = await fleet_on("node", "other", timeouts=Timeouts())
            await fleet.send(1)
            fleet.stores.gates["other"] = asyncio.Event()
            fleet.stores.relays.clear()
            sending = asyncio.create_task(fleet.send(2))
            while not fleet.stores.relays:
                await asyncio.sleep(0.001)
            await fleet.succeed()
            assert sending.done()
            assert states_of(fleet.stores, fleet.sent["2"]) == {}
            assert states_of(fleet.stores, fleet.sent["1"]) == {"node": "committed", "other": "committed"}

        run(story)
