"""How the kit reaches the workers of an engine that an actor holds, and what it says where it cannot."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from ray_weightsync.engines.facts import EngineFacts, WorkerFacts
from ray_weightsync.engines.ref import EngineRef
from ray_weightsync.errors import ConfigError, WeightSyncError
from ray_weightsync.testing import Faults
from ray_weightsync.testing.sides import EngineSide
from ray_weightsync.testing.spec import FaultSpec
from tests.ray.session.conftest import Fleet
from tests.ray.testing.conftest import files_of_the_kit

LIMIT_S = 30.0
RAISE = FaultSpec(replica="r0", phase="load", kind="raise", rank=1)


class Holder:
    """A synchronous actor that holds a synchronous engine of two workers, with or without the kit's method.

    The workers note their orders. ``answers`` says how each answers: as told, or with an error.
    """

    def __init__(self, has_method: bool, broken: bool = False) -> None:
        self.orders: list[dict[str, Any]] = []
        module = types.ModuleType("extension_of_this_test")
        module.Extension = type("Extension", (), {"rws_fault": lambda worker, order: None} if has_method else {})  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module
        self.broken = broken
        self.llm = type("LLM", (), {each: lambda engine, *args: None for each in REQUIRED})()
        self.llm.collective_rpc = self._collective_rpc
        self.llm.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(worker_extension_cls=f"{module.__name__}.Extension"))

    def _collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        assert method == "rws_fault"
        (order,) = args
        self.orders.append(order)
        if self.broken:
            return [{"error": None, "rank": 0, "world_size": 2, "armed": False}, {"error": "no such thing"}]
        wanted = order["spec"]["rank"] if order["op"] == "arm" else None
        return [{"error": None, "rank": rank, "world_size": 2, "armed": rank == wanted} for rank in range(2)]

    def seen(self) -> list[str]:
        return [order["op"] for order in self.orders]


REQUIRED = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    started: list[Any] = []

    def start(*args: Any) -> Any:
        started.append(ray.remote(Holder).options(num_cpus=0).remote(*args))
        return started[-1]

    yield start
    for actor in started:
        ray.kill(actor)


def side_of(handle: Any) -> EngineSide:
    workers = tuple(WorkerFacts(nonce="n", rank=rank, world_size=2, package_version="0") for rank in range(2))
    facts = EngineFacts(kind="sync", workers=workers)
    return EngineSide(EngineRef(handle, attr="llm"), facts, label="r0", limit_s=LIMIT_S)


def test_a_synchronous_engine_is_given_its_orders_and_healed(start: Callable[..., Any]) -> None:
    handle = start(True)
    side = side_of(handle)
    side.arm("fault", RAISE)
    assert side.reached("fault", 0.01) == (0, False)
    side.disarm()
    assert ray.get(handle.seen.remote(), timeout=LIMIT_S) == ["arm", "heal"]


def test_an_engine_without_the_extension_is_refused_with_what_to_pass_and_asked_nothing(start: Callable[..., Any]) -> None:
    handle = start(False)
    with pytest.raises(ConfigError, match=r"(?s)extension_of_this_test\.Extension.*ray_weightsync\.testing\.vllm_engine_args\(\)"):
        side_of(handle)
    assert ray.get(handle.seen.remote(), timeout=LIMIT_S) == []


def test_a_worker_that_refuses_an_order_is_an_error_with_its_words(start: Callable[..., Any]) -> None:
    side = side_of(start(True, True))
    with pytest.raises(WeightSyncError, match=r"(?s)r0: the order 'arm' of the fault kit was not carried out.*no such thing"):
        side.arm("fault", RAISE)
    before = files_of_the_kit()
    with pytest.raises(WeightSyncError, match="the order 'heal' of the fault kit was not carried out"):
        side.disarm()
    assert len(before - files_of_the_kit()) == 1, "its files are gone all the same"


def test_an_engine_behind_a_url_has_no_rank_faults() -> None:
    with pytest.raises(ConfigError, match="need an engine in a Ray actor"):
        EngineSide(EngineRef("http://127.0.0.1:1"), EngineFacts(kind="http"), label="r0", limit_s=LIMIT_S)


def test_an_actor_that_is_gone_has_no_faults(start: Callable[..., Any]) -> None:
    handle = start(True)
    side = side_of(handle)
    side.arm("fault", RAISE)
    ray.kill(handle)
    with pytest.raises(WeightSyncError, match="r0 is gone, and its faults with it"):
        side.reached("fault", 0)
    side.disarm()


def test_a_coordinator_that_does_not_answer_is_told_with_the_limit(start_fleet: Callable[..., Fleet]) -> None:
    faults = Faults(start_fleet(1).sync, limit_s=1e-6)
    with pytest.raises(WeightSyncError, match="The coordinator did not answer the fault kit") as caught:
        faults.inject("r0", "update", "raise")
    assert caught.value.limit_s == 1e-6


def test_an_error_of_the_test_is_not_hidden_by_a_kit_that_cannot_be_taken_out(start_fleet: Callable[..., Fleet]) -> None:
    fleet = start_fleet(1)

    def test_of_a_user() -> None:
        with Faults(fleet.sync, limit_s=LIMIT_S) as faults:
            faults.inject("r0", "update", "raise")
            faults._coordinator._limit_s = 1e-6
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        test_of_a_user()
    assert "could not be taken out" in caught.value.__notes__[0]
