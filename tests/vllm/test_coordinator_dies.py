"""The coordinator is killed in a round of two real engines, TP 1 and TP 2, with requests in flight; its successor settles them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

import ray_weightsync as rws
from ray_weightsync.testing import Faults
from tests.vllm.stream import Stream
from tests.vllm.support import CALL_LIMIT_S, Driver, Pairs

Tokens = dict[int, list[list[int]]]


@pytest.fixture
def sync(engine_tp1: Driver, engine_tp2: Driver, fresh_a: Tokens, pairs_a: Pairs) -> Iterator[rws.WeightSync]:
    """A session on both engines that serves A, committed as "a"."""
    refs = [rws.EngineRef(engine.handle, attr="llm") for engine in (engine_tp1, engine_tp2)]
    with rws.WeightSync.attach(refs, on_failure=rws.FailurePolicy(auto_heal=False)) as sync:
        sync.send_weights(pairs_a, version="a")
        yield sync
    for engine in (engine_tp1, engine_tp2):
        assert engine.leftovers() == []


def whole(engines: tuple[Driver, ...], version: str, fresh: Tokens) -> None:
    for engine in engines:
        assert (engine.call("get_weight_version"), engine.call("is_paused")) == (version, False)
        assert engine.tokens() == fresh[engine.world_size]


@pytest.mark.parametrize("replica", ["r0", "r1"])
@pytest.mark.parametrize("phase", ["mark", "update", "outcome", "commit", "resume"])
def test_at_a_call_of_one_engine(
    sync: rws.WeightSync,
    engine_tp1: Driver,
    engine_tp2: Driver,
    pairs_b: Pairs,
    fresh_a: Tokens,
    fresh_b: Tokens,
    phase: str,
    replica: str,
) -> None:
    engines = (engine_tp1, engine_tp2)
    with Stream(engine_tp1) as one, Stream(engine_tp2) as two:
        with Faults(sync, limit_s=CALL_LIMIT_S) as faults:
            faults.inject(replica, phase, "kill", victim="coordinator")
            try:
                version = sync.send_weights(pairs_b, version="b").version
            except rws.ReplicasLost:
                version = "b"
            except (rws.RoundAborted, rws.FleetTorn):
                version = "a"
        assert sync.status().version == version
        if len(sync.serving()) < len(engines):
            sync.heal()
        assert sync.status().serving == ("r0", "r1")
    assert one.versions | two.versions <= {"a", "b"}, "no token was made by torn weights"
    whole(engines, str(version), fresh_b if version == "b" else fresh_a)


def test_while_one_rank_loads_the_successor_waits_and_brings_the_round_to_its_end(
    sync: rws.WeightSync, engine_tp1: Driver, engine_tp2: Driver, pairs_b: Pairs, fresh_b: Tokens
) -> None:
    outcomes: list[Any] = []
    pid = ray.get(sync.coordinator.__ray_call__.remote(lambda actor: os.getpid()), timeout=CALL_LIMIT_S)
    with Stream(engine_tp1), Stream(engine_tp2), Faults(sync, limit_s=CALL_LIMIT_S) as faults:
        fault = faults.inject("r1", "load", "hang", rank=1, carried_out=True)
        sending = threading.Thread(target=lambda: outcomes.append(sync.send_weights(pairs_b, version="b")))
        sending.start()
        fault.wait_reached(timeout_s=CALL_LIMIT_S)
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + CALL_LIMIT_S
        while sync.status().phase != "recovering":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        fault.release()
        sending.join(CALL_LIMIT_S)
    assert isinstance(outcomes[0], rws.SyncReport)
    whole((engine_tp1, engine_tp2), "b", fresh_b)
