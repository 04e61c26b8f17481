"""Random lives of a fleet: rounds, repairs, joins, leaves, sleep, deaths, restarts and faults; and what must hold after each step."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ray_weightsync.config import FailurePolicy, Timeouts
from ray_weightsync.errors import WeightSyncError
from tests.unit.fleet.fake_engine import FakeEngine
from tests.unit.fleet.fakes import FakeFleet
from tests.unit.fleet.test_invariants import require_true
from tests.unit.fleet.test_membership import resolved
from tests.unit.fleet.virtual_time import run

REPLICAS = 3
CALLS = (
    "inspect",
    "judge",
    "plan",
    "pause",
    "mark",
    "start",
    "update",
    "finish",
    "outcome",
    "commit",
    "cache",
    "resume",
    "unmark",
    "sleep",
    "wake_up",
)
TIMEOUTS = Timeouts(
    min_rate_bytes_per_s=1e12,
    health_interval_s=0.05,
    **{f"{phase}_s": 0.02 for phase in ("preflight", "pause", "start", "update", "finish", "attest", "commit", "resume")},
)
FAULTS = st.dictionaries(
    st.tuples(st.integers(0, REPLICAS - 1), st.sampled_from(CALLS)), st.sampled_from(["raise", "die", "hang", "late"]), max_size=2
)
STEPS = st.sampled_from(["send", "send", "heal", "check", "add", "replace", "remove", "sleep 1", "sleep 2", "wake", "wake weights"])
BEHIND_OUR_BACK = st.sampled_from([None, None, "restart", "kill", "resume", "relabel"])


class Life:
    """A fleet, and what happens to it."""

    def __init__(self, fleet: FakeFleet) -> None:
        self.fleet = fleet
        self.engines: dict[str, FakeEngine] = {engine.label: engine for engine in fleet.engines}
        self.relabelled: set[str] = set()
        self.steps = 0

    async def live(self, step: str, behind: str | None, faults: dict[tuple[int, str], str]) -> None:
        self.steps += 1
        members = [self.engines[each.id] for each in self.fleet.coordinator.status().replicas if each.state != "RETIRED"]
        if behind is not None and members:
            self._behind_our_back(members[self.steps % len(members)], behind)
        for (index, call), fault in faults.items():
            if index < len(members):
                members[index].faults[call] = fault
        found = self.fleet.coordinator.status()
        try:
            await self._step(step, members)
        except WeightSyncError as error:
            require_true(error, self.fleet.coordinator.status(), before=found)
        await self._quiet()
        self._hold()

    def _behind_our_back(self, engine: FakeEngine, what: str) -> None:
        if what == "restart" and not engine.dead:
            engine.restart()
        elif what == "kill":
            engine.dead = True
        elif what == "resume":
            engine.paused = bool(engine.asleep)
        elif what == "relabel" and engine.version.startswith("!rws:"):
            engine.version = "relabelled"

    async def _step(self, step: str, members: list[FakeEngine]) -> None:
        coordinator = self.fleet.coordinator
        match step.split():
            case ["send"]:
                await self.fleet.send(f"v{self.steps}")
            case ["heal"]:
                await coordinator.repair.heal()
            case ["check"]:
                await coordinator.health.check()
            case ["add"]:
                await coordinator.membership.add([await resolved(self._new())])
            case ["replace"] if members:
                await coordinator.membership.replace(members[0].label, await resolved(self._new()))
            case ["remove"] if members:
                await coordinator.membership.remove(members[0].label)
            case ["sleep", level]:
                await coordinator.sleep_mode.sleep(int(level))
            case ["wake", *tags]:
                await coordinator.sleep_mode.wake_up(tags or None)

    def _new(self) -> FakeEngine:
        engine = FakeEngine(f"n{self.steps}")
        self.engines[engine.label] = engine
        self.fleet.engines.append(engine)
        return engine

    async def _quiet(self) -> None:
        """Faults end, late answers come, and whatever runs beside comes to its end."""
        for engine in self.engines.values():
            engine.faults.clear()
            engine.release.set()
        coordinator = self.fleet.coordinator
        while coordinator._parts.turn.holder is not None or any(each.unanswered for each in coordinator._roster.replicas.values()):
            await asyncio.sleep(0.001)
        while coordinator._parts._background - set(coordinator.health._looking.values()):
            await asyncio.sleep(0.001)
        for engine in self.engines.values():
            engine.release.clear()

    def _hold(self) -> None:
        status = self.fleet.coordinator.status()
        for told in status.replicas:
            engine = self.engines[told.id]
            alive_as_known = not engine.dead and told.incarnation == engine.incarnation
            if not engine.dead and engine.version in self.fleet.sent:
                assert engine.weights == self.fleet.sent[engine.version], f"{told.id}: a valid label means whole weights of that version"
            if told.serving:
                assert told.state == "SERVING"
                assert told.version == status.version, "no two serving replicas differ in version"
                if alive_as_known:
                    assert engine.version == told.version
            if told.state == "RETIRED":
                assert not told.serving
            if told.lost:
                assert told.state in ("RETIRED", "QUARANTINED")
            assert told.state not in ("UPDATING",)
        assert (status.phase, status.round_id) == ("idle", None)
        assert self.fleet.coordinator._parts.turn.holder is None


async def story(lives: list[tuple[str, str | None, dict[tuple[int, str], str]]]) -> None:
    fleet = await FakeFleet(REPLICAS, timeouts=TIMEOUTS, on_failure=FailurePolicy(max_heals=2)).attach()
    life = Life(fleet)
    for step, behind, faults in lives:
        await life.live(step, behind, faults)
    await _ends_whole(life)


async def _ends_whole(life: Life) -> None:
    """With no more faults: awake, looked at, sent to twice (one round may have to find out who is gone), the fleet is of one version."""
    coordinator = life.fleet.coordinator
    for act in (lambda: coordinator.sleep_mode.wake_up(None), coordinator.health.check):
        with contextlib.suppress(WeightSyncError):
            await act()
        await life._quiet()
    if not any(each.state != "RETIRED" and not life.engines[each.id].dead for each in coordinator.status().replicas):
        return
    report: Any = None
    for _ in range(2):
        try:
            report = await life.fleet.send("last")
            break
        except WeightSyncError:
            await life._quiet()
    status = coordinator.status()
    members = [each for each in status.replicas if each.state != "RETIRED" and not life.engines[each.id].dead]
    assert report is not None, status
    assert {each.id for each in members} == set(report.committed) == set(status.serving)
    assert [(life.engines[each.id].version, life.engines[each.id].paused) for each in members] == [("last", False)] * len(members)


@settings(max_examples=150, deadline=None, print_blob=True)
@given(st.lists(st.tuples(STEPS, BEHIND_OUR_BACK, FAULTS), min_size=1, max_size=6))
@example([("add", None, {}), ("remove", "restart", {}), ("send", "kill", {})])  # one that joins has not the version that was found
@example([("sleep 1", None, {(0, "sleep"): "hang"}), ("send", None, {})])  # one that was believed asleep is found awake
def test_whatever_happens_to_a_fleet_the_promises_hold_and_it_can_be_made_whole(
    lives: list[tuple[str, str | None, dict[tuple[int, str], str]]],
) -> None:
    run(story(lives))
