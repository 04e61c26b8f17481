"""`TorchEngine` is a fair stand-in: each of vLLM's rules, over Ray, with real snapshots in shared memory."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from ray_weightsync.engines.resolve import Engine, inspect, resolve
from ray_weightsync.engines.torch_engine import MAX_REQUESTS, TorchEngine
from ray_weightsync.errors import AttachError, EngineCallError
from ray_weightsync.protocol.reading import died
from ray_weightsync.transports.host.store import SnapshotStore
from ray_weightsync.transports.host.writer import SlotWriter
from ray_weightsync.weights.plan import Plan
from ray_weightsync.weights.sources import ModuleSource

LIMIT_S = 60.0
MiB = 1 << 20


def make_module(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))


X = torch.linspace(-1, 1, 12).reshape(3, 4)


@dataclass
class Sender:
    """The trainer's side of the host transport, without a coordinator."""

    store: SnapshotStore
    writer: SlotWriter
    epoch: int = 0

    def publish(self, module: torch.nn.Module) -> Published:
        source = ModuleSource(module)
        plan = Plan.from_metadata(source.metadata())
        snapshot = secrets.token_hex(16)
        address = self.store.open_slot(snapshot, plan.digest, plan.num_bytes, False)
        packed = self.writer.write(address, plan, source, progress_bytes=MiB)
        self.store.seal(snapshot, packed.digest)
        self.epoch += 1
        expected = {"plan": plan.digest, "snapshot": snapshot, "digest": packed.digest, "num_bytes": packed.num_bytes}
        expected["num_tensors"] = packed.num_tensors
        common = {"round": f"round-{self.epoch}", "epoch": self.epoch, "limit_s": LIMIT_S}
        update = {"transport": "host", "plan": plan.digest, "slot": dict(address), **common}
        return Published(plan, update, {"op": "outcome", "expected": expected, **common})


@dataclass
class Published:
    plan: Plan
    update: dict[str, Any]
    outcome: dict[str, Any]


@pytest.fixture(scope="module")
def sender(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sender]:
    directory: Path = tmp_path_factory.mktemp("shm")
    with SnapshotStore(secrets.token_hex(8), str(directory), 2) as store, SlotWriter() as writer:
        yield Sender(store, writer)


@pytest.fixture(scope="module")
def kept() -> Iterator[list[Any]]:
    """The engine that tests hand on to each other: starting one takes seconds."""
    handles: list[Any] = []
    yield handles
    for handle in handles:
        ray.kill(handle)


@pytest.fixture
def engine(kept: list[Any]) -> Iterator[Any]:
    """A living engine that is awake, not paused, has no update open and the label "default"; its weights are what the last test left."""
    if not kept:
        kept.append(TorchEngine.remote(make_module))
    yield kept[0]
    try:
        if call(kept[0], "collective_rpc", "rws_describe", args=("n",))[0]["update_open"]:
            call(kept[0], "finish_weight_update")
        call(kept[0], "wake_up")
        call(kept[0], "update_weight_version", "default")
    except ray.exceptions.RayError:
        ray.kill(kept.pop())  # the test was about its death


def init(handle: Any, info: dict[str, Any]) -> None:
    ray.get(handle.init_weight_transfer_engine.remote({"init_info": info}), timeout=LIMIT_S)


def update(handle: Any, info: Any) -> None:
    ray.get(handle.update_weights.remote({"update_info": info}), timeout=LIMIT_S)


def call(handle: Any, verb: str, *args: Any, **kwargs: Any) -> Any:
    return ray.get(getattr(handle, verb).remote(*args, **kwargs), timeout=LIMIT_S)


def send(handle: Any, published: Published) -> None:
    """Everything between pause and commit."""
    init(handle, {"op": "plan", "plan": published.plan.to_wire()})
    call(handle, "start_weight_update")
    update(handle, published.update)
    call(handle, "finish_weight_update")
    init(handle, published.outcome)


def frozen(handle: Any, num: int) -> list[Any]:
    waiting = [handle.forward.remote(X) for _ in range(num)]
    assert call(handle, "wait_frozen", num)
    return waiting


def raised(act: Callable[[], Any]) -> str:
    with pytest.raises(ray.exceptions.RayTaskError) as error:
        act()
    return str(error.value)


class TestAnUpdate:
    def test_outputs_and_weights_equal_the_trainers_bit_for_bit(self, engine: Any, sender: Sender) -> None:
        trainer = make_module(7)
        assert not torch.equal(call(engine, "forward", X), trainer(X))
        call(engine, "pause_generation", mode="keep", clear_cache=False)
        send(engine, sender.publish(trainer))
        call(engine, "update_weight_version", "v1")
        call(engine, "resume_generation")
        output, version = call(engine, "forward_versioned", X)
        assert torch.equal(output, trainer(X).detach())
        assert version == "v1"
        state = call(engine, "state_dict")
        assert all(torch.equal(state[name], tensor) for name, tensor in trainer.state_dict().items())

    def test_requests_in_flight_freeze_and_run_on_the_new_weights(self, engine: Any, sender: Sender) -> None:
        trainer = make_module(8)
        call(engine, "pause_generation", mode="keep", clear_cache=False)
        waiting = frozen(engine, 3)
        send(engine, sender.publish(trainer))
        assert ray.wait(waiting, num_returns=3, timeout=0)[0] == []
        call(engine, "resume_generation")
        for output in ray.get(waiting, timeout=LIMIT_S):
            assert torch.equal(output, trainer(X).detach())

    def test_a_request_object_and_a_list_with_one_entry_per_rank_do_as_well(self, engine: Any, sender: Sender) -> None:
        published = sender.publish(make_module(9))
        call(engine, "pause_generation", mode="keep")
        ray.get(engine.init_weight_transfer_engine.remote(SimpleNamespace(init_info={"op": "plan", "plan": published.plan.to_wire()})))
        call(engine, "start_weight_update")
        ray.get(engine.update_weights.remote(SimpleNamespace(update_info=[published.update])))
        call(engine, "finish_weight_update")
        init(engine, published.outcome)

    def test_finish_and_the_version_label_are_two_things(self, engine: Any, sender: Sender) -> None:
        assert call(engine, "get_weight_version") == "default"
        published = sender.publish(make_module(1))
        call(engine, "pause_generation", mode="keep")
        send(engine, published)
        assert call(engine, "get_weight_version") == "default"
        call(engine, "start_weight_update")
        call(engine, "finish_weight_update", "v2")
        assert call(engine, "get_weight_version") == "v2"


class TestVLLMsRules:
    def test_start_twice_raises_and_the_first_session_stays(self, engine: Any, sender: Sender) -> None:
        published = sender.publish(make_module(2))
        init(engine, {"op": "plan", "plan": published.plan.to_wire()})
        call(engine, "pause_generation", mode="keep")
        call(engine, "start_weight_update")
        assert "already active. Call finish_weight_update first." in raised(lambda: call(engine, "start_weight_update"))
        update(engine, published.update)
        call(engine, "finish_weight_update")
        init(engine, published.outcome)

    def test_finish_without_start_raises(self, engine: Any) -> None:
        assert "without a matching start_weight_update" in raised(lambda: call(engine, "finish_weight_update"))

    def test_update_without_start_raises(self, engine: Any) -> None:
        assert "start_weight_update must be called before update_weights" in raised(lambda: update(engine, {}))

    def test_a_request_during_an_update_kills_the_engine_for_good(self, engine: Any) -> None:
        call(engine, "start_weight_update")
        assert "engine is dead" in raised(lambda: call(engine, "forward", X))
        for verb in ("finish_weight_update", "get_weight_version", "is_paused", "resume_generation", "state_dict", "reset_prefix_cache"):
            assert "engine is dead" in raised(lambda verb=verb: call(engine, verb)), verb
        with pytest.raises(ray.exceptions.RayTaskError) as error:
            call(engine, "forward", X)
        assert died(error.value)

    def test_frozen_requests_do_not_kill_it_while_the_pause_holds(self, engine: Any) -> None:
        call(engine, "pause_generation", mode="keep")
        waiting = frozen(engine, 2)
        call(engine, "start_weight_update")
        call(engine, "finish_weight_update")
        call(engine, "resume_generation")
        assert len(ray.get(waiting, timeout=LIMIT_S)) == 2

    def test_an_update_of_nothing_is_accepted_and_the_outcome_finds_it(self, engine: Any, sender: Sender) -> None:
        published = sender.publish(make_module(3))
        call(engine, "pause_generation", mode="keep")
        init(engine, {"op": "plan", "plan": published.plan.to_wire()})
        call(engine, "start_weight_update")
        call(engine, "finish_weight_update")
        assert "nothing was transferred" in raised(lambda: init(engine, published.outcome))

    def test_an_update_that_fails_is_accepted_and_the_outcome_finds_it_and_a_whole_one_mends_it(self, engine: Any, sender: Sender) -> None:
        trainer = make_module(4)
        published = sender.publish(trainer)
        call(engine, "pause_generation", mode="keep")
        init(engine, {"op": "plan", "plan": published.plan.to_wire()})
        call(engine, "start_weight_update")
        update(engine, {**published.update, "slot": {**published.update["slot"], "snapshot": secrets.token_hex(16)}})
        call(engine, "finish_weight_update")
        assert "rws: rank 0: " in raised(lambda: init(engine, published.outcome))
        send(engine, published)
        call(engine, "resume_generation")
        assert torch.equal(call(engine, "forward", X), trainer(X).detach())

    def test_an_older_epoch_is_refused(self, engine: Any, sender: Sender) -> None:
        old, new = sender.publish(make_module(5)), sender.publish(make_module(6))
        call(engine, "pause_generation", mode="keep")
        send(engine, new)
        assert "older than" in raised(lambda: send(engine, old))

    def test_pause_twice_resume_twice_and_shutdown_are_harmless(self, engine: Any) -> None:
        for verb in ("pause_generation", "pause_generation", "resume_generation", "resume_generation", "shutdown_weight_transfer_engine"):
            call(engine, verb)
        assert call(engine, "is_paused") is False
        assert call(engine, "forward", X).shape == (3, 2)

    def test_a_shutdown_during_an_update_is_an_error(self, engine: Any) -> None:
        call(engine, "pause_generation", mode="keep")
        call(engine, "start_weight_update")
        assert "during a weight update" in raised(lambda: call(engine, "shutdown_weight_transfer_engine"))

    def test_pause_abort_ends_frozen_requests_at_once(self, engine: Any) -> None:
        call(engine, "pause_generation", mode="keep")
        waiting = frozen(engine, 2)
        call(engine, "pause_generation", mode="abort")
        for request in waiting:
            assert "aborted by pause_generation" in raised(lambda request=request: ray.get(request, timeout=LIMIT_S))
        assert call(engine, "is_paused") is True

    def test_caches_reset_and_only_the_workers_own_method_is_there(self, engine: Any) -> None:
        assert call(engine, "reset_prefix_cache", reset_running_requests=True) is True
        (told,) = call(engine, "collective_rpc", "rws_describe", args=("n",))
        assert (told["nonce"], told["rank"], told["world_size"]) == ("n", 0, 1)
        assert "has no method 'other'" in raised(lambda: call(engine, "collective_rpc", "other"))


class TestPlans:
    @pytest.mark.parametrize(
        ("module", "problem"),
        [
            (
                torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.GELU(), torch.nn.Linear(9, 2)),
                "0.weight has shape [9, 4], the engine's has [8, 4]",
            ),
            (torch.nn.Sequential(torch.nn.Linear(4, 8)), "2.weight is missing"),
            (torch.nn.Sequential(*make_module(), torch.nn.Linear(2, 2)), "3.weight is unknown"),
            (make_module().to(torch.bfloat16), "0.weight has dtype bfloat16"),
        ],
        ids=["shape", "missing", "unknown", "dtype"],
    )
    def test_a_plan_that_is_not_the_modules_is_refused_and_the_old_weights_serve(
        self, engine: Any, module: torch.nn.Module, problem: str
    ) -> None:
        before = call(engine, "forward", X)
        plan = Plan.from_metadata(ModuleSource(module).metadata())
        assert problem in raised(lambda: init(engine, {"op": "plan", "plan": plan.to_wire()}))
        assert torch.equal(call(engine, "forward", X), before)

    def test_a_duplicate_name_is_refused(self, engine: Any) -> None:
        wire = Plan.from_metadata(ModuleSource(make_module()).metadata()).to_wire()
        names = wire["names"]
        wire["names"] = [names[0], *names[:-1]]
        assert "rws: rank 0: " in raised(lambda: init(engine, {"op": "plan", "plan": wire}))

    def test_an_accepted_plan_is_known_from_then_on(self, engine: Any) -> None:
        plan = Plan.from_metadata(ModuleSource(make_module()).metadata())
        init(engine, {"op": "plan", "plan": plan.to_wire()})
        assert call(engine, "collective_rpc", "rws_describe", args=("n",))[0]["plans"] == [plan.digest]

    def test_a_store_in_sight_is_seen_and_another_is_not(self, engine: Any, sender: Sender) -> None:
        probe = sender.store.probe()
        init(engine, {"op": "see", "transport": "host", "probe": probe})
        assert "rws: rank 0: " in raised(
            lambda: init(engine, {"op": "see", "transport": "host", "probe": {**probe, "nonce": secrets.token_hex(16)}})
        )


class TestSleep:
    def test_a_sleeping_engine_shows_what_is_resident_and_a_full_wake_resumes(self, engine: Any) -> None:
        resident = lambda: tuple(call(engine, "collective_rpc", "rws_describe", args=("n",))[0]["resident"])  # noqa: E731
        before = call(engine, "forward", X)
        call(engine, "sleep", level=1, mode="keep")
        assert (resident(), call(engine, "is_sleeping"), call(engine, "is_paused")) == ((), True, True)
        assert call(engine, "wake_up", ["weights"]) is False
        assert (resident(), call(engine, "is_paused")) == (("weights",), True)
        assert call(engine, "wake_up", ["kv_cache"]) is True
        assert (call(engine, "is_sleeping"), call(engine, "is_paused")) == (False, False)
        assert torch.equal(call(engine, "forward", X), before)

    def test_after_level_two_the_old_weights_are_gone(self, engine: Any) -> None:
        call(engine, "sleep", level=2)
        call(engine, "wake_up")
        assert not call(engine, "forward", X).any()

    def test_an_update_while_the_weights_are_away_is_found_by_the_outcome(self, engine: Any, sender: Sender) -> None:
        published = sender.publish(make_module(1))
        call(engine, "sleep", level=1)
        assert "wake the engine up" in raised(lambda: send(engine, published))

    def test_level_zero_only_pauses(self, engine: Any) -> None:
        call(engine, "sleep", level=0, mode="keep")
        assert call(engine, "is_paused") is True
        assert call(engine, "wake_up", ["scheduling"]) is True
        assert call(engine, "is_paused") is False


class TestInspection:
    def resolved(self, handle: Any) -> Engine:
        return asyncio.run(resolve(handle, limit_s=LIMIT_S))

    def test_it_tells_what_it_is(self, engine: Any) -> None:
        facts = self.resolved(engine).facts
        assert (facts.kind, facts.world_size, facts.backend, facts.version, facts.paused) == ("torch", 1, "rws", "default", False)
        assert facts.workers[0].resident == ("weights", "kv_cache")

    def test_it_answers_while_frozen_requests_hold_every_slot_and_more_wait(self, engine: Any) -> None:
        call(engine, "pause_generation", mode="keep")
        waiting = frozen(engine, MAX_REQUESTS) + [engine.forward.remote(X) for _ in range(4)]
        facts = self.resolved(engine).facts
        assert (facts.paused, facts.unfinished_requests) == (True, MAX_REQUESTS)
        call(engine, "resume_generation")
        assert len(ray.get(waiting, timeout=LIMIT_S)) == MAX_REQUESTS + 4

    def test_a_dead_core_is_told_from_one_that_raised(self, engine: Any) -> None:
        found = self.resolved(engine)
        call(engine, "start_weight_update")
        raised(lambda: call(engine, "forward", X))
        with pytest.raises(EngineCallError) as error:
            asyncio.run(inspect(found, "n", limit_s=LIMIT_S))
        assert error.value.failures["r0"].kind == "died"
        assert error.value.__cause__ is not None
        assert died(error.value.__cause__)
        with pytest.raises(AttachError, match="is dead"):
            self.resolved(engine)

    def test_an_engine_that_is_killed_is_dead(self, engine: Any) -> None:
        found = self.resolved(engine)
        call(engine, "pause_generation", mode="keep")
        (waiting,) = frozen(engine, 1)
        ray.kill(engine)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(waiting, timeout=LIMIT_S)  # it has arrived: kill only sends
        with pytest.raises(EngineCallError) as error:
            asyncio.run(inspect(found, "n", limit_s=LIMIT_S))
        assert error.value.failures["r0"].kind == "died"


class TestConstruction:
    def test_what_is_no_module_is_refused(self) -> None:
        handle = TorchEngine.remote(lambda: {"weight": 1})  # type: ignore[arg-type, return-value]
        with pytest.raises(ray.exceptions.RayActorError, match=r"must return a torch\.nn\.Module, not dict"):
            call(handle, "is_paused")

    def test_it_serves_in_eval_mode_without_gradients(self) -> None:
        handle = TorchEngine.remote(lambda: torch.nn.Sequential(make_module(), torch.nn.Dropout(0.9)))
        output = call(handle, "forward", X)
        assert torch.equal(output, make_module()(X).detach())
        assert not output.requires_grad
        ray.kill(handle)
