"""The fault kit on two real engines: an actor that holds an `AsyncLLM` of two workers, and one with `EngineMixin` of one.

They are the ones that told what a fresh engine of B says; the last test here ends one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import ray_weightsync as rws
from ray_weightsync.testing import Faults
from tests.vllm.conftest import StartedFromB
from tests.vllm.support import CALL_LIMIT_S, Pairs, tokens_of

Tokens = dict[int, list[list[int]]]


@pytest.fixture(scope="module")
def engines(started_from_b: StartedFromB, fresh_b: Tokens) -> Iterator[list[Any]]:
    yield [started_from_b.held, started_from_b.spawned]
    started_from_b.end()


@pytest.fixture(scope="module")
def sync(engines: list[Any]) -> Iterator[rws.WeightSync]:
    """Both engines: r0 has two workers, r1 has one. Every test leaves them whole."""
    refs = [rws.EngineRef(engines[0], attr="llm"), engines[1]]
    with rws.WeightSync.attach(refs, on_failure=rws.FailurePolicy(auto_heal=False)) as sync:
        yield sync


@pytest.mark.parametrize("phase", ["start", "load", "finish", "outcome"])
@pytest.mark.parametrize(("replica", "rank"), [("r0", 0), ("r0", 1), ("r1", 0)])
def test_one_rank_fails_and_is_named_and_the_next_round_makes_its_engine_whole(
    sync: rws.WeightSync, engines: list[Any], pairs_a: Pairs, pairs_b: Pairs, fresh_b: Tokens, replica: str, rank: int, phase: str
) -> None:
    with Faults(sync) as faults:
        fault = faults.inject(replica, phase, "raise", rank=rank)
        with pytest.raises(rws.ReplicasLost, match=f"rws: rank {rank}: .*made to fail in {phase}") as caught:
            sync.send_weights(pairs_a, version=f"a {replica} {rank} {phase}")
        assert caught.value.replicas == (replica,)
        assert fault.struck() == 1
    report = sync.send_weights(pairs_b, version=f"b {replica} {rank} {phase}")
    assert report.committed == ("r0", "r1")
    assert tokens_of(engines[0]) == fresh_b[2]


@pytest.mark.parametrize(("replica", "rank"), [("r0", 0), ("r0", 1), ("r1", 0)])
def test_a_byte_flipped_in_one_rank_is_refused_in_the_name_of_that_rank(
    sync: rws.WeightSync, engines: list[Any], pairs_a: Pairs, pairs_b: Pairs, fresh_b: Tokens, replica: str, rank: int
) -> None:
    with Faults(sync) as faults:
        faults.inject(replica, "load", "corrupt", rank=rank)
        with pytest.raises(rws.ReplicasLost) as caught:
            sync.send_weights(pairs_a, version=f"a {replica} {rank}")
        assert caught.value.replicas == (replica,)
        assert re.findall(r"rank (\d): digest: expected", str(caught.value)) == [str(rank)]
    assert sync.send_weights(pairs_b, version=f"b {replica} {rank}").committed == ("r0", "r1")
    assert tokens_of(engines[0]) == fresh_b[2]


@pytest.mark.parametrize("replica", ["r0", "r1"])
@pytest.mark.parametrize(("phase", "error"), [("preflight", rws.RoundAborted), ("mark", rws.RoundAborted), ("update", rws.ReplicasLost)])
def test_a_replica_fails_at_the_phase_that_was_named(
    sync: rws.WeightSync, pairs_b: Pairs, replica: str, phase: str, error: type[rws.WeightSyncError]
) -> None:
    with Faults(sync) as faults:
        faults.inject(replica, phase, "raise")
        with pytest.raises(error, match=f"made to fail in {phase}") as caught:
            sync.send_weights(pairs_b, version=f"first {replica} {phase}")
        assert (caught.value.replicas, caught.value.phase) == ((replica,), phase)
    assert sync.send_weights(pairs_b, version=f"second {replica} {phase}").committed == ("r0", "r1")


def test_a_rank_that_hangs_holds_the_round_until_it_is_released(sync: rws.WeightSync, pairs_b: Pairs) -> None:
    staged = sync.stage_weights(pairs_b, version="held")
    with Faults(sync) as faults:
        fault = faults.inject("r0", "load", "hang", rank=1, carried_out=True)
        commit = _commit_on_another_thread(sync, staged)
        fault.wait_reached(timeout_s=CALL_LIMIT_S)
        assert sync.status().phase == "update"
        fault.release()
        assert commit.result(CALL_LIMIT_S).committed == ("r0", "r1")


def test_a_rank_that_is_killed_costs_its_engine_and_the_other_one_commits(sync: rws.WeightSync, pairs_a: Pairs) -> None:
    """The last test here: the engine of two is gone."""
    with Faults(sync) as faults:
        fault = faults.inject("r0", "load", "kill", rank=1)
        with pytest.raises(rws.ReplicasLost) as caught:
            sync.send_weights(pairs_a, version="without r0")
        fault.wait_reached(timeout_s=CALL_LIMIT_S)
        assert caught.value.replicas == ("r0",)
    assert [replica.id for replica in sync.serving()] == ["r1"]


def _commit_on_another_thread(sync: rws.WeightSync, staged: Any) -> Any:
    with_one = ThreadPoolExecutor(1)
    future = with_one.submit(sync.commit_weights, staged)
    with_one.shutdown(wait=False)
    return future
