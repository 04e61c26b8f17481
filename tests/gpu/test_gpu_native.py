"""vLLM's own backends through rounds on real engines: `pip install vllm`, then `python -m pytest tests/gpu` on a machine with two GPUs.

``ipc`` needs one GPU, which trainer and engine share; the others one for each. The scenario is the one that `tests/vllm` runs on a CPU.
Not yet run: no GPU was at hand.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import ray_weightsync as rws
from tests.vllm import stock_session, support

NUM_GPUS = torch.cuda.device_count()


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing
        return False


pytestmark = [
    pytest.mark.gpu(last_run=None),
    pytest.mark.skipif(NUM_GPUS < 1 or not installed("vllm"), reason="needs a GPU and vLLM; run by hand on a machine with them"),
    pytest.mark.timeout(2 * support.START_LIMIT_S),
]

needs_two = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs: NCCL has one rank a GPU")


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [module for module in modules if not installed(module)]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def tokens_of(engine: support.Driver) -> list[list[int]]:
    """As `support.tokens_of`, one prompt after the other: on a GPU, logits depend on what else is in the batch."""
    generate = engine.handle.generate.remote
    return [ray.get(generate(prompt, support.NUM_TOKENS), timeout=support.CALL_LIMIT_S)[0] for prompt in support.PROMPTS]


@dataclass(frozen=True)
class Checkpoints:
    """Directories of two random models, and what a fresh engine says to each."""

    a: str
    b: str
    tokens_a: list[list[int]]
    tokens_b: list[list[int]]


@dataclass(frozen=True)
class Pair:
    """An engine that was started from A, and a trainer."""

    engine: support.Driver
    trainer: Any
    checkpoints: Checkpoints

    def told(self, verb: str, *args: Any) -> Any:
        return ray.get(getattr(self.trainer, verb).remote(*args), timeout=support.CALL_LIMIT_S)

    @contextmanager
    def session(self, transport: Any) -> Iterator[None]:
        self.told("attach", [self.engine.handle], transport)
        yield
        self.told("close")

    def serves(self, version: str, tokens: list[list[int]]) -> None:
        assert (self.engine.call("get_weight_version"), self.engine.call("is_paused")) == (version, False)
        assert tokens_of(self.engine) == tokens

    def three_rounds(self, transport: Any) -> rws.SyncReport:
        """Rounds to B, A and B, each of them served. Returns the last one's report."""
        with self.session(transport):
            self.told("send", self.checkpoints.b, "b")
            self.serves("b", self.checkpoints.tokens_b)
            self.told("send", self.checkpoints.a, "a")
            self.serves("a", self.checkpoints.tokens_a)
            report: rws.SyncReport = self.told("send", self.checkpoints.b, "b again")
        self.serves("b again", self.checkpoints.tokens_b)
        assert report.committed == ("r0",)
        assert report.weights_digest == rws.weights_digest(support.checkpoint(self.checkpoints.b))
        return report


def on_gpu(index: int) -> dict[str, str]:
    """The environment of a process that has this GPU of ours alone, whoever else has it. Ray would lend it once."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    ours = visible.split(",") if visible else [str(number) for number in range(NUM_GPUS)]
    return {"CUDA_VISIBLE_DEVICES": ours[index], "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


@contextmanager
def engine_on(env: dict[str, str], model: str, **overrides: Any) -> Iterator[support.Driver]:
    handle = support.start_engine(model, 1, env=env, gpu_memory_utilization=0.2, **overrides)
    try:
        support.started(handle)
        yield support.Driver(handle, 1)
    finally:
        support.kill_engine(handle)


@contextmanager
def trainer_with(**options: Any) -> Iterator[Any]:
    env = {"PYTHONPATH": support.REPOSITORY, **options.pop("env", {})}
    trainer = (
        ray.remote(stock_session.Owner).options(num_cpus=0, max_concurrency=4, runtime_env={"env_vars": env}, **options).remote("cuda")
    )
    try:
        yield trainer
    finally:
        ray.kill(trainer)


@pytest.fixture(scope="module")
def checkpoints(own_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    root: Path = tmp_path_factory.mktemp("checkpoints")
    paths = [support.tiny_llama(root / name, seed) for seed, name in enumerate(("a", "b"), start=1)]
    tokens = []
    for path in paths:
        with engine_on(on_gpu(0), path) as engine:
            tokens.append(tokens_of(engine))
    return Checkpoints(paths[0], paths[1], tokens[0], tokens[1])


@pytest.fixture(scope="module")
def sharing(checkpoints: Checkpoints) -> Iterator[Pair]:
    """A guarded engine on the trainer's GPU. Nothing is unpickled in its core: it is started as vLLM is by default."""
    with engine_on(on_gpu(0), checkpoints.a) as engine, trainer_with(env=on_gpu(0)) as trainer:
        yield Pair(engine, trainer, checkpoints)


@pytest.fixture(scope="module")
def apart(checkpoints: Checkpoints) -> Iterator[Pair]:
    """A guarded engine on a GPU of its own."""
    with engine_on(on_gpu(1), checkpoints.a) as engine, trainer_with(env=on_gpu(0)) as trainer:
        yield Pair(engine, trainer, checkpoints)


PACKED = {"packed": True, "packed_buffer_size_bytes": 1 << 21}
FORMS = pytest.mark.parametrize("options", [PACKED, {"packed": False}], ids=["packed", "one_by_one"])


@FORMS
def test_a_guarded_engine_on_the_trainers_gpu_is_lent_its_memory_and_attests_what_it_loaded(sharing: Pair, options: dict[str, Any]) -> None:
    report = sharing.three_rounds(rws.Native("ipc", options=options))
    assert report.transport == "native:ipc"
    assert "bytes attested by every worker" in report.guarantees
    assert sharing.engine.leftovers() == []


def test_auto_lends_memory_to_engines_on_the_trainers_gpu(sharing: Pair) -> None:
    report = sharing.three_rounds("auto")
    assert report.transport == "native:ipc"
    assert "all workers share the sender's GPU" in report.transport_reason


@FORMS
def test_an_engine_on_vllms_own_ipc_receives_and_the_report_says_what_is_not_guaranteed(
    checkpoints: Checkpoints, options: dict[str, Any]
) -> None:
    env = {**on_gpu(0), "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # vLLM pickles handles of GPU memory
    stock = {"extension": "", "weight_transfer_config": {"backend": "ipc"}}
    with engine_on(env, checkpoints.a, **stock) as engine, trainer_with(env=on_gpu(0)) as trainer:
        report = Pair(engine, trainer, checkpoints).three_rounds(rws.Native("ipc", options=options))
    assert "r0: it was started on vLLM's own 'ipc' backend" in "\n".join(report.missing)
    assert "bytes attested by every worker" not in report.guarantees


@needs_two
@needs("nccl")
def test_auto_broadcasts_to_engines_on_gpus_of_their_own(apart: Pair) -> None:
    report = apart.three_rounds("auto")
    assert report.transport.startswith("collective")
    assert "every worker has a GPU of its own" in report.transport_reason


@needs_two
@FORMS
def test_vllms_own_broadcast_reaches_a_guarded_engine_and_is_attested(apart: Pair, options: dict[str, Any]) -> None:
    report = apart.three_rounds(rws.Native("nccl", options=options))
    assert report.transport == "native:nccl"
    assert "bytes attested by every worker" in report.guarantees


@needs_two
def test_patches_bring_an_engine_from_one_checkpoint_to_the_other_and_back(apart: Pair) -> None:
    a, b = apart.checkpoints.a, apart.checkpoints.b
    with apart.session("host"):
        apart.told("send", a, "whole")
    with apart.session(rws.Native("sparse_nccl")):
        report = apart.told("send_patches", a, b, "patched")
        assert (report.committed, report.transport) == (("r0",), "native:sparse_nccl")
        apart.serves("patched", apart.checkpoints.tokens_b)
        apart.told("send_patches", b, a, "patched back")
        apart.serves("patched back", apart.checkpoints.tokens_a)


@needs_two
@needs("nccl.m2n")
def test_nccl_m2n_writes_into_the_engines_own_parameters(apart: Pair) -> None:
    report = apart.three_rounds(rws.Native("nccl_m2n"))
    assert report.transport == "native:nccl_m2n"
    assert "bytes attested by every worker" not in report.guarantees


@needs_two
@needs("nixl")
def test_workers_pull_their_parts_by_sharded_rdt(checkpoints: Checkpoints) -> None:
    # Its workers are actors of Ray, and so is who serves them: Ray hands out the GPUs.
    with trainer_with(num_gpus=1) as trainer, engine_on({}, checkpoints.a, distributed_executor_backend="ray") as engine:
        report = Pair(engine, trainer, checkpoints).three_rounds(rws.Native("sharded_rdt"))
    assert report.transport == "native:sharded_rdt"
