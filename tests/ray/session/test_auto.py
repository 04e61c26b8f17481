"""Rounds that choose their way themselves. Here all weights are in host memory, so what a GPU would decide is decided by made-up facts."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import ray_weightsync as rws
from ray_weightsync.engines.facts import CONTROL_GROUP, DeviceFacts
from ray_weightsync.engines.torch_engine import TorchEngineActor
from ray_weightsync.fleet.choosing import SenderFacts
from ray_weightsync.trainer import sender as sender_module
from ray_weightsync.trainer.facts import sender_facts
from tests.ray.session.conftest import LIMIT_S, Fleet, make_module
from tests.ray.session.native_engines import NativeEngineActor, Trainer

StartFleet = Callable[..., Fleet]
MINE = DeviceFacts("cuda", "mine")


class _OnAGpu(TorchEngineActor):
    """Says that it is on a GPU of its own and has NCCL. It is on the CPU, where a group of CPU processes reaches it."""

    def __init__(self, make_module: Callable[[], torch.nn.Module]) -> None:
        super().__init__(make_module)
        self._updates._device, self._updates._nccl = {"type": "cuda", "uuid": uuid.uuid4().hex}, True


OnAGpu: Any = ray.remote(concurrency_groups={CONTROL_GROUP: 4}, max_concurrency=8, num_cpus=0)(_OnAGpu)


class _VLLMOnAGpu(NativeEngineActor):
    """Says the same, and that it is vLLM. What comes by CUDA IPC comes inside the calls."""

    def __init__(self, make_module: Callable[[], torch.nn.Module]) -> None:
        super().__init__(make_module)
        self._updates._device, self._updates._nccl = {"type": "cuda", "uuid": uuid.uuid4().hex}, True

    @ray.method(concurrency_group=CONTROL_GROUP)
    def rws_inspect(self, nonce: str) -> dict[str, Any]:
        return {**super().rws_inspect(nonce), "kind": "async"}


VLLMOnAGpu: Any = ray.remote(concurrency_groups={CONTROL_GROUP: 4}, max_concurrency=8, num_cpus=0)(_VLLMOnAGpu)


@pytest.fixture
def shm() -> Iterator[Path]:
    """A memory-backed directory that is not the one by default. To be asked for before `start_fleet`, whose sessions use it."""
    path = Path(tempfile.mkdtemp(prefix="elsewhere-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def sender_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process says that its weights are on a GPU. They are sent as they are: from the CPU, through gloo."""
    facts = SenderFacts(node_id="node", device=MINE, current=MINE, nccl=True, vllm=True)
    monkeypatch.setattr(sender_module, "sender_facts", lambda source: facts)


def test_a_sender_without_a_gpu_goes_by_host_memory_where_it_was_told_and_the_report_says_why(shm: Path, start_fleet: StartFleet) -> None:
    fleet = start_fleet(2, transport=rws.Auto(host=rws.Host(directory=str(shm))))
    module = make_module()
    report = fleet.sync.send_weights(module, version=1)
    assert fleet.serve(module)
    assert any(path.stat().st_size >= report.num_bytes for path in shm.iterdir())
    assert report.transport == "host"
    assert report.transport_reason == "auto: the weights are on the CPU (the sender's process has no GPU)"
    assert report.transport_reason in str(report)


def test_it_is_what_nobody_asked_for(start_fleet: StartFleet) -> None:
    unasked = start_fleet(1)
    assert unasked.sync.send_weights(make_module(), version=1).transport_reason.startswith("auto: ")
    unasked.sync.close()
    assert start_fleet(1, transport="host").sync.send_weights(make_module(), version=1).transport_reason == "asked for"


def test_a_trainer_in_a_process_of_its_own_chooses_by_what_that_process_is(start_fleet: StartFleet) -> None:
    fleet = start_fleet(2, transport="auto")

    @ray.remote(num_cpus=0)
    def send(session: str) -> tuple[str, str]:
        with rws.WeightSender(session, make_module()) as sender:
            report = sender.send_weights(version="from afar")
            return report.transport, report.transport_reason

    how, why = ray.get(send.remote(fleet.sync.name), timeout=LIMIT_S)
    assert (how, why) == ("host", "auto: the weights are on the CPU (the sender's process has no GPU)")


def test_what_is_staged_waits_in_host_memory_whatever_the_devices(start_fleet: StartFleet, sender_on_a_gpu: None) -> None:
    fleet = start_fleet(2, engine_class=OnAGpu, transport="auto")
    module = make_module()
    report = fleet.sync.commit_weights(fleet.sync.stage_weights(module, version=1))
    assert fleet.serve(module)
    assert (report.transport, report.transport_reason) == ("host", "auto: it is staged, and what is staged waits in host memory")


def test_engines_on_gpus_of_their_own_are_broadcast_to_and_healed_from_what_is_kept(
    shm: Path, start_fleet: StartFleet, sender_on_a_gpu: None
) -> None:
    fleet = start_fleet(2, engine_class=OnAGpu, transport=rws.Auto(host=rws.Host(directory=str(shm))))
    module = make_module()
    report = fleet.sync.send_weights(module, version=1)
    assert fleet.serve(module)
    assert any(path.stat().st_size >= report.num_bytes for path in shm.iterdir())
    assert report.transport == "collective"
    assert report.transport_reason == "auto: every worker has a GPU of its own, and NCCL is installed on both sides"
    assert not any("nobody can be healed" in each for each in report.missing)
    assert fleet.sync.status().ranks == "group of 3: 0 sender | 1 r0 | 2 r1"


def test_each_round_chooses_for_the_fleet_as_it_is_then(start_fleet: StartFleet, engine_pool: list[Any], sender_on_a_gpu: None) -> None:
    fleet = start_fleet(1, engine_class=OnAGpu, transport="auto")
    assert fleet.sync.send_weights(make_module(), version=1).transport == "collective"
    fleet.sync.add([rws.EngineRef(engine_pool[0], id="on-the-cpu")])
    fleet.sync.wait_serving(2, timeout_s=LIMIT_S)
    module = make_module()
    report = fleet.sync.send_weights(module, version=2)
    assert (report.transport, report.transport_reason) == ("host", "auto: on-the-cpu is on the CPU")
    fleet.sync.remove("on-the-cpu")
    assert fleet.sync.send_weights(module, version=3).transport == "collective"
    assert fleet.serve(module)


def test_a_transport_that_was_asked_for_is_refused_where_it_cannot_get_to_the_engines(
    start_fleet: StartFleet, engine_pool: list[Any], sender_on_a_gpu: None
) -> None:
    fleet = start_fleet(1, engine_class=OnAGpu, transport="collective")
    module = make_module()
    assert fleet.sync.send_weights(module, version=1).transport_reason == "asked for"
    fleet.sync.add([rws.EngineRef(engine_pool[0], id="on-the-cpu")])
    with pytest.raises(rws.RoundAborted, match="on-the-cpu are not on GPUs, and the sender's bytes go from its GPU"):
        fleet.sync.send_weights(make_module(), version=2)
    assert fleet.serve(module)


def test_engines_on_the_trainers_gpu_receive_by_cuda_ipc_in_just_the_rounds_that_have_no_others(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = start_fleet(2, engine_class=VLLMOnAGpu, transport="auto")
    near, far = fleet.engines
    told = ray.get(near.rws_inspect.remote("nonce"), timeout=LIMIT_S)["workers"][0]["device"]
    shared = DeviceFacts.from_wire(told)
    assert shared is not None
    facts = SenderFacts(node_id="node", device=shared, current=shared, nccl=True, vllm=True)
    monkeypatch.setattr(sender_module, "sender_facts", lambda source: facts)
    with contextlib.closing(Trainer(fleet)) as trainer:

        def goes(version: int) -> tuple[str, str]:
            module = make_module()
            report = trainer.send_weights(module, version=version)
            assert fleet.serve(module)
            assert report.transport_reason in str(report)
            return report.transport, report.transport_reason

        transport, why = goes(1)
        assert transport == "host"
        assert why.startswith("auto: r0 share the sender's GPU and not every worker does")
        fleet.sync.remove("r1")
        fleet.engines = [near]
        assert goes(2) == ("native:ipc", f"auto: all workers share the sender's GPU {shared.uuid}")
        fleet.sync.add([rws.EngineRef(far, id="far")])
        fleet.engines = [near, far]
        assert goes(3)[0] == "host"
        fleet.sync.remove("r0")
        fleet.engines = [far]
        assert goes(4) == ("collective", "auto: every worker has a GPU of its own, and NCCL is installed on both sides")
        assert [engine.sent for engine in trainer.engines.made] == [1], "CUDA IPC's trainer engine was made for one round of the four"


def test_what_a_process_without_a_gpu_says_of_itself(ray_cluster: str) -> None:
    facts = sender_facts(rws.ModuleSource(make_module()))
    assert (facts.device, facts.current) == (DeviceFacts("cpu"), None)
    assert facts.node_id == ray.get_runtime_context().get_node_id()
