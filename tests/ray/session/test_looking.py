"""Status and views answer at once from what the coordinator knows, also while a round waits for an engine."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import ray

import ray_weightsync as rws
from ray_weightsync.engines.facts import CONTROL_GROUP
from ray_weightsync.engines.torch_engine import TorchEngineActor
from tests.ray.session.conftest import LIMIT_S, Fleet, make_module

StartFleet = Callable[..., Fleet]


class _Gated(TorchEngineActor):
    """An engine whose update waits at a gate that the test opens."""

    def __init__(self, make: Any) -> None:
        super().__init__(make)
        self._reached, self._open = threading.Event(), threading.Event()

    @ray.method(concurrency_group=CONTROL_GROUP)
    def update_weights(self, request: Any) -> None:
        self._reached.set()
        assert self._open.wait(LIMIT_S)
        super().update_weights(request)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def reached(self) -> bool:
        return self._reached.wait(LIMIT_S)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def open_gate(self) -> None:
        self._open.set()


Gated: Any = ray.remote(concurrency_groups={CONTROL_GROUP: 6}, num_cpus=0)(_Gated)


def test_status_answers_while_an_update_waits(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2, engine_class=Gated)
    before = fleet.sync.status()
    assert before.phase == "idle"
    sending = threading.Thread(target=lambda: fleet.sync.send_weights(make_module(), version=1))
    sending.start()
    ray.get([engine.reached.remote() for engine in fleet.engines], timeout=LIMIT_S)
    during = fleet.sync.status()
    assert during.phase == "update"
    assert during.round_id is not None
    assert [replica.state for replica in during.replicas] == ["UPDATING", "UPDATING"]
    assert during.serving == before.serving == ("r0", "r1"), "requests may go on: they queue"
    ray.get([engine.open_gate.remote() for engine in fleet.engines], timeout=LIMIT_S)
    sending.join(timeout=LIMIT_S)
    after = fleet.sync.status()
    assert (after.version, after.phase, after.ordinal) == ("1", "idle", 1)


def test_a_round_in_progress_refuses_a_caller_who_does_not_want_to_wait(start_fleet: StartFleet) -> None:
    fleet = start_fleet(1, engine_class=Gated)
    sending = threading.Thread(target=lambda: fleet.sync.send_weights(make_module(), version=1))
    sending.start()
    ray.get(fleet.engines[0].reached.remote(), timeout=LIMIT_S)
    with pytest.raises(rws.RoundAborted, match="in progress"):
        fleet.sync.send_weights(make_module(), version=2, busy="raise")
    ray.get(fleet.engines[0].open_gate.remote(), timeout=LIMIT_S)
    sending.join(timeout=LIMIT_S)
    assert fleet.versions() == ["1"]


def test_a_view_follows_the_fleet_and_travels_to_other_processes(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    view = fleet.sync.view()
    assert view.version == "default"
    salt = view.cache_salt
    fleet.sync.send_weights(make_module(), version="next")
    assert view.wait_for_version("next", timeout_s=LIMIT_S).ordinal == 1
    assert view.cache_salt != salt
    assert [replica.id for replica in view.serving()] == ["r0", "r1"]
    copy = pickle.loads(pickle.dumps(view))
    assert copy.version == "next"


def test_waiting_for_a_version_that_does_not_come_ends_at_the_deadline(start_fleet: StartFleet) -> None:
    fleet = start_fleet(1)
    with pytest.raises(rws.WeightSyncError, match="not committed"):
        fleet.sync.view().wait_for_version("never", timeout_s=0.1)


def test_engines_that_agree_are_adopted_unattested_and_those_that_do_not_are_stale(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    adopted = fleet.sync.status()
    assert {(each.state, each.version, each.attested) for each in adopted.replicas} == {("SERVING", "default", False)}
    fleet.sync.send_weights(make_module(), version=1)
    assert all(replica.attested for replica in fleet.sync.status().replicas)
    fleet.sync.close()
    ray.get(fleet.engines[0].update_weight_version.remote("other"), timeout=LIMIT_S)
    with rws.WeightSync.attach(fleet.engines) as second:
        assert [each.state for each in second.status().replicas] == ["STALE", "STALE"]
        assert second.serving() == ()
        second.send_weights(make_module(), version=2)
        assert len(second.serving()) == 2
