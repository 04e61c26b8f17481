"""The main job on two real engines, TP 1 and TP 2 in one fleet, with requests in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch

import ray_weightsync as rws
from tests.vllm.stream import Stream
from tests.vllm.support import CALL_LIMIT_S, PROMPTS, Driver, Pairs

Tokens = dict[int, list[list[int]]]
Attach = Callable[..., rws.WeightSync]


class Fleet:
    """Both engines under one session, and what a test asks of them."""

    def __init__(self, *engines: Driver) -> None:
        self.engines = engines

    def serves(self, fresh: Tokens) -> bool:
        """Whether both say what fresh engines of their size say."""
        return all(engine.tokens() == fresh[engine.world_size] for engine in self.engines)

    def versions(self) -> list[str]:
        return [engine.call("get_weight_version") for engine in self.engines]

    def paused(self) -> list[bool]:
        return [engine.call("is_paused") for engine in self.engines]

    def requests(self, num_tokens: int = 240) -> list[Any]:
        """Two long requests on each engine, running when this returns."""
        refs = [engine.handle.generate.remote(prompt, num_tokens) for engine in self.engines for prompt in PROMPTS[:2]]
        # Short ones are answered after the long ones have begun.
        ray.get([engine.handle.generate.remote(PROMPTS[0], 2) for engine in self.engines], timeout=CALL_LIMIT_S)
        return refs


@pytest.fixture
def fleet(engine_tp1: Driver, engine_tp2: Driver, fresh_a: Tokens) -> Iterator[Fleet]:
    fleet = Fleet(engine_tp1, engine_tp2)
    yield fleet
    for engine in fleet.engines:
        engine.rpc("rws_test_heal")
        engine.call("resume_generation")
        assert engine.leftovers() == []


@pytest.fixture
def attach(fleet: Fleet) -> Iterator[Attach]:
    sessions: list[rws.WeightSync] = []

    def attach(**options: Any) -> rws.WeightSync:
        # What a test finds fenced, or lets go itself, must not be healed or fenced again while it looks.
        options.setdefault("timeouts", rws.Timeouts(health_interval_s=3600))
        sessions.append(rws.WeightSync.attach([rws.EngineRef(engine.handle, attr="llm") for engine in fleet.engines], **options))
        return sessions[-1]

    yield attach
    for session in sessions:
        session.close()


def spans_of(requests: list[Any]) -> list[list[str]]:
    """The versions that made each request's tokens, in order."""
    return [[version for version, _, _ in spans] for _, spans in ray.get(requests, timeout=CALL_LIMIT_S)]


@pytest.mark.parametrize("overlap", [False, True], ids=["staged", "overlap"])
def test_both_engines_serve_what_fresh_ones_would_and_requests_in_flight_show_both_versions(
    fleet: Fleet, attach: Attach, pairs_a: Pairs, pairs_b: Pairs, fresh_a: Tokens, fresh_b: Tokens, overlap: bool
) -> None:
    sync = attach(transport=rws.Host(overlap=overlap, bucket_bytes=1 << 16))
    for version, pairs, fresh in (("b", pairs_b, fresh_b), ("a", pairs_a, fresh_a), ("b again", pairs_b, fresh_b)):
        before = fleet.versions()
        with Stream(fleet.engines[0], num_tokens=150) as one, Stream(fleet.engines[1], num_tokens=150) as two:
            report = sync.send_weights(pairs, version=version)
        assert report.committed == ("r0", "r1")
        assert report.weights_digest == rws.weights_digest(pairs)
        assert fleet.versions() == [version] * 2
        for old, traffic in zip(before, (one, two), strict=True):
            assert [old, version] in traffic.spans, "a request was in flight across the round"
            assert all(spans in ([old], [old, version], [version]) for spans in traffic.spans)
        assert report.requests_recomputed == 4
        assert fleet.serves(fresh), "nothing of the old weights, not even a cached prefix, is used again"


def test_a_staged_version_is_served_only_when_it_is_committed(
    fleet: Fleet, attach: Attach, pairs_a: Pairs, pairs_b: Pairs, fresh_a: Tokens, fresh_b: Tokens
) -> None:
    sync = attach()
    report = sync.send_weights(pairs_a, version=1)
    why = "auto: the weights are on the CPU (the sender's process has no GPU)"
    assert (report.transport, report.transport_reason) == ("host", why), "nobody named a transport"
    staged = sync.stage_weights(pairs_b, version=2)
    assert fleet.paused() == [False, False]
    assert fleet.serves(fresh_a)
    sync.commit_weights(staged)
    assert fleet.serves(fresh_b)


def half_fused(pairs: Pairs) -> Pairs:
    return {name: tensor for name, tensor in pairs.items() if "v_proj" not in name}


def wrong_shape(pairs: Pairs) -> Pairs:
    return pairs | {"model.norm.weight": torch.zeros(3, dtype=torch.bfloat16)}


def unknown_name(pairs: Pairs) -> Pairs:
    return pairs | {"model.layers.9.mlp.up_proj.weight": pairs["model.layers.1.mlp.up_proj.weight"]}


def wrong_dtype(pairs: Pairs) -> Pairs:
    return {name: tensor.to(torch.float16) for name, tensor in pairs.items()}


@pytest.mark.parametrize("spoil", [half_fused, wrong_shape, unknown_name, wrong_dtype], ids=lambda spoil: spoil.__name__)
def test_a_plan_that_the_models_refuse_touches_nobody(
    fleet: Fleet, attach: Attach, pairs_a: Pairs, fresh_a: Tokens, spoil: Callable[[Pairs], Pairs]
) -> None:
    sync = attach()
    sync.send_weights(pairs_a, version="good")
    requests = fleet.requests(60)
    with pytest.raises(rws.RoundAborted) as caught:
        sync.send_weights(spoil(pairs_a), version="bad")
    assert caught.value.phase == "preflight"
    assert caught.value.replicas == ("r0", "r1")
    assert spans_of(requests) == [["good"]] * 4
    assert fleet.versions() == ["good"] * 2
    assert fleet.serves(fresh_a)


@pytest.mark.parametrize("step", ["start", "load", "finish"])
@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]], ids=["rank 0", "rank 1", "both"])
def test_an_engine_one_of_whose_ranks_fails_is_fenced_released_and_made_whole_by_the_next_round(
    fleet: Fleet, attach: Attach, pairs_a: Pairs, pairs_b: Pairs, fresh_b: Tokens, step: str, ranks: list[int]
) -> None:
    sync = attach()
    sync.send_weights(pairs_a, version="old")
    failing = fleet.engines[1]
    failing.fail(ranks, step)
    requests = fleet.requests()
    with pytest.raises(rws.ReplicasLost, match=f"rank {ranks[0]}") as caught:
        sync.send_weights(pairs_b, version="new")
    assert caught.value.replicas == ("r1",)
    assert caught.value.phase == "outcome"
    assert [each.id for each in sync.serving()] == ["r0"]
    whole, torn = fleet.engines
    assert whole.call("get_weight_version") == "new"
    assert whole.tokens() == fresh_b[1]
    assert torn.call("get_weight_version").startswith("!rws:")
    assert torn.call("is_paused") is True
    spans = spans_of(requests)
    assert all(each in (["old"], ["old", "new"]) for each in spans[:2])
    assert spans[2:] == [["old"]] * 2, "frozen requests went back to their callers, by old weights alone"
    failing.rpc("rws_test_heal")
    report = sync.send_weights(pairs_b, version="newer")
    assert report.committed == ("r0", "r1")
    assert fleet.serves(fresh_b)


def test_an_engine_that_its_user_paused_gets_the_weights_and_stays_paused(
    fleet: Fleet, attach: Attach, pairs_a: Pairs, pairs_b: Pairs, fresh_b: Tokens
) -> None:
    sync = attach()
    sync.send_weights(pairs_a, version=1)
    fleet.engines[0].pause()
    sync.send_weights(pairs_b, version=2)
    assert fleet.paused() == [True, False]
    assert fleet.versions() == ["2", "2"]
    fleet.engines[0].call("resume_generation")
    assert fleet.serves(fresh_b)


def test_tokens_that_a_woken_torn_engine_makes_carry_the_tombstone(fleet: Fleet, attach: Attach, pairs_a: Pairs, pairs_b: Pairs) -> None:
    sync = attach()
    sync.send_weights(pairs_a, version=1)
    torn = fleet.engines[1]
    torn.fail([1], "finish")
    with pytest.raises(rws.ReplicasLost):
        sync.send_weights(pairs_b, version=2)
    torn.call("resume_generation")  # by somebody else
    ((span,),) = spans_of([torn.handle.generate.remote(PROMPTS[0], 4)])
    assert span.startswith("!rws:")
    torn.rpc("rws_test_heal")
    assert sync.send_weights(pairs_b, version=3).committed == ("r0", "r1")
