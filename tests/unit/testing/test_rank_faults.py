"""Faults inside one worker, on the worker side of this package itself: its updates, its loader, its receiver and a real snapshot."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_weightsync.engines.torch_loader import ModuleLoader
from ray_weightsync.errors import ConfigError
from ray_weightsync.testing import in_engine
from ray_weightsync.testing import worker as worker_module
from ray_weightsync.testing.worker import WorkerFaults, flip_last_byte
from ray_weightsync.transports.host.receiver import HostReceiver
from ray_weightsync.transports.host.store import SnapshotStore
from ray_weightsync.transports.host.writer import SlotWriter
from ray_weightsync.weights.plan import ParamMeta, Plan
from ray_weightsync.worker.receiver import Received
from ray_weightsync.worker.seams import SoleRank
from ray_weightsync.worker.updates import WorkerUpdates

LIMIT_S = 30


def module(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)).requires_grad_(False)


class Worker:
    """One worker with a model, and a sealed snapshot of another model's weights."""

    def __init__(self, store: SnapshotStore, directory: str) -> None:
        self.model, sent = module(1), module(2)
        self.sent = sent.state_dict()
        receiver = HostReceiver()
        self.updates = WorkerUpdates(ModuleLoader(self.model), SoleRank(), {"host": receiver})
        self.flushed = 0
        self.faults = WorkerFaults(self.updates, flush=self._flush)
        self.seams = (self.updates, self.updates._model, receiver)
        self._untouched = [set(vars(each)) for each in self.seams]
        self.directory = directory
        self._epoch = 0
        plan = Plan.from_metadata([ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.sent.items()])
        snapshot = uuid.uuid4().hex
        self._address = store.open_slot(snapshot, plan.digest, plan.num_bytes, False)
        writer = SlotWriter()
        packed = writer.write(self._address, plan, iter(self.sent.items()), progress_bytes=1 << 20)
        writer.close()
        store.seal(snapshot, packed.digest)
        self._expected = {
            "plan": plan.digest,
            "snapshot": snapshot,
            "digest": packed.digest,
            "num_bytes": packed.num_bytes,
            "num_tensors": packed.num_tensors,
        }
        self.updates.init({"op": "plan", "plan": plan.to_wire()})

    def _flush(self) -> None:
        self.flushed += 1

    def inject(self, phase: str, kind: str, **options: Any) -> str:
        fault_id = uuid.uuid4().hex
        spec = {"replica": "r0", "phase": phase, "kind": kind, "rank": 0, **options}
        told = self.faults.obey({"op": "arm", "id": fault_id, "directory": self.directory, "spec": spec})
        assert told["armed"] == (spec["rank"] == 0)
        return fault_id

    def release(self, fault_id: str) -> None:
        in_engine.release(None, self.directory, fault_id)

    def struck(self, fault_id: str, wait_s: float = 0) -> int:
        return in_engine.struck(None, self.directory, fault_id, wait_s)

    def round(self) -> str:
        """A whole session; the words in which the worker refuses to attest it."""
        self._epoch += 1
        named = {"round": f"round {self._epoch}", "epoch": self._epoch}
        self.updates.start()
        self.updates.update({"transport": "host", "plan": self._expected["plan"], "slot": dict(self._address), "limit_s": LIMIT_S, **named})
        self.updates.finish()
        try:
            self.updates.init({"op": "outcome", "expected": self._expected, **named})
        except ValueError as error:
            return str(error)
        return ""

    def holds_what_was_sent(self) -> bool:
        return all(torch.equal(tensor, self.sent[name]) for name, tensor in self.model.state_dict().items())

    def is_untouched(self) -> bool:
        return [set(vars(each)) for each in self.seams] == self._untouched


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    (tmp_path / "faults").mkdir()
    with (
        tempfile.TemporaryDirectory(prefix="rws-tests-", dir="/dev/shm") as memory,
        SnapshotStore(uuid.uuid4().hex[:12], memory, 2) as store,
    ):
        yield Worker(store, str(tmp_path / "faults"))


@pytest.mark.parametrize("phase", ["start", "load", "finish", "outcome"])
def test_a_phase_that_is_made_to_fail_is_told_by_the_outcome_and_the_next_round_is_right(worker: Worker, phase: str) -> None:
    fault = worker.inject(phase, "raise")
    complaint = worker.round()
    assert complaint.startswith("rws: rank 0: ")
    assert f"InjectedFault: made to fail in {phase}" in complaint
    assert worker.struck(fault) == 1
    assert worker.flushed == (phase == "finish"), "a finish that fails leaves the model flushed, as a real one does"
    assert worker.round() == ""
    assert worker.holds_what_was_sent()


class Delegated:
    """A receiver with sessions of its own."""

    many_updates = True

    def __init__(self) -> None:
        self.order: list[str] = []

    def see(self, probe: Mapping[str, Any]) -> None:
        raise NotImplementedError

    open: Any = see

    def prepare(self, info: Mapping[str, Any]) -> None:
        pass

    def join(self) -> None:
        pass

    def course(self) -> Delegated:
        return self

    def start(self) -> None:
        self.order.append("start")

    def update(self, plan: Plan, info: Mapping[str, Any]) -> Received:
        self.order.append("update")
        return Received(snapshot=None, digest="d", num_bytes=1, num_tensors=1)

    def drop(self, info: Mapping[str, Any]) -> None:
        self.order.append("drop")

    def finish(self) -> None:
        self.order.append("finish")


def native_round(worker: Worker, name: str) -> str:
    """A whole session of a delegate; the words in which the worker refuses to attest it."""
    named = {"round": name, "epoch": 9}
    plan = worker.updates.describe("n")["plans"][0]
    worker.updates.init({"op": "native", **named})
    worker.updates.start()
    worker.updates.update({"transport": "native", "plan": plan, "limit_s": LIMIT_S, **named})
    worker.updates.finish()
    try:
        worker.updates.init({"op": "outcome", "expected": {"plan": plan, "attested": False}, **named})
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("phase", "order"),
    [("start", ["drop", "finish"]), ("load", ["start", "drop", "finish"]), ("finish", ["start", "update"])],
    ids=["start", "load", "finish"],
)
def test_a_delegates_session_is_made_to_fail_as_one_of_ours(worker: Worker, phase: str, order: list[str]) -> None:
    delegated = Delegated()
    worker.updates._receivers["native"] = delegated
    worker.inject(phase, "raise")
    assert f"made to fail in {phase}" in native_round(worker, "first")
    assert delegated.order == order
    assert worker.flushed == (phase == "finish")
    assert native_round(worker, "second") == ""


def test_bytes_of_a_delegate_are_not_pretended_to_be_corrupted(worker: Worker) -> None:
    worker.updates._receivers["native"] = Delegated()
    worker.inject("load", "corrupt")
    assert "cannot be corrupted on their way" in native_round(worker, "first")


def test_a_load_that_is_made_to_fail_does_so_half_way(worker: Worker) -> None:
    worker.inject("load", "raise")
    worker.round()
    arrived = [torch.equal(tensor, worker.sent[name]) for name, tensor in worker.model.state_dict().items()]
    assert arrived == [True, True, False, False]


def test_a_fault_of_another_rank_is_not_taken(worker: Worker) -> None:
    fault = worker.inject("load", "raise", rank=1)
    assert worker.round() == ""
    assert worker.struck(fault) == 0


def test_a_fault_strikes_as_often_as_it_is_told(worker: Worker) -> None:
    fault = worker.inject("load", "raise", times=2)
    assert [bool(worker.round()) for _ in range(3)] == [True, True, False]
    assert worker.struck(fault) == 2


def test_one_flipped_byte_changes_the_digest_that_the_receiver_reports_and_the_outcome_refuses_it(worker: Worker) -> None:
    worker.inject("load", "corrupt")
    assert "digest: expected" in worker.round()
    assert not worker.holds_what_was_sent()
    assert worker.round() == "", "the snapshot itself is as it was"
    assert worker.holds_what_was_sent()


def test_a_byte_that_is_flipped_silently_is_found_by_nothing_but_the_weights(worker: Worker) -> None:
    worker.inject("load", "corrupt", silent=True)
    assert worker.round() == ""
    assert not worker.holds_what_was_sent()


def test_a_flipped_byte_is_the_last_one_of_its_tensor_whatever_the_shape() -> None:
    for tensor in (torch.tensor(1.0), torch.ones(3, 1, dtype=torch.bfloat16), torch.empty(0)):
        before = tensor.clone()
        flip_last_byte(tensor)
        assert int((tensor != before).sum()) == min(1, tensor.numel())


def test_a_worker_that_hangs_waits_for_its_release(worker: Worker) -> None:
    for carried_out, complaint in ((True, ""), (False, "it came back at last, and failed")):
        fault = worker.inject("finish", "hang", carried_out=carried_out)
        with ThreadPoolExecutor(1) as thread:
            said = thread.submit(worker.round)
            assert worker.struck(fault, LIMIT_S) == 1
            assert not said.done()
            worker.release(fault)
            assert complaint in said.result(LIMIT_S)
            assert bool(said.result()) != carried_out


def test_a_worker_that_hangs_goes_on_when_the_kit_has_been_taken_out(worker: Worker) -> None:
    fault = worker.inject("load", "hang", carried_out=True)
    with ThreadPoolExecutor(1) as thread:
        said = thread.submit(worker.round)
        assert worker.struck(fault, LIMIT_S) == 1
        in_engine.remove_directory(None, worker.directory)
        assert said.result(LIMIT_S) == ""


def test_a_hang_that_nobody_releases_ends_by_itself(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "MAX_HANG_S", 0.05)
    worker.inject("start", "hang", carried_out=True)
    assert "not released within" in worker.round()


def test_a_slow_phase_is_carried_out(worker: Worker) -> None:
    fault = worker.inject("start", "slow", seconds=0.01)
    assert worker.round() == ""
    assert worker.struck(fault) == 1


def test_healing_leaves_nothing_behind(worker: Worker) -> None:
    worker.inject("load", "raise", times=9)
    worker.inject("finish", "raise", times=9)
    assert not worker.is_untouched()
    worker.faults.obey({"op": "heal"})
    assert worker.is_untouched()
    assert worker.round() == ""


@pytest.mark.parametrize(
    ("order", "error"),
    [
        ({"op": "explode"}, ValueError),
        ({"op": "arm"}, KeyError),
        ({"op": "arm", "id": "x", "directory": "x", "spec": {"replica": "r0", "phase": "update", "kind": "raise", "rank": 0}}, ConfigError),
    ],
    ids=str,
)
def test_an_order_that_cannot_be_understood_changes_nothing(worker: Worker, order: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        worker.faults.obey(order)
    assert worker.is_untouched()


def test_a_worker_that_is_killed_leaves_its_note(tmp_path: Path) -> None:
    code = (
        "from ray_weightsync.testing.spec import FaultSpec; from ray_weightsync.testing.worker import Armed; import sys;"
        "Armed('f', FaultSpec(replica='r0', phase='load', kind='kill', rank=0), sys.argv[1]).strike()"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == -9
    assert in_engine.struck(None, str(tmp_path), "f", 0) == 1


class TestWhoHasTheExtension:
    """Told by looking: a method that is not there must never be called, for that would put an engine's replies out of step."""

    @staticmethod
    def actor(extension: str | None) -> Any:
        parallel = type("Parallel", (), {"worker_extension_cls": extension})()
        config = type("Config", (), {"parallel_config": parallel})()
        llm = type("LLM", (), {"vllm_config": config})()
        return type("Actor", (), {"llm": llm})()

    def test_one_with_the_method_has_it(self) -> None:
        name = f"{__name__}.Extension"
        assert in_engine.extension_of(self.actor(name), "llm") == (name, True)

    @pytest.mark.parametrize("name", ["collections.OrderedDict", "", None])
    def test_another_has_not(self, name: str | None) -> None:
        assert in_engine.extension_of(self.actor(name), "llm") == (name or None, False)


class Extension:
    """Has the kit's method."""

    def rws_fault(self, order: dict[str, Any]) -> dict[str, Any]:
        return {}
