"""One real engine of a mixture-of-experts model with two data-parallel engines inside: an update is attested for both.

vLLM hands every call to both, and returns the first one's answer alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import ray_weightsync as rws
from tests.vllm import holder, support
from tests.vllm.support import CALL_LIMIT_S, NUM_TOKENS, PROMPTS, Driver, Pairs

EXTENSION = "tests.vllm.data_parallel_on_cpu.Extension"
INDICES = (0, 1)


class Holder(holder.Holder):
    """An engine whose requests may choose their data-parallel engine."""

    async def generate_at(self, index: int, prompt: list[int]) -> list[int]:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, detokenize=False, ignore_eos=True)
        request = {"prompt_token_ids": prompt}
        async for out in self.llm.generate(request, sampling, request_id=f"{index}-{prompt[0]}", data_parallel_rank=index):
            last = out.outputs[0]
        return list(last.token_ids)


def start(model: str, **overrides: Any) -> Any:
    actor = ray.remote(Holder).options(num_cpus=0, runtime_env={"env_vars": support.engine_env(2)}, max_concurrency=100)
    return actor.remote(model, 1, extension=EXTENSION, data_parallel_size=2, **overrides)


def tokens_at(handle: Any) -> list[list[list[int]]]:
    """By data-parallel engine, the greedy tokens of the fixed prompts, one request after the other: their batches are the same then."""
    return [[ray.get(handle.generate_at.remote(index, prompt), timeout=CALL_LIMIT_S) for prompt in PROMPTS] for index in INDICES]


@pytest.fixture(scope="module")
def models(vllm_ray: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root: Path = tmp_path_factory.mktemp("experts")
    return support.tiny_mixtral(root / "a", 1), support.tiny_mixtral(root / "b", 2)


@pytest.fixture(scope="module")
def engines(models: tuple[str, str]) -> Iterator[list[Any]]:
    """One of each model. The one of B ends with the test that first needs its tokens."""
    engines = [start(model) for model in models]
    support.started(*engines)
    yield engines
    for handle in engines:
        support.kill_engine(handle)


@pytest.fixture(scope="module")
def fresh_b(engines: list[Any]) -> list[list[list[int]]]:
    handle = engines.pop()
    try:
        return tokens_at(handle)
    finally:
        support.kill_engine(handle)


@pytest.fixture(scope="module")
def experts(engines: list[Any], fresh_b: Any) -> Driver:
    return Driver(engines[0], 1)


@pytest.fixture(scope="module")
def fresh_a(experts: Driver) -> list[list[list[int]]]:
    return tokens_at(experts.handle)


def attach(engine: Driver, **options: Any) -> rws.WeightSync:
    timeouts = rws.Timeouts(health_interval_s=3600)
    ref = rws.EngineRef(engine.handle, attr="llm")
    return rws.WeightSync.attach(ref, timeouts=timeouts, on_failure=support.LEFT_FENCED, **options)


@pytest.mark.parametrize("transport", [rws.Host(), rws.Collective(interface="lo")], ids=["host", "collective"])
def test_both_engines_inside_serve_what_fresh_ones_would(
    experts: Driver, models: tuple[str, str], fresh_a: Any, fresh_b: Any, transport: Any
) -> None:
    pairs_a, pairs_b = map(support.checkpoint, models)
    with attach(experts, transport=transport) as sync:
        for version, pairs, fresh in (("b", pairs_b, fresh_b), ("a", pairs_a, fresh_a)):
            sync.send_weights(pairs, version=version)
            assert (experts.call("get_weight_version"), experts.call("is_paused")) == (version, False)
            assert tokens_at(experts.handle) == fresh


@pytest.mark.parametrize("index", INDICES)
def test_a_load_that_fails_in_either_engine_inside_is_named_by_its_rank_fences_the_replica_and_is_mended_by_a_heal(
    experts: Driver, models: tuple[str, str], fresh_b: Any, index: int
) -> None:
    pairs_a, pairs_b = map(support.checkpoint, models)
    with attach(experts) as sync:
        sync.send_weights(pairs_a, version="a")
        experts.rpc("rws_test_fail_in", index, ["load"])
        with pytest.raises(rws.FleetTorn, match=rf"rank {index}: update_weights: .*made to fail"):
            sync.send_weights(pairs_b, version="torn")
        experts.rpc("rws_test_heal")
        sync.send_weights(pairs_b, version="b")
        assert tokens_at(experts.handle) == fresh_b


STACKED = {
    "experts.gate_up_proj": ("experts.{expert}.w1.weight", "experts.{expert}.w3.weight"),
    "experts.down_proj": ("experts.{expert}.w2.weight",),
}


def stacked(pairs: Pairs) -> Pairs:
    """The checkpoint as some trainers hold it: all experts of a layer in one tensor, gate and up projection in one."""
    held = {name: tensor for name, tensor in pairs.items() if ".experts." not in name}
    for prefix in sorted({name.partition(".experts.")[0] for name in pairs if ".experts." in name}):
        w1, w2, w3 = (
            torch.stack([pairs[f"{prefix}.experts.{expert}.{each}.weight"] for expert in range(4)]) for each in ("w1", "w2", "w3")
        )
        held |= {f"{prefix}.experts.gate_up_proj": torch.cat([w1, w3], dim=1), f"{prefix}.experts.down_proj": w2}
    return held


def test_stacked_experts_are_refused_as_they_are_and_served_when_they_are_split(
    experts: Driver, models: tuple[str, str], fresh_a: Any, fresh_b: Any
) -> None:
    pairs_a, pairs_b = map(support.checkpoint, models)
    with attach(experts) as sync:
        sync.send_weights(pairs_a, version="a")
        with pytest.raises(rws.RoundAborted, match=r"experts\.\S*w13_weight would be given nothing"):
            sync.send_weights(stacked(pairs_b), version="stacked")
        assert (experts.call("get_weight_version"), tokens_at(experts.handle)) == ("a", fresh_a)
        sync.send_weights(rws.StateDictSource(stacked(pairs_b), transform=rws.split_experts(STACKED)), version="split")
        assert tokens_at(experts.handle) == fresh_b


def test_a_plan_that_does_not_fit_is_refused_and_nothing_changes(experts: Driver, models: tuple[str, str]) -> None:
    pairs: Pairs = support.checkpoint(models[1])
    pairs["lm_head.weight"] = pairs["lm_head.weight"][:-1].contiguous()
    with attach(experts) as sync, pytest.raises(rws.RoundAborted, match=r"lm_head\.weight"):
        sync.send_weights(pairs, version="narrow")
    assert experts.call("is_paused") is False
