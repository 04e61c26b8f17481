"""A real TP 2 engine in a reserved place: it takes its executor and its threads from there, not from what vLLM would guess.

Runs before the session's engines are started: no more than two engines may be alive.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import ray

import ray_weightsync as rws
from ray_weightsync.engines.resolve import resolve
from ray_weightsync.fleet.topology import group_of, shape_of
from tests.vllm import support

LIMIT_S = 60.0
ARGS = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "bfloat16", "max_model_len": 256}


def executor_of(actor: Any) -> str:
    return str(actor.llm.vllm_config.parallel_config.distributed_executor_backend)


def test_an_engine_with_two_workers_starts_in_its_place_and_takes_a_new_version(checkpoints: Any) -> None:
    env = support.engine_env(1)  # without the binding to cores that TP 2 needs elsewhere
    with rws.placement.reserve(engines=1, tensor_parallel_size=2, gpus=False) as placed:
        assert "VLLM_CPU_OMP_THREADS_BIND" not in env
        spec = rws.VLLMEngineSpec(checkpoints.a, tensor_parallel_size=2, engine_args=ARGS, env=env, placement=placed)
        with rws.WeightSync.spawn(spec) as sync:
            (engine,) = sync.engines
            found = asyncio.run(resolve(engine, limit_s=LIMIT_S))
            assert found.facts.node_id == placed.engine(0).node_id
            assert ray.get(engine.__ray_call__.remote(executor_of), timeout=LIMIT_S) == "mp"
            assert group_of([shape_of(found)]).table() == "group of 3: 0 sender | 1-2 r0 (TP 2)"
            version = f"v-{secrets.token_hex(4)}"
            sync.send_weights(support.checkpoint(checkpoints.b), version=version)
            sampling = {"max_tokens": 4, "temperature": 0, "detokenize": False, "ignore_eos": True}
            answer = ray.get(engine.generate.remote([1, 2, 3], sampling), timeout=LIMIT_S)
            assert answer["outputs"][0]["weight_versions"] == [(version, 0, 4)]
            support.kill_engine(engine)
