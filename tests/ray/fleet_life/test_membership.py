"""Engines join, leave, are replaced and sleep, with requests in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray
import torch

import ray_weightsync as rws
from tests.ray.fleet_life.conftest import HEALS, QUICK, states, until
from tests.ray.session.conftest import LIMIT_S, Fleet, make_module

StartFleet = Callable[..., Fleet]
INPUTS = torch.arange(16, dtype=torch.float32).reshape(1, 16) / 7


@contextmanager
def requests(sync: rws.WeightSync, engines: dict[str, Any], modules: dict[str, torch.nn.Module]) -> Iterator[list[str]]:
    """A router that sends requests to whoever serves, one after the other; every answer has to be of whole weights of its version."""
    view, answered, problems, stop = sync.view(), [], [], threading.Event()

    def route() -> None:
        number = 0
        while not stop.is_set():
            serving = [each.id for each in view.serving() if each.id in engines]
            name = serving[number % len(serving)]
            number += 1
            try:
                output, version = ray.get(engines[name].forward_versioned.remote(INPUTS), timeout=LIMIT_S)
            except Exception as error:
                problems.append(f"{name}: {error}")
                return
            with torch.no_grad():
                if not torch.equal(output, modules[version](INPUTS)):
                    problems.append(f"{name} answered version {version} with other weights")
            answered.append(name)

    router = threading.Thread(target=route)
    router.start()
    try:
        yield answered
    finally:
        stop.set()
        router.join(LIMIT_S)
    assert problems == []


def wait_answered_by(answered: list[str], name: str, sync: rws.WeightSync) -> None:
    for _ in range(10_000):
        if name in answered:
            return
        threading.Event().wait(0.01)
    pytest.fail(f"no request reached {name}: {sync.status()}")


def wait_ended(engine: Any) -> None:
    for _ in range(10_000):
        try:
            ray.get(engine.get_weight_version.remote(), timeout=LIMIT_S)
        except ray.exceptions.RayActorError:
            return
        threading.Event().wait(0.01)
    pytest.fail("it was not ended")


def test_engines_are_added_replaced_and_removed_while_requests_are_answered(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2, fresh=True, timeouts=QUICK, on_failure=HEALS)
    modules = {"1": make_module(), "2": make_module()}
    fleet.sync.send_weights(modules["1"], version=1)
    third, fourth = (rws.TorchEngine.remote(make_module) for _ in range(2))
    engines = {"r0": fleet.engines[0], "r1": fleet.engines[1], "r2": third, "r3": fourth}
    with requests(fleet.sync, engines, modules) as answered:
        assert fleet.sync.add(third) == ("r2",)
        assert [each.id for each in fleet.sync.wait_serving(3, timeout_s=LIMIT_S)] == ["r0", "r1", "r2"]
        wait_answered_by(answered, "r2", fleet.sync)
        fleet.sync.remove("r0", drain_s=LIMIT_S)
        assert ray.get(fleet.engines[0].get_weight_version.remote(), timeout=LIMIT_S) == "1", "it is left running as it is"
        assert fleet.sync.send_weights(modules["2"], version=2).committed == ("r1", "r2")
        assert fleet.sync.replace(fleet.sync.serving()[0], fourth) == "r3"
        assert fleet.sync.engines == (third, fourth)
        assert [each.id for each in fleet.sync.wait_serving(timeout_s=LIMIT_S)] == ["r2", "r3"]
        wait_answered_by(answered, "r3", fleet.sync)
    assert states(fleet.sync.status()) == {"r0": "RETIRED", "r1": "RETIRED", "r2": "SERVING", "r3": "SERVING"}
    with pytest.raises(rws.ConfigError, match="r1 has left the fleet"):
        fleet.sync.replace("r1", fleet.engines[0])
    fleet.sync.add(fleet.engines[0])  # one that left may come back
    fleet.sync.wait_serving(3, timeout_s=LIMIT_S)
    for engine in (third, fourth):
        ray.kill(engine)


def test_what_cannot_be_added_is_refused_and_the_fleet_stays_as_it_is(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    with pytest.raises(rws.AttachError, match="same engine"):
        fleet.sync.add(fleet.engines[0])
    with pytest.raises(rws.ConfigError, match="engine_factory"):
        fleet.sync.add()
    fleet.sync.remove("r0")
    with pytest.raises(rws.ConfigError, match="last replica"):
        fleet.sync.remove("r1")
    with pytest.raises(rws.WeightSyncError, match="1 replicas serve, 2 were waited for"):
        fleet.sync.wait_serving(2, timeout_s=0.1)
    for call in (lambda: fleet.sync.wait_serving(0, timeout_s=1), lambda: fleet.sync.remove("r1", drain_s=-1), lambda: fleet.sync.sleep(3)):
        with pytest.raises(rws.ConfigError):
            call()
    assert fleet.sync.status().serving == ("r1",)


def test_an_engine_that_was_lost_is_replaced_by_the_factory(start_fleet: StartFleet) -> None:
    made: list[Any] = []

    def factory() -> Any:
        if not made:
            made.append(None)
            raise RuntimeError("no room at the first attempt")
        made.append(rws.TorchEngine.remote(make_module))
        return made[-1]

    fleet = start_fleet(2, fresh=True, timeouts=QUICK, on_failure=HEALS, engine_factory=factory)
    module = make_module()
    fleet.sync.send_weights(module, version=1)
    ray.kill(fleet.engines[1])
    status = until(fleet, lambda status: states(status).get("r2") == "SERVING")
    lost = {each.id: each for each in status.replicas}["r1"]
    assert (lost.state, lost.lost, lost.replaced_by) == ("RETIRED", True, "r2")
    assert len(made) == 2
    assert fleet.sync.add(count=1) == ("r3",)
    fleet.sync.wait_serving(3, timeout_s=LIMIT_S)
    assert Fleet([fleet.engines[0], *made[1:]], fleet.sync).serve(module)
    fleet.sync.close()
    for engine in made[1:]:
        assert ray.get(engine.get_weight_version.remote(), timeout=LIMIT_S) == "1", "what the user's factory made is the user's"
        ray.kill(engine)


def test_spawned_engines_are_made_anew_from_their_spec_and_end_with_their_replica() -> None:
    module = make_module()
    with rws.WeightSync.spawn(rws.TorchEngineSpec(make_module, num_replicas=2), timeouts=QUICK, on_failure=HEALS) as sync:
        fleet = Fleet(list(sync.engines), sync)
        sync.send_weights(module, version=1)
        ray.kill(sync.engines[0])
        until(fleet, lambda status: status.serving == ("r1", "r2"))
        sync.remove("r1", drain_s=LIMIT_S)
        wait_ended(fleet.engines[1])
        assert sync.add(count=1) == ("r3",)
        sync.wait_serving(2, timeout_s=LIMIT_S)
        assert sync.send_weights(make_module(), version=2).committed == ("r2", "r3")


def test_the_colocated_cycle_with_sleep_leaves_the_kv_cache_to_the_user(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2, timeouts=QUICK, on_failure=HEALS)
    first, second = make_module(), make_module()
    fleet.sync.send_weights(first, version=1)
    fleet.sync.sleep(1)
    assert fleet.sync.serving() == ()
    fleet.sync.wake_up()
    assert len(fleet.sync.serving()) == 2
    assert fleet.serve(first)
    fleet.sync.sleep(level=2)
    assert all(version.startswith("!rws:") for version in fleet.versions())
    fleet.sync.wake_up(["weights"])
    assert fleet.sync.send_weights(second, version=2).committed == ("r0", "r1")
    assert fleet.sync.serving() == ()
    assert fleet.paused() == [True, True]
    fleet.sync.wake_up(["kv_cache"])
    assert len(fleet.sync.serving()) == 2
    assert fleet.serve(second)


def test_an_engine_that_its_owner_put_to_sleep_with_its_weights_awake_is_left_as_found(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2, timeouts=QUICK)
    fleet.sync.send_weights(make_module(), version=1)
    owned = fleet.engines[1]
    ray.get(owned.sleep.remote(1), timeout=LIMIT_S)
    ray.get(owned.wake_up.remote(["weights"]), timeout=LIMIT_S)
    until(fleet, lambda status: status.serving == ("r0",))
    module = make_module()
    assert fleet.sync.send_weights(module, version=2).committed == ("r0", "r1")
    assert fleet.paused() == [False, True]
    assert [each.id for each in fleet.sync.serving()] == ["r0"]
    ray.get(owned.wake_up.remote(["kv_cache"]), timeout=LIMIT_S)
    fleet.sync.wait_serving(2, timeout_s=LIMIT_S)
    assert fleet.serve(module)


def test_a_spawned_engine_that_another_session_took_over_is_not_ended_by_the_first() -> None:
    sync = rws.WeightSync.spawn(rws.TorchEngineSpec(make_module, num_replicas=2), timeouts=QUICK)
    with sync, rws.WeightSync.attach(sync.engines[:1], take_over=True) as second:
        taken = until(Fleet(list(sync.engines), sync), lambda status: states(status)["r0"] == "RETIRED")
        assert taken.replicas[0].taken_by == second.name
        module = make_module()
        second.send_weights(module, version=1)
        sync.close()
        assert Fleet(list(sync.engines[:1]), second).serve(module)
        ray.kill(sync.engines[0])


def test_a_view_tells_how_old_an_output_is_and_goes_on_with_a_successor_of_the_coordinator(start_fleet: StartFleet) -> None:
    fleet = start_fleet(1)
    for version in (1, 2, "three"):
        fleet.sync.send_weights(make_module(), version=version)
    view = fleet.sync.view()
    view.wait_for_version("three", timeout_s=LIMIT_S)
    assert [view.staleness(version) for version in ("three", 2, "2", 1, "default", "!rws:x", "unknown")] == [0, 1, 1, 2, 3, None, None]

    @ray.remote(num_cpus=0)
    class Worker:
        def __init__(self, view: rws.FleetView) -> None:
            self.view = view

        def age(self, version: str) -> int | None:
            return self.view.staleness(version)

        def sees(self, version: str) -> int:
            return self.view.wait_for_version(version, timeout_s=LIMIT_S).ordinal

    worker: Any = Worker.remote(view)
    assert ray.get(worker.age.remote("2"), timeout=LIMIT_S) == 1
    ray.kill(fleet.sync.coordinator)
    fleet.sync.send_weights(make_module(), version="four")
    assert ray.get(worker.sees.remote("four"), timeout=LIMIT_S) == 4
    assert view.wait_for_version("four", timeout_s=LIMIT_S).ordinal == 4
    assert ray.get(worker.age.remote("2"), timeout=LIMIT_S) == 2
    ray.kill(worker)
