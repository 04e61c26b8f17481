"""Cases from the field that only a whole session can hold: what lies about a round, odd tensors, many tensors."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import ray
import torch

import ray_weightsync as rws
from ray_weightsync.engines.facts import CONTROL_GROUP
from ray_weightsync.engines.torch_engine import TorchEngineActor, payload_of
from ray_weightsync.trainer.sender import SnapshotSender
from tests.ray.session.conftest import LIMIT_S, Fleet, make_module

StartFleet = Callable[..., Fleet]


class _Lying(TorchEngineActor):
    """Says that all went well and loaded nothing, or what the round before had sent."""

    def __init__(self, make: Any) -> None:
        super().__init__(make)
        self._loads = "what it is given"
        self._slot: Any = None

    @ray.method(concurrency_group=CONTROL_GROUP)
    def lie(self, loads: str) -> None:
        self._loads = loads

    @ray.method(concurrency_group=CONTROL_GROUP)
    def update_weights(self, request: Any) -> None:
        info = payload_of(request, "update_info")
        before, self._slot = self._slot, info["slot"]
        if self._loads == "nothing":
            return
        super().update_weights({"update_info": info | {"slot": before}} if self._loads == "the former snapshot" else request)


Lying: Any = ray.remote(concurrency_groups={CONTROL_GROUP: 4}, num_cpus=0)(_Lying)


@pytest.mark.parametrize(
    ("loads", "words"), [("nothing", "nothing was transferred"), ("the former snapshot", "digest: expected .*, received ")]
)
def test_an_engine_that_says_ok_and_moved_nothing_or_other_bytes_gets_no_version(start_fleet: StartFleet, loads: str, words: str) -> None:
    fleet = start_fleet(2, engine_class=Lying)
    fleet.sync.send_weights(make_module(), version=1)
    ray.get(fleet.engines[1].lie.remote(loads), timeout=LIMIT_S)
    with pytest.raises(rws.ReplicasLost, match=words) as caught:
        fleet.sync.send_weights(make_module(), version=2)
    assert (caught.value.replicas, caught.value.phase) == (("r1",), "outcome")
    honest, liar = fleet.versions()
    assert honest == "2"
    assert liar.startswith("!rws:")
    assert [each.id for each in fleet.sync.serving()] == ["r0"]


class _Mislabelling(TorchEngineActor):
    """Fails the first time that a version is to be published."""

    def __init__(self, make: Any) -> None:
        super().__init__(make)
        self._failed = False
        self._updates_seen = 0

    @ray.method(concurrency_group=CONTROL_GROUP)
    def update_weights(self, request: Any) -> None:
        self._updates_seen += 1
        super().update_weights(request)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def update_weight_version(self, new_version: str) -> None:
        if new_version == "new" and not self._failed:
            self._failed = True
            raise RuntimeError("no label today")
        super().update_weight_version(new_version)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def updates_seen(self) -> int:
        return self._updates_seen


Mislabelling: Any = ray.remote(concurrency_groups={CONTROL_GROUP: 4}, num_cpus=0)(_Mislabelling)


def test_after_a_failure_in_publishing_alone_the_status_tells_who_holds_what_and_a_repeat_is_for_that_one(
    start_fleet: StartFleet,
) -> None:
    engines = [rws.TorchEngine.remote(make_module), Mislabelling.remote(make_module), rws.TorchEngine.remote(make_module)]
    fleet = start_fleet(3, engines=engines)
    module = make_module()
    with pytest.raises(rws.ReplicasLost, match="no label today") as caught:
        fleet.sync.send_weights(module, version="new")
    assert (caught.value.replicas, caught.value.phase) == (("r1",), "commit")
    assert [(each.version, each.serving) for each in fleet.sync.status().replicas] == [("new", True), (None, False), ("new", True)]
    report = fleet.sync.send_weights(module, version="new")
    assert [each.id for each in report.replicas] == ["r1"], "the others are left alone"
    assert fleet.sync.status().ordinal == 1
    assert fleet.versions() == ["new"] * 3
    assert fleet.paused() == [False] * 3
    assert fleet.serve(module)
    for engine in engines:
        ray.kill(engine)


def until_all_have_started(fleet: Fleet) -> None:
    """Wait until an update is open in every engine."""
    deadline = time.monotonic() + LIMIT_S
    while not all(
        ray.get([engine.__ray_call__.remote(lambda actor: actor._gate.update_open) for engine in fleet.engines], timeout=LIMIT_S)
    ):
        assert time.monotonic() < deadline, "an engine does not start"


def test_a_seal_that_is_refused_under_an_overlapped_round_does_not_claim_that_nothing_changed(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = start_fleet(2, fresh=True, transport=rws.Host(overlap=True))
    fleet.sync.send_weights(make_module(), version=1)
    pack = SnapshotSender._pack

    def packed_with_a_useless_digest(self: SnapshotSender, *args: Any) -> Any:
        sealed = pack(self, *args)
        object.__setattr__(sealed, "digest", "no digest")
        until_all_have_started(fleet)  # before that, nothing has changed indeed
        return sealed

    monkeypatch.setattr(SnapshotSender, "_pack", packed_with_a_useless_digest)
    with pytest.raises(rws.FleetTorn, match="could not be sealed"):
        fleet.sync.send_weights(make_module(), version=2)
    assert all(version.startswith("!rws:") for version in fleet.versions())
    monkeypatch.undo()
    module = make_module()
    fleet.sync.send_weights(module, version=2)
    assert fleet.serve(module)


BUCKET = 4096


@pytest.mark.parametrize("overlap", [False, True], ids=["staged", "overlap"])
@pytest.mark.parametrize("rows", [1, BUCKET // 64, BUCKET // 64 + 1, 5 * BUCKET // 64], ids=["smaller", "equal", "larger", "much larger"])
def test_a_tensor_may_have_any_size_beside_the_bucket(start_fleet: StartFleet, rows: int, overlap: bool) -> None:
    make = functools.partial(torch.nn.Linear, 16, rows)  # 64 bytes a row
    engine = rws.TorchEngine.remote(make)
    fleet = start_fleet(1, engines=[engine], transport=rws.Host(overlap=overlap, bucket_bytes=BUCKET))
    module = make()
    fleet.sync.send_weights(module, version=1)
    state = ray.get(engine.state_dict.remote(), timeout=LIMIT_S)
    assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())
    ray.kill(engine)


class Odd(torch.nn.Module):
    """Parameters that are easily lost or bent on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = torch.nn.Parameter(torch.tensor(0.0))
        self.empty = torch.nn.Parameter(torch.zeros(0, 4))
        self.nan = torch.nn.Parameter(torch.zeros(3))
        self.flags = torch.nn.Parameter(torch.zeros(5, dtype=torch.bool), requires_grad=False)
        self.turned = torch.nn.Parameter(torch.zeros(3, 5, dtype=torch.bfloat16))
        self.waves = torch.nn.Parameter(torch.zeros(4, dtype=torch.complex64))

    def forward(self) -> torch.Tensor:
        return self.scalar


def odd_values() -> dict[str, torch.Tensor]:
    return {
        "scalar": torch.tensor(2.5, requires_grad=True),
        "empty": torch.zeros(0, 4),
        "nan": torch.tensor([1.0, float("nan"), float("-inf")]),
        "flags": torch.tensor([True, False, True, True, False]),
        "turned": torch.arange(15, dtype=torch.bfloat16).reshape(5, 3).t(),
        "waves": torch.tensor([1 + 2j, 3 - 4j, 0, 1j]).conj(),
    }


def test_scalars_empty_strided_conjugate_boolean_and_nan_tensors_arrive_bit_for_bit(start_fleet: StartFleet) -> None:
    engine = rws.TorchEngine.remote(Odd)
    fleet = start_fleet(1, engines=[engine])
    values = odd_values()
    fleet.sync.send_weights(values, version=1)
    state = ray.get(engine.state_dict.remote(), timeout=LIMIT_S)
    for name, sent in values.items():
        assert torch.equal(torch.nan_to_num(state[name]), torch.nan_to_num(sent.detach().resolve_conj())), name
        assert (state[name].dtype, state[name].shape) == (sent.dtype, sent.shape)
    with pytest.raises((rws.ConfigError, rws.RoundAborted), match="nan"):
        fleet.sync.send_weights(rws.StateDictSource(odd_values(), reject_nonfinite=True), version=2)
    assert fleet.versions() == ["1"]
    fleet.sync.send_weights(odd_values() | {"nan": torch.ones(3)}, version=2)
    ray.kill(engine)


@pytest.mark.parametrize("bad", [torch.zeros(3, device="meta"), torch.zeros(3).to_sparse()], ids=["meta", "sparse"])
def test_a_tensor_without_plain_values_is_refused_by_name_before_anything_is_asked(start_fleet: StartFleet, bad: torch.Tensor) -> None:
    fleet = start_fleet(1)
    with pytest.raises(rws.ConfigError, match=r"2\.bias"):
        fleet.sync.send_weights({**make_module().state_dict(), "2.bias": bad}, version=1)
    assert fleet.sync.status().epoch == 0
    assert fleet.versions() == ["default"]


VERBS = (
    "rws_inspect",
    "init_weight_transfer_engine",
    "pause_generation",
    "update_weight_version",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "reset_prefix_cache",
    "resume_generation",
)


class _Counting(TorchEngineActor):
    """Remembers every call that a round makes."""

    @ray.method(concurrency_group=CONTROL_GROUP)
    def calls(self) -> list[str]:
        seen = list(self.__dict__.get("seen", ()))
        self.__dict__["seen"] = []
        return seen


def _counted(verb: str) -> Any:
    original = getattr(TorchEngineActor, verb)

    @functools.wraps(original)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.__dict__.setdefault("seen", []).append(verb)
        return original(self, *args, **kwargs)

    return ray.method(concurrency_group=CONTROL_GROUP)(counted)


for each in VERBS:
    setattr(_Counting, each, _counted(each))

Counting: Any = ray.remote(concurrency_groups={CONTROL_GROUP: 4}, num_cpus=0)(_Counting)


def make_many() -> torch.nn.Module:
    """2,000 tiny tensors."""
    return torch.nn.ParameterList([torch.nn.Parameter(torch.rand(2)) for _ in range(2000)])


@pytest.mark.parametrize("overlap", [False, True], ids=["staged", "overlap"])
def test_two_thousand_tiny_tensors_take_the_calls_that_four_do(start_fleet: StartFleet, overlap: bool) -> None:
    calls: dict[int, list[str]] = {}
    for num_tensors, make in ((4, make_module), (2000, make_many)):
        engine = Counting.remote(make)
        fleet = start_fleet(1, engines=[engine], transport=rws.Host(overlap=overlap))
        fleet.sync.send_weights(make(), version=1)
        ray.get(engine.calls.remote(), timeout=LIMIT_S)
        module = make()
        report = fleet.sync.send_weights(module, version=2)
        calls[report.num_tensors] = ray.get(engine.calls.remote(), timeout=LIMIT_S)
        assert report.num_tensors == num_tensors
        state = ray.get(engine.state_dict.remote(), timeout=LIMIT_S)
        assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())
        ray.kill(engine)
    assert calls[2000] == calls[4]
    assert len(calls[4]) <= 10
