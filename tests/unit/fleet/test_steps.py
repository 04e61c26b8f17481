"""A chain of calls keeps each call's own deadline, and a call that is late is the last one of its chain."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.steps import Call, StepFailed, Timeline, chain
from ray_weightsync.protocol.chain import Place
from ray_weightsync.protocol.channel import FINISH, START, UPDATE
from tests.unit.fleet.fake_engine import FakeEngine
from tests.unit.fleet.fakes import FakeFleet
from tests.unit.fleet.test_rounds import run

LONG_S = 100.0


def calls(**limits_s: float) -> list[Call]:
    verbs = {"start": START, "update": UPDATE, "finish": FINISH}
    update = {"round": "r", "epoch": 1}
    return [Call(phase, limits_s.get(phase, LONG_S), verb, (update,) * (verb == UPDATE)) for phase, verb in verbs.items()]


async def one(engine_class: type[FakeEngine] = FakeEngine) -> tuple[Replica, FakeEngine]:
    fleet = FakeFleet(1)
    fleet.engines[0] = engine_class("r0")
    await fleet.attach()
    engine = fleet.engines[0]
    engine.paused = True
    return fleet.coordinator._roster.replicas["r0"], engine


async def made(replica: Replica, chained: list[Call], timeline: Timeline | None = None) -> dict[str, Any]:
    return await chain(replica, "update", chained, incarnation=replica.engine.facts.incarnation, timeline=timeline or Timeline())


@pytest.mark.parametrize("late", ["start", "update", "finish"])
def test_a_call_that_hangs_costs_its_own_deadline_and_no_later_one_begins(late: str) -> None:
    async def story() -> None:
        replica, engine = await one()
        gate = engine.gate(late)
        with pytest.raises(StepFailed, match="was not answered") as caught:
            await made(replica, calls(**{late: 0.1}))
        failed = caught.value
        assert (failed.phase, failed.limit_s, failed.failure.kind, failed.goes_on) == (late, 0.1, "unanswered", False)
        assert 0.1 <= failed.failure.elapsed_s < LONG_S / 10
        (owed,) = replica.unanswered
        gate.set()
        await asyncio.wait({owed})
        assert engine.calls[-1] == late
        assert not replica.unanswered

    run(story)


def test_a_call_may_take_its_time_although_a_later_one_has_a_shorter_deadline() -> None:
    async def story() -> None:
        replica, engine = await one()
        gate = engine.gate("start")
        making = asyncio.create_task(made(replica, calls(finish=0.01)))
        await engine.reached["start"].wait()
        await asyncio.sleep(0.05)  # several of the shorter deadlines
        gate.set()
        assert set(await making) == {START, UPDATE, FINISH}

    run(story)


class Mute(FakeEngine):
    async def halt_chain(self, token: str, limits_s: Any) -> Place | None:
        raise ConnectionError("nobody there")


def test_of_an_engine_that_does_not_say_where_it_is_the_first_deadline_counts_and_its_chain_may_go_on() -> None:
    async def story() -> None:
        replica, engine = await one(Mute)
        gate = engine.gate("update")
        with pytest.raises(StepFailed) as caught:
            await made(replica, calls(start=0.1))
        assert (caught.value.phase, caught.value.goes_on) == ("start", True)
        (owed,) = replica.unanswered
        gate.set()
        await asyncio.wait({owed})
        assert engine.calls[-1] == "finish"

    run(story)


class Lossy(FakeEngine):
    async def call_chain(self, token: str, steps: Any, *, incarnation: str | None = None) -> Any:
        await super().call_chain(token, steps, incarnation=incarnation)
        raise ConnectionError("the answer was lost")


def test_of_a_chain_whose_answer_was_lost_all_may_have_been_carried_out() -> None:
    async def story() -> None:
        replica, engine = await one(Lossy)
        with pytest.raises(StepFailed, match="the answer was lost") as caught:
            await made(replica, calls())
        assert (caught.value.phase, caught.value.goes_on) == ("update", True)
        assert engine.calls[-1] == "finish"
        engine.incarnation = "another"
        with pytest.raises(StepFailed, match="another process") as caught:
            await made(replica, calls())
        assert not caught.value.goes_on, "it was meant for the one before, and began nothing"

    run(story)


def test_an_engine_that_died_failed_in_the_phase_of_the_whole() -> None:
    async def story() -> None:
        replica, engine = await one()
        replica.engine = replica.engine.with_facts(replica.engine.facts)
        engine.incarnation = "another"
        with pytest.raises(StepFailed, match="another process") as caught:
            await made(replica, calls())
        assert (caught.value.phase, caught.value.failure.kind) == ("update", "died")
        assert engine.calls == []

    run(story)


def test_each_call_has_its_own_seconds_which_add_up_to_those_of_the_whole() -> None:
    async def story() -> None:
        replica, engine = await one()
        gate = engine.gate("update")
        timeline = Timeline()
        making = asyncio.create_task(made(replica, calls(), timeline))
        await engine.reached["update"].wait()
        await asyncio.sleep(0.05)
        gate.set()
        await making
        seconds = timeline.seconds["r0"]
        assert list(seconds) == ["start", "update", "finish"]
        assert seconds["update"] >= 0.05 > seconds["start"] + seconds["finish"]
        assert sum(seconds.values()) == pytest.approx(timeline.span_s("start", "update", "finish"))

    run(story)
