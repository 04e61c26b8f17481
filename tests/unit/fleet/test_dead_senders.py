"""A sender that dies before it sealed holds neither turn nor slot; one that dies later is not missed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from ray_weightsync.config import Host, Timeouts
from ray_weightsync.errors import FleetTorn, RoundAborted
from ray_weightsync.fleet import cluster
from ray_weightsync.fleet.cluster import Process
from tests.unit.fleet.fakes import FakeFleet, sealed

DEAD: set[str] = set()


class Mortal(Process):
    """Dies when it is told to."""

    @property
    def is_gone(self) -> bool:
        return self.job_id in DEAD


class Unknowable(Process):
    """Nobody can be asked whether it lives."""

    @property
    def is_gone(self) -> bool:
        raise ConnectionError("the control plane does not answer")


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "GONE_POLL_S", 0.01)
    DEAD.clear()


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 30))  # type: ignore[arg-type]


def test_a_sender_that_dies_while_it_packs_gives_turn_and_slot_back() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2, timeouts=Timeouts()).attach()
        ticket = await fleet.open(1, sender=Mortal(job_id="sender"))
        assert ticket.address["snapshot"] in fleet.stores.open
        DEAD.add("sender")
        await fleet.send(2)  # waits for the turn
        assert [engine.version for engine in fleet.engines] == ["2"] * 2
        assert ticket.address["snapshot"] not in fleet.stores.open

    run(story)


def test_a_sender_that_died_while_it_waited_for_its_turn_does_not_keep_it() -> None:
    async def story() -> None:
        fleet = await FakeFleet(1, timeouts=Timeouts()).attach()
        ticket = await fleet.open(1)
        waiting = asyncio.create_task(fleet.open(2, sender=Mortal(job_id="waiting")))
        await asyncio.sleep(0)
        DEAD.add("waiting")
        await fleet.coordinator.rounds.abandon(ticket.snapshot, "done")
        await waiting
        await fleet.send(3)
        assert fleet.engines[0].version == "3"

    run(story)


def test_a_sender_that_dies_after_it_said_what_it_wrote_is_not_missed() -> None:
    async def story() -> None:
        fleet = await FakeFleet(1, timeouts=Timeouts()).attach()
        gate = fleet.engines[0].gate("update")
        ticket = await fleet.open(1, sender=Mortal(job_id="sender"))
        committing = asyncio.create_task(fleet.coordinator.rounds.commit(ticket.snapshot, sealed=sealed("d"), holds_turn=True))
        await fleet.engines[0].reached["update"].wait()
        DEAD.add("sender")
        await asyncio.sleep(0.05)
        gate.set()
        assert (await committing).committed == ("r0",)

    run(story)


def test_with_overlap_engines_that_had_started_are_fenced_and_the_next_round_heals_them() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2, timeouts=Timeouts(), transport=Host(overlap=True)).attach()
        ticket = await fleet.open(1, sender=Mortal(job_id="sender"))
        committing = asyncio.create_task(fleet.coordinator.rounds.commit(ticket.snapshot, holds_turn=True))
        while [engine.calls[-1:] for engine in fleet.engines] != [["finish"]] * 2:
            await asyncio.sleep(0)
        DEAD.add("sender")
        with pytest.raises(FleetTorn, match="the sender died before it had sealed"):
            await committing
        assert [(engine.paused, engine.version[:5]) for engine in fleet.engines] == [(True, "!rws:")] * 2
        await fleet.send(2)
        assert [(engine.paused, engine.version) for engine in fleet.engines] == [(False, "2")] * 2

    run(story)


def test_a_sender_that_cannot_be_asked_about_has_until_its_deadline() -> None:
    async def story() -> None:
        timeouts = Timeouts(gather_s=0.2, stage_s=0.1)
        fleet = await FakeFleet(1, timeouts=timeouts).attach()
        ticket = await fleet.open(1, sender=Unknowable(job_id="sender"))
        await asyncio.sleep(0.05)
        assert fleet.coordinator._parts.turn.holder == ticket.snapshot
        await fleet.send(2)
        with pytest.raises(RoundAborted, match="is gone"):
            await fleet.coordinator.rounds.seal(ticket.snapshot, sealed("d"))

    run(story)
