"""Random faults over several rounds, and what must hold after each of them whatever happened."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_weightsync.config import Collective, Host, Native, Timeouts, Transport
from ray_weightsync.errors import FleetTorn, ReplicasLost, RoundAborted
from ray_weightsync.report import FleetStatus
from tests.unit.fleet.fakes import FakeFleet, FakeTrainerEngine
from tests.unit.fleet.virtual_time import run

CALLS = (
    "inspect",
    "see",
    "judge",
    "plan",
    "pause",
    "mark",
    "native",
    "start",
    "update",
    "finish",
    "outcome",
    "commit",
    "cache",
    "resume",
    "unmark",
)
REPLICAS = 3
FAULTS = st.dictionaries(
    st.tuples(st.integers(0, REPLICAS - 1), st.sampled_from(CALLS)), st.sampled_from(["raise", "die", "hang", "late"]), max_size=3
)

# Deadlines are short and phases that move bytes are not longer: a hung call costs its 20 ms.
TIMEOUTS = Timeouts(
    min_rate_bytes_per_s=1e12,
    **{f"{phase}_s": 0.02 for phase in ("preflight", "connect", "pause", "start", "update", "finish", "attest", "commit", "resume")},
)


async def story(schedule: list[dict[tuple[int, str], str]], transport: Transport) -> None:
    fleet = await FakeFleet(REPLICAS, timeouts=TIMEOUTS, transport=transport).attach()
    send: Callable[[str], Awaitable[Any]] = fleet.broadcast if isinstance(transport, Collective) else fleet.send
    if isinstance(transport, Native):
        send = partial(_relayed, fleet, transport.backend)
    for number, faults in enumerate(schedule):
        version = f"v{number + 1}"
        before = [(engine.version, engine.paused, engine.weights) for engine in fleet.engines]
        found = fleet.coordinator.status()
        fleet.forget_calls()
        for (index, call), fault in faults.items():
            fleet.engines[index].faults[call] = fault
        outcome: BaseException | None = None
        try:
            await send(version)
        except (RoundAborted, ReplicasLost, FleetTorn) as error:
            outcome = error
        status = fleet.coordinator.status()
        for engine, replica, was in zip(fleet.engines, status.replicas, before, strict=True):
            if not engine.dead and not engine.version.startswith("!rws:"):
                assert engine.weights == fleet.sent[engine.version], "a valid label means whole weights of that version"
            if replica.serving and not engine.dead:
                assert not engine.paused or was[1], "a replica that may be sent requests answers them"
                assert engine.version == status.version, "no two serving replicas differ in version"
            if (
                isinstance(outcome, RoundAborted)
                and engine.label not in outcome.replicas
                and engine.label in found.serving
                and replica.serving
            ):
                assert (engine.version, engine.paused, engine.weights) == was, "an aborted round leaves everyone as found"
            if isinstance(outcome, RoundAborted):
                assert "start" not in engine.calls
        require_true(outcome, status, before=found)
        if isinstance(outcome, ReplicasLost):
            assert not set(outcome.replicas) & set(status.serving)
        for engine in fleet.engines:
            engine.faults.clear()
            engine.release.set()
        while any(replica.unanswered for replica in fleet.coordinator._roster.replicas.values()):
            await asyncio.sleep(0.001)
        for engine in fleet.engines:
            engine.release.clear()
    if not all(engine.dead for engine in fleet.engines):
        await _heals(fleet, send)


def require_true(error: BaseException | None, status: FleetStatus, *, before: FleetStatus) -> None:
    """The type of an error says what holds now."""
    asleep = any(replica.state == "SERVING" and replica.asleep for replica in status.replicas)  # as soon as it is woken up
    if isinstance(error, FleetTorn):
        assert status.serving == (), error
    if isinstance(error, ReplicasLost):
        assert status.serving or asleep, error
    if isinstance(error, RoundAborted):
        came_with = any(replica.state in ("STALE", "JOINING") for replica in status.replicas) and status.version is None
        assert status.serving or came_with or asleep, error
        assert (status.version, status.ordinal) == (before.version, before.ordinal), error
        held = {replica.id for replica in before.replicas if replica.state == "SERVING"}  # one believed asleep may be found awake
        brought_back = "was taken back" in str(error)  # and so is whoever had been fenced before
        assert brought_back or set(status.serving) <= held, "an aborted call makes nobody whole"


async def _relayed(fleet: FakeFleet, backend: str, version: str) -> Any:
    return await fleet.relay(version, engine=FakeTrainerEngine(backend))


async def _heals(fleet: FakeFleet, send: Callable[[str], Awaitable[Any]]) -> None:
    """With no more faults, at most one aborted round (which finds the dead) stands before a whole fleet."""
    try:
        report = await send("last")
    except (RoundAborted, FleetTorn):
        report = await send("last")
    alive = tuple(engine.label for engine in fleet.engines if not engine.dead)
    assert report.committed == alive
    assert fleet.coordinator.status().serving == alive
    assert [(engine.version, engine.paused) for engine in fleet.engines if not engine.dead] == [("last", False)] * len(alive)


@pytest.mark.parametrize("transport", [Host(), Collective(), Native("ipc"), Native("nccl")], ids=["host", "collective", "ipc", "nccl"])
@settings(max_examples=150, deadline=None, print_blob=True)
@given(schedule=st.lists(FAULTS, min_size=1, max_size=4))
def test_whatever_fails_the_promises_hold_and_the_fleet_can_be_made_whole(
    schedule: list[dict[tuple[int, str], str]], transport: Transport
) -> None:
    run(story(schedule, transport))
