"""`ActorChannel` on small actors: how an engine is reached, what is learned of it, and what a failure says."""

from __future__ import annotations

import asyncio
import pickle
import sys
import textwrap
from types import ModuleType
from typing import Any

import pytest
import ray
from protocol_actors import (
    Counter,
    EngineActor,
    Gate,
    HoldingActor,
    MismatchedActor,
    NoFinishActor,
    OldEngineActor,
    RetryingActor,
    SyncHoldingActor,
)

from ray_weightsync.errors import AttachError, ConfigError, UnsupportedError
from ray_weightsync.protocol import channel as verbs
from ray_weightsync.protocol import remote
from ray_weightsync.protocol.channel import Channel
from ray_weightsync.protocol.ray_channel import ActorChannel
from ray_weightsync.protocol.reading import EngineRaised, died, words


def held_order(actor: Any) -> list[str]:
    return ray.get(actor.__ray_call__.remote(lambda self: self.llm.order))


class TestDirect:
    def test_an_actor_that_is_an_engine_is_called_directly_and_gets_requests_without_a_class_of_ours(self) -> None:
        actor = EngineActor.remote()
        channel = ActorChannel(actor, label="e0")

        async def session() -> str:
            await channel.call(verbs.INIT, {"a": 1})
            await channel.call(verbs.START)
            await channel.call(verbs.UPDATE, [{"b": 2}, {"b": 3}])
            await channel.call(verbs.FINISH)
            await channel.call(verbs.PAUSE, mode="keep", clear_cache=False)
            await channel.call(verbs.SET_VERSION, "v1")
            return str(await channel.call(verbs.GET_VERSION))

        assert asyncio.run(session()) == "v1"
        record = ray.get(actor.record.remote())
        assert record["order"] == ["init", "start", "update", "finish", "pause keep False", "version"]
        assert record["payloads"] == [{"a": 1}, [{"b": 2}, {"b": 3}]]

    def test_it_is_a_channel_and_travels_to_another_process(self) -> None:
        actor = EngineActor.remote()
        channel = ActorChannel(actor, label="e0")
        assert isinstance(channel, Channel)

        @ray.remote(num_cpus=0)
        def drive(channel: ActorChannel) -> Any:
            return asyncio.run(channel.call(verbs.GET_VERSION))

        assert ray.get(drive.remote(channel)) == "default"

    def test_a_verb_that_the_actor_lacks_is_unsupported_and_nothing_is_sent(self) -> None:
        actor = OldEngineActor.remote()
        channel = ActorChannel(actor, label="old")
        assert not channel.supports(verbs.SET_VERSION)
        with pytest.raises(UnsupportedError, match=r"nothing was done: old cannot do update_weight_version \(vLLM has it since 0\.28\)"):
            asyncio.run(channel.call(verbs.SET_VERSION, "v1"))
        assert ray.get(actor.record.remote()) == []

    def test_an_exception_of_the_engine_is_read_as_its_own_words(self) -> None:
        channel = ActorChannel(EngineActor.remote({"start": "raise", "finish": "core dead"}), label="e0")
        with pytest.raises(ValueError, match="no luck") as raised:
            asyncio.run(channel.call(verbs.START))
        assert words(raised.value) == "ValueError: no luck in start"
        assert not died(raised.value)
        with pytest.raises(Exception, match="EngineCore") as dead:
            asyncio.run(channel.call(verbs.FINISH))
        assert died(dead.value)

    def test_an_exception_that_cannot_be_rebuilt_here_still_says_what_it_said(self) -> None:
        channel = ActorChannel(EngineActor.remote({"start": "picky"}), label="e0")
        with pytest.raises(ray.exceptions.UnserializableException) as raised:
            asyncio.run(channel.call(verbs.START))
        assert words(raised.value) == "protocol_actors.PickyError: this and that"
        assert not died(raised.value)

    def test_the_death_of_the_actor_is_told_from_an_error(self) -> None:
        channel = ActorChannel(EngineActor.remote({"update": "die"}), label="e0")
        with pytest.raises(ray.exceptions.RayActorError) as raised:
            asyncio.run(channel.call(verbs.UPDATE, {}))
        assert died(raised.value)
        assert "died" in words(raised.value)
        assert "\n" not in words(raised.value)

    def test_no_call_is_repeated_though_the_actor_asks_ray_for_retries(self) -> None:
        counter = Counter.remote()
        channel = ActorChannel(RetryingActor.remote(counter), label="e0")
        with pytest.raises(ValueError, match="not again"):
            asyncio.run(channel.call(verbs.START))
        with pytest.raises(ray.exceptions.RayActorError) as raised:
            asyncio.run(channel.call(verbs.UPDATE, {}))
        assert died(raised.value)
        assert ray.get(counter.all.remote()) == ["start", "update"]


class TestHeld:
    def test_an_engine_held_in_an_attribute_is_driven_although_its_process_has_no_package_of_ours(self) -> None:
        actor = HoldingActor.remote()
        channel = ActorChannel(actor, label="h0")

        async def session() -> Any:
            shape = await channel.probe()
            assert (shape.is_async, shape.actor_is_async, shape.engine_type) == (True, True, "AsyncEngine")
            assert (channel.supports(verbs.PAUSE), channel.supports(verbs.START_DRAFT)) == (True, False)
            await channel.call(verbs.INIT, {"a": 1})
            await channel.call(verbs.START)
            await channel.call(verbs.UPDATE, {"b": 2})
            await channel.call(verbs.FINISH)
            await channel.call(verbs.SET_VERSION, "v1")
            return await channel.call(verbs.GET_VERSION)

        assert asyncio.run(session()) == "v1"
        assert held_order(actor) == ["init", "start", "update", "finish", "version"]
        loaded = ray.get(actor.__ray_call__.remote(lambda self: list(__import__("sys").modules)))
        assert [name for name in loaded if name.partition(".")[0] == "ray_weightsync"] == []

    def test_a_call_waits_in_slices_and_another_gets_through_meanwhile(self) -> None:
        gate = Gate.remote()
        channel = ActorChannel(HoldingActor.remote({"update": gate}), label="h0", attr="llm")

        async def session() -> tuple[bool, Any]:
            update = asyncio.create_task(channel.call(verbs.UPDATE, {"x": 1}))
            await gate.arrived.remote()
            version = await channel.call(verbs.GET_VERSION)
            still_out = not update.done()
            await gate.open.remote()
            await update
            return still_out, version

        assert asyncio.run(session()) == (True, "default")

    def test_it_is_reached_while_requests_hold_every_slot_of_the_actor(self) -> None:
        gate = Gate.remote()
        actor = HoldingActor.remote()  # max_concurrency=2
        requests = [actor.generate.remote(gate) for _ in range(2)]
        ray.get(gate.arrived.remote(2))
        late = actor.ready.remote()
        channel = ActorChannel(actor, label="h0")
        asyncio.run(asyncio.wait_for(channel.call(verbs.PAUSE, mode="keep", clear_cache=False), 30))
        assert ray.wait([late], timeout=0)[0] == []  # the slots were really taken
        ray.get(gate.open.remote())
        assert ray.get(requests) == ["tokens", "tokens"]

    def test_what_it_raises_arrives_in_one_piece_even_if_its_class_cannot(self) -> None:
        channel = ActorChannel(HoldingActor.remote({"start": "picky", "update": "core dead"}), label="h0")
        with pytest.raises(EngineRaised) as raised:
            asyncio.run(channel.call(verbs.START))
        assert words(raised.value) == "PickyError: this and that"
        assert "PickyError" in raised.value.trace
        assert not died(raised.value)
        assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
        with pytest.raises(EngineRaised) as dead:
            asyncio.run(channel.call(verbs.UPDATE, {}))
        assert died(dead.value)

    def test_the_death_of_the_process_ends_a_call_that_is_being_polled(self) -> None:
        gate = Gate.remote()
        actor = HoldingActor.remote({"update": gate})
        channel = ActorChannel(actor, label="h0")

        async def session() -> None:
            update = asyncio.create_task(channel.call(verbs.UPDATE, {}))
            await gate.arrived.remote()
            ray.kill(actor)
            await update

        with pytest.raises(ray.exceptions.RayActorError) as raised:
            asyncio.run(session())
        assert died(raised.value)

    def test_no_call_is_left_in_the_process_once_it_was_answered(self) -> None:
        actor = HoldingActor.remote({"start": "raise"})
        channel = ActorChannel(actor, label="h0")

        async def session() -> None:
            await channel.call(verbs.GET_VERSION)
            with pytest.raises(EngineRaised):
                await channel.call(verbs.START)

        asyncio.run(session())
        left = ray.get(actor.__ray_call__.remote(lambda self, store: len(__import__("sys").modules[store].calls), remote.STORE))
        assert left == 0

    def test_nothing_is_known_before_the_probe(self) -> None:
        channel = ActorChannel(HoldingActor.remote(), label="h0")
        with pytest.raises(RuntimeError, match="probe"):
            channel.supports(verbs.PAUSE)


class TestRefusals:
    def test_an_attribute_that_does_not_exist_is_refused_and_the_right_one_named(self) -> None:
        channel = ActorChannel(HoldingActor.remote(attr="engine"), label="h0", attr="llm")
        with pytest.raises(AttachError, match=r"has no attribute 'llm'") as raised:
            asyncio.run(channel.probe())
        assert "EngineRef(handle, attr='engine')" in str(raised.value)

    def test_an_actor_without_an_engine_is_refused_naming_the_verb_its_class_lacks(self) -> None:
        channel = ActorChannel(NoFinishActor.remote(), label="n0")
        with pytest.raises(
            AttachError, match=r"its class lacks finish_weight_update, and the actor \(NoFinishActor\) has no attribute 'llm'"
        ):
            asyncio.run(channel.probe())

    def test_an_attribute_that_holds_no_engine_is_refused_naming_the_verbs_it_lacks(self) -> None:
        channel = ActorChannel(Counter.remote(), label="c0", attr="seen")
        with pytest.raises(AttachError, match=r"is a list, which lacks init_weight_transfer_engine, start_weight_update"):
            asyncio.run(channel.probe())

    def test_an_async_engine_without_a_loop_is_refused_with_a_way_out(self) -> None:
        channel = ActorChannel(HoldingActor.remote(handler=False), label="h0")
        with pytest.raises(AttachError, match="event loop") as raised:
            asyncio.run(channel.probe())
        assert "EngineMixin" in str(raised.value)

    def test_a_synchronous_engine_in_an_actor_that_runs_calls_side_by_side_is_refused(self) -> None:
        channel = ActorChannel(MismatchedActor.remote(), label="m0")
        with pytest.raises(AttachError, match="several calls at a time"):
            asyncio.run(channel.probe())

    @pytest.mark.parametrize("handle", [None, "engine", 7, EngineActor])
    def test_what_is_no_actor_handle_is_refused(self, handle: Any) -> None:
        with pytest.raises(ConfigError, match="expected a Ray actor handle"):
            ActorChannel(handle, label="x")

    def test_what_names_no_attribute_is_refused(self) -> None:
        actor = EngineActor.remote()
        wrong: list[Any] = ["", "a b", "a..b", 3]
        for attr in wrong:
            with pytest.raises(ConfigError, match="attr must be the name"):
                ActorChannel(actor, label="x", attr=attr)


CHAIN = [(verbs.START, (), {}), (verbs.UPDATE, ({"x": 1},), {}), (verbs.FINISH, (), {})]


class TestChain:
    def test_a_synchronous_engine_runs_the_whole_chain_before_any_request_queued_behind_it(self) -> None:
        actor = SyncHoldingActor.remote()
        channel = ActorChannel(actor, label="s0")

        async def session() -> Any:
            await channel.probe()
            chain = asyncio.create_task(channel.call_chain("c", CHAIN))
            await asyncio.sleep(0)  # the chain is submitted
            requests = [actor.generate.remote() for _ in range(3)]
            outcome = await chain
            assert await asyncio.gather(*requests) == ["tokens"] * 3
            return outcome

        outcome = asyncio.run(session())
        assert (outcome.answers, outcome.failed_step, outcome.error) == ((None, None, None), None, None)
        order = ray.get(actor.order.remote())
        assert [verb for verb in order if verb != "generate"] == ["start", "update", "finish"]
        assert order.index("finish") == order.index("start") + 2  # nothing came in between

    def test_the_step_that_failed_is_named_and_later_ones_are_not_run(self) -> None:
        for actor in (SyncHoldingActor.remote({"update": "raise"}), HoldingActor.remote({"update": "raise"})):
            outcome = asyncio.run(ActorChannel(actor, label="x").call_chain("c", CHAIN))
            assert (outcome.failed_step, outcome.answers) == (1, (None,))
            assert words(outcome.error) == "ValueError: no luck in update"
            assert held_order(actor) == ["start", "update"]

    def test_an_engine_called_directly_runs_a_chain_too(self) -> None:
        actor = EngineActor.remote({"finish": "raise"})
        outcome = asyncio.run(ActorChannel(actor, label="e0").call_chain("c", CHAIN))
        assert (outcome.failed_step, words(outcome.error)) == (2, "ValueError: no luck in finish")
        assert ray.get(actor.record.remote())["order"] == ["start", "update", "finish"]

    def test_a_chain_with_a_verb_that_is_missing_does_not_begin(self) -> None:
        actor = SyncHoldingActor.remote()
        with pytest.raises(UnsupportedError):
            asyncio.run(ActorChannel(actor, label="s0").call_chain("c", [*CHAIN, (verbs.SET_VERSION, ("v",), {})]))
        assert ray.get(actor.order.remote()) == []


def test_a_function_can_be_run_in_the_engines_process() -> None:
    assert asyncio.run(ActorChannel(EngineActor.remote(), label="e0").run(remote.world_size, "")) == 4
    assert asyncio.run(ActorChannel(HoldingActor.remote(), label="h0").run(remote.world_size, "llm")) == 4
    assert asyncio.run(ActorChannel(SyncHoldingActor.remote(), label="s0").run(remote.world_size, "llm")) is None


def test_what_runs_in_a_foreign_actor_needs_the_standard_library_only() -> None:
    names = {value.__name__.partition(".")[0] for value in vars(remote).values() if isinstance(value, type(sys))}
    assert "asyncio" in names
    assert names <= set(sys.stdlib_module_names)


def test_a_function_of_another_module_travels_with_what_it_uses_of_ours() -> None:
    module = ModuleType("somebodys_module")
    sys.modules[module.__name__] = module
    source = """
    import sys
    from ray_weightsync.protocol.remote import resolve

    def kind(actor, path):
        return type(resolve(actor, path)).__name__, sorted(sys.modules)
    """
    exec(textwrap.dedent(source), module.__dict__)
    kind, loaded = asyncio.run(ActorChannel(HoldingActor.remote(), label="h0").run(module.kind, "llm"))
    assert kind == "AsyncEngine"
    assert [name for name in loaded if name.partition(".")[0] == "ray_weightsync"] == []
