"""The journal says what was written last, however late an earlier call of it returns."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.unit.fleet.fakes import FakeFleet
from tests.unit.fleet.test_rounds import run

LIMIT_S = 10


async def with_a_late_write() -> tuple[FakeFleet, threading.Event]:
    """A fleet whose journal has not been written in time; it goes on with that when the gate is opened."""
    fleet = await FakeFleet(1).attach()
    chronicle, write, gate = fleet.coordinator.chronicle, fleet.journal.write, threading.Event()
    await chronicle.noted()

    def held(record: Any) -> None:
        fleet.journal.write = write  # type: ignore[method-assign]
        assert gate.wait(LIMIT_S)
        write(record)

    fleet.journal.write = held  # type: ignore[method-assign]
    chronicle._limit_s = 0.05
    with pytest.raises(TimeoutError):
        await chronicle.write()
    return fleet, gate


def test_a_write_that_is_late_does_not_undo_a_later_one() -> None:
    async def story() -> None:
        fleet, gate = await with_a_late_write()
        chronicle = fleet.coordinator.chronicle
        fleet.coordinator._roster.label = "later"
        with pytest.raises(TimeoutError, match="an earlier call"):
            await chronicle.write()
        chronicle._limit_s = LIMIT_S
        writing = asyncio.create_task(chronicle.write())
        await asyncio.sleep(0.05)
        assert not writing.done()
        gate.set()
        await writing
        assert fleet.journal.record.label == "later"

    run(story)


def test_nor_does_it_bring_back_a_journal_that_was_erased() -> None:
    async def story() -> None:
        fleet, gate = await with_a_late_write()
        chronicle = fleet.coordinator.chronicle
        chronicle._limit_s = LIMIT_S
        erasing = asyncio.create_task(chronicle.erase())
        await asyncio.sleep(0.05)
        gate.set()
        await erasing
        assert chronicle._doing is not None and chronicle._doing.done()
        assert fleet.journal.record is None

    run(story)
