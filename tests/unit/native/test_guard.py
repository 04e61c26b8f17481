"""One session of a backend under guard, on fakes: what is asked of whom, and what is never completed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from ray_weightsync.transports.native.backends import traits
from ray_weightsync.transports.native.receiver import NativeReceiver
from ray_weightsync.weights.digest import weights_digest
from ray_weightsync.weights.plan import ParamMeta, Plan
from ray_weightsync.worker.course import Delegate
from ray_weightsync.worker.seams import SoleRank
from ray_weightsync.worker.updates import WorkerUpdates

PAIRS = {"a": torch.arange(4.0), "b": torch.ones(2, 3), "c": torch.zeros(5)}


def plan_of(pairs: dict[str, torch.Tensor], **fields: Any) -> Plan:
    return Plan.from_metadata([ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in pairs.items()], **fields)


PLAN = plan_of(PAIRS)


class Model(torch.nn.Module):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, torch.Tensor] = {}
        self.fail_on: str | None = None

    def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in pairs:
            if name == self.fail_on:
                raise RuntimeError(f"made to fail on {name}")
            self.given[name] = tensor
        return set(self.given)


class Worker:
    """The guarded way into `Model`, its reload, a `ModelLoader` and the order of all that was asked."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.model = Model()
        self.order: list[str] = []
        self.open = False
        self.dirty = False
        self.backends: list[Backend] = []
        self.known = {"ipc", "nccl", "sparse_nccl", "sharded_rdt"}
        self.rank = 0
        self.receiver = NativeReceiver(self, self.model, self, lambda: self.rank)
        self.updates = WorkerUpdates(self, SoleRank(), {"native": self.receiver})
        self.updates.init({"op": "plan", "plan": PLAN.to_wire()})

    @property
    def reload(self) -> Worker:
        return self

    # -- the reload

    def start(self, begin: Callable[[], None] | None = None) -> None:
        assert begin is not None, "a session of ours began"
        self.clear()
        begin()

    def clear(self) -> None:
        if self.open:
            self.order.append("flush")
        self.open = False

    def require_clean(self) -> None:
        if self.open or self.dirty:
            raise RuntimeError("not clean")

    def finish(self, complete: Callable[[], None] | None = None, *, every_layer: bool = True) -> None:
        assert complete is not None
        self.order.append(f"complete every_layer={every_layer}")
        complete()
        self.require_clean()

    def load_by(self, load_weights: Callable[..., Any], pairs: Iterable[tuple[str, torch.Tensor]], seen: Any, /) -> Any:
        return load_weights(pairs)

    # -- the way into the model for sessions of ours

    def check(self, plan: Plan) -> list[str]:
        return []

    def unjudged(self) -> list[str]:
        return []

    def load(self, pairs: Any) -> None:
        raise AssertionError("a session of ours began")

    # -- where backends are had from

    def require(self, name: str) -> None:
        if name not in self.known:
            raise ValueError(f"no backend {name!r}")

    def make(self, name: str) -> Backend:
        self.require(name)
        self.backends.append(Backend(self))
        return self.backends[-1]

    # -- what a coordinator asks

    def choose(self, backend: str = "ipc", init_info: Any = None, round: str = "r1", epoch: int = 1) -> None:
        self.updates.init({"op": "native", "backend": backend, "init_info": init_info, "round": round, "epoch": epoch, "limit_s": 5})

    def session(self, *parts: Any, plan: Plan = PLAN, **fields: Any) -> None:
        self.updates.start()
        for each in parts:
            self.part(each, plan, **fields)
        self.updates.finish()

    def part(self, update_info: Any, plan: Plan = PLAN, **fields: Any) -> None:
        named = {"transport": "native", "backend": "ipc", "round": "r1", "epoch": 1, "plan": plan.digest, "limit_s": 5}
        self.updates.update({**named, "update_info": update_info, **fields})

    def outcome(self, plan: Plan = PLAN, round: str = "r1", **fields: Any) -> None:
        expected = {"plan": plan.digest, "snapshot": "x", "digest": weights_digest(PAIRS), "num_bytes": PLAN.weight_bytes, "num_tensors": 3}
        self.updates.init({"op": "outcome", "round": round, "epoch": 1, "expected": expected | fields})


class Backend:
    """As vLLM's; its update info are the names of `PAIRS` that it is to load, and what it is to do besides."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.fail_at: set[str] = set()
        self.reloads = True

    def _step(self, name: str) -> None:
        self.worker.order.append(name)
        if name in self.fail_at:
            raise RuntimeError(f"made to fail in {name}")

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        self.fail_at = set(init_dict.get("fail_at", ()))
        self._step("parse")
        return init_dict

    def init_transfer_engine(self, init_info: Any) -> None:
        self.worker.open = self.reloads and "init" in self.fail_at
        self._step("init")

    def start_weight_update(self) -> None:
        self.worker.open = self.reloads
        self._step("start")

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        return update_dict

    def update_weights(self, update_info: dict[str, Any]) -> None:
        raise AssertionError("it would wait for an accelerator")

    def receive_weights(self, update_info: Any) -> None:
        for name in update_info["names"]:
            self.worker.model.load_weights(pair for pair in [(name, PAIRS[name])])
        self._step("receive")

    def finish_weight_update(self) -> None:
        self._step("finish")
        self.worker.open = False

    def shutdown(self) -> None:
        self._step("shutdown")


@pytest.fixture
def worker() -> Worker:
    return Worker()


EACH = [{"names": [name]} for name in PAIRS]
SESSION = ["start", "receive", "receive", "receive", "complete every_layer=True", "finish"]


def test_the_receiver_is_one_that_takes_sessions_of_its_own(worker: Worker) -> None:
    assert isinstance(worker.receiver, Delegate)


def test_a_session_of_many_updates_is_attested(worker: Worker) -> None:
    worker.choose(init_info={})
    worker.session(*EACH)
    worker.outcome()
    assert worker.order == ["parse", "init", *SESSION]
    assert set(worker.model.given) == set(PAIRS)


def test_a_backend_is_used_again_and_another_takes_its_place(worker: Worker) -> None:
    worker.choose(init_info={})
    worker.session(*EACH)
    worker.choose()
    worker.session(*EACH)
    worker.outcome()
    worker.choose("nccl", {})
    assert len(worker.backends) == 2
    assert worker.order == ["parse", "init", *SESSION, *SESSION, "shutdown", "parse", "init"]


def test_its_load_weights_is_the_models_own_again_after_each_update(worker: Worker) -> None:
    worker.choose(init_info={})
    worker.session(*EACH)
    assert "load_weights" not in vars(worker.model)
    theirs = worker.model.load_weights
    vars(worker.model)["load_weights"] = theirs
    worker.choose()
    worker.session(*EACH)
    assert vars(worker.model)["load_weights"] is theirs


def test_each_worker_takes_its_own_entry_of_a_list(worker: Worker) -> None:
    worker.rank = 1
    worker.choose(init_info={})
    worker.session([{"names": []}, {"names": list(PAIRS)}])
    worker.outcome()
    worker.rank = 2
    worker.choose()
    worker.session([{"names": []}, {"names": list(PAIRS)}])
    with pytest.raises(ValueError, match="'update_info' has 2 entries, none of them for rank 2 of this replica"):
        worker.outcome()


@pytest.mark.parametrize("name", ["nccl", "ipc"])
def test_a_loader_that_fails_is_not_raised_into_the_backend_and_nothing_more_is_loaded(worker: Worker, name: str) -> None:
    worker.choose(name, {})
    worker.model.fail_on = "b"
    worker.session({"names": ["a", "b", "c"]}, backend=name)
    assert worker.order[2:] == ["start", "receive", "flush", "finish"]
    assert set(worker.model.given) == {"a"}
    with pytest.raises(ValueError, match=r"^rws: rank 0: update_weights: RuntimeError: made to fail on b$"):
        worker.outcome()


@pytest.mark.parametrize(("name", "taken"), [("nccl", 3), ("ipc", 1)])
def test_after_a_failure_updates_are_received_and_dropped_where_others_wait_for_it(worker: Worker, name: str, taken: int) -> None:
    worker.choose(name, {})
    worker.model.fail_on = "a"
    worker.session(*EACH, backend=name)
    assert worker.order.count("receive") == taken
    assert worker.model.given == {}


def test_a_start_that_fails_still_takes_what_a_group_sends(worker: Worker) -> None:
    worker.choose("nccl", {"fail_at": ["start"]})
    worker.session(*EACH, backend="nccl")
    assert worker.order[2:] == ["start", "receive", "receive", "receive", "flush"]
    assert not worker.open
    assert worker.model.given == {}
    with pytest.raises(ValueError, match="start_weight_update: RuntimeError: made to fail in start"):
        worker.outcome()


@pytest.mark.parametrize("step", ["start", "receive", "finish"])
def test_whatever_fails_the_next_session_works(worker: Worker, step: str) -> None:
    worker.choose(init_info={"fail_at": [step]})
    worker.session(*EACH)
    with pytest.raises(ValueError, match=f"made to fail in {step}"):
        worker.outcome()
    worker.backends[0].fail_at = set()
    worker.choose(round="r2")
    worker.session(*EACH, round="r2")
    worker.outcome(round="r2")


@pytest.mark.parametrize(
    ("malformed", "said"),
    [
        (
            {"names": ["a", "b", "c"], "ipc_handles": [{}, {}]},
            r"^rws: rank 0: update_weights: 'c' has no handle: there are 2 for 3 tensors$",
        ),
        ({"names": ["a"], "ipc_handles": [None]}, "'a' has NoneType in place of its handles"),
        ({"shapes": []}, "KeyError: 'names'"),
        (None, "'update_info' must be a dict"),
    ],
)
def test_a_malformed_payload_is_told_and_nothing_of_it_is_loaded(worker: Worker, malformed: Any, said: str) -> None:
    worker.choose(init_info={})
    worker.session(malformed)
    assert worker.model.given == {}
    assert not worker.open
    with pytest.raises(ValueError, match=said):
        worker.outcome()
    worker.choose(round="r2")
    worker.session(*EACH, round="r2")
    worker.outcome(round="r2")


def test_less_than_the_plan_is_flushed_and_named(worker: Worker) -> None:
    worker.choose(init_info={})
    worker.session(*EACH[:2])
    assert worker.order[-3:] == ["receive", "flush", "finish"]
    with pytest.raises(ValueError, match="1 of 3 tensors of the plan did not come: c"):
        worker.outcome()


def test_a_session_without_an_update_is_flushed_and_not_attested(worker: Worker) -> None:
    worker.choose(init_info={})
    worker.session()
    assert worker.order[2:] == ["start", "flush", "finish"]
    with pytest.raises(ValueError, match=r"^rws: rank 0: nothing was transferred"):
        worker.outcome(attested=False)


def test_a_model_that_cannot_be_brought_into_a_clean_state_is_told(worker: Worker) -> None:
    worker.choose(init_info={})
    worker.dirty = True
    worker.session(*EACH[:1])
    with pytest.raises(ValueError, match="the session could not be ended properly: RuntimeError: not clean"):
        worker.outcome()


def test_threads_of_a_backend_are_waited_for_before_anything_is_put_back(worker: Worker) -> None:
    worker.choose("sharded_rdt", {"fail_at": ["receive"]})
    worker.backends[0].drain_pending = lambda: worker.order.append("drain")  # type: ignore[attr-defined]
    worker.session(*EACH, backend="sharded_rdt")
    assert worker.order[2:] == ["start", "receive", "drain", "flush", "finish"]


class TestNotAttested:
    def test_only_its_session_is_compared(self, worker: Worker) -> None:
        worker.choose("sharded_rdt", {})
        worker.session(*EACH[:1], backend="sharded_rdt")
        assert worker.order[-2:] == ["complete every_layer=False", "finish"]
        worker.outcome(attested=False, digest="", num_bytes=0)
        with pytest.raises(ValueError, match="nothing was received that could be attested"):
            worker.outcome()
        with pytest.raises(ValueError, match="plan: expected"):
            worker.outcome(plan_of({"a": PAIRS["a"]}), attested=False)
        with pytest.raises(ValueError, match="round r2 of epoch 1 was asked for"):
            worker.outcome(round="r2", attested=False)

    def test_it_has_the_models_own_load_weights(self, worker: Worker) -> None:
        worker.choose("sparse_nccl", {})
        worker.backends[0].reloads = False
        worker.session(*EACH, backend="sparse_nccl")
        assert set(worker.model.given) == set(PAIRS)
        worker.outcome(attested=False)

    def test_a_partial_plan_is_for_such_a_backend_alone(self, worker: Worker) -> None:
        plan = plan_of({"a": PAIRS["a"]}, partial=True)
        worker.updates.init({"op": "plan", "plan": plan.to_wire()})
        worker.choose("sparse_nccl", {})
        worker.session(EACH[0], plan=plan, backend="sparse_nccl")
        worker.outcome(plan, attested=False)
        worker.choose("ipc", {})
        worker.session(EACH[0], plan=plan)
        with pytest.raises(ValueError, match="is partial; backend 'ipc' can only bring all of a model"):
            worker.outcome(plan, attested=False)

    def test_attested_has_to_be_a_bool(self, worker: Worker) -> None:
        with pytest.raises(ValueError, match="'attested' must be a bool, not 'no'"):
            worker.outcome(attested="no")


class TestChoosing:
    def test_a_backend_that_fails_to_join_is_shut_down_and_what_it_left_open_is_flushed(self, worker: Worker) -> None:
        with pytest.raises(ValueError, match=r"^rws: rank 0: RuntimeError: made to fail in init$"):
            worker.choose(init_info={"fail_at": ["init"]})
        assert worker.order == ["parse", "init", "shutdown", "flush"]
        with pytest.raises(ValueError, match="'ipc' was to be used again, but this worker keeps none; send its init_info"):
            worker.choose()

    def test_a_backend_that_does_not_understand_its_init_info_is_shut_down(self, worker: Worker) -> None:
        with pytest.raises(ValueError, match="made to fail in parse"):
            worker.choose(init_info={"fail_at": ["parse"]})
        assert worker.order == ["parse", "shutdown"]
        with pytest.raises(ValueError, match="this worker keeps none"):
            worker.choose()

    @pytest.mark.parametrize("bad", [[], "text", 7], ids=repr)
    def test_init_info_is_a_dict_or_none(self, worker: Worker, bad: Any) -> None:
        with pytest.raises(ValueError, match="'init_info' must be a dict"):
            worker.choose(init_info=bad)

    def test_one_that_is_unknown_is_refused(self, worker: Worker) -> None:
        for op in ({"op": "see", "transport": "native", "probe": {"backend": "pigeon"}}, {"op": "native", "backend": "pigeon"}):
            with pytest.raises(ValueError, match="no backend 'pigeon'"):
                worker.updates.init({**op, "round": "r1", "epoch": 1, "init_info": {}})

    def test_an_update_of_another_backend_is_refused(self, worker: Worker) -> None:
        worker.choose(init_info={})
        worker.session(EACH[0], backend="nccl")
        with pytest.raises(ValueError, match="this update is of backend 'nccl', the session was begun for 'ipc'"):
            worker.outcome()

    def test_an_update_of_another_round_than_the_one_that_chose_it_is_refused(self, worker: Worker) -> None:
        worker.choose(init_info={})
        worker.session(*EACH, round="r2")
        assert worker.model.given == {}
        with pytest.raises(ValueError, match=r"this update is of round r2 of epoch 1, the session was begun for round r1 of epoch 1$"):
            worker.outcome()

    def test_all_updates_of_a_session_are_of_one_plan(self, worker: Worker) -> None:
        worker.choose(init_info={})
        worker.updates.start()
        worker.part(EACH[0])
        worker.part(EACH[1], plan_of({"b": PAIRS["b"]}))
        worker.updates.finish()
        assert set(worker.model.given) == {"a"}
        with pytest.raises(ValueError, match=r"is of plan \w+, the session's first was of plan "):
            worker.outcome()

    def test_an_older_epoch_is_refused(self, worker: Worker) -> None:
        worker.choose(init_info={}, epoch=3)
        worker.session(*EACH, epoch=3)
        with pytest.raises(ValueError, match="epoch 2 of this update is older than 3"):
            worker.choose(epoch=2)

    def test_it_is_refused_while_an_update_is_open(self, worker: Worker) -> None:
        worker.choose(init_info={})
        worker.updates.start()
        with pytest.raises(ValueError, match="a backend cannot be made while an update is open"):
            worker.choose()
        worker.updates.finish()

    def test_closing_the_worker_shuts_it_down(self, worker: Worker) -> None:
        worker.choose(init_info={})
        worker.updates.close()
        worker.updates.close()
        assert worker.order == ["parse", "init", "shutdown"]


def test_no_backend_is_attested_that_is_not_known_to_load_everything_through_load_weights() -> None:
    names = ("ipc", "nccl", "sparse_nccl", "sharded_rdt", "nccl_m2n", "carrier_pigeon")
    assert [name for name in names if traits(name).attested] == ["ipc", "nccl"]
