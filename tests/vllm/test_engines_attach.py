"""Attaching to real engines in somebody's own actor, TP 1 and TP 2."""

from __future__ import annotations

import asyncio

import pytest
import ray

from ray_weightsync.engines.facts import DeviceFacts, EngineFacts
from ray_weightsync.engines.ref import EngineRef
from ray_weightsync.engines.resolve import Engine, inspect, resolve
from ray_weightsync.errors import AttachError
from tests.vllm.support import Driver

LIMIT_S = 60.0


def attached(engine: Driver, **fields: object) -> Engine:
    return asyncio.run(resolve(EngineRef(engine.handle, attr="llm", **fields), limit_s=LIMIT_S))  # type: ignore[arg-type]


def looked(engine: Engine, nonce: str) -> EngineFacts:
    return asyncio.run(inspect(engine, nonce, limit_s=LIMIT_S))


def test_an_unchanged_actor_tells_sizes_identity_and_every_worker(engine: Driver) -> None:
    facts = attached(engine).facts
    size = engine.world_size
    assert (facts.kind, facts.backend, facts.in_step) == ("async", "rws", True)
    assert (facts.world_size, facts.tensor_parallel_size, facts.pipeline_parallel_size, facts.data_parallel_size) == (size, size, 1, 1)
    assert [worker.rank for worker in facts.workers] == list(range(size))
    assert [worker.device for worker in facts.workers] == [DeviceFacts("cpu")] * size
    assert facts.version == engine.call("get_weight_version")
    assert facts.node_id == ray.get_runtime_context().get_node_id()
    assert facts.incarnation


def test_attaching_and_looking_change_nothing(engine: Driver) -> None:
    found = attached(engine)
    before = engine.rpc("rws_test_identities")
    first, second = looked(found, "one"), looked(found, "two")
    assert first.incarnation == second.incarnation == found.facts.incarnation
    assert [worker.nonce for worker in second.workers] == ["two"] * engine.world_size
    assert engine.rpc("rws_test_identities") == before
    assert engine.leftovers() == []
    engine.describe()


def test_a_pause_of_its_user_is_seen_and_left(engine: Driver) -> None:
    found = attached(engine)
    engine.pause()
    assert looked(found, "paused").paused is True
    assert engine.call("is_paused") is True
    engine.call("resume_generation")
    assert looked(found, "running").paused is False


def test_requests_in_flight_are_counted_and_finish(engine: Driver) -> None:
    found = attached(engine)
    engine.pause()
    request = engine.handle.generate.remote([1, 2, 3], 10)
    facts = looked(found, "flight")
    while not facts.unfinished_requests:
        facts = looked(found, "flight")
    assert facts.unfinished_requests == 1
    engine.call("resume_generation")
    assert len(ray.get(request, timeout=LIMIT_S)[0]) == 10


def test_another_world_size_than_configured_is_refused_with_both(engine: Driver) -> None:
    with pytest.raises(AttachError, match=rf"it has {engine.world_size} workers .*world_size=7"):
        attached(engine, world_size=7)
