"""Whose an engine is: one session's, whichever way it is reached, and nobody's when its session is gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from ray_weightsync.engines.facts import EngineFacts, WorkerFacts
from ray_weightsync.engines.ref import EngineRef
from ray_weightsync.engines.resolve import Engine
from ray_weightsync.errors import SessionConflict
from ray_weightsync.fleet.claims import Claims, HandOver, Holder, identity_of
from ray_weightsync.fleet.cluster import Process
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.states import ReplicaEvent, ReplicaState
from tests.unit.fleet.fake_cluster import FakeKeys
from tests.unit.fleet.fake_engine import FakeEngine


class ControlPlane(FakeKeys):
    """Ray's, in memory: the claims that stand, and who is dead. Claims ask it on threads."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: set[Process] = set()
        self.asked = 0
        self._lock = threading.Lock()

    def put_if_absent(self, key: str, value: bytes) -> bool:
        with self._lock:
            return super().put_if_absent(key, value)

    def keys(self, prefix: str) -> list[str]:
        self.asked += 1
        return super().keys(prefix)

    def is_gone(self, process: Process) -> bool:
        return process in self.gone

    def session(self, name: str, *, coordinator: str | None = None) -> Claims:
        holder = Holder(
            session=name, coordinator=Process(job_id="1", actor_id=coordinator or f"coordinator of {name}"), owner=Process(job_id=name)
        )
        return Claims(holder, keys=self, is_gone=self.is_gone)


def facts(incarnation: str | None = "i-1", *workers: str, in_step: bool = True) -> EngineFacts:
    told = tuple(
        WorkerFacts(nonce="n", rank=rank, world_size=len(workers), package_version="0", incarnation=each)
        for rank, each in enumerate(workers)
    )
    return EngineFacts(kind="async", incarnation=incarnation, workers=told, in_step=in_step)


def replica(name: str, known: EngineFacts | None = None) -> Replica:
    known = known if known is not None else facts(f"{name}-1")
    return Replica(Engine(id=name, label=name, channel=FakeEngine(name), facts=known, ref=EngineRef(name, id=name)))


def restarted(one: Replica, incarnation: str) -> None:
    one.engine = one.engine.with_facts(facts(incarnation))


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 20))  # type: ignore[arg-type]


class TestIdentity:
    def test_the_first_workers_counts_since_a_handle_and_a_url_both_lead_to_it(self) -> None:
        by_handle, by_url = facts("worker/x", "w0", "w1"), facts("x", "w0", "w1")
        assert identity_of(by_handle) == identity_of(by_url) == "w0"

    def test_an_engine_whose_workers_tell_none_has_its_own(self) -> None:
        assert identity_of(facts("i-1", "")) == identity_of(facts("i-1")) == "i-1"

    def test_a_users_own_client_has_none(self) -> None:
        assert identity_of(EngineFacts(kind="client")) is None


class TestClaiming:
    def test_a_second_session_is_told_who_holds_what_and_nothing_of_it_is_left(self) -> None:
        async def story() -> None:
            plane = ControlPlane()
            await plane.session("first").claim([replica("a"), replica("b")], limit_s=1)
            before = dict(plane.values)
            with pytest.raises(SessionConflict, match="Nothing was changed: session 'first' holds b, a") as caught:
                await plane.session("second").claim([replica("c"), replica("b"), replica("a")], limit_s=1)
            assert caught.value.replicas == ("b", "a")
            assert "take_over=True" in str(caught.value)
            assert plane.values == before

        run(story)

    def test_released_engines_are_anybodys(self) -> None:
        async def story() -> None:
            plane, first = ControlPlane(), [replica("a"), replica("b")]
            mine = plane.session("first")
            await mine.claim(first, limit_s=1)
            await mine.release(first[:1])
            assert await plane.session("second").claim([replica("a")], limit_s=1) is False
            await mine.release_all()
            await mine.release_all()
            await plane.session("third").claim([replica("b")], limit_s=1)

        run(story)

    def test_closing_leaves_nothing(self) -> None:
        async def story() -> None:
            plane = ControlPlane()
            mine = plane.session("first")
            await mine.claim([replica("a"), replica("b")], limit_s=1)
            await mine.release_all()
            assert plane.values == {}

        run(story)

    def test_the_claim_of_a_coordinator_that_is_gone_for_good_is_taken_over_silently(self) -> None:
        async def story() -> None:
            plane = ControlPlane()
            dead = plane.session("dead")
            await dead.claim([replica("a")], limit_s=1)
            plane.gone.add(dead.me.coordinator)
            assert await plane.session("second").claim([replica("a")], limit_s=1) is False
            assert len(plane.values) == 1
            with pytest.raises(SessionConflict, match="session 'second' holds a"):
                await plane.session("third").claim([replica("a")], limit_s=1)

        run(story)

    def test_of_many_that_find_a_dead_sessions_claim_one_gets_the_engine(self) -> None:
        async def story() -> None:
            plane = ControlPlane()
            dead = plane.session("dead")
            await dead.claim([replica("a")], limit_s=1)
            plane.gone.add(dead.me.coordinator)
            rush = [plane.session(f"s{index}").claim([replica("a")], limit_s=1) for index in range(20)]
            outcomes = await asyncio.gather(*rush, return_exceptions=True)
            assert [outcome for outcome in outcomes if not isinstance(outcome, SessionConflict)] == [False]

        run(story)

    def test_of_two_that_want_the_same_engines_at_once_one_gets_them_all(self) -> None:
        async def story() -> None:
            plane = ControlPlane()
            names = [f"r{index}" for index in range(40)]
            sessions = {name: plane.session(name) for name in ("forwards", "backwards")}
            rush = [
                sessions["forwards"].claim([replica(each) for each in names], limit_s=1),
                sessions["backwards"].claim([replica(each) for each in reversed(names)], limit_s=1),
            ]
            outcomes = await asyncio.gather(*rush, return_exceptions=True)
            assert sorted(map(type, outcomes), key=str) == [bool, SessionConflict]
            assert len({Holder.from_bytes(value).session for value in plane.values.values()}) == 1
            assert len(plane.values) == len(names)

        run(story)

    def test_a_successor_of_the_same_name_has_its_predecessors_claims(self) -> None:
        async def story() -> None:
            plane, one = ControlPlane(), replica("a")
            await plane.session("mine").claim([one], limit_s=1)
            for coordinator in (None, "a successor"):  # restarted by Ray as the same actor, or started anew
                successor = plane.session("mine", coordinator=coordinator)
                await successor.follow([one])
                assert one.state is ReplicaState.JOINING
                assert len(plane.values) == 1
            await successor.release_all()
            assert plane.values == {}

        run(story)

    def test_a_client_is_not_claimed(self) -> None:
        async def story() -> None:
            plane = ControlPlane()
            for name in ("first", "second"):
                await plane.session(name).claim([replica("a", EngineFacts(kind="client"))], limit_s=1)
            assert plane.values == {}

        run(story)


class TestEndingSessions:
    def test_one_whose_owner_is_gone_is_waited_for(self) -> None:
        async def story() -> None:
            plane, one = ControlPlane(), replica("a")
            orphan = plane.session("orphan")
            await orphan.claim([one], limit_s=1)
            assert orphan.me.owner is not None
            plane.gone.add(orphan.me.owner)
            claiming = asyncio.create_task(plane.session("next").claim([replica("a")], limit_s=10))
            asked = plane.asked
            while plane.asked < asked + 2:
                await asyncio.sleep(0.01)
            assert not claiming.done()
            await orphan.release_all()
            assert await claiming is True

        run(story)

    def test_one_that_does_not_end_in_time_is_a_conflict_that_says_how_long(self) -> None:
        async def story() -> None:
            plane = ControlPlane()
            orphan = plane.session("orphan")
            await orphan.claim([replica("a")], limit_s=1)
            assert orphan.me.owner is not None
            plane.gone.add(orphan.me.owner)
            with pytest.raises(SessionConflict) as caught:
                await plane.session("next").claim([replica("a")], limit_s=0.3)
            assert (caught.value.elapsed_s or 0) >= 0.3

        run(story)


class TestTakingOver:
    def test_each_holder_is_asked_for_what_it_holds(self) -> None:
        async def story() -> None:
            plane = ControlPlane()
            holders = {name: (plane.session(name), [replica(name)]) for name in ("first", "second")}
            for claims, held in holders.values():
                await claims.claim(held, limit_s=1)
            asked = []

            async def hand_over(session: str, identities: tuple[str, ...], limit_s: float) -> None:
                asked.append((session, identities))
                await holders[session][0].release(holders[session][1])

            mine = plane.session("mine")
            assert await mine.claim([replica("second"), replica("free"), replica("first")], limit_s=1, hand_over=hand_over) is True
            assert asked == [("first", ("first-1",)), ("second", ("second-1",))]
            with pytest.raises(SessionConflict, match="session 'mine' holds first"):
                await holders["first"][0].claim([replica("first")], limit_s=1)

        run(story)

    @pytest.mark.parametrize("refuses", [True, False])
    def test_a_holder_that_keeps_them_is_asked_once_and_no_claim_is_left(self, refuses: bool) -> None:
        async def story() -> None:
            plane = ControlPlane()
            await plane.session("first").claim([replica("a")], limit_s=1)
            before, asked = dict(plane.values), []

            async def hand_over(session: str, identities: tuple[str, ...], limit_s: float) -> None:
                asked.append(session)
                if refuses:
                    raise SessionConflict("Nothing was changed: its round does not end.")

            keeps: HandOver = hand_over
            with pytest.raises(SessionConflict, match="its round does not end" if refuses else "'first' holds a") as caught:
                await plane.session("second").claim([replica("b"), replica("a")], limit_s=5, hand_over=keeps)
            assert caught.value.__cause__ is not caught.value
            assert asked == ["first"]
            assert plane.values == before

        run(story)

    @pytest.mark.parametrize("refuses", [True, False])
    def test_where_one_holder_keeps_its_engines_it_is_said_that_others_had_let_go_of_theirs(self, refuses: bool) -> None:
        async def story() -> None:
            plane = ControlPlane()
            first, held = plane.session("first"), [replica("a")]
            await first.claim(held, limit_s=1)
            await plane.session("second").claim([replica("b")], limit_s=1)

            async def hand_over(session: str, identities: tuple[str, ...], limit_s: float) -> None:
                if session == "first":
                    await first.release(held)
                elif refuses:
                    raise SessionConflict("Nothing was changed: its round does not end.", hint="see its status()")

            with pytest.raises(SessionConflict, match="Before that, 'first' had let go") as caught:
                await plane.session("mine").claim([replica("a"), replica("b")], limit_s=1, hand_over=hand_over)
            assert "Nothing was changed" not in str(caught.value)

        run(story)


class TestFollowing:
    def test_a_restarted_engine_is_claimed_and_the_claim_on_its_dead_process_ends(self) -> None:
        async def story() -> None:
            plane, one = ControlPlane(), replica("a")
            mine = plane.session("mine")
            await mine.claim([one], limit_s=1)
            restarted(one, "a-2")
            await mine.follow([one])
            assert mine.identity(one) == "a-2"
            await plane.session("second").claim([replica("x", facts("a-1"))], limit_s=1)
            with pytest.raises(SessionConflict, match="session 'mine' holds y"):
                await plane.session("second").claim([replica("y", facts("a-2"))], limit_s=1)

        run(story)

    def test_nobody_is_asked_when_nothing_changed_or_the_engine_is_out_of_step(self) -> None:
        async def story() -> None:
            plane, one = ControlPlane(), replica("a", facts("x", "w0"))
            mine = plane.session("mine")
            await mine.claim([one], limit_s=1)
            asked = plane.asked
            await mine.follow([one])
            one.engine = one.engine.with_facts(facts("x", in_step=False))
            await mine.follow([one])
            assert plane.asked == asked
            assert mine.identity(one) == "w0"

        run(story)

    def test_a_restarted_engine_that_another_session_has_is_out_of_the_fleet(self) -> None:
        async def story() -> None:
            plane, one = ControlPlane(), replica("a")
            mine = plane.session("mine")
            await mine.claim([one], limit_s=1)
            await plane.session("second").claim([replica("b", facts("a-2"))], limit_s=1)
            one.happen(ReplicaEvent.FAIL, error="the engine restarted")
            restarted(one, "a-2")
            await mine.follow([one])
            assert (one.state, one.taken_by) == (ReplicaState.RETIRED, "second")
            assert one.error == "session 'second' has this engine now"
            assert [Holder.from_bytes(value).session for value in plane.values.values()] == ["second"]

        run(story)

    def test_an_engine_found_taken_by_a_round_and_a_health_check_at_once_is_let_go_once(self) -> None:
        async def story() -> None:
            plane, one = ControlPlane(), replica("a")
            mine = plane.session("mine")
            await mine.claim([one], limit_s=1)
            await plane.session("second").claim([replica("b", facts("a-2"))], limit_s=1)
            restarted(one, "a-2")
            one.state = ReplicaState.STALE
            await asyncio.gather(mine.follow([one]), mine.follow([one]))
            assert (one.state, one.taken_by) == (ReplicaState.RETIRED, "second")

        run(story)

    def test_a_successor_whose_engines_were_claimed_meanwhile_lets_them_go(self) -> None:
        async def story() -> None:
            plane, one = ControlPlane(), replica("a")
            dead = plane.session("mine")
            await dead.claim([one], limit_s=1)
            plane.gone.add(dead.me.coordinator)
            await plane.session("second").claim([replica("a")], limit_s=1)
            successor = plane.session("mine", coordinator="a successor")
            await successor.follow([one])
            assert one.state is ReplicaState.RETIRED
            with pytest.raises(SessionConflict, match=r"session 'mine' has no engine left. Taken over: a \(by 'second'\)"):
                successor.require_any([one])

        run(story)


def test_what_a_claim_says_survives_the_control_plane() -> None:
    for owner in (None, Process(job_id="1"), Process(job_id="1", actor_id="2")):
        holder = Holder(session="s", coordinator=Process(job_id="1", actor_id="3"), owner=owner)
        assert Holder.from_bytes(holder.to_bytes()) == holder
