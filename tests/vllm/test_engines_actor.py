"""`VLLMEngineActor` and `EngineMixin` around a real `AsyncLLM`: spawned, attached, asked while its slots are taken."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray

from ray_weightsync.engines.resolve import Engine, inspect, resolve
from ray_weightsync.engines.specs import VLLMEngineSpec
from ray_weightsync.errors import AttachError
from ray_weightsync.protocol.channel import PAUSE, RESUME, SET_VERSION
from tests.vllm import support
from tests.vllm.conftest import StartedFromB

LIMIT_S = 60.0
SLOTS = StartedFromB.SLOTS
GREEDY = {"max_tokens": 20, "temperature": 0, "detokenize": False, "ignore_eos": True}


@pytest.fixture
def actor(started_from_b: StartedFromB) -> Any:
    return started_from_b.spawned


def attached(handle: Any) -> Engine:
    return asyncio.run(resolve(handle, limit_s=LIMIT_S))


def test_a_spawned_engine_fits_and_tells_what_it_is(actor: Any) -> None:
    facts = attached(actor).facts
    assert (facts.kind, facts.world_size, facts.backend, facts.version, facts.paused) == ("async", 1, "rws", "default", False)
    assert facts.workers[0].resident == ("weights", "kv_cache")
    assert facts.vllm_version is not None


def test_a_request_returns_plain_data_with_the_version_that_made_each_token(actor: Any) -> None:
    answer = ray.get(actor.generate.remote([1, 2, 3], GREEDY), timeout=LIMIT_S)
    (output,) = answer["outputs"]
    assert answer["prompt_token_ids"] == [1, 2, 3]
    assert len(output["token_ids"]) == 20
    assert output["weight_versions"] == [("default", 0, 20)]


def test_control_calls_arrive_while_frozen_requests_hold_every_slot(actor: Any) -> None:
    engine = attached(actor)

    async def control() -> list[Any]:
        await engine.channel.call(PAUSE, mode="keep", clear_cache=False)
        requests = [actor.generate.remote([4, 5, each], GREEDY) for each in range(SLOTS + 2)]
        facts = await inspect(engine, "n1", limit_s=LIMIT_S)
        while (facts.unfinished_requests or 0) < SLOTS:
            facts = await inspect(engine, "n2", limit_s=LIMIT_S)
        assert facts.paused is True
        assert facts.in_step
        await engine.channel.call(SET_VERSION, "v1")
        await engine.channel.call(RESUME)
        return list(await asyncio.gather(*requests))

    answers = asyncio.run(asyncio.wait_for(control(), 3 * LIMIT_S))
    assert [answer["outputs"][0]["weight_versions"] for answer in answers] == [[("v1", 0, 20)]] * (SLOTS + 2)
    assert attached(actor).facts.version == "v1"


def test_an_engine_that_cannot_start_says_where_to_look(checkpoints: Any) -> None:
    args = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "bfloat16", "max_model_len": 1 << 20}
    with pytest.raises(AttachError, match="failed to start") as raised:
        VLLMEngineSpec(checkpoints.a, num_cpus=0, engine_args=args, env=support.engine_env(1)).spawn(300)
    assert raised.value.engine_message
    assert "log" in str(raised.value)
