"""Rounds by a trainer engine's own data plane: the engine is kept from round to round, and what is left when somebody is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch

import ray_weightsync as rws
from ray_weightsync.fleet.link import CoordinatorLink
from ray_weightsync.testing import Faults
from ray_weightsync.trainer.sender import SnapshotSender
from tests.ray.killing import kill
from tests.ray.session.conftest import LIMIT_S, Fleet, make_module
from tests.ray.session.native_engines import Engines, NativeEngine, Trainer
from tests.ray.session.test_broadcast import Sending, Source

StartFleet = Callable[..., Fleet]


@pytest.fixture
def start(start_fleet: StartFleet) -> Iterator[Callable[..., tuple[Fleet, Trainer]]]:
    trainers: list[Trainer] = []

    def started(num_engines: int, backend: str = "ipc", **options: Any) -> tuple[Fleet, Trainer]:
        fleet = start_fleet(num_engines, engine_class=NativeEngine, transport=rws.Native(backend), **options)
        trainers.append(Trainer(fleet))
        return fleet, trainers[-1]

    yield started
    for trainer in trainers:
        trainer.close()
        assert all(engine.ended.wait(LIMIT_S) for engine in trainer.engines.made), "every trainer engine was shut down"


@ray.remote(num_cpus=0, max_concurrency=4)
class FarTrainer:
    """A sender in a process of its own that never gets to the end of its weights."""

    def __init__(self, session: str, coordinator: Any) -> None:
        settings = ray.get(coordinator.settings.remote(), timeout=LIMIT_S)
        link = CoordinatorLink(session, coordinator, timeouts=settings.timeouts)
        self.source = Source(make_module())
        self.sender = SnapshotSender(session, link, settings=settings, engine_maker=Engines())

    def send(self, version: str) -> None:
        self.sender.send(self.source, version=version)

    def wait_stopped(self) -> bool:
        return self.source.stopped.wait(LIMIT_S)


def inits(fleet: Fleet) -> list[Any]:
    return ray.get([engine.__ray_call__.remote(lambda actor: actor.native.inits) for engine in fleet.engines], timeout=LIMIT_S)  # type: ignore[no-any-return]


Start = Callable[..., tuple[Fleet, Trainer]]


def test_one_trainer_engine_sends_round_after_round_and_the_report_says_how(start: Start) -> None:
    fleet, trainer = start(3)
    for number in range(3):
        module = make_module()
        report = trainer.send_weights(module, version=number)
        assert fleet.serve(module)
        assert fleet.versions() == [str(number)] * 3
        assert fleet.paused() == [False] * 3
        assert (report.committed, report.transport) == (("r0", "r1", "r2"), "native:ipc")
        assert report.weights_digest == rws.weights_digest(rws.ModuleSource(module))
        assert {"init", "start", "update", "finish", "outcome"} <= set(report.phases_s)
    assert [engine.sent for engine in trainer.engines.made] == [3]
    assert inits(fleet) == [[{"rank_offset": offset, "packed": False}, None, None] for offset in (1, 2, 3)]
    assert fleet.sync.status().ranks == "group of 4: 0 sender | 1 r0 | 2 r1 | 3 r2"


def test_another_plan_or_another_fleet_has_another_trainer_engine(start: Start) -> None:
    fleet, trainer = start(2)
    module = make_module()
    trainer.send_weights(module, version=1)
    trainer.send_weights(dict(reversed(module.state_dict().items())), version=2)
    first, second = trainer.engines.made
    assert first.ended.wait(LIMIT_S)
    fleet.sync.remove("r1")
    module = make_module()
    report = trainer.send_weights(dict(reversed(module.state_dict().items())), version=3)
    assert report.committed == ("r0",)
    assert second.ended.wait(LIMIT_S)
    assert len(trainer.engines.made) == 3


def test_a_version_that_is_committed_already_is_not_sent_again(start: Start) -> None:
    _, trainer = start(2)
    module = make_module()
    trainer.send_weights(module, version=1)
    assert trainer.send_weights(module, version=1).repeated
    with pytest.raises(rws.RoundAborted, match="committed with other bytes"):
        trainer.send_weights(make_module(), version=1)
    assert [engine.sent for engine in trainer.engines.made] == [1]


@pytest.mark.parametrize("why", ["trainer", "engine"])
def test_what_cannot_be_set_up_changes_nothing(start: Start, why: str) -> None:
    fleet, trainer = start(2)
    served = make_module()
    trainer.send_weights(served, version="good")
    trainer.engines.fails = why == "trainer"
    trainer.engines.init_info = {"fails": why == "engine"}
    other_plan = dict(reversed(make_module().state_dict().items()))
    with pytest.raises(rws.RoundAborted, match="no GPU here" if why == "trainer" else "cannot join") as caught:
        trainer.send_weights(other_plan, version="bad")
    assert caught.value.phase == "init"
    assert fleet.versions() == ["good"] * 2
    assert fleet.paused() == [False] * 2
    assert fleet.serve(served)
    trainer.engines.fails, trainer.engines.init_info = False, {}
    assert trainer.send_weights(other_plan, version="better").committed == ("r0", "r1")


@pytest.mark.parametrize("backend", ["ipc", "nccl"])
def test_an_engine_killed_while_bytes_move_takes_the_others_with_it_only_from_a_group(start: Start, backend: str) -> None:
    fleet, trainer = start(3, backend)
    trainer.send_weights(make_module(), version="good")
    module = make_module()
    source = Source(module)
    sending = Sending(trainer, source, "bad")  # type: ignore[arg-type]
    assert source.stopped.wait(LIMIT_S)
    kill(fleet.engines.pop(1))
    source.goes_on.set()
    error = sending.ended()
    if backend == "ipc":
        assert isinstance(error, rws.ReplicasLost), error
        assert error.replicas == ("r1",)
        assert fleet.serve(module)
    else:
        assert isinstance(error, rws.FleetTorn), error
        assert all(label.startswith("!rws:") for label in fleet.versions())
    assert "r1" in str(error)
    module = make_module()
    assert trainer.send_weights(module, version="whole").committed == ("r0", "r2")
    assert fleet.serve(module)
    assert len(trainer.engines.made) == 2, "an engine that was made for three is of no use to two"


@pytest.mark.parametrize("phase", ["start", "update", "finish"])
def test_an_engine_that_refuses_a_call_is_fenced_alone(start: Start, phase: str) -> None:
    fleet, trainer = start(2)
    with Faults(fleet.sync) as faults:
        faults.inject("r1", phase, "raise")
        with pytest.raises(rws.ReplicasLost, match="r1"):
            trainer.send_weights(make_module(), version="bad")
    module = make_module()
    assert trainer.send_weights(module, version="whole").committed == ("r0", "r1")
    assert fleet.serve(module)


def test_a_source_that_fails_half_way_tears_the_fleet_in_its_own_words_and_the_next_round_heals_it(start: Start) -> None:
    fleet, trainer = start(2)
    trainer.send_weights(make_module(), version="good")
    with pytest.raises(rws.FleetTorn, match="the checkpoint is gone"):
        trainer.send_weights(Source(make_module(), fails=True), version="torn")
    assert fleet.sync.serving() == ()
    module = make_module()
    assert trainer.send_weights(module, version="whole").committed == ("r0", "r1")
    assert fleet.serve(module)


def test_a_source_that_disagrees_with_what_it_declared_is_never_served(start: Start) -> None:
    _, trainer = start(1)

    class Disagreeing(Source):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self._source:
                yield name, tensor.double()

    with pytest.raises(rws.FleetTorn, match="float64"):
        trainer.send_weights(Disagreeing(make_module()), version="torn")
    assert trainer.send_weights(make_module(), version="whole").committed == ("r0",)


def test_a_trainer_engine_that_hangs_is_left_behind_at_the_deadline(start: Start) -> None:
    timeouts = rws.Timeouts(connect_s=4, start_s=1, update_s=1, finish_s=1)
    fleet, trainer = start(2, timeouts=timeouts)
    trainer.engines.hangs = True
    began = time.monotonic()
    with pytest.raises(rws.FleetTorn, match="asked for nothing more"):
        trainer.send_weights(make_module(), version="torn")
    assert time.monotonic() - began < 60
    assert trainer.engines.made[0].aborted.is_set()
    module = make_module()
    assert trainer.send_weights(module, version="whole").committed == ("r0", "r1")
    assert fleet.serve(module)
    assert len(trainer.engines.made) == 2


def test_a_trainer_killed_while_it_sends_leaves_fenced_engines_that_the_next_sender_makes_whole(start: Start) -> None:
    fleet, trainer = start(2)
    trainer.send_weights(make_module(), version="good")
    far = FarTrainer.remote(fleet.sync.name, fleet.sync.coordinator)
    far.send.remote("never")
    assert ray.get(far.wait_stopped.remote(), timeout=LIMIT_S)
    kill(far)
    module = make_module()
    assert trainer.send_weights(module, version="after").committed == ("r0", "r1")
    assert fleet.serve(module)


def test_a_coordinator_killed_while_bytes_move_is_succeeded_and_the_next_round_makes_the_engines_whole(start: Start) -> None:
    fleet, trainer = start(2)
    trainer.send_weights(make_module(), version="good")
    source = Source(make_module())
    sending = Sending(trainer, source, "lost")  # type: ignore[arg-type]
    assert source.stopped.wait(LIMIT_S)
    ray.kill(fleet.sync.coordinator, no_restart=False)
    source.goes_on.set()
    error = sending.ended()
    assert isinstance(error, rws.FleetTorn), error
    module = make_module()
    assert trainer.send_weights(module, version="after").committed == ("r0", "r1")
    assert fleet.serve(module)
    assert fleet.paused() == [False] * 2


def test_what_a_torch_engine_cannot_receive_is_refused_before_anything_changes(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2, transport="native:ipc")
    trainer = Trainer(fleet)
    with pytest.raises(rws.RoundAborted, match="transport 'native' is not known here"):
        trainer.send_weights(make_module(), version=1)
    assert fleet.versions() == ["default"] * 2
    assert fleet.paused() == [False] * 2
    assert trainer.engines.made == []


def test_a_backend_that_the_engines_do_not_have_is_refused_before_anything_changes(start: Start) -> None:
    fleet, trainer = start(1, "carrier_pigeon")
    with pytest.raises(rws.RoundAborted, match="there is no backend 'carrier_pigeon'"):
        trainer.send_weights(make_module(), version=1)
    assert fleet.paused() == [False]


def test_what_a_native_transport_cannot_do_is_refused_with_what_can(start: Start) -> None:
    fleet, trainer = start(1)
    with pytest.raises(rws.ConfigError, match="needs the host transport"):
        trainer._sender.stage(make_module(), version=1)
    trainer.send_weights(make_module(), version=1)
    with pytest.raises(rws.RoundAborted, match="nobody kept it"):
        fleet.sync.heal("r0")
    with pytest.raises(rws.ConfigError, match="goes back to the version before"):
        rws.WeightSync.attach(fleet.engines, transport="native:ipc", on_failure=rws.FailurePolicy(after_start="all_or_none"))


def test_all_weights_go_by_host_memory_where_the_backend_takes_patches_alone(start: Start) -> None:
    fleet, trainer = start(2, backend="sparse_nccl")
    module = make_module()
    report = trainer.send_weights(module, version=1)
    assert fleet.serve(module)
    assert (report.transport, report.committed) == ("host", ("r0", "r1"))
    assert report.transport_reason == "all weights are sent, and this transport sends patches alone"
    assert "bytes attested by every worker" in report.guarantees
    assert trainer.engines.made == []
