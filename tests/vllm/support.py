"""What the tests on real engines share: tiny checkpoints, an actor as a user writes one, and a driver of its protocol.

Light on import: vllm and transformers are imported in Ray workers only (in the test's own process they would cost 17 s, and
their warnings are not ours to fix).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
import torch

import ray_weightsync as rws
from ray_weightsync.transports.host.store import SnapshotStore
from ray_weightsync.transports.host.writer import SlotWriter
from ray_weightsync.weights.plan import ParamMeta, Plan
from ray_weightsync.worker.updates import MARKER
from tests.vllm.holder import Holder

REPOSITORY = str(Path(__file__).resolve().parents[2])
PROMPTS = ([1, 2, 3, 4], [2046, 7, 1999, 12, 5], list(range(3, 40)))
NUM_TOKENS = 12
CALL_LIMIT_S = 120
START_LIMIT_S = 400  # 30 s on a quiet machine

Pairs = dict[str, torch.Tensor]

LEFT_FENCED = rws.FailurePolicy(auto_heal=False)
"""For tests that look at a fenced engine: a health check would mend it meanwhile."""


def engine_env(tensor_parallel_size: int) -> dict[str, str]:
    """Environment of an engine on two cores; without the binding TP 2 refuses to start ("Not enough allowed NUMA nodes")."""
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": REPOSITORY, "TOKENIZERS_PARALLELISM": "false"}
    if tensor_parallel_size > 1:
        cores = sorted(os.sched_getaffinity(0))
        env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(tensor_parallel_size))
    return env


@ray.remote(num_cpus=0)
def _write(config_class: str, path: str, seed: int, overrides: dict[str, Any]) -> None:
    import transformers

    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": 2047,  # not a multiple of 64: vLLM pads it, and keeps the embedding's views until finish
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.08,
        "dtype": torch.bfloat16,
    }
    config = getattr(transformers, config_class)(**(shape | overrides))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):  # all ones in every fresh model: a stale one would not be noticed
                parameter.uniform_(0.5, 1.5)
    model.to(torch.bfloat16).save_pretrained(path)


def tiny_llama(path: Path, seed: int, **overrides: Any) -> str:
    """Write a random Llama (7 MB) as a checkpoint to ``path``; ``overrides`` are fields of its ``LlamaConfig``."""
    ray.get(_write.remote("LlamaConfig", str(path), seed, overrides), timeout=CALL_LIMIT_S)
    return str(path)


def tiny_mixtral(path: Path, seed: int) -> str:
    """Write a random mixture of four experts as a checkpoint to ``path``."""
    shape = {"intermediate_size": 256, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    ray.get(_write.remote("MixtralConfig", str(path), seed, shape), timeout=CALL_LIMIT_S)
    return str(path)


def checkpoint(path: str) -> Pairs:
    """A checkpoint's tensors by name, in alphabetical order; a tied head under its own name as well."""
    from safetensors.torch import load_file

    pairs = load_file(f"{path}/model.safetensors")
    if json.loads(Path(path, "config.json").read_text())["tie_word_embeddings"]:
        pairs["lm_head.weight"] = pairs["model.embed_tokens.weight"]
    return pairs


def start_engine(model: str, tensor_parallel_size: int, *, env: Mapping[str, str] | None = None, **overrides: Any) -> Any:
    """A handle to a `Holder` that is starting, with ``env`` on top of what its environment is here."""
    env_vars = {**engine_env(tensor_parallel_size), **(env or {})}
    actor = ray.remote(Holder).options(num_cpus=0, runtime_env={"env_vars": env_vars}, max_concurrency=100)
    return actor.remote(model, tensor_parallel_size, **overrides)


def started(*handles: Any) -> None:
    """Wait until these engines answer."""
    ray.get([handle.call.remote("get_weight_version") for handle in handles], timeout=START_LIMIT_S)


def kill_engine(handle: Any) -> None:
    """SIGKILL for the actor and all that it has started, at once, and the end of their shared memory. vLLM's own way out takes 5 s.

    Trackers of shared memory are left to free what is Python's; what vLLM's CPU workers share among themselves is nobody's then.
    """
    pid: int = ray.get(handle.__ray_call__.remote(lambda actor: os.getpid()), timeout=CALL_LIMIT_S)
    actor = psutil.Process(pid)
    family = [actor, *actor.children(recursive=True)]
    shared: set[Path] = set()
    for process in family:  # before any is killed: the others may end with it
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, and is not waited for
            shared |= {Path(each.path) for each in process.memory_maps() if each.path.startswith("/dev/shm/vllm_dist_")}
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any("resource_tracker" in word for word in process.cmdline()):
                process.kill()
    assert alive_after(CALL_LIMIT_S, family) == []
    for path in shared:
        path.unlink(missing_ok=True)


def alive_after(seconds: float, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run when all have ended, or after that long. One that nobody has asked after yet has ended all the same."""

    def runs(process: psutil.Process) -> bool:
        try:
            return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    deadline = time.monotonic() + seconds
    while alive := [each for each in processes if runs(each)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return alive


def tokens_of(handle: Any) -> list[list[int]]:
    """Greedy tokens of the fixed prompts."""
    return [tokens for tokens, _ in ray.get([handle.generate.remote(prompt, NUM_TOKENS) for prompt in PROMPTS], timeout=CALL_LIMIT_S)]


@dataclass(frozen=True)
class Staged:
    """A sealed snapshot and what an outcome expects of it."""

    plan: Plan
    address: dict[str, Any]
    expected: dict[str, Any]


class Stage:
    """A snapshot store and its writer, as one node has them."""

    def __init__(self) -> None:
        self.store = SnapshotStore(uuid.uuid4().hex[:12], "/dev/shm", 2)
        self._writer = SlotWriter()

    def __call__(self, pairs: Pairs, order: Iterable[str] | None = None) -> Staged:
        """Seal ``pairs``, in ``order`` if given."""
        names = list(pairs) if order is None else list(order)
        plan = plan_of({name: pairs[name] for name in names})
        snapshot = uuid.uuid4().hex
        address = self.store.open_slot(snapshot, plan.digest, plan.num_bytes, False)
        packed = self._writer.write(address, plan, [(name, pairs[name]) for name in names], progress_bytes=1 << 20)
        self.store.seal(snapshot, packed.digest)
        expected = {
            "plan": plan.digest,
            "snapshot": snapshot,
            "digest": packed.digest,
            "num_bytes": packed.num_bytes,
            "num_tensors": packed.num_tensors,
        }
        return Staged(plan, dict(address), expected)

    def close(self) -> None:
        self._writer.close()
        self.store.close()


def plan_of(pairs: Pairs) -> Plan:
    return Plan.from_metadata([ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in pairs.items()])


class Driver:
    """Speaks the protocol to one engine, a call at a time, so that a test can leave out or repeat what it likes."""

    def __init__(self, handle: Any, world_size: int) -> None:
        self.handle = handle
        self.world_size = world_size
        self.round = "none"
        self.epoch = 0

    def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Call the engine and wait.

        Raises:
            Exception: what the engine answered.
        """
        return ray.get(self.handle.call.remote(verb, *args, **kwargs), timeout=CALL_LIMIT_S)

    def supports(self, verb: str) -> bool:
        """Whether this vLLM has the call."""
        return bool(ray.get(self.handle.supports.remote(verb), timeout=CALL_LIMIT_S))

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Every worker's answer."""
        answers: list[Any] = self.call("collective_rpc", method, args=args)
        return answers

    def fail(self, ranks: Sequence[int], *steps: str) -> None:
        self.rpc("rws_test_fail", list(ranks), list(steps))

    def init(self, info: Any) -> None:
        self.call("init_weight_transfer_engine", info)

    def preflight(self, plan: Plan) -> None:
        self.init({"op": "plan", "plan": plan.to_wire(), "limit_s": 60})

    def judge(self, plan: Plan) -> None:
        """Begin the preflight in pieces."""
        self.init({"op": "judge", "plan": plan.to_wire(), "limit_s": 60})

    def looks_until_judged(self) -> int:
        for looks in range(10_000):
            if all(worker["judging"] is None for worker in self.describe()):
                return looks
        raise AssertionError("a worker never comes to a judgement")

    def refusal(self, plan: Plan) -> str:
        """The words in which the engine refuses ``plan``; empty if it accepts it."""
        return _words(lambda: self.preflight(plan))

    def transfer(self, staged: Staged) -> None:
        """A session of a new round, on a paused engine."""
        self.new_round()
        self.call("start_weight_update")
        self.call("update_weights", self.update_info(staged))
        self.call("finish_weight_update")

    def new_round(self) -> None:
        self.epoch = 1 + max(worker["epoch"] for worker in self.describe())  # other tests' sessions count on as well
        self.round = f"round-{self.epoch}"

    def update_info(self, staged: Staged) -> dict[str, Any]:
        return {
            "transport": "host",
            "round": self.round,
            "epoch": self.epoch,
            "plan": staged.plan.digest,
            "limit_s": 30,
            "slot": staged.address,
        }

    def outcome(self, staged: Staged) -> None:
        self.init({"op": "outcome", "round": self.round, "epoch": self.epoch, "expected": staged.expected, "limit_s": 30})

    def complaint(self, staged: Staged) -> str:
        """The words in which the engine says that the round failed; empty if it attests it."""
        return _words(lambda: self.outcome(staged))

    def pause(self) -> None:
        self.call("pause_generation", mode="keep", clear_cache=False)

    def resume(self) -> None:
        self.call("reset_prefix_cache", reset_running_requests=True)
        self.call("resume_generation")

    def bring(self, staged: Staged) -> None:
        """A whole good round; raises if the engine does not attest it."""
        self.preflight(staged.plan)
        self.pause()
        self.transfer(staged)
        self.outcome(staged)
        self.resume()

    def describe(self) -> list[dict[str, Any]]:
        """Every worker's description; asserts that all of them answered this very call."""
        nonce = uuid.uuid4().hex
        told = self.rpc("rws_describe", nonce)
        assert [each["nonce"] for each in told] == [nonce] * self.world_size
        return told

    def leftovers(self) -> list[str]:
        """What an ended session left behind in any worker; always empty if we keep our promise."""
        return [left for worker in self.rpc("rws_test_leftovers") for left in worker]

    def tokens(self) -> list[list[int]]:
        return tokens_of(self.handle)


def _words(call: Any) -> str:
    try:
        call()
    except Exception as error:
        text = str(error)
        assert MARKER in text, f"not our words: {text}"
        return text[text.index(MARKER) :].partition("', please check the stack trace")[0].strip()  # the rest is vLLM's executor's
    return ""
