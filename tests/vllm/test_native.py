"""Native rounds on two real engines, TP 1 and TP 2, with requests in flight.

``nccl`` is vLLM's own on both sides, unmodified, over gloo; ``ipc`` needs GPUs, and is stood in for by a backend that is asked for the
same, registered under its name with vLLM's factories on both sides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import ray

import ray_weightsync as rws
from tests.vllm import support
from tests.vllm.conftest import Checkpoints
from tests.vllm.native_trainer import start_trainer
from tests.vllm.stream import Stream
from tests.vllm.support import CALL_LIMIT_S, Driver

Tokens = dict[int, list[list[int]]]

EXTENSION = "tests.vllm.native_backends.Extension"


@dataclass
class Native:
    """Guarded engines, what engines that were started from A say, and a trainer."""

    drivers: list[Driver]
    fresh_a: Tokens
    trainer: Any

    def serve(self, version: str, fresh: Tokens) -> None:
        for driver in self.drivers:
            assert (driver.call("get_weight_version"), driver.call("is_paused")) == (version, False)
            assert driver.tokens() == fresh[driver.world_size]
            assert driver.leftovers() == []

    @contextlib.contextmanager
    def session(self, transport: rws.Native) -> Iterator[tuple[rws.WeightSync, Any]]:
        """A session on them, and the trainer, which has joined it."""
        refs = [rws.EngineRef(driver.handle, attr="llm") for driver in self.drivers]
        timeouts = rws.Timeouts(health_interval_s=3600)
        with rws.WeightSync.attach(refs, transport=transport, timeouts=timeouts, on_failure=support.LEFT_FENCED) as sync:
            ray.get(self.trainer.join.remote(sync.name), timeout=CALL_LIMIT_S)
            try:
                yield sync, self.trainer
                ray.get(self.trainer.leave.remote(), timeout=CALL_LIMIT_S)
            except BaseException:
                self._another_trainer()
                raise

    def _another_trainer(self) -> None:
        ray.kill(self.trainer)
        self.trainer = start_trainer()


@pytest.fixture(scope="module")
def native(checkpoints: Checkpoints, fresh_b: Tokens) -> Iterator[Native]:
    handles = {tp: support.start_engine(checkpoints.a, tp, extension=EXTENSION) for tp in (1, 2)}
    trainer = start_trainer()
    support.started(*handles.values())
    drivers = [Driver(handle, tp) for tp, handle in handles.items()]
    native = Native(drivers, {driver.world_size: driver.tokens() for driver in drivers}, trainer)
    yield native
    ray.kill(native.trainer)
    for driver in native.drivers:
        support.kill_engine(driver.handle)


def send(trainer: Any, checkpoint: str, version: str, **options: Any) -> rws.SyncReport:
    report: rws.SyncReport = ray.get(trainer.send.remote(checkpoint, version, **options), timeout=CALL_LIMIT_S)
    return report


@pytest.mark.parametrize(
    "transport",
    [
        rws.Native("ipc", options={"at_once": 11}),
        rws.Native("nccl", options={"packed": True, "packed_buffer_size_bytes": 1 << 19}),
        rws.Native("nccl", options={"packed": False}),
    ],
    ids=["ipc", "nccl_packed", "nccl_one_by_one"],
)
def test_round_after_round_is_served_and_requests_in_flight_show_whole_versions(
    native: Native, checkpoints: Checkpoints, fresh_b: Tokens, transport: rws.Native
) -> None:
    with native.session(transport) as (sync, trainer):
        one, two = (Stream(driver, num_tokens=100) for driver in native.drivers)
        with one, two:
            report = send(trainer, checkpoints.b, "b")
            send(trainer, checkpoints.a, "a")
            send(trainer, checkpoints.b, "b again")
        assert (report.committed, report.transport) == (("r0", "r1"), f"native:{transport.backend}")
        assert report.weights_digest == rws.weights_digest(support.checkpoint(checkpoints.b))
        assert "bytes attested by every worker" in report.guarantees
        assert not any(version.startswith("!rws:") for version in one.versions | two.versions)
        native.serve("b again", fresh_b)
        send(trainer, checkpoints.a, "a again")
        native.serve("a again", native.fresh_a)
        if transport.backend == "ipc":
            assert ray.get(trainer.made.remote(), timeout=CALL_LIMIT_S) == 1
        assert sync.status().ranks == "group of 4: 0 sender | 1 r0 | 2-3 r1 (TP 2)"


@pytest.mark.parametrize("options", [{"colour": "red"}, {"rank": 1}, {"world_size": 3}])
def test_options_that_the_backend_does_not_have_or_that_are_ours_are_refused(
    native: Native, checkpoints: Checkpoints, options: dict[str, Any]
) -> None:
    with native.session(rws.Native("ipc", options=options)) as (_, trainer):
        before = [driver.call("get_weight_version") for driver in native.drivers]
        with pytest.raises(rws.ConfigError, match=f"cannot have {next(iter(options))}; options of this backend: at_once"):
            send(trainer, checkpoints.b, "never")
        assert [driver.call("get_weight_version") for driver in native.drivers] == before


def test_a_worker_that_cannot_load_is_fenced_alone_and_the_next_round_makes_it_whole(
    native: Native, checkpoints: Checkpoints, fresh_b: Tokens
) -> None:
    for backend in ("ipc", "nccl"):
        with native.session(rws.Native(backend)) as (_, trainer):
            send(trainer, checkpoints.a, f"{backend} a")
            native.drivers[1].fail([1], "raise in load")
            with pytest.raises(rws.ReplicasLost, match="made to fail in load_weights"):
                send(trainer, checkpoints.b, f"{backend} torn")
            native.drivers[1].rpc("rws_test_heal")
            assert send(trainer, checkpoints.b, f"{backend} b").committed == ("r0", "r1")
            native.serve(f"{backend} b", fresh_b)


def test_an_engine_that_is_killed_in_the_middle_of_an_update_keeps_nobody_else_from_the_version(
    native: Native, checkpoints: Checkpoints, fresh_b: Tokens
) -> None:
    with native.session(rws.Native("ipc")) as (sync, trainer):
        send(trainer, checkpoints.a, "before")
        sending = trainer.send.remote(checkpoints.b, "b", 2 * 7 + 1)
        assert ray.get(trainer.wait_stopped.remote(), timeout=CALL_LIMIT_S)
        support.kill_engine(native.drivers.pop(1).handle)
        ray.get(trainer.go_on.remote(), timeout=CALL_LIMIT_S)
        with pytest.raises(rws.ReplicasLost) as caught:
            ray.get(sending, timeout=CALL_LIMIT_S)
        assert caught.value.replicas == ("r1",)
        native.serve("b", fresh_b)
        assert send(trainer, checkpoints.a, "after").committed == ("r0",)
        native.serve("after", native.fresh_a)
        assert ray.get(trainer.made.remote(), timeout=CALL_LIMIT_S) == 2
        assert [replica.id for replica in sync.serving()] == ["r0"]
