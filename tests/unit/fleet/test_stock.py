"""Engines on vLLM's own backends: in which session they may be, what becomes of one that failed, and what a report says is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from ray_weightsync.config import Collective, FailurePolicy, Host, Native
from ray_weightsync.engines.facts import EngineFacts
from ray_weightsync.engines.headers import Headers
from ray_weightsync.engines.inspect import ask
from ray_weightsync.engines.ref import EngineRef
from ray_weightsync.engines.resolve import Engine
from ray_weightsync.errors import AttachError
from ray_weightsync.fleet.preflight import refusal
from ray_weightsync.fleet.repair import may_be_healed_unasked, never_again
from ray_weightsync.fleet.replica import Left, Replica
from ray_weightsync.fleet.states import ReplicaEvent, ReplicaState
from ray_weightsync.fleet.steps import StepFailed, Timeline
from ray_weightsync.fleet.stock import flush, missing_of, mixed, refused, ruined, served_by
from ray_weightsync.protocol.channel import START, UPDATE
from tests.unit.fleet.fake_engine import FakeEngine
from tests.unit.fleet.fakes import QUICK, FakeFleet
from tests.unit.fleet.stock_fakes import StockEngine


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 30))  # type: ignore[arg-type]


def replica_of(engine: FakeEngine, *, state: ReplicaState = ReplicaState.SERVING, **fields: Any) -> Replica:
    facts = asyncio.run(ask(engine, "n", limit_s=1.0))
    resolved = Engine(id=engine.label, label=engine.label, channel=engine, facts=facts, ref=EngineRef(engine.label, id=engine.label))
    return Replica(resolved, state=state, **fields)


STOCK = replica_of(StockEngine("r0")).engine.facts
GUARDED = replica_of(FakeEngine("r0")).engine.facts


@pytest.mark.parametrize(
    ("transport", "backend"), [(Host(), None), (Collective(), "nccl"), (Native("ipc"), "ipc"), (Native("nccl"), "nccl")]
)
def test_each_transport_serves_the_stock_engines_of_one_backend_or_of_none(transport: Any, backend: str | None) -> None:
    assert served_by(transport) == backend


def test_a_stock_engine_takes_part_in_a_round_that_serves_its_backend_and_in_no_other() -> None:
    assert refusal(STOCK, "nccl") is None
    assert refusal(GUARDED, "nccl") is None
    for served in (None, "ipc"):
        said = refusal(STOCK, served)
        assert said is not None
        assert "its weight-transfer backend is 'nccl'" in said
        assert "transport='collective'" in said
        assert "**ray_weightsync.vllm_engine_args()" in said
    said = refusal(replace(STOCK, backend="ipc"), "nccl")
    assert said is not None
    assert "transport='native:ipc'" in said


def test_an_engine_without_any_backend_is_refused() -> None:
    said = refusal(replace(STOCK, backend=None), "nccl")
    assert said is not None
    assert "no weight-transfer backend" in said


def test_stock_engines_and_engines_with_our_worker_side_are_not_members_of_one_round() -> None:
    stock, other, guarded = (replica_of(each) for each in (StockEngine("r0"), StockEngine("r2"), FakeEngine("r1")))
    assert mixed([stock, other]) is None
    assert mixed([guarded]) is None
    assert mixed([]) is None
    said = mixed([stock, guarded, other])
    assert said is not None
    assert "r0 ('nccl'), r2 ('nccl') were started on vLLM's own backend, r1 with vllm_engine_args()" in said


def test_a_client_of_which_nothing_is_known_is_of_either_kind() -> None:
    client = replica_of(FakeEngine("r1"))
    client.engine = client.engine.with_facts(EngineFacts(kind="client"))
    assert mixed([replica_of(StockEngine("r0")), client]) is None


def settings(transport: Any, **policy: Any) -> Any:
    return FakeFleet(0, transport=transport, on_failure=FailurePolicy(**policy)).settings


def test_a_session_refuses_engines_that_none_of_its_rounds_could_bring() -> None:
    stock, guarded = replica_of(StockEngine("r0")), replica_of(FakeEngine("r1"))
    assert refused([stock], settings(Collective())) is None
    assert refused([guarded], settings(Host())) is None
    for replicas, transport, words in (
        ([stock], Host(), "r0: its weight-transfer backend is 'nccl'"),
        ([stock], Native("ipc"), "r0: its weight-transfer backend is 'nccl'"),
        ([stock, guarded], Collective(), "one round brings one kind"),
    ):
        found = refused(replicas, settings(transport))
        assert found is not None
        assert words in found[1]


def test_a_round_for_all_or_none_is_not_for_engines_that_cannot_be_taken_back() -> None:
    found = refused([replica_of(StockEngine("r0"))], settings(Collective(keep_snapshot=True), after_start="all_or_none"))
    assert found is not None
    assert "all_or_none" in found[1]
    assert "quarantine" in found[2]


def test_a_session_that_cannot_serve_an_engine_claims_nothing_and_leaves_it_as_it_is() -> None:
    async def story() -> None:
        fleet = FakeFleet(1)
        fleet.engines[0] = StockEngine("r0")
        with pytest.raises(AttachError, match=r"transport='collective'"):
            await fleet.attach()
        assert fleet.keys.values == {}
        assert set(fleet.engines[0].calls) == {"inspect"}

    run(story)


def test_an_engine_of_the_other_kind_does_not_join() -> None:
    async def story() -> None:
        fleet = await FakeFleet(1, transport=Collective()).attach()
        facts = await ask(StockEngine("r9"), "n", limit_s=1.0)
        joining = Replica(Engine(id="r9", label="r9", channel=StockEngine("r9"), facts=facts, ref=EngineRef("r9", id="r9")))
        with pytest.raises(AttachError, match="one round brings one kind"):
            await fleet.coordinator.membership.add([joining])

    run(story)


class TestAfterAFailure:
    def test_one_of_several_workers_has_to_be_replaced_and_one_of_one_has_not(self) -> None:
        wide = replica_of(StockEngine("r0", num_workers=2))
        assert ruined(wide) is None
        wide.left = Left.OPEN
        assert ruined(wide) is None
        for replica in (wide, narrow := replica_of(StockEngine("r1")), guarded := replica_of(FakeEngine("r2"))):
            replica.left = Left.UNKNOWN
        said = ruined(wide)
        assert said is not None
        assert "it has 2 workers" in said
        assert never_again(wide) == said
        assert ruined(narrow) is None
        assert ruined(guarded) is None

    def test_a_commit_or_a_new_process_makes_it_as_good_as_new(self) -> None:
        wide = replica_of(StockEngine("r0", num_workers=2))
        wide.happen(ReplicaEvent.START)
        wide.left = Left.UNKNOWN
        wide.happen(ReplicaEvent.COMMIT)
        assert ruined(wide) is None
        wide.left = Left.UNKNOWN
        wide.forget_incarnation()
        assert ruined(wide) is None

    def test_one_that_is_found_under_a_tombstone_may_have_an_update_open_unless_the_tombstone_is_ours(self) -> None:
        found, ours = replica_of(StockEngine("r0")), replica_of(StockEngine("r1"))
        ours.lose_weights("a probe refused it")
        for replica in (found, ours):
            replica.found_torn()
        assert (found.left, ours.left) == (Left.UNKNOWN, Left.NOTHING)

    def test_it_costs_no_heal_to_wait_for_the_next_round(self) -> None:
        assert may_be_healed_unasked(replica_of(FakeEngine("r0"), state=ReplicaState.QUARANTINED))
        assert not may_be_healed_unasked(replica_of(StockEngine("r0"), state=ReplicaState.QUARANTINED))

    @pytest.mark.parametrize("left", ["open", "failed", "closed"])
    def test_the_flush_of_one_worker_leaves_an_engine_that_takes_a_complete_update(self, left: str) -> None:
        engine = StockEngine("r0")
        replica = replica_of(engine, state=ReplicaState.QUARANTINED, left=Left.UNKNOWN)

        async def story() -> None:
            engine.update_open, engine.leftovers = left == "open", left == "failed"
            await flush(replica, timeouts=QUICK, timeline=Timeline())
            assert engine.paused
            assert replica.left is Left.NOTHING
            await engine.call(START)
            await engine.call(UPDATE, {})

        run(story)

    @pytest.mark.parametrize("num_workers", [1, 2])
    def test_one_whose_calls_all_went_well_is_only_finished(self, num_workers: int) -> None:
        engine = StockEngine("r0", num_workers=num_workers)
        replica = replica_of(engine, state=ReplicaState.QUARANTINED, left=Left.OPEN)

        async def story() -> None:
            engine.update_open = engine.paused = True
            replica.engine = replica.engine.with_facts(await ask(engine, "n", limit_s=1.0))
            engine.calls.clear()
            await flush(replica, timeouts=QUICK, timeline=Timeline())
            assert engine.calls == ["finish"]

        run(story)

    def test_one_that_cannot_be_flushed_is_not_taken_for_flushed(self) -> None:
        engine = StockEngine("r0")
        replica = replica_of(engine, state=ReplicaState.QUARANTINED, left=Left.UNKNOWN)

        async def story() -> None:
            engine.faults["finish"] = "raise"
            with pytest.raises(StepFailed, match="made to fail in finish"):
                await flush(replica, timeouts=QUICK, timeline=Timeline())
            assert replica.left is Left.UNKNOWN
            engine.faults["start"] = "hang"
            with pytest.raises(StepFailed, match="start_weight_update was not answered"):
                await flush(replica, timeouts=QUICK, timeline=Timeline())
            assert replica.unanswered
            engine.release.set()
            await asyncio.wait(replica.unanswered)

        run(story)


def test_a_report_says_what_a_stock_engine_does_not_guarantee() -> None:
    one, two = replica_of(StockEngine("r0")), replica_of(StockEngine("r1", num_workers=2))
    told = "\n".join(missing_of(one))
    assert "r0: it was started on vLLM's own 'nccl' backend: its workers do not attest" in told
    assert "compared with the headers of its checkpoint" in told
    assert "cannot be healed or added without the trainer" in told
    assert "has to be replaced" not in told
    assert "r1: it has 2 workers, so once a call of an update fails in it, it has to be replaced" in missing_of(two)
    one.headers = Headers(problem="its model is elsewhere")
    assert "r0: the plan was compared with nothing before the update: its model is elsewhere" in missing_of(one)
