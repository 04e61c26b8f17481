"""Rounds by broadcast: one group of the sender and every engine, made anew in each round, and what is left when one of them is lost."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch

import ray_weightsync as rws
from ray_weightsync.engines.facts import CONTROL_GROUP
from ray_weightsync.engines.torch_engine import TorchEngineActor
from ray_weightsync.testing import Faults
from tests.ray.killing import kill
from tests.ray.session.conftest import LIMIT_S, Fleet, make_module

StartFleet = Callable[..., Fleet]

BY_BROADCAST = rws.Collective(bucket_bytes=4096, interface="lo")  # the module's first tensor is a bucket, and the rest another
KEPT = rws.Collective(bucket_bytes=4096, interface="lo", keep_snapshot=True)
FOR_EVER_S = 600


class _Receiving(TorchEngineActor):
    """Tells when the first tensor of an update is there, and when the update is over."""

    def __init__(self, make_module: Callable[[], torch.nn.Module]) -> None:
        super().__init__(make_module)
        self._arrived, self._over = threading.Event(), threading.Event()
        loader: Any = self._loader
        self._load, loader.load = loader.load, self._load_noted

    def _load_noted(self, pairs: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._over.clear()
        try:
            self._load(self._noted(pairs))
        finally:
            self._arrived.clear()
            self._over.set()

    def _noted(self, pairs: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in pairs:
            self._arrived.set()
            yield pair

    def wait_arrived(self) -> bool:
        return self._arrived.wait(LIMIT_S)

    def wait_over(self) -> bool:
        return self._over.wait(LIMIT_S)


Receiving: Any = ray.remote(concurrency_groups={CONTROL_GROUP: 4}, max_concurrency=8, num_cpus=0)(_Receiving)


class Source:
    """A module's weights, which stop or fail after the first tensor until they are told otherwise."""

    def __init__(self, module: torch.nn.Module, *, fails: bool = False) -> None:
        self._source = rws.ModuleSource(module)
        self._fails = fails
        self.stopped = threading.Event()
        self.goes_on = threading.Event()

    def metadata(self) -> Any:
        return self._source.metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        pairs = iter(self._source)
        yield next(pairs)
        if self._fails:
            raise OSError("the checkpoint is gone")
        self.stopped.set()
        self.goes_on.wait(FOR_EVER_S)
        yield from pairs


@ray.remote(num_cpus=0, max_concurrency=4)
class Trainer:
    """A rank of its own that will never get to the end of its weights."""

    def __init__(self, session: str) -> None:
        self.source = Source(make_module())
        self.sender = rws.WeightSender(session, self.source)

    def send(self, version: str) -> None:
        self.sender.send_weights(version=version)

    def wait_stopped(self) -> bool:
        return self.source.stopped.wait(LIMIT_S)


class Sending(threading.Thread):
    """A round on a thread."""

    def __init__(self, sync: rws.WeightSync, source: Any, version: str) -> None:
        super().__init__(daemon=True)
        self._send = lambda: sync.send_weights(source, version=version)
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._send()
        except BaseException as error:  # read by the test
            self.error = error

    def ended(self) -> BaseException | None:
        self.join(LIMIT_S)
        assert not self.is_alive(), "it hangs"
        return self.error


def slots() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("rws-*")}


def test_every_engine_serves_what_was_broadcast_and_the_report_says_how(start_fleet: StartFleet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ray_weightsync.follower")
    before, last_told = slots(), threading.Event()
    fleet = start_fleet(3, transport=BY_BROADCAST)
    fleet.sync.subscribe(lambda news: last_told.set() if (news.version, news.phase) == ("2", "idle") else None)
    for number in range(3):
        module = make_module()
        report = fleet.sync.send_weights(module, version=number)
        assert fleet.serve(module)
        assert fleet.versions() == [str(number)] * 3
        assert fleet.paused() == [False] * 3
        assert report.committed == ("r0", "r1", "r2")
        assert (report.transport, report.transport_reason) == ("collective", "asked for")
        assert report.weights_digest == rws.weights_digest(rws.ModuleSource(module))
        assert any("nobody can be healed" in each for each in report.missing)
        assert any("takes the others of its round with it" in each for each in report.missing)
    table = "group of 4: 0 sender | 1 r0 | 2 r1 | 3 r2"
    assert fleet.sync.status().ranks == table
    assert last_told.wait(LIMIT_S)
    assert [line for line in caplog.messages if "group of" in line] == [f"{fleet.sync.name}: {table}"], "the driver prints it, once"
    assert slots() == before, "nothing is kept in shared memory"


def test_a_trainer_in_a_process_of_its_own_broadcasts_as_well(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2, transport=BY_BROADCAST)

    @ray.remote(num_cpus=0)
    def send(session: str) -> str:
        with rws.WeightSender(session, make_module()) as sender:
            return sender.send_weights(version="from afar").transport

    assert ray.get(send.remote(fleet.sync.name), timeout=LIMIT_S) == "collective"
    assert fleet.versions() == ["from afar"] * 2


def test_the_same_version_again_is_not_sent_twice_and_other_bytes_under_it_are_refused(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2, transport=BY_BROADCAST)
    module = make_module()
    fleet.sync.send_weights(module, version=1)
    report = fleet.sync.send_weights(module, version=1)
    assert report.repeated
    assert report.pause_s == 0
    with pytest.raises(rws.RoundAborted, match="committed with other bytes"):
        fleet.sync.send_weights(make_module(), version=1)
    assert fleet.serve(module)


def test_a_plan_that_an_engine_refuses_changes_nothing_and_the_sender_waits_for_nobody(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2, transport=BY_BROADCAST)
    served = make_module()
    fleet.sync.send_weights(served, version="good")
    began = time.monotonic()
    with pytest.raises(rws.RoundAborted, match=r"has shape \[8, 8\], the engine's has \[128, 16\]") as caught:
        fleet.sync.send_weights(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)), version="bad")
    assert caught.value.phase == "preflight"
    assert time.monotonic() - began < 60
    assert fleet.serve(served)
    assert fleet.paused() == [False] * 2


@pytest.mark.parametrize("phase", ["pause", "mark"])
def test_a_round_that_ends_before_start_is_put_back_and_its_sender_told(start_fleet: StartFleet, phase: str) -> None:
    fleet = start_fleet(2, transport=BY_BROADCAST)
    served = make_module()
    fleet.sync.send_weights(served, version="good")
    with Faults(fleet.sync) as faults:
        faults.inject("r1", phase, "raise")
        with pytest.raises(rws.RoundAborted, match=f"made to fail in {phase}"):
            fleet.sync.send_weights(make_module(), version="bad")
    assert fleet.versions() == ["good"] * 2
    assert fleet.paused() == [False] * 2
    assert fleet.serve(served)


def test_an_engine_killed_while_bytes_move_takes_the_others_with_it_at_once_and_the_next_round_is_theirs(start_fleet: StartFleet) -> None:
    fleet = start_fleet(3, engine_class=Receiving, transport=BY_BROADCAST)
    good = fleet.sync.send_weights(make_module(), version="good")
    assert fleet.sync.status().ranks == "group of 4: 0 sender | 1 r0 | 2 r1 | 3 r2"
    source = Source(make_module())
    sending = Sending(fleet.sync, source, "torn")
    assert source.stopped.wait(LIMIT_S)
    arrived = ray.get([engine.wait_arrived.remote() for engine in fleet.engines], timeout=2 * LIMIT_S)
    victim = psutil.Process(ray.get(fleet.engines.pop(1).__ray_call__.remote(lambda actor: os.getpid()), timeout=LIMIT_S))
    began = time.monotonic()
    victim.kill()
    victim.wait(LIMIT_S)
    over = ray.get([engine.wait_over.remote() for engine in fleet.engines], timeout=2 * LIMIT_S)
    source.goes_on.set()
    error = sending.ended()
    assert all(arrived), "the first of two buckets was there"
    assert all(over), "who waits for the second one is told"
    assert isinstance(error, rws.FleetTorn), error
    assert time.monotonic() - began < 60, "nobody waits for the deadline of an update"
    assert error.replicas == ("r0", "r1", "r2")
    assert all(label.startswith("!rws:") for label in fleet.versions())
    assert fleet.paused() == [True] * 2
    assert fleet.sync.serving() == ()
    told = ray.get([engine.collective_rpc.remote("rws_describe", args=("nonce",)) for engine in fleet.engines], timeout=LIMIT_S)
    assert all("8192 of 10816 bytes were received, waiting for bucket 2 of 2" in worker["failure"] for (worker,) in told), told
    module = make_module()
    report = fleet.sync.send_weights(module, version="whole")
    assert report.committed == ("r0", "r2")
    assert report.epoch > good.epoch
    assert fleet.sync.status().ranks == "group of 3: 0 sender | 1 r0 | 2 r2"
    assert fleet.serve(module)
    assert fleet.paused() == [False] * 2


def test_a_source_that_fails_half_way_tears_the_fleet_in_its_own_words_and_the_next_round_heals_it(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2, transport=BY_BROADCAST)
    fleet.sync.send_weights(make_module(), version="good")
    with pytest.raises(rws.FleetTorn, match="the checkpoint is gone"):
        fleet.sync.send_weights(Source(make_module(), fails=True), version="torn")
    assert [each.id for each in fleet.sync.serving()] == []
    module = make_module()
    assert fleet.sync.send_weights(module, version="whole").committed == ("r0", "r1")
    assert fleet.serve(module)
    assert fleet.paused() == [False] * 2


def test_a_trainer_killed_while_it_sends_leaves_fenced_engines_that_the_next_sender_makes_whole(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2, fresh=True, transport=BY_BROADCAST)
    fleet.sync.send_weights(make_module(), version="good")
    trainer = Trainer.remote(fleet.sync.name)
    trainer.send.remote("never")
    assert ray.get(trainer.wait_stopped.remote(), timeout=LIMIT_S)
    kill(trainer)
    module = make_module()
    assert fleet.sync.send_weights(module, version="after").committed == ("r0", "r1")
    assert fleet.serve(module)


def test_a_coordinator_killed_while_bytes_move_is_succeeded_and_the_next_round_makes_the_engines_whole(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2, fresh=True, transport=BY_BROADCAST)
    fleet.sync.send_weights(make_module(), version="good")
    source = Source(make_module())
    sending = Sending(fleet.sync, source, "lost")
    assert source.stopped.wait(LIMIT_S)
    ray.kill(fleet.sync.coordinator, no_restart=False)
    source.goes_on.set()
    error = sending.ended()
    assert isinstance(error, rws.FleetTorn), error
    module = make_module()
    assert fleet.sync.send_weights(module, version="after").committed == ("r0", "r1")
    assert fleet.serve(module)
    assert fleet.paused() == [False] * 2


def test_what_was_kept_heals_and_joins_without_the_trainer(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2, fresh=True, transport=KEPT)
    module = make_module()
    report = fleet.sync.send_weights(module, version="kept")
    assert report.transport == "collective"
    assert not any("nobody can be healed" in each for each in report.missing)
    assert fleet.serve(module)
    joining = rws.TorchEngine.remote(make_module)
    try:
        fleet.sync.add([joining])
        fleet.sync.wait_serving(3, timeout_s=LIMIT_S)
        fleet.engines = [*fleet.engines, joining]
        assert fleet.serve(module)
        with Faults(fleet.sync) as faults:
            faults.inject("r1", "update", "raise")
            with pytest.raises(rws.FleetTorn, match="r1"):
                fleet.sync.send_weights(make_module(), version="torn")
        report = fleet.sync.heal()
        assert report.transport == "host"
        assert fleet.versions() == ["kept"] * 3
        assert fleet.serve(module)
    finally:
        kill(joining)


def test_what_was_not_kept_cannot_heal_and_says_so(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2, transport=BY_BROADCAST)
    fleet.sync.send_weights(make_module(), version="gone")
    with pytest.raises(rws.RoundAborted, match=r"Collective\(keep_snapshot=True\)"):
        fleet.sync.heal("r1")


def test_what_a_broadcast_cannot_do_is_refused_with_what_can(start_fleet: StartFleet) -> None:
    fleet = start_fleet(1, transport="collective")
    with pytest.raises(rws.ConfigError, match="needs the host transport"):
        fleet.sync.stage_weights(make_module(), version=1)
    with pytest.raises(rws.ConfigError, match=r"keep_snapshot=True"):
        rws.WeightSync.attach(fleet.engines, transport="collective", on_failure=rws.FailurePolicy(after_start="all_or_none"))


def test_all_or_none_goes_back_to_what_was_kept(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2, transport=KEPT, on_failure=rws.FailurePolicy(after_start="all_or_none", auto_heal=False))
    module = make_module()
    fleet.sync.send_weights(module, version="before")
    with Faults(fleet.sync) as faults:
        faults.inject("r1", "outcome", "raise")
        with pytest.raises(rws.RoundAborted, match="taken back from all"):
            fleet.sync.send_weights(make_module(), version="bad")
    assert fleet.versions() == ["before"] * 2
    assert fleet.serve(module)
