"""Cases from the field that only a whole session on real engines can hold: caches, versions over failures, sessions left open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray
import torch

import ray_weightsync as rws
from ray_weightsync.engines.facts import CONTROL_GROUP
from ray_weightsync.engines.torch_engine import TorchEngineActor
from tests.vllm.support import CALL_LIMIT_S, PROMPTS, Driver, Pairs

Tokens = dict[int, list[list[int]]]

BLOCK = 128
"""Tokens that the prefix cache of a CPU engine holds together."""
LONG = [(11 * place) % 2047 for place in range(BLOCK + 60)]
OTHER = [(13 * place) % 2047 for place in range(BLOCK + 2)]


@contextmanager
def attached(engine: Driver, *more: Any, **options: Any) -> Iterator[rws.WeightSync]:
    """A session on the engine, and on whatever else."""
    with rws.WeightSync.attach([rws.EngineRef(engine.handle, attr="llm"), *more], **options) as sync:
        yield sync


def cached(engine: Driver, prompt: list[int] = LONG, cache_salt: str | None = None) -> int:
    return int(ray.get(engine.handle.cached_tokens.remote(prompt, cache_salt), timeout=CALL_LIMIT_S))


def generated(engine: Driver, prompt: list[int], num_tokens: int) -> list[int]:
    tokens, _ = ray.get(engine.handle.generate.remote(prompt, num_tokens), timeout=CALL_LIMIT_S)
    return list(tokens)


def in_flight(engine: Driver, prompt: list[int], num_tokens: int) -> Any:
    """A request that is running when this returns: a short one behind it was answered."""
    request = engine.handle.generate.remote(prompt, num_tokens)
    ray.get(engine.handle.generate.remote([5], 2), timeout=CALL_LIMIT_S)
    return request


def half_fused(pairs: Pairs) -> Pairs:
    return {name: tensor for name, tensor in pairs.items() if "v_proj" not in name}


class TestCache:
    def test_with_recompute_nothing_of_the_old_weights_is_used_again(self, engine: Driver, pairs_a: Pairs, pairs_b: Pairs) -> None:
        with attached(engine) as sync:
            sync.send_weights(pairs_a, version="a")
            assert [cached(engine), cached(engine)] == [0, BLOCK]
            staged = sync.stage_weights(pairs_b, version="b")
            request = in_flight(engine, OTHER, 120)
            report = sync.commit_weights(staged)
            assert cached(engine) == 0, "the same prompt as before the round"
            tokens, spans = ray.get(request, timeout=CALL_LIMIT_S)
            assert report.requests_recomputed == 1
            assert [version for version, _, _ in spans] == ["a", "b"]
            switch = spans[0][2]
            again = generated(engine, [*OTHER, *tokens[:switch]], 120 - switch)
            assert tokens[switch:] == again, "it goes on as a request that begins there, by the new weights alone"

    def test_a_round_that_is_refused_throws_no_cache_away(self, engine: Driver, pairs_a: Pairs) -> None:
        with attached(engine) as sync:
            sync.send_weights(pairs_a, version="a")
            assert [cached(engine), cached(engine)] == [0, BLOCK]
            with pytest.raises(rws.RoundAborted):
                sync.send_weights(half_fused(pairs_a), version="b")
            assert cached(engine) == BLOCK

    def test_a_round_that_aborts_after_the_pause_throws_no_cache_away_and_frozen_requests_go_on(
        self, engine_tp1: Driver, fresh_a: Tokens, pairs_a: Pairs, pairs_b: Pairs
    ) -> None:
        other = Unmarkable.remote(lambda: module_of(pairs_a))
        with attached(engine_tp1, other) as sync:
            sync.send_weights(pairs_a, version="a")
            assert [cached(engine_tp1), cached(engine_tp1)] == [0, BLOCK]
            ray.get(other.refuse_marks.remote(), timeout=CALL_LIMIT_S)
            staged = sync.stage_weights(pairs_b, version="b")
            request = in_flight(engine_tp1, OTHER, 120)
            with pytest.raises(rws.RoundAborted, match="no tombstones here") as caught:
                sync.commit_weights(staged)
            assert (caught.value.phase, caught.value.replicas) == ("mark", ("r1",))
            tokens, spans = ray.get(request, timeout=CALL_LIMIT_S)
            assert {version for version, _, _ in spans} == {"a"}
            assert tokens == generated(engine_tp1, OTHER, 120)
            assert cached(engine_tp1) == BLOCK
            assert engine_tp1.call("get_weight_version") == "a"
            assert engine_tp1.tokens() == fresh_a[1]
        ray.kill(other)

    def test_with_keep_what_was_cached_is_used_on(self, engine: Driver, pairs_a: Pairs, pairs_b: Pairs) -> None:
        with attached(engine, cache="keep") as sync:
            engine.call("reset_prefix_cache")
            sync.send_weights(pairs_a, version="a")
            assert [cached(engine), cached(engine)] == [0, BLOCK]
            report = sync.send_weights(pairs_b, version="b")
            assert cached(engine) == BLOCK
            assert "cache policy 'keep'" in report.guarantees
        engine.call("reset_prefix_cache")

    def test_with_salt_requests_of_one_version_share_and_those_of_two_do_not(self, engine: Driver, pairs_a: Pairs, pairs_b: Pairs) -> None:
        with attached(engine, cache="salt") as sync:
            view = sync.view()
            for version, pairs in (("a", pairs_a), ("b", pairs_b)):
                sync.send_weights(pairs, version=version)
                view.wait_for_version(version, timeout_s=CALL_LIMIT_S)
                assert [cached(engine, cache_salt=view.cache_salt) for _ in range(2)] == [0, BLOCK]
        engine.call("reset_prefix_cache")


class _Unmarkable(TorchEngineActor):
    """A member of the fleet that can be paused and then refuses its tombstone."""

    def __init__(self, make: Any) -> None:
        super().__init__(make)
        self._refuses = False

    @ray.method(concurrency_group=CONTROL_GROUP)
    def refuse_marks(self) -> None:
        self._refuses = True

    @ray.method(concurrency_group=CONTROL_GROUP)
    def update_weight_version(self, new_version: str) -> None:
        if self._refuses and new_version.startswith("!rws:"):
            raise RuntimeError("no tombstones here")
        super().update_weight_version(new_version)


Unmarkable: Any = ray.remote(concurrency_groups={CONTROL_GROUP: 4}, num_cpus=0)(_Unmarkable)


def module_of(pairs: Pairs) -> torch.nn.Module:
    """A module with parameters of these names."""
    root = torch.nn.Module()
    for name, tensor in pairs.items():
        *path, leaf = name.split(".")
        here = root
        for part in path:
            if not hasattr(here, part):
                here.add_module(part, torch.nn.Module())
            here = getattr(here, part)
        here.register_parameter(leaf, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    return root


def test_versions_go_from_default_over_a_failed_round_to_the_next_and_a_request_across_it_names_both(
    engine: Driver, pairs_a: Pairs, pairs_b: Pairs, fresh_b: Tokens
) -> None:
    engine.call("update_weight_version", "default")  # as every engine starts
    with attached(engine, transport=rws.Host(num_slots=3)) as sync:
        assert (sync.status().version, sync.status().ordinal) == ("default", 0)
        staged = sync.stage_weights(pairs_a, version="v1")
        first = in_flight(engine, PROMPTS[0], 200)
        sync.commit_weights(staged)
        assert _versions(first) == ["default", "v1"]
        staged = sync.stage_weights(pairs_b, version="v2")
        across = in_flight(engine, PROMPTS[0], 240)
        with pytest.raises(rws.RoundAborted):
            sync.send_weights(half_fused(pairs_b), version="refused")
        assert _versions(across) == ["v1"], "the refused round left no trace"
        second = in_flight(engine, PROMPTS[0], 240)
        assert (engine.call("get_weight_version"), sync.status().version) == ("v1", "v1")
        assert sync.commit_weights(staged).ordinal == 2
        assert _versions(second) == ["v1", "v2"]
        staged = sync.stage_weights(pairs_a, version="v3")
        third = in_flight(engine, PROMPTS[0], 240)
        engine.fail(range(engine.world_size), "load")
        with pytest.raises(rws.FleetTorn):
            sync.commit_weights(staged)
        assert _versions(third) == ["v2"], "released, by whole weights alone"
        assert sync.status().version == "v2", "the version moves only with a commit"
        engine.rpc("rws_test_heal")
        sync.send_weights(pairs_b, version="v3")
        assert engine.tokens() == fresh_b[engine.world_size]


def _versions(request: Any) -> list[str]:
    _, spans = ray.get(request, timeout=CALL_LIMIT_S)
    return [version for version, _, _ in spans]


def test_an_update_that_another_client_left_open_is_flushed_on_request_alone(engine: Driver, pairs_b: Pairs, fresh_b: Tokens) -> None:
    engine.pause()
    engine.call("start_weight_update")
    with pytest.raises(rws.AttachError, match="take_over"), attached(engine):
        pass
    assert [worker["update_open"] for worker in engine.describe()] == [True] * engine.world_size, "left as found"
    with attached(engine, take_over=True) as sync:
        assert [each.state for each in sync.status().replicas] == ["QUARANTINED"]
        sync.send_weights(pairs_b, version="whole")
        assert engine.tokens() == fresh_b[engine.world_size]
