"""The journal says what was written last, however late an earlier call of it returns."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from ray_weightsync.fleet import chronicle as module
from tests.unit.fleet.fakes import FakeFleet
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
