"""A synchronous LLM has no pause: mark, update, commit and cache are one call of its actor, and each failure keeps its phase."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from ray_weightsync.config import FailurePolicy, Host, Timeouts
from ray_weightsync.errors import AttachError, FleetTorn, ReplicasLost, RoundAborted
from ray_weightsync.protocol.chain import ChainOutcome, Place, Step
from ray_weightsync.protocol.channel import IS_PAUSED, PAUSE, RESUME
from tests.unit.fleet.fake_engine import PLAN, FakeEngine
from tests.unit.fleet.fakes import QUICK, FakeFleet, sealed
from tests.unit.fleet.test_membership import resolved
from tests.unit.fleet.test_rounds import run

TURN = ["mark", "start", "update", "finish", "outcome", "commit", "count", "cache"]


class SyncEngine(FakeEngine):
    """An ``LLM`` in an actor: one call at a time, requests too, and nothing of its own to keep a request away.

    Attributes:
        turns: The calls of each turn of its actor.
        seconds: How long it says that it has been at the call that it is at.
        busy_after: A call behind whose turn a request runs until `idle`.
    """

    pausable = False

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self.turns: list[list[str]] = []
        self.seconds = 1e9
        self.busy_after: str | None = None
        self._turn = asyncio.Lock()
        self._places: dict[str, Place] = {}

    def supports(self, verb: str) -> bool:
        return verb not in (PAUSE, RESUME, IS_PAUSED)

    async def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        assert self.supports(verb), verb
        outcome = await self.call_chain("one call", [(verb, args, kwargs)])
        if outcome.error is not None:
            raise outcome.error
        return outcome.answers[0]

    async def call_chain(self, token: str, steps: Sequence[Step], *, incarnation: str | None = None) -> ChainOutcome:
        answers: list[Any] = []
        async with self._turn:
            if incarnation is not None:
                await self.require_incarnation(incarnation)
            self.turns.append([])
            for index, (verb, args, kwargs) in enumerate(steps):
                self.turns[-1].append(self._name(verb, args))
                self._places[token] = Place(index, self.seconds)
                try:
                    answers.append(await super().call(verb, *args, **kwargs))
                except Exception as error:
                    if self.dead:
                        raise
                    return ChainOutcome(answers=tuple(answers), failed_step=index, error=error, seconds=(0.001,) * (index + 1))
        if self.busy_after in self.turns[-1]:
            await self._turn.acquire()
        return ChainOutcome(answers=tuple(answers), seconds=(0.001,) * len(steps))

    async def halt_chain(self, token: str, limits_s: Sequence[float]) -> Place | None:
        return self._places.get(token)

    def idle(self) -> None:
        self._turn.release()

    def _told(self, nonce: str) -> dict[str, Any]:
        told = super()._told(nonce)
        del told["paused"], told["unfinished_requests"]
        return told | {"kind": "sync"}


async def mixed(**settings: Any) -> tuple[FakeFleet, SyncEngine]:
    """A fleet of an asynchronous engine and a synchronous one."""
    fleet = FakeFleet(2, **settings)
    sync = SyncEngine("r1")
    fleet.engines[1] = sync
    await fleet.attach()
    sync.turns.clear()
    return fleet, sync


def test_from_mark_to_cache_it_is_one_turn_of_the_actor() -> None:
    async def story() -> None:
        fleet, sync = await mixed()
        report = await fleet.send(1)
        assert report.committed == ("r0", "r1")
        assert sync.turns == [["inspect"], ["see"], *([each] for each in PLAN), TURN]
        assert (sync.version, sync.weights) == ("1", fleet.stores.committed)
        assert report.replicas[1].pause_s == 0
        assert report.replicas[1].phases_s["update"] > 0
        assert any("r1" in each and "no pause" in each for each in report.missing)

    run(story)


def test_requests_that_are_queued_behind_its_turn_for_longer_than_any_deadline_cost_it_nothing() -> None:
    async def story() -> None:
        fleet, sync = await mixed()
        sync.busy_after = "cache"
        assert (await fleet.send(1)).committed == ("r0", "r1")
        assert sync.turns[-1] == TURN
        sync.idle()

    run(story)


def test_its_turn_may_take_the_sum_of_what_its_calls_may_take() -> None:
    async def story() -> None:
        short = dict.fromkeys(("start_s", "update_s", "finish_s", "attest_s"), 0.05) | {"resume_s": 0.01, "warn_every_s": 0.01}
        fleet, sync = await mixed(timeouts=Timeouts(min_rate_bytes_per_s=1e12, commit_s=0.4, **short))
        sync.seconds = 0.0
        sending = asyncio.create_task(fleet.send(1))
        for phase in ("commit", "cache"):
            gate = sync.gate(phase)
            await sync.reached[phase].wait()
            await asyncio.sleep(0.3)
            gate.set()
        assert (await sending).committed == ("r0", "r1")

    run(story)


@pytest.mark.parametrize("cache", ["keep", "salt"])
def test_its_cache_is_touched_only_by_the_policy_that_says_so(cache: str) -> None:
    async def story() -> None:
        fleet, sync = await mixed(cache=cache)
        await fleet.send(1)
        assert sync.turns[-1] == TURN[:-2]

    run(story)


@pytest.mark.parametrize("phase", [each for each in TURN if each != "count"])
def test_the_step_of_the_turn_that_failed_is_the_phase_named_and_later_ones_are_not_run(phase: str) -> None:
    async def story() -> None:
        fleet, sync = await mixed()
        sync.faults[phase] = "raise"
        with pytest.raises(ReplicasLost, match=f"made to fail in {phase}") as caught:
            await fleet.send(1)
        assert (caught.value.replicas, caught.value.phase) == (("r1",), phase)
        assert sync.turns[5] == TURN[: TURN.index(phase) + 1]
        assert sync.version.startswith("!rws:")
        assert fleet.engines[0].version == "1"
        assert fleet.coordinator.status().serving == ("r0",)
        assert (await fleet.send(2)).committed == ("r0", "r1")
        assert (sync.version, sync.weights) == ("2", fleet.stores.committed)

    run(story)


@pytest.mark.parametrize(("fault", "phase"), [("die", "update"), ("hang", "finish")])
def test_a_turn_that_does_not_come_back_names_the_step_that_it_is_at_if_anybody_can_say(fault: str, phase: str) -> None:
    async def story() -> None:
        fleet, sync = await mixed()
        sync.faults["finish"] = fault
        with pytest.raises(ReplicasLost) as caught:
            await fleet.send(1)
        assert (caught.value.replicas, caught.value.phase) == (("r1",), phase)
        sync.release.set()

    run(story)


@pytest.mark.parametrize("answer", [False, None])
def test_a_cache_reset_that_answers_anything_but_true_fences_it(answer: Any) -> None:
    async def story() -> None:
        fleet, sync = await mixed()
        sync.cache_answer = answer
        with pytest.raises(ReplicasLost) as caught:
            await fleet.send(1)
        assert caught.value.phase == "cache"
        assert sync.version.startswith("!rws:")

    run(story)


def test_it_is_refused_where_nobody_may_serve_before_all_are_attested() -> None:
    async def story() -> None:
        with pytest.raises(AttachError, match="r1 hold a synchronous LLM, which has no pause") as caught:
            await mixed(on_failure=FailurePolicy(after_start="all_or_none"))
        assert caught.value.replicas == ("r1",)
        assert "AsyncLLM" in str(caught.value.hint)
        fleet = await FakeFleet(1, on_failure=FailurePolicy(after_start="all_or_none")).attach()
        with pytest.raises(AttachError, match="synchronous LLM"):
            await fleet.coordinator.membership.add([await resolved(SyncEngine("r1"))])

    run(story)


def test_an_abort_before_start_has_not_touched_it() -> None:
    async def story() -> None:
        fleet, sync = await mixed()
        fleet.engines[0].faults["mark"] = "raise"
        with pytest.raises(RoundAborted):
            await fleet.send(1)
        assert sync.turns == [["inspect"], ["see"], *([each] for each in PLAN)]
        assert sync.version == "v0"

    run(story)


def test_with_overlap_its_turn_begins_when_the_snapshot_is_sealed() -> None:
    async def story() -> None:
        fleet, sync = await mixed(transport=Host(overlap=True), timeouts=Timeouts())
        ticket = await fleet.open(1)
        committing = asyncio.create_task(fleet.coordinator.rounds.commit(ticket.snapshot, holds_turn=True))
        while fleet.engines[0].calls[-1:] != ["finish"]:
            await asyncio.sleep(0)
        assert TURN not in sync.turns
        await fleet.coordinator.rounds.seal(ticket.snapshot, sealed("d"), keep_turn=True)
        assert (await committing).committed == ("r0", "r1")

    run(story)


def test_a_seal_that_does_not_come_is_never_taken_for_an_attested_update() -> None:
    """Nothing bounds the wait for the sender but the round itself: whoever still waits then is fenced, not committed."""

    async def story() -> None:
        timeouts = {each: getattr(QUICK, each) for each in QUICK.__dataclass_fields__} | {"gather_s": 300.0, "stage_s": 300.0}
        timeouts["warn_every_s"] = 0.05
        fleet, sync = await mixed(transport=Host(overlap=True), timeouts=Timeouts(**timeouts))
        ticket = await fleet.open(1)
        with pytest.raises(FleetTorn):
            await fleet.coordinator.rounds.commit(ticket.snapshot, holds_turn=True)
        status = fleet.coordinator.status()
        assert (status.version, status.ordinal, status.serving) == ("v0", 0, ())
        assert fleet.engines[0].version.startswith("!rws:")
        assert sync.version == "v0", "its turn had not begun"

    run(story)
