"""An error's type and words are true of the fleet as it stands, also where nobody serves any more."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable
from typing import Any

import pytest

from ray_weightsync.config import FailurePolicy, Native
from ray_weightsync.errors import FleetTorn, ReplicasLost, RoundAborted
from ray_weightsync.fleet.bring import Bring
from ray_weightsync.fleet.parts import Parts
from ray_weightsync.fleet.round import RoundLog, RoundSpec
from tests.unit.fleet.fake_engine import FakeEngine
from tests.unit.fleet.fakes import QUICK, FakeFleet, FakeTrainerEngine, sealed
from tests.unit.fleet.stock_fakes import StockEngine
from tests.unit.fleet.test_rounds import run


async def torn(num_engines: int = 2, **settings: Any) -> FakeFleet:
    """A fleet that served v1, and in the round of v2 was torn."""
    fleet = await FakeFleet(num_engines, **settings).attach()
    await fleet.send("v1")
    for engine in fleet.engines:
        engine.faults["update"] = "raise"
    with pytest.raises(FleetTorn):
        await fleet.send("v2")
    return fleet


async def says_that_nobody_serves(fleet: FakeFleet, act: Awaitable[Any]) -> str:
    with pytest.raises(FleetTorn, match="No replica serves") as caught:
        await act
    assert fleet.coordinator.status().serving == ()
    assert "still serves" not in str(caught.value)
    return str(caught.value)


class TestNobodyServes:
    def test_when_the_only_engine_dies(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(1).attach()
            await fleet.send("v1")
            fleet.engines[0].faults["inspect"] = "die"
            assert "r0 is gone" in await says_that_nobody_serves(fleet, fleet.send("v2"))

        run(story)

    def test_when_one_died_in_the_update_it_is_not_said_to_carry_a_mark(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(2).attach()
            await fleet.send("v1")
            fleet.engines[0].faults["update"], fleet.engines[1].faults["update"] = "die", "raise"
            told = await says_that_nobody_serves(fleet, fleet.send("v2"))
            assert "Fenced: r0, r1; those that can be reached are paused, with a label that starts with '!rws:'" in told
            assert fleet.engines[0].dead
            assert (fleet.engines[1].paused, fleet.engines[1].version[:5]) == (True, "!rws:")

        run(story)

    def test_when_a_torn_fleet_cannot_be_paused(self) -> None:
        async def story() -> None:
            fleet = await torn()
            for engine in fleet.engines:
                engine.faults["pause"] = "raise"
            await says_that_nobody_serves(fleet, fleet.send("v3"))

        run(story)

    def test_when_the_only_engine_can_be_neither_marked_nor_put_back(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(1).attach()
            await fleet.send("v1")
            fleet.engines[0].faults = {"mark": "raise", "resume": "raise"}
            assert "r0 could not be put back and is fenced" in await says_that_nobody_serves(fleet, fleet.send("v2"))

        run(story)

    def test_when_the_only_engine_is_out_of_step_since_its_end_was_not_set_up(self) -> None:
        async def story() -> None:
            fleet = FakeFleet(1, transport=Native("nccl"))
            fleet.engines = [StockEngine("r0", num_workers=2)]
            await fleet.attach()
            fleet.engines[0].faults["init"] = "raise"
            trainer = FakeTrainerEngine("nccl", init={"master_address": "a", "master_port": 1, "rank_offset": 1, "world_size": 3})
            await says_that_nobody_serves(fleet, fleet.relay("v1", engine=trainer))

        run(story)

    def test_when_a_torn_fleet_is_sent_a_version_that_was_given_up(self) -> None:
        async def story() -> None:
            fleet = await torn()
            ticket = await fleet.open("v3")
            await fleet.coordinator.rounds.abandon(ticket.snapshot, "the sender gave up")
            await says_that_nobody_serves(fleet, fleet.coordinator.rounds.commit(ticket.snapshot, holds_turn=True))

        run(story)

    def test_when_a_torn_fleet_has_a_round_in_progress(self) -> None:
        async def story() -> None:
            fleet = await torn()
            await fleet.open("v3")
            await says_that_nobody_serves(fleet, fleet.coordinator._parts.turn.take("other", busy="raise", limit_s=1))

        run(story)

    def test_when_the_first_round_has_torn_all_who_had_other_weights_before(self) -> None:
        async def story() -> None:
            fleet = await FakeFleet(2, adopt="never").attach()
            fleet.engines[0].faults["pause"] = "raise"
            with pytest.raises(RoundAborted, match="what the engines had before still serves everywhere"):
                await fleet.send("v1")
            fleet.engines[0].faults["update"] = fleet.engines[1].faults["update"] = "raise"
            with pytest.raises(FleetTorn):
                await fleet.send("v1")
            fleet.engines[0].faults["pause"] = fleet.engines[1].faults["pause"] = "raise"
            await says_that_nobody_serves(fleet, fleet.send("v1"))

        run(story)


async def one_is_fenced(num_engines: int, index: int, **settings: Any) -> FakeFleet:
    """A fleet that serves v1, but for the engine of that index."""
    fleet = await FakeFleet(num_engines, **settings).attach()
    fleet.engines[index].faults["update"] = "raise"
    with pytest.raises(ReplicasLost):
        await fleet.send("v1")
    return fleet


def test_who_was_fenced_before_is_not_said_to_serve() -> None:
    async def story() -> None:
        fleet = await one_is_fenced(3, 2)
        fleet.engines[0].faults["pause"] = "raise"
        with pytest.raises(RoundAborted, match="version v1 still serves everywhere, except on r2, which is fenced"):
            await fleet.send("v2")

    run(story)


def test_where_somebody_is_gone_who_was_fenced_before_is_named_as_well() -> None:
    async def story() -> None:
        fleet = await one_is_fenced(3, 2, on_failure=FailurePolicy(auto_heal=False))
        fleet.engines[0].faults["inspect"] = "die"
        with pytest.raises(RoundAborted, match="still serves on the rest; r0 is gone or to be replaced; r2 is fenced"):
            await fleet.send("v2")

    run(story)


def test_the_last_one_that_serves_serves_on_where_it_could_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        fleet = await one_is_fenced(2, 0)
        await fleet.open("v2")
        monkeypatch.setattr(Parts, "longest_turn_s", 0.01)
        with pytest.raises(RoundAborted, match="version v1 still serves"):
            await fleet.coordinator.membership.remove("r1")
        assert fleet.coordinator.status().serving == ("r1",)

    run(story)


class LosesAnAnswer(FakeEngine):
    """Carries out the trip in which it is paused and marked, and its answer is lost."""

    lost = False

    async def call_chain(self, token: str, steps: Any, *, incarnation: str | None = None) -> Any:
        outcome = await super().call_chain(token, steps, incarnation=incarnation)
        if not self.lost and any(verb == "pause_generation" for verb, _, _ in steps):
            self.lost = True
            raise ConnectionError("the connection broke")
        return outcome


def test_a_mark_whose_answer_was_lost_is_taken_off_again() -> None:
    async def story() -> None:
        fleet = FakeFleet(2)
        fleet.engines[0] = LosesAnAnswer("r0")
        await fleet.attach()
        with pytest.raises(RoundAborted, match="still serves everywhere"):
            await fleet.send("v1")
        assert [(engine.version, engine.paused) for engine in fleet.engines] == [("v0", False)] * 2
        assert fleet.coordinator.status().serving == ("r0", "r1")

    run(story)


ALL_OR_NONE = FailurePolicy(after_start="all_or_none", auto_heal=False)


async def held_on_its_way_back(num_engines: int = 2) -> tuple[FakeFleet, str, asyncio.Task[Any]]:
    """A fleet that served v1; v2 failed on the last engine and is taken back; the first one is held in it."""
    fleet = await FakeFleet(num_engines, on_failure=ALL_OR_NONE, timeouts=dataclasses.replace(QUICK, update_s=5)).attach()
    await fleet.send("v1")
    first, last = fleet.engines[0], fleet.engines[-1]
    last.faults["outcome"] = "raise"
    gate = last.gate("outcome")
    ticket = await fleet.open("v2")
    committing = asyncio.ensure_future(fleet.coordinator.rounds.commit(ticket.snapshot, sealed=sealed("v2"), holds_turn=True))
    await last.reached["outcome"].wait()
    while first.calls[-1] != "outcome":
        await asyncio.sleep(0)
    first.gate("update")
    gate.set()
    await first.reached["update"].wait()
    return fleet, ticket.snapshot, committing


def test_a_successor_of_one_that_died_in_a_roll_back_tells_the_caller_how_that_ended() -> None:
    async def story() -> None:
        fleet, round_id, _ = await held_on_its_way_back()
        await (await fleet.succeed()).chronicle.noted()
        with pytest.raises(RoundAborted, match="except on r0, which could not be put back") as caught:
            await fleet.coordinator.settled(round_id)
        assert "Version v2 failed on r1, and was taken back from the rest" in str(caught.value)
        assert fleet.coordinator.status().serving == ("r1",)

    run(story)


def test_where_a_roll_back_came_to_nothing_its_caller_is_told_that_nobody_serves() -> None:
    async def story() -> None:
        fleet, round_id, _ = await held_on_its_way_back(1)
        await fleet.succeed()
        assert "taken back from none" in await says_that_nobody_serves(fleet, fleet.coordinator.settled(round_id))

    run(story)


def test_a_roll_back_that_the_journal_does_not_take_is_made_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        fleet = await FakeFleet(2, on_failure=ALL_OR_NONE).attach()
        await fleet.send("v1")
        fleet.engines[1].faults["update"] = "raise"
        ticket = await fleet.open("v2")

        def write(record: Any) -> None:
            if record.round is not None and record.round.id != ticket.snapshot:
                raise OSError("the head node is gone")

        monkeypatch.setattr(fleet.journal, "write", write)
        with pytest.raises(RoundAborted, match="taken back from all"):
            await fleet.coordinator.rounds.commit(ticket.snapshot, sealed=sealed("v2"), holds_turn=True)
        assert [(engine.version, engine.paused) for engine in fleet.engines] == [("v1", False)] * 2
        assert fleet.coordinator.status().serving == ("r0", "r1")

    run(story)


def test_a_live_sender_is_told_of_a_member_that_does_not_come_to_an_end() -> None:
    async def story() -> None:
        fleet = await FakeFleet(1).attach()
        limits = {f"{phase}_s": 0.01 for phase in ("start", "update", "finish", "attest", "resume", "warn_every")}
        spec = RoundSpec(
            round_id="round",
            epoch=1,
            label="v1",
            num_bytes=16,
            all_or_none=False,
            overlap=True,
            attested=True,
            pause="keep",
            cache="recompute",
            timeouts=dataclasses.replace(QUICK, **limits),
            policy=FailurePolicy(),
        )
        told, arrives = [], asyncio.Event()

        async def expected() -> dict[str, Any]:
            await arrives.wait()
            return {"snapshot": "another"}

        replica = fleet.coordinator._roster.named("r0")
        payload = {"r0": {"round": "round", "epoch": 1, "transport": "host", "slot": {"snapshot": "s"}}}
        bring = Bring(spec, [replica], lambda _: payload, expected, log=RoundLog("round"), on_lost=lambda *lost: told.append(lost))
        (report,) = await bring.run()
        assert (report.state, report.failed_phase) == ("QUARANTINED", "update")
        assert [name for name, _ in told] == ["r0"]
        arrives.set()
        while replica.unanswered:
            await asyncio.sleep(0)
        assert fleet.engines[0].version == "!rws:round"

    run(story)
