"""Rounds by broadcast on two real engines, TP 1 and TP 2 in one group, with requests in flight."""

from __future__ import annotations

import pytest

import ray_weightsync as rws
from ray_weightsync.testing import Faults
from tests.vllm.stream import Stream
from tests.vllm.support import CALL_LIMIT_S, Driver, Pairs

Tokens = dict[int, list[list[int]]]


def attach(engines: list[Driver], **options: object) -> rws.WeightSync:
    refs = [rws.EngineRef(engine.handle, attr="llm") for engine in engines]
    transport = rws.Collective(bucket_bytes=1 << 18, interface="lo", **options)  # type: ignore[arg-type]
    timeouts = rws.Timeouts(health_interval_s=3600)
    return rws.WeightSync.attach(refs, transport=transport, timeouts=timeouts, on_failure=rws.FailurePolicy(auto_heal=False))


def serve(engines: list[Driver], version: str, fresh: Tokens) -> None:
    for engine in engines:
        assert (engine.call("get_weight_version"), engine.call("is_paused")) == (version, False)
        assert engine.tokens() == fresh[engine.world_size]


def test_all_workers_receive_one_broadcast_and_requests_in_flight_show_both_versions(
    engines: list[Driver], pairs_a: Pairs, pairs_b: Pairs, fresh_a: Tokens, fresh_b: Tokens
) -> None:
    with attach(engines) as sync:
        sync.send_weights(pairs_a, version="a")
        serve(engines, "a", fresh_a)
        with Stream(engines[0], num_tokens=150) as one, Stream(engines[1], num_tokens=150) as two:
            report = sync.send_weights(pairs_b, version="b")
            sync.send_weights(pairs_a, version="a again")
            sync.send_weights(pairs_b, version="b again")
        assert report.transport == "collective"
        for stream in (one, two):
            assert {"b", "b again"} & stream.versions
            assert not any(version.startswith("!rws:") for version in stream.versions)
        serve(engines, "b again", fresh_b)


@pytest.mark.parametrize(("replica", "step"), [("r0", "load"), ("r1", "start")])
def test_a_worker_that_cannot_load_is_fenced_alone_and_healed_from_what_was_kept(
    engines: list[Driver], pairs_a: Pairs, pairs_b: Pairs, fresh_a: Tokens, fresh_b: Tokens, replica: str, step: str
) -> None:
    with attach(engines, keep_snapshot=True) as sync:
        sync.send_weights(pairs_a, version="a")
        failing = engines[int(replica[1])]
        failing.fail([failing.world_size - 1], step)
        with pytest.raises(rws.ReplicasLost) as caught:
            sync.send_weights(pairs_b, version="b")
        assert caught.value.replicas == (replica,)
        failing.rpc("rws_test_heal")
        sync.heal(replica)
        serve(engines, "b", fresh_b)


def test_an_engine_that_never_joins_tears_the_group_and_the_next_round_makes_it_whole(
    engines: list[Driver], pairs_a: Pairs, pairs_b: Pairs, fresh_b: Tokens
) -> None:
    with attach(engines) as sync:
        sync.send_weights(pairs_a, version="a")
        with Stream(engines[0]) as one, Stream(engines[1]) as two:
            with Faults(sync, limit_s=CALL_LIMIT_S) as faults:
                faults.inject("r1", "update", "raise")
                with pytest.raises(rws.FleetTorn, match="r1"):
                    sync.send_weights(pairs_b, version="torn")
            sync.send_weights(pairs_b, version="b")
        assert "torn" not in one.versions | two.versions
        assert not any(version.startswith("!rws:") for version in one.versions | two.versions)
        serve(engines, "b", fresh_b)
