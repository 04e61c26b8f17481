"""Two real engines, TP 1 and TP 2, receive one gloo broadcast of the test's process, driven by hand."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray

from ray_weightsync.config import Collective
from ray_weightsync.transports.collective.rendezvous import RendezvousServer
from ray_weightsync.transports.collective.sender import BroadcastSender
from ray_weightsync.weights.digest import weights_digest
from ray_weightsync.weights.packing import Packed
from tests.vllm.support import CALL_LIMIT_S, Driver, Pairs, plan_of

Tokens = dict[int, list[list[int]]]

BUCKET_BYTES = 1 << 19
"""Seven MB of weights in many buckets, and an embedding that is larger than one."""


def broadcast(engines: list[Driver], pairs: Pairs) -> tuple[Packed, RendezvousServer]:
    """One round but for outcome and resume, on paused engines: every worker joins in its update, the sender meanwhile."""
    plan = plan_of(pairs)
    world_size = 1 + sum(engine.world_size for engine in engines)
    with (
        RendezvousServer(options=Collective(bucket_bytes=BUCKET_BYTES), address="127.0.0.1") as server,
        BroadcastSender(server.meeting.of(world_size), limit_s=CALL_LIMIT_S) as sender,
        ThreadPoolExecutor(1) as pool,
    ):
        epoch = 1 + max(worker["epoch"] for engine in engines for worker in engine.describe())
        for engine in engines:
            engine.init({"op": "see", "transport": "collective", "probe": server.meeting.probe()})
            engine.preflight(plan)
            engine.pause()
            engine.epoch, engine.round = epoch, f"round-{epoch}"
            engine.call("start_weight_update")
        sending = pool.submit(sender.send, list(pairs.items()), plan)
        updates = []
        rank_offset = 1
        for engine in engines:
            group = server.meeting.of(world_size).payload(rank_offset)
            rank_offset += engine.world_size
            common = {"round": engine.round, "epoch": epoch, "plan": plan.digest, "limit_s": CALL_LIMIT_S}
            updates.append(engine.handle.call.remote("update_weights", {"transport": "collective", "group": group, **common}))
        packed = sending.result(CALL_LIMIT_S)
        ray.get(updates, timeout=CALL_LIMIT_S)
    for engine in engines:
        engine.call("finish_weight_update")
    return packed, server


def expected_of(pairs: Pairs, packed: Packed, server: RendezvousServer) -> dict[str, Any]:
    return {"plan": plan_of(pairs).digest, "snapshot": server.meeting.id, **vars(packed)}


def attest(engine: Driver, expected: dict[str, Any]) -> None:
    engine.init({"op": "outcome", "round": engine.round, "epoch": engine.epoch, "expected": expected, "limit_s": 30})


def test_engines_of_one_and_two_workers_serve_what_one_broadcast_brought_and_so_does_the_way_back(
    engines: list[Driver], pairs_a: Pairs, pairs_b: Pairs, fresh_a: Tokens, fresh_b: Tokens
) -> None:
    assert any(tensor.nbytes > BUCKET_BYTES for tensor in pairs_b.values())
    for pairs, fresh in ((pairs_b, fresh_b), (pairs_a, fresh_a)):
        packed, server = broadcast(engines, pairs)
        assert packed.digest == weights_digest(pairs)
        for engine in engines:
            attest(engine, expected_of(pairs, packed, server))
            engine.resume()
            assert engine.tokens() == fresh[engine.world_size]
            assert engine.leftovers() == []


def test_a_loader_that_fails_on_one_engine_leaves_the_other_one_whole(
    engines: list[Driver], pairs_a: Pairs, pairs_b: Pairs, fresh_b: Tokens
) -> None:
    whole, broken = engines
    broken.fail([1], "load")
    packed, server = broadcast(engines, pairs_b)
    expected = expected_of(pairs_b, packed, server)
    attest(whole, expected)
    whole.resume()
    assert whole.tokens() == fresh_b[1]
    with pytest.raises(Exception, match="rws: rank 1: update_weights: "):
        attest(broken, expected)
    broken.rpc("rws_test_heal")
    packed, server = broadcast([broken], pairs_b)
    attest(broken, expected_of(pairs_b, packed, server))
    broken.resume()
    assert broken.tokens() == fresh_b[2]


def test_every_worker_attests_the_digest_of_what_it_received(engines: list[Driver], pairs_b: Pairs) -> None:
    packed, server = broadcast(engines, pairs_b)
    expected = expected_of(pairs_b, packed, server)
    for engine in engines:
        with pytest.raises(Exception, match=f"rank {engine.world_size - 1}: snapshot: expected "):
            attest(engine, expected | {"snapshot": uuid.uuid4().hex})
        attest(engine, expected)
        engine.resume()
