"""A trainer that dies while it writes keeps neither the turn nor the memory: the next sender goes on within seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import ray_weightsync as rws
from ray_weightsync.testing import Faults
from tests.ray.killing import kill
from tests.ray.session.conftest import LIMIT_S, Fleet, make_module

StartFleet = Callable[..., Fleet]

FOR_EVER_S = 600


class StopsHalfWay:
    """A source that yields one tensor, says so, and goes no further."""

    def __init__(self, module: torch.nn.Module, stopped: threading.Event) -> None:
        self._source = rws.ModuleSource(module)
        self._stopped = stopped

    def metadata(self) -> Any:
        return self._source.metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(self._source))
        self._stopped.set()
        threading.Event().wait(FOR_EVER_S)


@ray.remote(num_cpus=0, max_concurrency=4)
class Trainer:
    """A rank of its own that will never get to the end of its weights."""

    def __init__(self, session: str) -> None:
        self.stopped = threading.Event()
        self.sender = rws.WeightSender(session, StopsHalfWay(make_module(), self.stopped))

    def send(self, version: str) -> None:
        self.sender.send_weights(version=version)

    def wait_stopped(self) -> bool:
        return self.stopped.wait(LIMIT_S)


def outcome(request: Any) -> Any:
    """What a request was answered, also if that was an error."""
    try:
        return ray.get(request, timeout=LIMIT_S)
    except ray.exceptions.RayTaskError as error:
        return error


def slots() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("rws-*")}


def test_the_next_sender_does_not_wait_for_the_dead_ones_deadline(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    fleet.sync.send_weights(make_module(), version="before")
    trainer = Trainer.remote(fleet.sync.name)
    trainer.send.remote("never")
    assert ray.get(trainer.wait_stopped.remote(), timeout=LIMIT_S)
    with pytest.raises(rws.RoundAborted, match="has been in progress"):
        fleet.sync.send_weights(make_module(), version="too early", busy="raise")
    kill(trainer)
    module = make_module()
    report = fleet.sync.send_weights(module, version="after")  # by itself it would be allowed 7 minutes
    assert report.committed == ("r0", "r1")
    assert fleet.serve(module)
    held = slots()
    fleet.sync.send_weights(make_module(), version="once more")
    assert len(slots()) <= len(held)


def test_with_overlap_engines_that_load_from_a_dead_sender_fail_at_once_and_are_healed(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2, fresh=True, transport=rws.Host(overlap=True), on_failure=rws.FailurePolicy(auto_heal=False))
    fleet.sync.send_weights(make_module(), version="before")
    trainer = Trainer.remote(fleet.sync.name)
    with Faults(fleet.sync) as faults:
        loading = [faults.inject(replica, "update", "slow", seconds=0.01) for replica in ("r0", "r1")]
        lost = trainer.send.remote("never")
        for each in loading:
            each.wait_reached(timeout_s=LIMIT_S)
        requests = [engine.forward.remote(torch.ones(1, 16)) for engine in fleet.engines]
        kill(trainer)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(lost, timeout=LIMIT_S)
    module = make_module()
    fleet.sync.send_weights(module, version="after")
    assert fleet.versions() == ["after"] * 2
    assert fleet.paused() == [False] * 2
    assert fleet.serve(module)
    ended = [outcome(request) for request in requests]  # released when its engine was fenced, or answered after the next round
    assert all(isinstance(each, torch.Tensor) or "abort" in str(each) for each in ended)
