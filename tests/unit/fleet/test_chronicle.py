"""The journal says what was written last, however late an earlier call of it returns."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from ray_weightsync.fleet import chronicle as module
from tests.unit.fleet.fakes import FakeFleet, plan_of, sealed
from tests.unit.fleet.test_rounds import run

LIMIT_S = 10


async def with_a_late_write() -> tuple[FakeFleet, threading.Event, threading.Event]:
    """A fleet whose journal has not been written in time; that it goes on with when the first event is set, and then sets the second."""
    fleet = await FakeFleet(1).attach()
    chronicle, write, gate = fleet.coordinator.chronicle, fleet.journal.write, threading.Event()
    written = threading.Event()
    await chronicle.noted()

    def held(record: Any) -> None:
        fleet.journal.write = write  # type: ignore[method-assign]
        assert gate.wait(LIMIT_S)
        write(record)
        written.set()

    fleet.journal.write = held  # type: ignore[method-assign]
    chronicle._limit_s = 0.05
    with pytest.raises(TimeoutError):
        await chronicle.write()
    return fleet, gate, written


def test_a_write_that_is_late_does_not_undo_a_later_one() -> None:
    async def story() -> None:
        fleet, gate, written = await with_a_late_write()
        chronicle = fleet.coordinator.chronicle
        fleet.coordinator._roster.label = "later"
        with pytest.raises(TimeoutError, match="an earlier call"):
            await chronicle.write()
        chronicle._limit_s = LIMIT_S
        writing = asyncio.create_task(chronicle.write())
        assert not (await asyncio.wait({writing}, timeout=0.05))[0]
        gate.set()
        await writing
        assert written.is_set()
        assert fleet.journal.record.label == "later"

    run(story)


def test_nor_does_it_bring_back_a_journal_that_was_erased() -> None:
    async def story() -> None:
        fleet, gate, written = await with_a_late_write()
        chronicle = fleet.coordinator.chronicle
        chronicle._limit_s = LIMIT_S
        erasing = asyncio.create_task(chronicle.erase())
        await asyncio.wait({erasing}, timeout=0.05)
        gate.set()
        await erasing
        assert await asyncio.to_thread(written.wait, LIMIT_S)
        assert fleet.journal.record is None

    run(story)


def test_what_could_not_be_written_when_nobody_waited_is_written_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(module, "AGAIN_S", 0.01)
        fleet = await FakeFleet(1).attach()
        chronicle, write = fleet.coordinator.chronicle, fleet.journal.write
        await chronicle.noted()
        failures = iter([OSError("the control plane restarts")] * 3)

        def restarting(record: Any) -> None:
            if (failure := next(failures, None)) is not None:
                raise failure
            write(record)

        ticket = await fleet.open(1)
        while fleet.journal.record.round is None:
            await asyncio.sleep(0.001)
        fleet.journal.write = restarting  # type: ignore[method-assign]
        await fleet.coordinator.rounds.abandon(ticket.snapshot, "not needed")
        await asyncio.wait_for(chronicle.noted(), LIMIT_S)
        assert fleet.journal.record.round is None, "a successor would settle it"

    run(story)


def test_a_plan_that_was_forgotten_late_is_written_again_for_the_round_that_needs_it() -> None:
    async def story() -> None:
        fleet = await FakeFleet(1).attach()
        first, second = plan_of("first"), plan_of("second")
        await fleet.send(1, plan=first)
        chronicle, forget_plan = fleet.coordinator.chronicle, fleet.journal.forget_plan
        await chronicle.noted()
        reached, gate, forgotten = threading.Event(), threading.Event(), threading.Event()

        def held(digest: str) -> None:
            reached.set()
            assert gate.wait(LIMIT_S)
            forget_plan(digest)
            forgotten.set()

        fleet.journal.forget_plan = held  # type: ignore[method-assign]
        ticket = await fleet.open(2, second)
        await fleet.coordinator.rounds.commit(ticket.snapshot, sealed=sealed("2"), holds_turn=True)
        chronicle._limit_s = 0.05  # of the write to come
        assert await asyncio.to_thread(reached.wait, LIMIT_S)
        while chronicle._writing.locked():
            await asyncio.sleep(0.001)
        gate.set()
        assert await asyncio.to_thread(forgotten.wait, LIMIT_S)
        chronicle._limit_s = LIMIT_S
        ticket = await fleet.open(3, first)
        while fleet.journal.record.round is None:
            await asyncio.sleep(0.001)
        assert fleet.journal.record.round.snapshot.plan == first.digest
        assert first.digest in fleet.journal.plans

    run(story)
