"""Rounds toward engines of one and two workers that were started on vLLM's own ``nccl`` backend: nothing of ours is in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import ray

import ray_weightsync as rws
from tests.vllm import stock_session, support
from tests.vllm.conftest import Checkpoints
from tests.vllm.stream import Stream

Tokens = dict[int, list[list[int]]]

UPDATE_S = 10.0

COLLECTIVE = rws.Collective(bucket_bytes=1 << 19, interface="lo")
VLLMS_OWN = rws.Native("nccl", options={"packed_buffer_size_bytes": 1 << 19})


@dataclass
class Stock:
    """Two engines and a trainer."""

    one: support.Driver
    two: support.Driver
    trainer: Any
    checkpoints: Checkpoints
    fresh: dict[str, Tokens]

    def told(self, verb: str, *args: Any) -> Any:
        return ray.get(getattr(self.trainer, verb).remote(*args), timeout=support.CALL_LIMIT_S)

    def send(self, which: str, version: str, **options: Any) -> rws.SyncReport:
        report: rws.SyncReport = self.told("send", getattr(self.checkpoints, which), version, *options.values())
        return report

    def serves(self, version: str, which: str, *engines: support.Driver) -> None:
        for engine in engines or (self.one, self.two):
            assert (engine.call("get_weight_version"), engine.call("is_paused")) == (version, False)
            assert engine.tokens() == self.fresh[which][engine.world_size]


@pytest.fixture(scope="module")
def stock(checkpoints: Checkpoints, fresh_b: Tokens) -> Iterator[Stock]:
    trainer = stock_session.start_trainer()
    one, two = (stock_session.start_engine(checkpoints.a, size) for size in (1, 2))
    support.started(one.handle, two.handle)
    fresh_a = {engine.world_size: engine.tokens() for engine in (one, two)}
    yield Stock(one, two, trainer, checkpoints, {"a": fresh_a, "b": fresh_b})
    for engine in (one, two):
        with contextlib.suppress(ray.exceptions.RayActorError):  # the last test kills one
            support.kill_engine(engine.handle)
    ray.kill(trainer)


@pytest.fixture
def session(stock: Stock, request: pytest.FixtureRequest) -> Iterator[Stock]:
    """A session on the engines named by the parameter, by its transport."""
    engines, transport = request.param
    stock.told("attach", [getattr(stock, name).handle for name in engines], transport)
    yield stock
    stock.told("close")


def on(*engines: str, transport: Any = COLLECTIVE) -> tuple[tuple[str, ...], Any]:
    return engines, transport


@pytest.mark.parametrize("session", [on("one", "two"), on("one", "two", transport=VLLMS_OWN)], indirect=True, ids=["ours", "vllms"])
def test_rounds_reach_every_worker_with_requests_in_flight_and_the_report_says_what_is_not_guaranteed(session: Stock) -> None:
    with Stream(session.one) as one, Stream(session.two) as two:
        report = session.send("b", "b")
    assert report.committed == ("r0", "r1")
    assert report.weights_digest == rws.weights_digest(support.checkpoint(session.checkpoints.b))
    for stream in (one, two):
        assert not any(version.startswith("!rws:") for version in stream.versions)
    session.serves("b", "b")
    missing = "\n".join(report.missing)
    for words in ("r0: it was started on vLLM's own 'nccl' backend", "r1: it has 2 workers", "headers of its checkpoint", "healed"):
        assert words in missing
    assert "bytes attested by every worker" not in report.guarantees
    assert [replica.attested for replica in session.told("status").replicas] == [False, False]
    session.send("a", "a")  # in the same group
    session.serves("a", "a")
    assert session.send("a", "a").repeated


@pytest.mark.parametrize("session", [on("one", "two")], indirect=True)
def test_a_wrong_shape_is_refused_by_the_checkpoints_headers_before_anything_changes(session: Stock) -> None:
    before = [engine.call("get_weight_version") for engine in (session.one, session.two)]
    with pytest.raises(rws.RoundAborted, match=r"'model\.norm\.weight' is bfloat16 of shape \[256\] there, and would be .* \[257\]"):
        session.send("b", "misshapen", reshaped="model.norm.weight")
    assert [engine.call("get_weight_version") for engine in (session.one, session.two)] == before
    session.serves(before[0], "a")


@pytest.mark.parametrize("session", [on("one", "two")], indirect=True)
def test_a_source_that_fails_midway_costs_no_engine_and_the_next_round_serves_on_all(session: Stock) -> None:
    with pytest.raises(rws.FleetTorn, match="the optimizer is broken"):
        session.told("send_and_fail", session.checkpoints.b, "torn")
    assert all(engine.call("get_weight_version").startswith("!rws:") for engine in (session.one, session.two))
    assert session.send("b", "b").committed == ("r0", "r1")
    session.serves("b", "b")
    session.send("a", "a")


@pytest.mark.parametrize("session", [on("one")], indirect=True)
def test_one_worker_that_failed_to_load_is_flushed_and_serves_the_next_round(session: Stock) -> None:
    session.one.rpc("fail_to_load", list(support.checkpoint(session.checkpoints.b))[-1])
    with pytest.raises(rws.FleetTorn, match="no memory is left for"):
        session.send("b", "torn")
    assert session.one.call("get_weight_version").startswith("!rws:")
    assert session.send("b", "b").committed == ("r0",)
    session.serves("b", "b", session.one)


@pytest.mark.parametrize("session", [on("two")], indirect=True)
def test_two_workers_that_failed_to_load_are_not_used_again_and_are_said_to_be_replaced(session: Stock) -> None:
    session.two.rpc("fail_to_load", list(support.checkpoint(session.checkpoints.b))[-1])
    with pytest.raises(rws.FleetTorn, match="no memory is left for"):
        session.send("b", "torn")
    with pytest.raises(rws.FleetTorn, match=r"it has 2 workers .* only a new engine in its place helps"):
        session.send("b", "b")
    assert session.told("status").serving == ()


def test_an_engine_that_is_killed_midway_leaves_the_others_stuck_and_an_error_at_the_deadline_says_to_kill_them(stock: Stock) -> None:
    victim = stock_session.start_engine(stock.checkpoints.a, 1)
    support.started(victim.handle)
    stock.told("attach", [victim.handle, stock.one.handle], COLLECTIVE, UPDATE_S)
    stock.send("a", "before")
    with pytest.raises(rws.FleetTorn, match="nothing ends a wait in a group of vLLM's own nccl; kill the engine") as caught:
        stock.told("send_and_kill", stock.checkpoints.b, "torn", victim.handle)
    assert caught.value.replicas == ("r0", "r1")
    support.kill_engine(stock.one.handle)
    with pytest.raises(rws.FleetTorn, match="No replica serves"):
        stock.send("b", "after")
    assert stock.told("status").serving == ()
    stock.told("close")
