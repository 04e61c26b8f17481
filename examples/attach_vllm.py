"""Attach to two vLLM engines that run already, and send them new weights while they answer requests: `make demo-vllm`.

Real `AsyncLLM` engines on the CPU, each held by a plain actor in ``self.llm``; a tiny random Llama written here, nothing downloaded.
Three rounds under a stream of requests. The exit status is 0 only if

(a) no request failed,
(b) after each round greedy output equals that of a fresh engine started from the same checkpoint,
(c) every engine reports the version,
(d) requests in flight across a round show both versions, in order, and no tombstone.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import uuid
from itertools import pairwise
from pathlib import Path
from typing import Any

import ray

import ray_weightsync as rws

ENGINES = 2
ROUNDS = ("step-1", "step-2", "step-3")
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
ENGINE_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def write_checkpoint(path: Path, seed: int) -> None:
    """A Llama small enough for a laptop, with random weights. Its vocabulary is no multiple of 64: vLLM pads it."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=2047,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path)


@ray.remote(num_cpus=1)
class Server:
    """Your actor. The one line of ours in it is ``**rws.vllm_engine_args()``."""

    def __init__(self, model: str) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        args = AsyncEngineArgs(
            model=model, skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=512, **rws.vllm_engine_args()
        )
        self.llm = AsyncLLM.from_engine_args(args)

    async def generate(self, max_tokens: int) -> tuple[list[int], list[tuple[str, int, int]]]:
        """Token ids of a greedy continuation, and which weight version made which of them."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, detokenize=False, ignore_eos=True)
        final: Any = None
        async for output in self.llm.generate({"prompt_token_ids": PROMPT}, sampling, request_id=uuid.uuid4().hex):
            final = output
        completion = final.outputs[0]
        return list(completion.token_ids), [(span.version, span.start, span.end) for span in completion.weight_versions]

    async def version(self) -> str:
        return await self.llm.get_weight_version()


class Stream:
    """Keeps every engine busy with long requests until it is stopped; remembers every answer and every failure."""

    def __init__(self, servers: list[Any], in_flight: int = 3, max_tokens: int = 160) -> None:
        self.spans: list[list[tuple[str, int, int]]] = []
        self.failures: list[Exception] = []
        self._servers, self._in_flight, self._max_tokens = servers, in_flight, max_tokens
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=300)

    def _run(self) -> None:
        asked = {server.generate.remote(self._max_tokens): server for server in self._servers for _ in range(self._in_flight)}
        while asked:
            done, _ = ray.wait(list(asked), timeout=120)
            for ref in done:
                server = asked.pop(ref)
                try:
                    self.spans.append(ray.get(ref)[1])
                except Exception as error:  # what kind does not matter: any failed request fails the demo
                    self.failures.append(error)
                if not self._stop.is_set():
                    asked[server.generate.remote(self._max_tokens)] = server
            if not done:
                self.failures.append(TimeoutError(f"{len(asked)} requests have waited for 120 s"))
                return


def fresh_output(model: Path) -> list[int]:
    """What an engine started from this checkpoint says."""
    server = Server.options(runtime_env={"env_vars": ENGINE_ENV}).remote(str(model))
    tokens, _ = ray.get(server.generate.remote(16), timeout=300)
    ray.kill(server)
    return tokens


def run(folder: Path) -> list[str]:
    """Everything that went wrong; empty if nothing did."""
    from transformers import AutoModelForCausalLM

    problems = []
    checkpoints = {version: folder / version for version in ("start", *ROUNDS)}
    for seed, checkpoint in enumerate(checkpoints.values()):
        write_checkpoint(checkpoint, seed)
    print("asking a fresh engine for each checkpoint's output ...", flush=True)
    expected = {version: fresh_output(checkpoints[version]) for version in ROUNDS}

    print(f"starting {ENGINES} engines ...", flush=True)
    actors = [Server.options(runtime_env={"env_vars": ENGINE_ENV}).remote(str(checkpoints["start"])) for _ in range(ENGINES)]
    ray.get([actor.generate.remote(4) for actor in actors], timeout=300)
    stream = Stream(actors)
    with rws.WeightSync.attach([rws.EngineRef(actor, attr="llm") for actor in actors]) as sync:
        for version in ROUNDS:
            model = AutoModelForCausalLM.from_pretrained(checkpoints[version], dtype="bfloat16")
            print(sync.send_weights(model, version=version), flush=True)
            for actor in actors:
                tokens, spans = ray.get(actor.generate.remote(16), timeout=120)
                if tokens != expected[version]:
                    problems.append(f"(b) {version}: {tokens} is not what a fresh engine says: {expected[version]}")
                if ray.get(actor.version.remote(), timeout=60) != version or {span[0] for span in spans} != {version}:
                    problems.append(f"(c) {version}: an engine reports {spans}")
    stream.stop()

    problems += [f"(a) a request failed: {failure}" for failure in stream.failures]
    order = ["default", *ROUNDS]
    crossed = dict.fromkeys(ROUNDS, 0)
    for spans in stream.spans:
        versions = [version for version, _, _ in spans]
        if any(version not in order for version in versions):
            problems.append(f"(d) tokens carry a label that is no version: {versions}")
        elif any(order.index(earlier) >= order.index(later) for earlier, later in pairwise(versions)):
            problems.append(f"(d) versions out of order: {versions}")
        for later in versions[1:]:
            crossed[later] = crossed.get(later, 0) + 1
    problems += [f"(d) no request was in flight across {version}" for version, count in crossed.items() if count == 0]
    print(f"{len(stream.spans)} requests answered; in flight across a round: {crossed}")
    return problems


def main() -> int:
    os.environ.update(ENGINE_ENV)
    ray.init("local", num_cpus=ENGINES + 1, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        problems = run(Path(folder))
    ray.shutdown()
    for problem in problems:
        print(problem)
    print("all checks passed" if not problems else f"{len(problems)} checks failed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
