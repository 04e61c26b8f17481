"""Faults at every phase on two real engines, TP 1 and TP 2, with requests in flight: nothing torn is served, nobody waits for ever.

What is lost is brought back by `heal`, from the sealed snapshot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

import ray_weightsync as rws
from ray_weightsync.testing import Faults
from tests.vllm.stream import Stream
from tests.vllm.support import CALL_LIMIT_S, Driver, Pairs

Tokens = dict[int, list[list[int]]]
LATE_S = 5.0
"""The deadline that a late answer misses. A good call takes a tenth of it."""

BEFORE_START = ("pause", "mark")
AFTER_START = ("start", "update", "finish", "outcome", "commit", "cache", "resume")
REPLICAS = ("r0", "r1")


class Sessions:
    """One session on both engines, used by one test after the other while the same timeouts are wanted and nothing breaks."""

    def __init__(self, *engines: Driver) -> None:
        self.engines = engines
        self._timeouts: rws.Timeouts | None = None
        self._open: rws.WeightSync | None = None

    def with_timeouts(self, timeouts: rws.Timeouts) -> rws.WeightSync:
        if self._open is not None and timeouts == self._timeouts:
            return self._open
        self.close()
        refs = [rws.EngineRef(engine.handle, attr="llm") for engine in self.engines]
        self._timeouts = timeouts
        self._open = rws.WeightSync.attach(refs, timeouts=timeouts, on_failure=rws.FailurePolicy(auto_heal=False))
        return self._open

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


@pytest.fixture(scope="module")
def sessions(engine_tp1: Driver, engine_tp2: Driver) -> Iterator[Sessions]:
    sessions = Sessions(engine_tp1, engine_tp2)
    yield sessions
    sessions.close()


@pytest.fixture
def sync(request: pytest.FixtureRequest, sessions: Sessions, fresh_a: Tokens, pairs_a: Pairs) -> Iterator[rws.WeightSync]:
    """A session on both engines that serves A, committed under a version of this test's own."""
    late = request.node.originalname == test_a_call_that_is_answered_after_its_deadline.__name__
    limits = {f"{request.node.callspec.params['phase']}_s": LATE_S} if late else {}
    sync = sessions.with_timeouts(rws.Timeouts(health_interval_s=3600, **limits))
    try:
        sync.send_weights(pairs_a, version=f"a of {request.node.name}")
        yield sync
        for engine in sessions.engines:
            engine.call("resume_generation")
            assert engine.leftovers() == []
    except BaseException:
        sessions.close()
        raise


@pytest.fixture
def strike(
    request: pytest.FixtureRequest, sync: rws.WeightSync, engine_tp1: Driver, engine_tp2: Driver, pairs_b: Pairs, fresh_b: Tokens
) -> Callable[..., None]:
    """Send B over a fault while requests run, and have what was lost healed."""
    engines = dict(zip(REPLICAS, (engine_tp1, engine_tp2), strict=True))
    a, b = (f"{weights} of {request.node.name}" for weights in "ab")

    def strike(replica: str, phase: str, kind: str) -> None:
        with Stream(engine_tp1) as one, Stream(engine_tp2) as two:
            with Faults(sync, limit_s=CALL_LIMIT_S) as faults:
                faults.inject(replica, phase, kind)
                with pytest.raises(rws.RoundAborted if phase in BEFORE_START else rws.ReplicasLost) as caught:
                    sync.send_weights(pairs_b, version=b)
            assert caught.value.replicas == (replica,)
            if phase in BEFORE_START:
                assert sync.status().version == a
                _settled(sync)
                sync.send_weights(pairs_b, version=b)
            else:
                assert [each.id for each in sync.serving()] == [each for each in REPLICAS if each != replica]
                _settled(sync)
                assert sync.heal().committed == (replica,)
            assert sync.status().serving == REPLICAS
        assert one.versions | two.versions <= {a, b}, "no token was made by torn weights"
        for engine in engines.values():
            assert engine.call("get_weight_version") == b
            assert engine.tokens() == fresh_b[engine.world_size]

    return strike


def _settled(sync: rws.WeightSync) -> None:
    """Wait until both have answered what they were asked: an engine that owes an answer is not used."""

    def owed(actor: Any) -> int:
        return sum(len(replica.unanswered) for replica in actor._coordinator._parts.roster.replicas.values())

    for _ in range(1000):
        if not ray.get(sync.coordinator.__ray_call__.remote(owed), timeout=CALL_LIMIT_S):
            return
        threading.Event().wait(0.05)
    pytest.fail("an engine still owes an answer")


@pytest.mark.parametrize("replica", REPLICAS)
@pytest.mark.parametrize("phase", [*BEFORE_START, *AFTER_START])
def test_a_call_that_fails(strike: Callable[..., None], replica: str, phase: str) -> None:
    strike(replica, phase, "raise")


@pytest.mark.parametrize("phase", [*BEFORE_START, *AFTER_START])
def test_a_call_whose_answer_is_lost(strike: Callable[..., None], phase: str) -> None:
    strike("r1", phase, "lost")


@pytest.mark.parametrize("replica", REPLICAS)
@pytest.mark.parametrize("phase", ["pause", "update", "commit", "resume"])
def test_a_call_that_is_answered_after_its_deadline(strike: Callable[..., None], replica: str, phase: str) -> None:
    strike(replica, phase, "late")
