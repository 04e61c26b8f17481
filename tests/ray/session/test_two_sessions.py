"""Engines belong to one session at a time: a second one is refused, waits for one that ends, or takes them over."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray
import torch

import ray_weightsync as rws
from ray_weightsync.fleet import cluster
from ray_weightsync.testing import Faults
from tests.ray.killing import kill
from tests.ray.session.conftest import LIMIT_S, Fleet, make_module

StartFleet = Callable[..., Fleet]


def name() -> str:
    return f"second-{uuid.uuid4().hex[:8]}"


def claimed_by(session: str) -> int:
    """How many engines that session has a claim on."""
    return sum(session.encode() in (cluster.get(key) or b"") for key in cluster.keys("claim:"))


def test_a_second_session_is_refused_naming_the_first_and_nothing_changes(start_fleet: StartFleet) -> None:
    fleet = start_fleet(3)
    module = make_module()
    fleet.sync.send_weights(module, version=1)
    second = name()
    with pytest.raises(rws.SessionConflict, match=f"session '{fleet.sync.name}' holds r0, r1") as caught:
        rws.WeightSync.attach(fleet.engines[1:], name=second)
    assert caught.value.replicas == ("r0", "r1")
    assert "take_over=True" in str(caught.value)
    assert claimed_by(second) == 0
    assert claimed_by(fleet.sync.name) == 3
    assert fleet.serve(module)
    fleet.sync.send_weights(make_module(), version=2)
    assert fleet.versions() == ["2"] * 3


def test_a_closed_session_leaves_no_claim_and_the_next_adopts_what_serves(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    fleet.sync.send_weights(make_module(), version=1)
    fleet.sync.close()
    assert claimed_by(fleet.sync.name) == 0
    with rws.WeightSync.attach(fleet.engines, name=name()) as sync:
        assert sync.status().version == "1"
        assert len(sync.serving()) == 2


def test_a_close_that_was_interrupted_is_gone_on_with_when_it_is_called_again(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    fleet = start_fleet(1)
    with monkeypatch.context() as patched:
        patched.setattr(fleet.sync._link, "end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fleet.sync.close()
    fleet.sync.close()
    assert claimed_by(fleet.sync.name) == 0
    rws.WeightSync.attach(fleet.engines, name=fleet.sync.name).close()


def test_an_engine_is_one_whichever_way_it_is_reached(start_fleet: StartFleet) -> None:
    engine = rws.TorchEngine.options(name=(known := name())).remote(make_module)
    fleet = start_fleet(1, engines=[engine])
    with pytest.raises(rws.SessionConflict, match=f"session '{fleet.sync.name}' holds {known}"):
        rws.WeightSync.attach([known])
    fleet.sync.close()
    ray.kill(engine)


def test_a_session_taken_over_in_the_middle_of_a_round_ends_it_and_then_refuses_to_send(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    module = make_module()
    with ThreadPoolExecutor() as threads, Faults(fleet.sync) as faults:
        held = faults.inject("r1", "update", "hang", carried_out=True)
        sending = threads.submit(fleet.sync.send_weights, module, version="of the first")
        held.wait_reached(timeout_s=LIMIT_S)
        requests = [engine.forward.remote(torch.ones(1, 16)) for engine in fleet.engines]
        taking = threads.submit(rws.WeightSync.attach, fleet.engines, name=(second := name()), take_over=True)
        with pytest.raises(TimeoutError):
            taking.result(timeout=3)
        held.release()
        assert sending.result(timeout=LIMIT_S).committed == ("r0", "r1")
        sync = taking.result(timeout=LIMIT_S)
    try:
        assert sync.status().version == "of the first"
        assert len(sync.serving()) == 2
        assert fleet.serve(module)
        ray.get(requests, timeout=LIMIT_S)
        assert fleet.sync.serving() == ()
        assert all(f"session '{second}' has this engine now" in str(each.error) for each in fleet.sync.status().replicas)
        with pytest.raises(rws.SessionConflict, match="has no engine left"):
            fleet.sync.send_weights(make_module(), version="another of the first")
        fleet.sync.close()
        after = make_module()
        sync.send_weights(after, version="of the second")
        assert fleet.serve(after)
        assert claimed_by(second) == 2
    finally:
        sync.close()


def test_of_two_sessions_that_start_at_once_one_gets_the_engines(engine_pool: list[Any]) -> None:
    start = threading.Barrier(2)

    def attach() -> Any:
        start.wait(LIMIT_S)
        try:
            return rws.WeightSync.attach(engine_pool, name=name())
        except rws.SessionConflict as error:
            return error

    with ThreadPoolExecutor() as threads:
        outcomes = [each.result(timeout=LIMIT_S) for each in [threads.submit(attach) for _ in range(2)]]
    sessions = [each for each in outcomes if isinstance(each, rws.WeightSync)]
    try:
        assert [type(each) for each in outcomes if each not in sessions] == [rws.SessionConflict]
    finally:
        for session in sessions:
            session.close()
    with rws.WeightSync.attach(engine_pool, name=name()) as sync:
        sync.send_weights(make_module(), version=1)


@ray.remote(num_cpus=0)
class Driver:
    """A process that owns a session on engines of somebody else."""

    def attach(self, engines: list[Any], session: str) -> None:
        self.sync = rws.WeightSync.attach(engines, name=session)
        self.sync.send_weights(make_module(), version="of a dead session")


def test_the_engines_of_a_session_whose_owner_died_are_waited_for(engine_pool: list[Any], start_fleet: StartFleet) -> None:
    driver, session = Driver.remote(), name()
    ray.get(driver.attach.remote(engine_pool[:2], session), timeout=LIMIT_S)
    assert claimed_by(session) == 2
    kill(driver)
    fleet = start_fleet(2)
    assert fleet.sync.status().version == "of a dead session"
    assert claimed_by(session) == 0
    fleet.sync.send_weights(make_module(), version="of the next")
