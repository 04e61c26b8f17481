"""Two engines in actors receive one broadcast of the test's process, driven by hand, without a coordinator."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import ray
import torch

from ray_weightsync.config import Collective
from ray_weightsync.engines.torch_engine import TorchEngine
from ray_weightsync.transports.collective.rendezvous import GroupError, RendezvousServer
from ray_weightsync.transports.collective.sender import BroadcastSender
from ray_weightsync.weights.digest import weights_digest
from ray_weightsync.weights.packing import Packed
from ray_weightsync.weights.plan import Plan
from ray_weightsync.weights.sources import ModuleSource

LIMIT_S = 60.0
FOREVER_S = 3600.0
X = torch.linspace(-1, 1, 12).reshape(3, 4)


def make_module(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 800), torch.nn.GELU(), torch.nn.Linear(800, 2))


PLAN = Plan.from_metadata(ModuleSource(make_module()).metadata())


@pytest.fixture
def engines() -> Iterator[list[Any]]:
    handles = [TorchEngine.remote(make_module) for _ in range(2)]
    yield handles
    for handle in handles:
        ray.kill(handle)  # type: ignore[arg-type]


def call(handles: list[Any], verb: str, *args: Any, **kwargs: Any) -> list[Any]:
    answers: list[Any] = ray.get([getattr(handle, verb).remote(*args, **kwargs) for handle in handles], timeout=LIMIT_S)
    return answers


@dataclass
class Broadcast:
    """One round's group, and what engines are told of it."""

    epoch: int
    limit_s: float = LIMIT_S
    world_size: int = 3
    server: RendezvousServer = field(init=False)
    sender: BroadcastSender = field(init=False)

    def __enter__(self) -> Broadcast:
        self.server = RendezvousServer(options=Collective(bucket_bytes=4096), address="127.0.0.1")
        self.sender = BroadcastSender(self.server.meeting.of(self.world_size), limit_s=self.limit_s)
        return self

    def __exit__(self, *_: object) -> None:
        self.sender.close()
        self.server.close()

    def begin(self, engines: list[Any]) -> list[Any]:
        """Everything before the broadcast; the refs are of updates under way."""
        see = {"op": "see", "transport": "collective", "probe": self.server.meeting.probe()}
        call(engines, "init_weight_transfer_engine", {"init_info": see})
        call(engines, "init_weight_transfer_engine", {"init_info": {"op": "plan", "plan": PLAN.to_wire()}})
        call(engines, "pause_generation", mode="keep", clear_cache=False)
        call(engines, "start_weight_update")
        updates = [
            {
                "transport": "collective",
                "plan": PLAN.digest,
                "group": self.server.meeting.of(self.world_size).payload(rank),
                **self._common(),
            }
            for rank, _ in enumerate(engines, 1)
        ]
        return [engine.update_weights.remote({"update_info": update}) for engine, update in zip(engines, updates, strict=True)]

    def attest(self, engines: list[Any], packed: Packed) -> None:
        call(engines, "finish_weight_update")
        expected = {"plan": PLAN.digest, "snapshot": self.server.meeting.of(self.world_size).id, **vars(packed)}
        call(engines, "init_weight_transfer_engine", {"init_info": {"op": "outcome", "expected": expected, **self._common()}})
        call(engines, "resume_generation")

    def _common(self) -> dict[str, Any]:
        return {"round": f"round-{self.epoch}", "epoch": self.epoch, "limit_s": self.limit_s}


def raised(act: Callable[[], Any]) -> str:
    with pytest.raises(ray.exceptions.RayTaskError) as error:
        act()
    return str(error.value)


def test_both_engines_serve_what_one_broadcast_brought(engines: list[Any]) -> None:
    for epoch, seed in ((1, 7), (2, 8)):
        trainer = make_module(seed)
        with Broadcast(epoch) as broadcast:
            updates = broadcast.begin(engines)
            packed = broadcast.sender.send(ModuleSource(trainer), PLAN)
            ray.get(updates, timeout=LIMIT_S)
            broadcast.attest(engines, packed)
        assert packed.digest == weights_digest(trainer)
        for output in call(engines, "forward", X):
            assert torch.equal(output, trainer(X).detach())


def test_the_outcome_refuses_another_digest(engines: list[Any]) -> None:
    with Broadcast(1) as broadcast:
        updates = broadcast.begin(engines)
        packed = broadcast.sender.send(ModuleSource(make_module(3)), PLAN)
        ray.get(updates, timeout=LIMIT_S)
        other = Packed(digest="0" * 32, num_bytes=packed.num_bytes, num_tensors=packed.num_tensors)
        assert "rws: rank 0: digest: expected 0000" in raised(lambda: broadcast.attest(engines, other))


def test_an_engine_killed_in_the_middle_tears_the_other_one_and_a_new_group_mends_it(engines: list[Any]) -> None:
    trainer = make_module(4)
    reached, killed = threading.Event(), threading.Event()

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for position, pair in enumerate(ModuleSource(trainer)):
            if position == 2:
                reached.set()
                assert killed.wait(LIMIT_S)
            yield pair

    (told,) = call(engines[:1], "collective_rpc", "rws_describe", args=("n",))[0]
    survivor = engines[1:]
    with Broadcast(1, limit_s=FOREVER_S) as broadcast:
        updates = broadcast.begin(engines)
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(broadcast.sender.send, pairs(), PLAN)
            assert reached.wait(LIMIT_S)
            os.kill(told["pid"], signal.SIGKILL)
            with pytest.raises(ray.exceptions.RayActorError):
                ray.get(updates[0], timeout=LIMIT_S)
            killed.set()
            with pytest.raises(GroupError, match="of 22464 bytes were sent; nothing more was heard of rank 1"):
                sending.result(LIMIT_S)
        ray.get(updates[1], timeout=LIMIT_S)
        whole = Packed(digest=weights_digest(trainer), num_bytes=PLAN.weight_bytes, num_tensors=len(PLAN.tensors))
        assert "of 22464 bytes were received" in raised(lambda: broadcast.attest(survivor, whole))

    with Broadcast(2, world_size=2) as broadcast:
        updates = broadcast.begin(survivor)
        packed = broadcast.sender.send(ModuleSource(trainer), PLAN)
        ray.get(updates, timeout=LIMIT_S)
        broadcast.attest(survivor, packed)
    assert torch.equal(call(survivor, "forward", X)[0], trainer(X).detach())
