"""A synchronous `LLM` in a plain synchronous actor, with requests queued before and behind the update.

Runs before the session's engines are started: it has an engine of its own, and no more than two may be alive.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import ray

import ray_weightsync as rws
from tests.vllm import support
from tests.vllm.holder import EXTENSION
from tests.vllm.support import CALL_LIMIT_S, LEFT_FENCED, NUM_TOKENS, PROMPTS, Pairs

Tokens = list[list[int]]
Answer = tuple[list[int], list[str], int]
"""Tokens, the versions that made them in order, and how many tokens of the prompt came from the prefix cache."""

LONG_PROMPT = [(7 * place) % 2047 for place in range(200)]
"""More than one block (128 tokens on a CPU), so that the prefix cache holds something of it."""


class SyncHolder:
    """An actor that holds an ``LLM``, as a user writes it: nothing of ours but the engine arguments."""

    def __init__(self, model: str) -> None:
        from vllm import LLM

        from ray_weightsync.engines.vllm_args import vllm_engine_args

        ours = vllm_engine_args() | {"worker_extension_cls": EXTENSION}
        self.llm = LLM(model=model, skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=256, **ours)

    def generate(self, prompt: list[int], num_tokens: int) -> Answer:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=num_tokens, temperature=0, detokenize=False, ignore_eos=True)
        (out,) = self.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        spans = [span.version for span in out.outputs[0].weight_versions]
        return list(out.outputs[0].token_ids), spans, out.num_cached_tokens

    def fail(self, *steps: str) -> None:
        self.llm.collective_rpc("rws_test_fail", args=([0], list(steps)))

    def leftovers(self) -> list[str]:
        return [left for worker in self.llm.collective_rpc("rws_test_leftovers") for left in worker]

    def version(self) -> str:
        return str(self.llm.get_weight_version())


@pytest.fixture(scope="module")
def own_engine(checkpoints: Any, fresh_b: dict[int, Tokens]) -> Iterator[Any]:
    """The engine, started after the ones that `fresh_b` needs have ended."""
    actor: Any = ray.remote(SyncHolder).options(num_cpus=0, runtime_env={"env_vars": support.engine_env(1)})
    handle = actor.remote(checkpoints.a)
    ray.get(handle.version.remote(), timeout=support.START_LIMIT_S)
    yield handle
    support.kill_engine(handle)


@pytest.fixture
def sync(own_engine: Any) -> Iterator[rws.WeightSync]:
    with rws.WeightSync.attach([rws.EngineRef(own_engine, attr="llm")], on_failure=LEFT_FENCED) as sync:
        yield sync
    assert ray.get(own_engine.leftovers.remote(), timeout=CALL_LIMIT_S) == []


class Queue:
    """Keeps requests of all prompts waiting in the actor's queue, each prompt's next one as soon as its last was answered."""

    def __init__(self, engine: Any) -> None:
        self.answers: list[tuple[int, Answer]] = []
        """By prompt, in the order of its answers."""
        self._engine = engine
        self._began, self._stop = threading.Event(), threading.Event()
        self._failed: list[BaseException] = []
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(len(PROMPTS))]

    def __enter__(self) -> Queue:
        for thread in self._threads:
            thread.start()
        assert self._began.wait(CALL_LIMIT_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=CALL_LIMIT_S)
        assert not self._failed, self._failed

    def _ask(self, number: int) -> None:
        try:
            while not self._stop.is_set():
                answer = ray.get(self._engine.generate.remote(PROMPTS[number], NUM_TOKENS), timeout=CALL_LIMIT_S)
                self.answers.append((number, answer))
                self._began.set()
        except BaseException as error:  # told by the test's own thread, whatever it is
            self._failed.append(error)


def tokens_of(engine: Any) -> Tokens:
    return [tokens for tokens, _, _ in ray.get([engine.generate.remote(prompt, NUM_TOKENS) for prompt in PROMPTS], timeout=CALL_LIMIT_S)]


@pytest.mark.parametrize("overlap", [False, True], ids=["staged", "overlap"])
def test_requests_queued_around_the_update_are_answered_by_whole_weights_under_their_version(
    own_engine: Any, checkpoints: Any, pairs_a: Pairs, pairs_b: Pairs, fresh_b: dict[int, Tokens], overlap: bool
) -> None:
    with rws.WeightSync.attach(
        [rws.EngineRef(own_engine, attr="llm")], transport=rws.Host(overlap=overlap), on_failure=LEFT_FENCED
    ) as sync:
        sync.send_weights(pairs_a, version="a")
        right = {"a": tokens_of(own_engine), "b": fresh_b[1]}
        assert right["a"] != right["b"]
        with Queue(own_engine) as queue:
            report = sync.send_weights(pairs_b, version="b")
        assert report.committed == ("r0",)
        assert any("no pause" in each for each in report.missing)
        assert sync.status().version == "b"
        assert tokens_of(own_engine) == right["b"]
    made_by = [versions for _, (_, versions, _) in queue.answers]
    assert ["a"] in made_by
    assert ["b"] in made_by, "a request that waits while the update runs is queued behind it"
    assert all(versions in (["a"], ["b"]) for versions in made_by), "no request saw the inside of the update"
    for number, (tokens, (version,), _) in queue.answers:
        assert tokens == right[version][number]


def test_a_broadcast_and_a_round_for_all_or_none_are_refused_and_touch_nothing(own_engine: Any) -> None:
    ref, before = rws.EngineRef(own_engine, attr="llm"), ray.get(own_engine.version.remote(), timeout=CALL_LIMIT_S)
    with pytest.raises(rws.AttachError, match=r"(?s)synchronous LLM.*transport='host'"):
        rws.WeightSync.attach([ref], transport="collective")
    with pytest.raises(rws.AttachError, match="synchronous LLM"):
        rws.WeightSync.attach([ref], transport="host", on_failure=rws.FailurePolicy(after_start="all_or_none"))
    assert ray.get(own_engine.version.remote(), timeout=CALL_LIMIT_S) == before


def test_nothing_of_the_old_weights_is_used_again_not_even_by_a_request_queued_right_behind_the_update(
    own_engine: Any, sync: rws.WeightSync, pairs_a: Pairs, pairs_b: Pairs
) -> None:
    sync.send_weights(pairs_a, version="a")
    cold = ray.get(own_engine.generate.remote(LONG_PROMPT, 4), timeout=CALL_LIMIT_S)
    warm = ray.get(own_engine.generate.remote(LONG_PROMPT, 4), timeout=CALL_LIMIT_S)
    assert (cold[2], warm[2]) == (0, 128)
    sending = threading.Thread(target=lambda: sync.send_weights(pairs_b, version="b"))
    sending.start()
    answers = []
    while not answers or answers[-1][1] != ["b"]:
        answers.append(ray.get(own_engine.generate.remote(LONG_PROMPT, 4), timeout=CALL_LIMIT_S))
    sending.join(timeout=CALL_LIMIT_S)
    *before, after = answers
    assert all((versions, cached) == (["a"], 128) for _, versions, cached in before)
    assert after[2] == 0
    assert after[0] != warm[0]


def test_a_plan_that_it_refuses_touches_nothing(own_engine: Any, sync: rws.WeightSync, pairs_a: Pairs) -> None:
    sync.send_weights(pairs_a, version="good")
    tokens = tokens_of(own_engine)
    half = {name: tensor for name, tensor in pairs_a.items() if "v_proj" not in name}
    with pytest.raises(rws.RoundAborted, match="qkv_proj") as caught:
        sync.send_weights(half, version="bad")
    assert caught.value.phase == "preflight"
    assert ray.get(own_engine.version.remote(), timeout=CALL_LIMIT_S) == "good"
    assert tokens_of(own_engine) == tokens


@pytest.mark.parametrize("step", ["start", "load", "finish"])
def test_an_update_that_fails_inside_is_named_by_its_phase_marked_and_mended_by_the_next_round(
    own_engine: Any, sync: rws.WeightSync, pairs_a: Pairs, pairs_b: Pairs, fresh_b: dict[int, Tokens], step: str
) -> None:
    sync.send_weights(pairs_a, version="old")
    ray.get(own_engine.fail.remote(step), timeout=CALL_LIMIT_S)
    with pytest.raises(rws.FleetTorn, match=f"made to fail in {step}") as caught:
        sync.send_weights(pairs_b, version="new")
    assert caught.value.phase == "outcome"
    assert ray.get(own_engine.version.remote(), timeout=CALL_LIMIT_S).startswith("!rws:")
    _, (version,), _ = ray.get(own_engine.generate.remote(PROMPTS[0], 2), timeout=CALL_LIMIT_S)
    assert version.startswith("!rws:"), "it lives, and what it says carries no valid version"
    ray.get(own_engine.fail.remote(), timeout=CALL_LIMIT_S)
    assert sync.send_weights(pairs_b, version="newer").committed == ("r0",)
    assert tokens_of(own_engine) == fresh_b[1]
