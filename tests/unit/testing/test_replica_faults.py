"""Faults at a replica's channel, on a coordinator over engines of this process."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from ray_weightsync.errors import ConfigError, FleetTorn, ReplicasLost, RoundAborted
from ray_weightsync.testing import in_coordinator
from ray_weightsync.testing import victims as victims_module
from ray_weightsync.testing.interceptor import SEAMS
from ray_weightsync.testing.spec import FaultSpec
from tests.unit.fleet.fake_engine import FakeEngine
from tests.unit.fleet.fakes import FakeFleet
from tests.unit.fleet.test_sync_engines import mixed

BEFORE_START = ("preflight", "pause", "mark")
AFTER_START = ("start", "update", "finish", "outcome", "commit", "cache", "resume")


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 30))


class Kit:
    """What `Faults` is, for a coordinator of this process."""

    def __init__(self, fleet: FakeFleet) -> None:
        self.actor = SimpleNamespace(_coordinator=fleet.coordinator)
        self.ids: list[str] = []

    def inject(self, replica: str, phase: str, kind: str, **options: Any) -> str:
        self.ids.append(uuid.uuid4().hex)
        in_coordinator.arm(self.actor, self.ids[-1], FaultSpec(replica=replica, phase=phase, kind=kind, **options))
        return self.ids[-1]

    def release(self, fault: str) -> None:
        in_coordinator.release(self.actor, fault)

    def struck(self, fault: str) -> int:
        return in_coordinator.struck(self.actor, fault, 0)[0]

    async def reached(self, fault: str) -> None:
        while not await asyncio.to_thread(in_coordinator.struck, self.actor, fault, 0.05):
            pass
        while not in_coordinator.struck(self.actor, fault, 0)[1]:
            await asyncio.to_thread(in_coordinator.struck, self.actor, fault, 0.05)

    def clear(self) -> None:
        in_coordinator.disarm(self.actor, self.ids)


async def settled(fleet: FakeFleet) -> None:
    """Wait until every replica has answered what it owed."""
    replicas = fleet.coordinator._roster.replicas.values()
    while owed := [call for replica in replicas for call in replica.unanswered]:
        await asyncio.wait(owed)
        await asyncio.sleep(0)


def test_before_start_a_call_that_is_made_to_fail_aborts_the_round_and_the_engine_never_sees_it() -> None:
    async def story() -> None:
        for phase in BEFORE_START:
            fleet = await FakeFleet().attach()
            kit = Kit(fleet)
            fault = kit.inject("r1", phase, "raise")
            with pytest.raises(RoundAborted, match=f"InjectedFault: made to fail in {phase}") as caught:
                await fleet.send("v1")
            assert (caught.value.replicas, caught.value.phase) == (("r1",), phase)
            assert ("inspect" if phase == "preflight" else phase) not in fleet.engines[1].calls
            assert kit.struck(fault) == 1
            assert (await fleet.send("v1")).committed == ("r0", "r1", "r2")

    run(story())


def test_after_start_a_call_that_is_made_to_fail_costs_that_replica_alone() -> None:
    async def story() -> None:
        for phase in AFTER_START:
            fleet = await FakeFleet().attach()
            Kit(fleet).inject("r1", phase, "raise")
            with pytest.raises(ReplicasLost, match=f"made to fail in {phase}") as caught:
                await fleet.send("v1")
            assert (caught.value.replicas, caught.value.phase) == (("r1",), phase)
            assert phase not in fleet.engines[1].calls
            assert (await fleet.send("v2")).committed == ("r0", "r1", "r2")

    run(story())


def test_a_label_that_is_put_back_is_told_from_one_that_is_committed() -> None:
    async def story() -> None:
        fleet = await FakeFleet().attach()
        kit = Kit(fleet)
        kit.inject("r0", "pause", "raise")
        unmark, commit = kit.inject("r1", "unmark", "raise"), kit.inject("r1", "commit", "raise")
        with pytest.raises(RoundAborted):
            await fleet.send("v1")
        assert (kit.struck(unmark), kit.struck(commit)) == (1, 0)
        assert fleet.engines[1].version.startswith("!rws:")

    run(story())


def test_a_fault_strikes_as_often_as_it_is_told_and_only_its_replica() -> None:
    async def story() -> None:
        fleet = await FakeFleet().attach()
        kit = Kit(fleet)
        fault = kit.inject("r2", "pause", "raise", times=2)
        for version in ("v1", "v2"):
            with pytest.raises(RoundAborted) as caught:
                await fleet.send(version)
            assert caught.value.replicas == ("r2",)
        assert (await fleet.send("v3")).committed == ("r0", "r1", "r2")
        assert kit.struck(fault) == 2

    run(story())


@pytest.mark.parametrize("phase", ["start", "update", "finish", "outcome"])
def test_a_call_that_hangs_is_unanswered_and_fails_unseen_when_it_is_released(phase: str) -> None:
    async def story() -> None:
        fleet = await FakeFleet().attach()
        kit = Kit(fleet)
        fault = kit.inject("r1", phase, "hang")
        with pytest.raises(ReplicasLost, match="was not answered") as caught:
            await fleet.send("v1")
        assert (caught.value.replicas, caught.value.phase) == (("r1",), phase)
        kit.release(fault)
        await settled(fleet)
        assert phase not in fleet.engines[1].calls
        assert (await fleet.send("v2")).committed == ("r0", "r1", "r2")

    run(story())


def test_a_call_that_hangs_can_reach_the_engine_when_it_is_released() -> None:
    async def story() -> None:
        fleet = await FakeFleet().attach()
        kit = Kit(fleet)
        fault = kit.inject("r1", "pause", "hang", carried_out=True)
        with pytest.raises(RoundAborted, match="was not answered"):
            await fleet.send("v1")
        assert not fleet.engines[1].paused
        kit.release(fault)
        await settled(fleet)
        assert "pause" in fleet.engines[1].calls
        assert (await fleet.send("v2")).committed == ("r0", "r1", "r2")

    run(story())


def test_a_late_answer_belongs_to_a_call_that_was_carried_out() -> None:
    async def story() -> None:
        fleet = await FakeFleet().attach()
        kit = Kit(fleet)
        fault = kit.inject("r1", "pause", "late")
        sending = asyncio.create_task(fleet.send("v1"))
        await kit.reached(fault)
        assert fleet.engines[1].paused
        kit.release(fault)
        assert (await sending).committed == ("r0", "r1", "r2")

    run(story())


def test_a_lost_answer_belongs_to_a_call_that_was_carried_out() -> None:
    async def story() -> None:
        fleet = await FakeFleet().attach()
        Kit(fleet).inject("r1", "commit", "lost")
        with pytest.raises(ReplicasLost, match="made to lose the answer of commit"):
            await fleet.send("v1")
        assert "commit" in fleet.engines[1].calls
        assert fleet.engines[1].version.startswith("!rws:"), "fenced since"

    run(story())


def test_a_slow_call_is_carried_out_after_its_seconds() -> None:
    async def story() -> None:
        fleet = await FakeFleet().attach()
        Kit(fleet).inject("r1", "update", "slow", seconds=0.1)
        report = await fleet.send("v1")
        assert report.committed == ("r0", "r1", "r2")
        assert next(each for each in report.replicas if each.id == "r1").phases_s["update"] >= 0.1

    run(story())


def test_a_kill_ends_the_process_that_the_replica_last_named_and_then_the_call_goes_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(victims_module, "kill_here", killed.append)

    async def story() -> None:
        fleet = FakeFleet()
        told = FakeEngine._told
        monkeypatch.setattr(FakeEngine, "_told", lambda engine, nonce: told(engine, nonce) | {"pid": 4_000_000 + int(engine.label[1:])})
        await fleet.attach()
        kit = Kit(fleet)
        kit.inject("r2", "update", "kill")
        kit.inject("r1", "start", "kill", victim=4_999_999)
        kit.inject("r1", "finish", "kill", victim="coordinator")
        assert (await fleet.send("v1")).committed == ("r0", "r1", "r2"), "nobody was really killed"
        assert sorted(killed) == sorted([4_000_002, 4_999_999, os.getpid()])

    run(story())


def test_a_kill_of_a_process_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(pid: int, number: int) -> None:
        assert number == signal.SIGKILL
        raise ProcessLookupError(pid)

    monkeypatch.setattr(os, "kill", gone)
    victims_module.kill_here(4_000_000)


def test_what_cannot_be_armed_is_refused_with_what_there_is() -> None:
    async def story() -> None:
        kit = Kit(await FakeFleet().attach())
        with pytest.raises(ConfigError, match="there is no replica 'r7'; this session has r0, r1, r2"):
            kit.inject("r7", "update", "raise")
        with pytest.raises(ConfigError, match=r"r0 .* does not say which process it is"):
            kit.inject("r0", "update", "kill")
        with pytest.raises(ConfigError, match="r0 has no worker of rank 5"):
            kit.inject("r0", "commit", "kill", rank=5)
        with pytest.raises(LookupError):
            kit.release("another")

    run(story())


def test_taking_the_faults_out_releases_what_hangs_and_leaves_nothing_on_the_channels() -> None:
    async def story() -> None:
        fleet = await FakeFleet().attach()
        kit = Kit(fleet)
        fault = kit.inject("r1", "start", "hang")
        kit.inject("r0", "pause", "raise", times=9)
        assert all({"call", "call_chain"} <= vars(engine).keys() for engine in fleet.engines)
        kit.clear()
        assert not any(set(SEAMS) & vars(engine).keys() for engine in fleet.engines)
        with pytest.raises(LookupError):
            kit.release(fault)
        assert (await fleet.send("v1")).committed == ("r0", "r1", "r2")

    run(story())


def test_a_call_that_is_held_while_the_faults_are_taken_out_comes_back() -> None:
    async def story() -> None:
        fleet = await FakeFleet().attach()
        kit = Kit(fleet)
        fault = kit.inject("r1", "start", "hang", carried_out=True)
        sending = asyncio.create_task(fleet.send("v1"))
        await kit.reached(fault)
        kit.clear()
        assert (await sending).committed == ("r0", "r1", "r2")

    run(story())


def test_a_replica_that_is_looked_at_anew_keeps_its_faults() -> None:
    async def story() -> None:
        fleet = await FakeFleet().attach()
        Kit(fleet).inject("r1", "update", "raise")
        replica = fleet.coordinator._roster.replicas["r1"]
        replica.engine = replica.engine.with_facts(replica.engine.facts)
        with pytest.raises(ReplicasLost):
            await fleet.send("v2")

    run(story())


def test_a_synchronous_engine_makes_several_turns_of_one_while_a_fault_is_armed_and_says_where_it_struck() -> None:
    async def story() -> None:
        for phase in ("mark", "start", "update", "finish", "outcome", "commit", "cache"):
            fleet, sync = await mixed()
            kit = Kit(fleet)
            fault = kit.inject("r1", phase, "raise")
            with pytest.raises((ReplicasLost, FleetTorn), match=f"made to fail in {phase}") as caught:
                await fleet.send("v1")
            assert caught.value.phase == phase
            assert phase not in [call for turn in sync.turns for call in turn if phase != "mark"]
            assert kit.struck(fault) == 1
            sync.turns.clear()
            await fleet.send("v2")
            assert max(map(len, sync.turns)) > 1, "with nothing armed any more it is one turn again"

    run(story())
