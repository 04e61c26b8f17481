"""Both ends of a data plane as vLLM's are, without vLLM: an engine's receiver, and the trainer engine that sends to it.

The tensors travel inside the calls.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import ray

import ray_weightsync as rws
from ray_weightsync.engines.facts import CONTROL_GROUP
from ray_weightsync.engines.torch_engine import TorchEngineActor
from ray_weightsync.fleet.link import CoordinatorLink
from ray_weightsync.fleet.relay import NativeMembers
from ray_weightsync.protocol.client import VLLMWeightSyncClient
from ray_weightsync.trainer.sender import SnapshotSender
from ray_weightsync.transports.collective.receiver import CollectiveReceiver
from ray_weightsync.transports.host.receiver import HostReceiver
from ray_weightsync.transports.native.arrivals import Arrivals
from ray_weightsync.transports.native.source import RoundSource
from ray_weightsync.weights.plan import Plan
from ray_weightsync.worker.receiver import Delivery, Received
from ray_weightsync.worker.seams import SoleRank
from ray_weightsync.worker.updates import WorkerUpdates
from tests.ray.session.conftest import LIMIT_S, Fleet


class ByCalls:
    """An engine's receiver, whose sessions load what each update holds."""

    many_updates = True

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._arrivals: Arrivals | None = None
        self.inits: list[Any] = []

    def see(self, probe: Mapping[str, Any]) -> None:
        if probe["backend"] not in ("ipc", "nccl"):
            raise ValueError(f"there is no backend {probe['backend']!r}")

    def open(self, plan: Plan, update: Mapping[str, Any]) -> Delivery:
        raise AssertionError("it has sessions of its own")

    def prepare(self, info: Mapping[str, Any]) -> None:
        if info["init_info"] is None and not self.inits:
            raise ValueError("nothing was set up before")
        self.inits.append(info["init_info"])

    def join(self) -> None:
        if self.inits[-1] and self.inits[-1].get("fails"):
            raise OSError("cannot join")

    def course(self) -> ByCalls:
        return self

    def start(self) -> None:
        self._arrivals = None
        self._loader.start()

    def update(self, plan: Plan, info: Mapping[str, Any]) -> Received | None:
        self._arrivals = self._arrivals or Arrivals(plan)
        self._loader.load(self._arrivals.noted(info["update_info"]["pairs"]))
        return self._arrivals.received()

    def drop(self, info: Mapping[str, Any]) -> None:
        pass

    def finish(self) -> None:
        self._loader.finish()


class NativeEngineActor(TorchEngineActor):
    def __init__(self, make_module: Any) -> None:
        super().__init__(make_module)
        self.native = ByCalls(self._loader)
        receivers = {"host": HostReceiver(), "collective": CollectiveReceiver(), "native": self.native}
        self._updates = WorkerUpdates(self._loader, SoleRank(), receivers, resident=lambda: self._resident)


NativeEngine: Any = ray.remote(concurrency_groups={CONTROL_GROUP: 4}, max_concurrency=8, num_cpus=0)(NativeEngineActor)  # type: ignore[call-overload]


class Engines:
    """Makes trainer engines, and remembers them.

    Attributes:
        init_info: What is sent to be set up.
        hangs: The next one hangs between two updates, until it is aborted.
        fails: The next one cannot be made.
    """

    def __init__(self) -> None:
        self.made: list[CallsEngine] = []
        self.init_info: dict[str, Any] = {"rank_offset": 1, "packed": False}
        self.hangs = False
        self.fails = False

    def __call__(self, native: Any) -> Any:
        return self.make

    def make(self, client: VLLMWeightSyncClient, source: RoundSource, members: NativeMembers) -> CallsEngine:
        if self.fails:
            raise OSError("no GPU here")
        engine = CallsEngine(client, source, hangs=self.hangs)
        self.hangs = False
        client.init_weight_transfer_engine(self.init_info)
        self.made.append(engine)
        return engine


class CallsEngine:
    """A trainer engine that puts one tensor into each update."""

    def __init__(self, client: VLLMWeightSyncClient, source: RoundSource, *, hangs: bool) -> None:
        self._client = client
        self._source = source
        self._hangs = hangs
        self.aborted = threading.Event()
        self.ended = threading.Event()
        self.sent = 0

    def send_weights(self) -> None:
        self._client.start_weight_update()
        for name, tensor in self._source:
            self._client.update_weights({"pairs": [(name, tensor.detach())]})
            if self._hangs and not self.aborted.wait(LIMIT_S):
                raise TimeoutError("nobody aborted the engine")
        self._client.finish_weight_update()
        self.sent += 1

    def abort(self, reason: str) -> None:
        self.aborted.set()

    def shutdown(self) -> None:
        self.ended.set()


class Trainer:
    """A sender with trainer engines of the tests."""

    def __init__(self, fleet: Fleet) -> None:
        self.engines = Engines()
        sync = fleet.sync
        settings = ray.get(sync.coordinator.settings.remote(), timeout=LIMIT_S)
        link = CoordinatorLink(sync.name, sync.coordinator, timeouts=settings.timeouts)
        self._sender = SnapshotSender(sync.name, link, settings=settings, engine_maker=self.engines)

    def send_weights(self, source: Any, *, version: int | str) -> rws.SyncReport:
        return self._sender.send(source, version=version)

    def close(self) -> None:
        self._sender.close()
