"""The main job: a trainer's weights reach every engine, under one version, proved, with requests in flight."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import ray
import torch

import ray_weightsync as rws
from tests.ray.session.conftest import LIMIT_S, Fleet, make_module

StartFleet = Callable[..., Fleet]


def test_every_engine_serves_the_trainers_weights_under_the_version(start_fleet: StartFleet) -> None:
    fleet = start_fleet(3)
    for version in (1, "step-2", 3):
        module = make_module()
        report = fleet.sync.send_weights(module, version=version)
        assert fleet.serve(module)
        assert fleet.versions() == [str(version)] * 3
        assert fleet.paused() == [False] * 3
        assert report.version == version
        assert report.committed == ("r0", "r1", "r2")
        assert report.weights_digest == rws.weights_digest(module)


def test_a_coordinator_brings_a_version_without_importing_torch(start_fleet: StartFleet) -> None:
    """A second of every attach, and of the time until a successor is there."""
    fleet = start_fleet(1)
    fleet.sync.send_weights(make_module(), version=1)
    imported = fleet.sync.coordinator.__ray_call__.remote(lambda actor: "torch" in sys.modules)
    assert not ray.get(imported, timeout=LIMIT_S)


def test_overlapped_rounds_give_the_same_weights(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2, transport=rws.Host(overlap=True, bucket_bytes=4096))
    for version in range(3):
        module = make_module()
        fleet.sync.send_weights(module, version=version)
        assert fleet.serve(module)


def test_the_report_says_what_was_done_and_prints_as_a_short_table(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    module = make_module()
    report = fleet.sync.send_weights(module, version=7)
    assert report.num_tensors == 4
    assert report.num_bytes == sum(each.numel() * each.element_size() for each in module.parameters())
    assert report.ordinal == 1
    assert {"stage", "pause", "mark", "start", "update", "finish", "outcome", "commit", "resume"} <= set(report.phases_s)
    assert all(replica.pause_s > 0 for replica in report.replicas)
    assert report.trainer_blocked_s > 0
    assert report.pause_s <= report.total_s
    assert report.requests_recomputed == 0
    assert report.guarantees
    text = str(report)
    assert "version 7 on 2 of 2 replicas" in text
    assert len(text.splitlines()) < 8


def test_a_state_dict_and_a_source_of_ones_own_are_sent_as_well(start_fleet: StartFleet) -> None:
    fleet = start_fleet(1)
    module = make_module()
    fleet.sync.send_weights(module.state_dict(), version="state dict")
    assert fleet.serve(module)

    class Doubled:
        def metadata(self) -> list[Any]:
            return [rws.ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in module.state_dict().items()]

        def __iter__(self) -> Any:
            return ((name, tensor * 2) for name, tensor in module.state_dict().items())

    fleet.sync.send_weights(Doubled(), version="source")
    (state,) = ray.get([fleet.engines[0].state_dict.remote()], timeout=LIMIT_S)
    assert all(torch.equal(state[name], tensor * 2) for name, tensor in module.state_dict().items())


def test_staged_weights_are_what_they_were_when_staged(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    module = make_module()
    before = fleet.outputs(torch.ones(1, 16))
    staged = fleet.sync.stage_weights(module, version=1)
    kept = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    assert all(torch.equal(one, other) for one, other in zip(before, fleet.outputs(torch.ones(1, 16)), strict=True))
    assert fleet.versions() == ["default", "default"]
    report = fleet.sync.commit_weights(staged)
    module.load_state_dict(kept)
    assert fleet.serve(module)
    assert report.weights_digest == staged.weights_digest


def test_staged_weights_that_gave_way_to_later_ones_are_refused_when_committed(start_fleet: StartFleet) -> None:
    fleet = start_fleet(1)
    first = fleet.sync.stage_weights(make_module(), version=1)
    second_module = make_module()
    second = fleet.sync.stage_weights(second_module, version=2)
    with pytest.raises(rws.RoundAborted, match="stage the weights again"):
        fleet.sync.commit_weights(first)
    fleet.sync.commit_weights(second)
    assert fleet.serve(second_module)


def test_requests_that_arrive_during_a_round_wait_and_are_answered_by_whole_weights(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    first, second = make_module(), make_module()
    fleet.sync.send_weights(first, version=1)
    inputs = torch.ones(1, 16)
    with torch.no_grad():
        legal = {"1": first(inputs), "2": second(inputs)}
    stop = threading.Event()
    answers: list[tuple[torch.Tensor, str]] = []

    def ask() -> None:
        while not stop.is_set():
            answers.extend(ray.get([engine.forward_versioned.remote(inputs) for engine in fleet.engines], timeout=LIMIT_S))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        fleet.sync.send_weights(second, version=2)
    finally:
        stop.set()
        asking.join(timeout=LIMIT_S)
    answers.extend(ray.get([engine.forward_versioned.remote(inputs) for engine in fleet.engines], timeout=LIMIT_S))
    assert {version for _, version in answers} <= {"1", "2"}
    assert all(torch.equal(output, legal[version]) for output, version in answers)
    assert answers[-1][1] == "2"


def test_the_same_version_with_the_same_bytes_is_a_repeat_and_with_others_is_refused(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    module = make_module()
    first = fleet.sync.send_weights(module, version=1)
    again = fleet.sync.send_weights(module, version=1)
    assert again.repeated
    assert again.ordinal == first.ordinal
    with pytest.raises(rws.RoundAborted, match="other bytes"):
        fleet.sync.send_weights(make_module(), version=1)
    assert fleet.serve(module)
    assert fleet.versions() == ["1", "1"]


def test_versions_are_ordered_by_commit_and_not_by_their_names(start_fleet: StartFleet) -> None:
    fleet = start_fleet(1)
    ordinals = [fleet.sync.send_weights(make_module(), version=version).ordinal for version in ("step-10", "step-9", 10, 9)]
    assert ordinals == [1, 2, 3, 4]
    with pytest.raises(rws.ConfigError, match="step-9"):
        fleet.sync.send_weights(make_module(), version="step-9")


def test_two_threads_that_send_at_once_take_turns(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    modules = [make_module() for _ in range(4)]
    reports: list[rws.SyncReport] = []
    threads = [
        threading.Thread(target=lambda version=version, module=module: reports.append(fleet.sync.send_weights(module, version=version)))
        for version, module in enumerate(modules)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=LIMIT_S)
    assert sorted(report.ordinal for report in reports) == [1, 2, 3, 4]
    last = max(reports, key=lambda report: report.ordinal)
    assert fleet.serve(modules[int(last.version)])
    assert fleet.versions() == [str(last.version)] * 2


def test_sending_from_an_event_loop_does_not_block_it(start_fleet: StartFleet) -> None:
    fleet = start_fleet(1)
    module = make_module()

    async def story() -> rws.SyncReport:
        sending = asyncio.create_task(fleet.sync.asend_weights(module, version=1))
        await asyncio.sleep(0)
        assert not sending.done()
        return await sending

    assert asyncio.run(story()).version == 1
    assert fleet.serve(module)


def call_until_gone(engine: Any) -> None:
    """The kill is on its way when `close` returns; calls are answered until it arrives."""
    for _ in range(10_000):
        try:
            ray.get(engine.get_weight_version.remote(), timeout=LIMIT_S)
        except ray.exceptions.RayActorError:
            return
    raise AssertionError("the engine lives on")


@ray.remote(num_cpus=0)
class Trainer(rws.TrainerMixin):
    def __init__(self) -> None:
        self.module = make_module()

    def weight_source(self) -> torch.nn.Module:
        return self.module

    def get_module(self) -> torch.nn.Module:
        return self.module


def test_a_trainer_actor_sends_what_its_weight_source_returns(start_fleet: StartFleet) -> None:
    trainer = Trainer.remote()
    fleet = start_fleet(2, trainers=[trainer])
    report = fleet.sync.send_weights(version="from the trainer")
    module = ray.get(trainer.get_module.remote(), timeout=LIMIT_S)
    assert fleet.serve(module)
    assert report.weights_digest == rws.weights_digest(module)
    staged = fleet.sync.stage_weights(version="staged")
    assert fleet.sync.commit_weights(staged).version == "staged"
    with pytest.raises(rws.ConfigError, match="do not pass a source"):
        fleet.sync.send_weights(module, version=3)
    ray.kill(trainer)


@ray.remote(num_cpus=0)
class Rank:
    """A trainer that is a process of its own and joins the session by name."""

    def __init__(self, name: str) -> None:
        self.module = make_module()
        self.sender = rws.WeightSender(name, self.module)

    def send(self, version: int) -> rws.SyncReport:
        return self.sender.send_weights(version=version)

    def get_module(self) -> torch.nn.Module:
        return self.module


def test_a_sender_in_another_process_joins_by_name(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    rank = Rank.remote(fleet.sync.name)
    report = ray.get(rank.send.remote(5), timeout=LIMIT_S)
    assert report.committed == ("r0", "r1")
    assert fleet.serve(ray.get(rank.get_module.remote(), timeout=LIMIT_S))
    ray.kill(rank)


def test_spawned_engines_end_with_the_session() -> None:
    with rws.WeightSync.spawn(rws.TorchEngineSpec(make_module, num_replicas=2)) as sync:
        module = make_module()
        sync.send_weights(module, version=1)
        output = ray.get(sync.engines[0].forward.remote(torch.ones(1, 16)), timeout=LIMIT_S)
        with torch.no_grad():
            assert torch.equal(output, module(torch.ones(1, 16)))
        engine = sync.engines[0]
    call_until_gone(engine)
    with pytest.raises(rws.ConfigError, match="closed"):
        sync.send_weights(make_module(), version=2)


def test_named_actors_and_refs_are_attached_too() -> None:
    engines = [rws.TorchEngine.options(name=f"engine-{index}").remote(make_module) for index in range(2)]
    module = make_module()
    with rws.WeightSync.attach(["engine-0", rws.EngineRef(engines[1], id="mine")]) as sync:
        report = sync.send_weights(module, version=1)
        assert report.committed == ("engine-0", "mine")
    for engine in engines:
        ray.kill(engine)


def test_an_engine_that_its_user_paused_is_left_paused_with_the_new_weights(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2)
    ray.get(fleet.engines[0].pause_generation.remote(mode="keep", clear_cache=False), timeout=LIMIT_S)
    module = make_module()
    fleet.sync.send_weights(module, version=1)
    assert fleet.paused() == [True, False]
    ray.get(fleet.engines[0].resume_generation.remote(), timeout=LIMIT_S)
    assert fleet.serve(module)
