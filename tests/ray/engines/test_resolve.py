"""Attaching to actors: what is learned, and what is refused before anything was changed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import ray
from engine_actors import Counter, Foreign, Gate, Holder, Lacking, Mixed, MixedEmpty, MixedLate, MixedSync, Own, SyncHolder

from ray_weightsync import WeightSync
from ray_weightsync.engines.inspect import ask
from ray_weightsync.engines.ref import EngineRef, as_refs
from ray_weightsync.engines.resolve import Engine, inspect, resolve, resolve_all
from ray_weightsync.errors import AttachError, ConfigError, EngineCallError
from ray_weightsync.protocol.channel import FINISH, INIT, PAUSE, RESUME, SET_VERSION, START, UPDATE
from ray_weightsync.protocol.ray_channel import ActorChannel
from ray_weightsync.worker.identity import package_version

LIMIT_S = 60.0
Make = Callable[..., Any]


def attach(target: Any, **fields: Any) -> Engine:
    return asyncio.run(resolve(EngineRef(target, **fields), limit_s=LIMIT_S))


def refusal(target: Any, **fields: Any) -> str:
    with pytest.raises(AttachError) as raised:
        attach(target, **fields)
    return str(raised.value)


class TestWhatIsLearned:
    def test_an_engine_in_an_attribute_of_an_unchanged_actor(self, make: Make) -> None:
        handle = make(Holder, ranks=2)
        facts = attach(handle, attr="llm").facts
        assert (facts.kind, facts.world_size, facts.tensor_parallel_size, facts.backend) == ("async", 2, 2, "rws")
        assert (facts.version, facts.paused, facts.in_step) == ("default", False, True)
        assert [worker.rank for worker in facts.workers] == [0, 1]
        assert facts.pid == ray.get(handle.pid.remote())
        assert facts.node_id == ray.get_runtime_context().get_node_id()
        assert {START, PAUSE} <= set(facts.verbs)

    def test_the_engines_process_needs_no_package_of_ours(self, make: Make) -> None:
        handle = make(Foreign, ranks=2)
        assert ray.get(handle.importable.remote()) is False
        engine = attach(handle)
        assert len(engine.facts.workers) == 2
        assert asyncio.run(inspect(engine, "n", limit_s=LIMIT_S)).in_step

    def test_attaching_only_asks(self, make: Make) -> None:
        handle = make(Holder)
        attach(handle, attr="llm")
        assert ray.get(handle.order.remote()) == ["is_paused", "get_version", "collective_rpc"]

    def test_the_attribute_llm_is_found_without_being_named(self, make: Make) -> None:
        assert attach(make(Holder)).facts.kind == "async"

    def test_a_synchronous_engine_with_requests_queued_is_asked_in_its_turn(self, make: Make) -> None:
        handle = make(SyncHolder)
        generating = handle.generate.remote(0.3)
        facts = attach(handle, attr="llm").facts
        assert (facts.kind, facts.paused, facts.version) == ("sync", None, "default")
        assert ray.get(generating) == "text"
        assert ray.get(handle.order.remote()) == ["generate", "generated", "get_version", "collective_rpc"]

    def test_an_actor_with_the_mixin_tells_it_itself(self, make: Make) -> None:
        engine = attach(make(Mixed, ranks=2))
        assert (engine.facts.kind, engine.facts.world_size, engine.facts.version) == ("async", 2, "default")

    def test_an_actor_that_is_an_engine_itself(self, make: Make) -> None:
        facts = attach(make(Own, ranks=2)).facts
        assert (facts.kind, facts.world_size, facts.paused, facts.version) == ("async", 2, False, "default")
        assert len(facts.workers) == 2

    def test_a_named_actor_in_a_namespace_that_is_said(self, make: Make) -> None:
        make(Holder, name="gen-ns", namespace="elsewhere")
        engine = attach("gen-ns", namespace="elsewhere")
        assert engine.id == "gen-ns"
        assert engine.facts.kind == "async"

    def test_a_named_actor_is_looked_for_in_the_namespace_of_whoever_attaches(self, make: Make, ray_cluster: str) -> None:
        make(Holder, name="gen-here", namespace=ray_cluster)
        (ref,) = as_refs(["gen-here"])
        assert ref.namespace == ray_cluster
        assert attach("gen-here").facts.kind == "async"

    def test_an_engine_that_its_user_paused_is_found_paused_and_left_so(self, make: Make) -> None:
        handle = make(Holder)
        ray.get(handle.set.remote(paused=True))
        assert attach(handle).facts.paused is True
        assert "resume" not in ray.get(handle.order.remote())

    def test_each_inspection_asks_with_its_own_nonce(self, make: Make) -> None:
        engine = attach(make(Holder))
        first = asyncio.run(inspect(engine, "nonce-1", limit_s=LIMIT_S))
        second = asyncio.run(inspect(engine, "nonce-2", limit_s=LIMIT_S))
        assert (first.workers[0].nonce, second.workers[0].nonce) == ("nonce-1", "nonce-2")
        assert first.incarnation == second.incarnation == engine.facts.incarnation


class TestWhatIsRefused:
    def test_no_engines(self) -> None:
        with pytest.raises(ConfigError, match="nothing to send weights to"):
            as_refs([])

    def test_an_actor_of_another_class(self, make: Make) -> None:
        said = refusal(make(Counter), id="gen")
        assert "gen" in said
        assert "init_weight_transfer_engine, start_weight_update, update_weights, finish_weight_update" in said

    def test_an_actor_that_lacks_one_method_is_refused_naming_it(self, make: Make) -> None:
        said = refusal(make(Lacking))
        assert "lacks finish_weight_update" in said
        assert "start_weight_update" not in said

    def test_an_attribute_that_is_not_there_names_the_one_that_is(self, make: Make) -> None:
        said = refusal(make(Holder), attr="engine")
        assert "no attribute 'engine'" in said
        assert "EngineRef(handle, attr='llm')" in said

    def test_a_dead_handle(self, make: Make) -> None:
        handle = make(Holder)
        kill(handle)
        said = refusal(handle, id="gen")
        assert "gen" in said
        assert "is dead" in said

    def test_a_name_that_is_nobodys_says_where_it_was_looked_for(self) -> None:
        said = refusal("nobody", namespace="elsewhere")
        assert "no actor named 'nobody' in namespace 'elsewhere'" in said

    def test_an_engine_core_that_is_dead_in_a_living_actor(self, make: Make) -> None:
        handle = make(Holder)
        engine = attach(handle)
        ray.get(handle.set.remote(dead=True))
        assert "is dead" in refusal(handle)
        with pytest.raises(EngineCallError) as raised:
            asyncio.run(inspect(engine, "n", limit_s=LIMIT_S))
        assert raised.value.failures["r0"].kind == "died"

    @pytest.mark.parametrize(
        "fields",
        [{"backend": None}, {"extension": ""}, {"extension": "their.Extension"}],
        ids=["none", "bare", "own"],
    )
    def test_an_engine_without_our_worker_side_says_how_to_start_it_and_is_not_asked_for_it(self, make: Make, fields: Any) -> None:
        handle = make(Holder, **fields)
        assert "**ray_weightsync.vllm_engine_args()" in refusal(handle)
        assert "collective_rpc" not in ray.get(handle.order.remote())

    def test_an_engine_on_vllms_own_backend_is_known_by_it_and_not_asked_for_our_method(self, make: Make) -> None:
        handle = make(Holder, backend="nccl")
        assert attach(handle).facts.is_stock
        assert "collective_rpc" not in ray.get(handle.order.remote())

    def test_a_session_that_cannot_serve_it_says_which_could(self, make: Make) -> None:
        with pytest.raises(AttachError, match=r"its weight-transfer backend is 'nccl'.*transport='collective'"):
            WeightSync.attach([make(Holder, backend="nccl")], transport="host")

    def test_another_package_version_in_the_workers_names_both(self, make: Make) -> None:
        said = refusal(make(Holder, package_version="0.0.1"))
        assert "0.0.1" in said
        assert package_version() in said

    def test_another_world_size_than_configured_names_both(self, make: Make) -> None:
        said = refusal(make(Holder, ranks=2), world_size=4)
        assert "it has 2 workers" in said
        assert "world_size=4" in said

    def test_an_engine_out_of_step_is_told_from_a_dead_one_and_from_one_that_raised(self, make: Make) -> None:
        handle = make(Holder, ranks=2)
        engine = attach(handle)
        ray.get(handle.set.remote(stale="an earlier question"))
        facts = asyncio.run(inspect(engine, "n", limit_s=LIMIT_S))
        assert not facts.in_step
        assert facts.workers == ()
        assert "out of step" in refusal(handle)

    def test_the_same_engine_as_a_handle_and_by_name(self, make: Make) -> None:
        handle = make(Holder, name="twice", namespace="elsewhere")
        refs = as_refs([handle, EngineRef("twice", namespace="elsewhere")])
        with pytest.raises(AttachError, match="are the same engine"):
            asyncio.run(resolve_all(refs, limit_s=LIMIT_S))

    def test_the_same_handle_twice(self, make: Make) -> None:
        handle = make(Holder)
        with pytest.raises(ConfigError, match=r"engines\[0\] and engines\[1\] are the same engine"):
            as_refs([handle, EngineRef(handle, id="again")])

    def test_each_refused_engine_is_named_with_its_reason(self, make: Make) -> None:
        refs = as_refs([make(Holder), make(Counter), EngineRef(make(Holder, backend=None), id="none")])
        with pytest.raises(AttachError, match="2 of 3 engines cannot be attached") as raised:
            asyncio.run(resolve_all(refs, limit_s=LIMIT_S))
        assert set(raised.value.replicas) == {"r1", "none"}
        assert "lacks" in str(raised.value)
        assert "no weight-transfer backend" in str(raised.value)

    def test_a_synchronous_engine_under_the_mixin_is_refused_with_the_way_out(self, make: Make) -> None:
        said = refusal(make(MixedSync))
        assert "EngineMixin" in said
        assert "EngineRef(handle, attr=...)" in said

    def test_a_mixin_that_finds_no_engine_names_the_attribute(self, make: Make) -> None:
        assert "MixedEmpty holds no engine in 'engine'" in refusal(make(MixedEmpty))

    def test_an_engine_that_does_not_answer_in_time_is_left_alone(self, make: Make) -> None:
        gate = Gate.remote()
        handle = make(Holder)
        ray.get(handle.set.remote(gate=gate))
        began = time.monotonic()
        with pytest.raises(AttachError, match="did not answer") as raised:
            asyncio.run(resolve(EngineRef(handle, id="gen"), limit_s=1.0))
        assert time.monotonic() - began < 10
        assert raised.value.limit_s == 1.0
        ray.get(gate.open.remote())
        ray.get(handle.set.remote(gate=None))
        assert attach(handle).facts.in_step


class TestRestart:
    def test_a_restarted_actor_behind_the_same_handle_is_another_incarnation(self, make: Make) -> None:
        handle = make(Holder, max_restarts=1)
        engine = attach(handle)
        pid = ray.get(handle.pid.remote())
        os.kill(pid, signal.SIGKILL)
        facts = _inspect_when_back(engine)
        assert facts.pid != pid
        assert facts.incarnation != engine.facts.incarnation
        assert facts.workers[0].incarnation != engine.facts.workers[0].incarnation

    def test_the_same_with_the_mixin(self, make: Make) -> None:
        handle = make(Mixed, max_restarts=1)
        engine = attach(handle)
        kill(handle, no_restart=False)
        assert _inspect_when_back(engine).incarnation != engine.facts.incarnation


def kill(handle: Any, **how: Any) -> None:
    """Kill a `Holder` and return when it is dead; ``ray.kill`` only sends."""
    gate = Gate.remote()
    waiting = handle.wait_at.remote(gate)
    ray.get(gate.arrived.remote())
    ray.kill(handle, **how)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(waiting, timeout=LIMIT_S)


def _inspect_when_back(engine: Engine) -> Any:
    """Facts of the new process; while Ray is restarting it, calls fail as those of a dead one do."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return asyncio.run(inspect(engine, "n", limit_s=LIMIT_S))
        except EngineCallError as error:
            if error.failures["r0"].kind != "died" or time.monotonic() > deadline:
                raise


class TestSlots:
    @pytest.mark.parametrize("cls", [Mixed, Holder], ids=["mixin", "unchanged actor"])
    def test_an_actor_whose_request_slots_are_all_taken_still_answers(self, make: Make, cls: type) -> None:
        gate = Gate.remote()
        handle = make(cls, slots=2)
        waiting = [handle.wait_at.remote(gate) for _ in range(2)]
        ray.get(gate.arrived.remote(2))
        engine = attach(handle)
        assert engine.facts.in_step

        async def control() -> bool:
            await engine.channel.call(PAUSE, mode="keep", clear_cache=False)
            paused = (await inspect(engine, "n", limit_s=LIMIT_S)).paused
            await engine.channel.call(RESUME)
            return bool(paused)

        assert asyncio.run(asyncio.wait_for(control(), LIMIT_S))
        assert ray.wait(waiting, num_returns=2, timeout=0)[0] == []
        ray.get(gate.open.remote())
        ray.get(waiting)


class TestMixin:
    def test_every_call_runs_on_the_engines_own_loop_not_on_the_control_groups(self, make: Make) -> None:
        handle = make(Mixed)
        engine = attach(handle)

        async def round_trip() -> None:
            for verb, args in ((INIT, ({},)), (START, ()), (UPDATE, ({},)), (FINISH, ()), (SET_VERSION, ("v1",))):
                await engine.channel.call(verb, *args)

        asyncio.run(asyncio.wait_for(round_trip(), LIMIT_S))
        assert ray.get(handle.threads.remote()) == [ray.get(handle.mine.remote())]
        assert ray.get(handle.order.remote())[-5:] == ["init", "start", "update", "finish", "set_version"]
        assert ray.get(handle.get_weight_version.remote()) == "v1"

    def test_an_engine_without_a_loop_is_called_on_the_one_its_requests_come_on(self, make: Make) -> None:
        handle = make(MixedLate)
        assert attach(handle).facts.in_step
        ray.get(handle.pause_generation.remote(mode="keep"))
        assert ray.get(handle.threads.remote()) == [ray.get(handle.mine.remote())]

    def test_a_call_that_the_engine_lacks_says_so(self, make: Make) -> None:
        handle = make(Mixed)
        with pytest.raises(ray.exceptions.RayTaskError, match=r"AsyncEngine in Mixed\.llm cannot do reset_prefix_cache"):
            ray.get(handle.reset_prefix_cache.remote())

    def test_what_the_engine_raises_arrives(self, make: Make) -> None:
        handle = make(Mixed)
        ray.get(handle.set.remote(dead=True))
        with pytest.raises(ray.exceptions.RayTaskError, match="EngineCore encountered an issue"):
            ray.get(handle.start_weight_update.remote())

    def test_without_the_group_ray_refuses_the_class_as_the_docstring_says(self) -> None:
        with pytest.raises(AssertionError):
            ray.remote(Mixed).remote()
        with pytest.raises(ValueError, match="concurrency_groups"):
            ray.remote(Mixed).options(concurrency_groups=Mixed.concurrency_groups)


def test_a_synchronous_engine_is_never_called_beside_its_actors_own_thread() -> None:
    """The sockets of a real one end the process when two threads use them."""

    class ThreadBound:
        vllm_config = types.SimpleNamespace(parallel_config=types.SimpleNamespace(world_size=1))

        def __init__(self) -> None:
            self._thread = threading.get_ident()
            self.strangers: list[str] = []

        def _used(self) -> None:
            if threading.get_ident() != self._thread:
                self.strangers.append(threading.current_thread().name)

        def init_weight_transfer_engine(self, request: Any) -> None:
            self._used()

        start_weight_update = update_weights = finish_weight_update = init_weight_transfer_engine

        def get_weight_version(self) -> str:
            self._used()
            return "v1"

    class ThreadBoundHolder:
        def __init__(self) -> None:
            self.llm = ThreadBound()

        def strangers(self) -> list[str]:
            return self.llm.strangers

    actor: Any = ray.remote(ThreadBoundHolder).options(num_cpus=0).remote()

    async def story() -> None:
        channel = ActorChannel(actor, label="r0", attr="llm")
        await channel.probe()
        for number in range(5):
            facts = await ask(channel, f"nonce-{number}", limit_s=LIMIT_S)
            assert (facts.kind, facts.version) == ("sync", "v1")

    asyncio.run(story())
    assert ray.get(actor.strangers.remote(), timeout=LIMIT_S) == []
    ray.kill(actor)
