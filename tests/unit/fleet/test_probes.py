"""A version is taken back from the replicas whose outputs the user's probe refused, and from no others."""

from __future__ import annotations

import pytest

from ray_weightsync.config import FailurePolicy
from ray_weightsync.errors import FleetTorn, ReplicasLost
from ray_weightsync.fleet.probes import refuse
from tests.unit.fleet.fakes import FakeFleet
from tests.unit.fleet.test_rounds import run

WRONG = "the probe answered False"


def test_who_is_refused_is_fenced_and_the_error_says_who_serves() -> None:
    async def story() -> None:
        fleet = await FakeFleet(3).attach()
        report = await fleet.send(1)
        with pytest.raises(ReplicasLost, match="serves on r0, r2") as caught:
            await refuse(fleet.coordinator._parts, report, {"r1": WRONG})
        error = caught.value
        assert (error.replicas, error.phase) == (("r1",), "probe")
        assert WRONG in str(error)
        assert error.report.committed == ("r0", "r2")
        refused = fleet.engines[1]
        assert (refused.version, refused.paused) == (f"!rws:{report.round_id}", True)
        assert fleet.coordinator.status().serving == ("r0", "r2")
        assert (await fleet.send(2)).committed == ("r0", "r1", "r2")

    run(story)


def test_when_all_are_refused_no_replica_may_serve() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2).attach()
        report = await fleet.send(1)
        with pytest.raises(FleetTorn):
            await refuse(fleet.coordinator._parts, report, {"r0": WRONG, "r1": WRONG})
        assert fleet.coordinator.status().serving == ()
        assert all(engine.version.startswith("!rws:") for engine in fleet.engines)

    run(story)


def test_with_enough_left_the_report_tells_and_nothing_is_raised() -> None:
    async def story() -> None:
        fleet = await FakeFleet(3, on_failure=FailurePolicy(min_serving=2)).attach()
        report = await refuse(fleet.coordinator._parts, await fleet.send(1), {"r1": WRONG})
        assert (report.committed, report.lost) == (("r0", "r2"), ("r1",))

    run(story)


def test_a_complaint_of_a_version_that_is_not_served_any_more_is_noted_and_fences_nobody() -> None:
    async def story() -> None:
        fleet = await FakeFleet(2).attach()
        old = await fleet.send(1)
        await fleet.send(2)
        report = await refuse(fleet.coordinator._parts, old, {"r1": WRONG, "gone": WRONG})
        assert any("r1, gone" in note for note in report.notes)
        assert fleet.coordinator.status().serving == ("r0", "r1")
        assert [engine.paused for engine in fleet.engines] == [False, False]

    run(story)
