"""Engines of one and two workers, started on vLLM's own ``nccl`` backend, receive from our sender, and from vLLM's through our client.

Nothing of ours is in these engines. The test kills both of them at the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import ray

from ray_weightsync.fleet.topology import Group, Shape, group_of
from ray_weightsync.transports.collective.stock_format import StockFormat, update_info
from ray_weightsync.transports.collective.stock_meeting import takes_unique_id
from tests.vllm import support
from tests.vllm.conftest import Checkpoints
from tests.vllm.stock_trainer import start_stock_engine, start_trainer

Tokens = dict[int, list[list[int]]]

LIMIT_S = 60.0
GROUP: Group = group_of([Shape(id="r0", world_size=1), Shape(id="r1", world_size=2, tensor_parallel_size=2)])
PACKED = StockFormat(packed_buffer_size_bytes=1 << 19, packed_num_buffers=2)
"""Seven MB of weights in many broadcasts, and an embedding that is larger than one."""


@dataclass
class Stock:
    """Engines by replica, and their trainer."""

    engines: dict[str, Any]
    trainer: Any
    fresh_a: Tokens
    alive: bool = True

    def told(self, calls: list[Any]) -> list[Any]:
        answers: list[Any] = ray.get(calls, timeout=support.CALL_LIMIT_S)
        return answers

    def each(self, verb: str, *args: Any) -> list[Any]:
        """Call every engine; the answers are still to come."""
        return [engine.call.remote(verb, *args) for engine in self.engines.values()]

    def join(self, form: StockFormat, vllm: tuple[int, int] | None = None) -> None:
        self.told([self.trainer.open.remote(GROUP.world_size, form, vllm)])
        infos = self.told([self.trainer.init_info.remote(**GROUP.init_payload(replica)) for replica in self.engines])
        assert all(("nccl_unique_id_b64" in info) == takes_unique_id(vllm) for info in infos)
        inits = [engine.call.remote("init_weight_transfer_engine", info) for engine, info in zip(self.engines.values(), infos, strict=True)]
        self.told([self.trainer.join.remote(LIMIT_S), *inits])

    def leave(self, closing: str = "close") -> None:
        """End the group on both sides; ``closing`` is the trainer's method for its own."""
        if all(self.told([engine.supports.remote("shutdown_weight_transfer_engine") for engine in self.engines.values()])):
            self.told(self.each("shutdown_weight_transfer_engine"))
        self.told([getattr(self.trainer, closing).remote()])

    def begin(self, checkpoint: str) -> list[Any]:
        """Everything until the engines receive."""
        self.told(self.each("pause_generation"))
        self.told(self.each("start_weight_update"))
        return self.each("update_weights", update_info(support.plan_of(support.checkpoint(checkpoint))))

    def end(self) -> None:
        self.told(self.each("finish_weight_update"))
        self.told(self.each("resume_generation"))

    def tokens(self) -> Tokens:
        return {tp: support.tokens_of(engine) for tp, engine in zip((1, 2), self.engines.values(), strict=True)}


@pytest.fixture(scope="module")
def stock(checkpoints: Checkpoints, fresh_b: Tokens) -> Iterator[Stock]:
    trainer = start_trainer()
    engines = {replica: start_stock_engine(checkpoints.a, tp) for replica, tp in (("r0", 1), ("r1", 2))}
    support.started(*engines.values())
    stock = Stock(engines, trainer, {})
    stock.fresh_a = stock.tokens()
    yield stock
    if stock.alive:
        for engine in engines.values():
            support.kill_engine(engine)
    ray.kill(trainer)


@pytest.mark.parametrize("form", [PACKED, StockFormat(packed=False)], ids=["packed", "one_by_one"])
def test_stock_engines_serve_what_our_sender_broadcast_and_so_does_the_way_back_in_the_same_group(
    stock: Stock, form: StockFormat, checkpoints: Checkpoints, fresh_b: Tokens
) -> None:
    stock.join(form)
    for checkpoint, fresh in ((checkpoints.b, fresh_b), (checkpoints.a, stock.fresh_a)):
        receiving = stock.begin(checkpoint)
        stock.told([stock.trainer.send.remote(checkpoint, LIMIT_S), *receiving])
        stock.end()
        assert stock.tokens() == fresh
    stock.leave()


def test_engines_that_take_a_unique_id_meet_by_one_again_and_again(stock: Stock, checkpoints: Checkpoints, fresh_b: Tokens) -> None:
    versions = stock.told([engine.vllm_version.remote() for engine in stock.engines.values()])
    (oldest,) = stock.told([stock.trainer.oldest_release.remote(versions)])
    if not takes_unique_id(oldest):
        pytest.skip(f"vLLM {oldest} joins at a socket only")
    for checkpoint, fresh in ((checkpoints.b, fresh_b), (checkpoints.a, stock.fresh_a)):
        stock.join(PACKED, oldest)
        receiving = stock.begin(checkpoint)
        stock.told([stock.trainer.send.remote(checkpoint, LIMIT_S), *receiving])
        stock.end()
        assert stock.tokens() == fresh
        stock.leave()


@pytest.mark.parametrize("packed_buffer_size_bytes", [PACKED.packed_buffer_size_bytes, 0], ids=["packed", "one_by_one"])
def test_vllms_own_trainer_engine_drives_independent_engines_through_our_client(
    stock: Stock, packed_buffer_size_bytes: int, checkpoints: Checkpoints, fresh_b: Tokens
) -> None:
    handles = list(stock.engines.values())
    stock.told([stock.trainer.open_vllms.remote(handles, checkpoints.b, GROUP.world_size, packed_buffer_size_bytes)])
    for checkpoint, fresh in ((checkpoints.b, fresh_b), (checkpoints.a, stock.fresh_a)):
        stock.told(stock.each("pause_generation"))
        stock.told([stock.trainer.send_vllms.remote(checkpoint)])
        stock.told(stock.each("resume_generation"))
        assert stock.tokens() == fresh
    stock.leave("close_vllms")


def test_a_source_that_fails_leaves_no_engine_waiting_and_the_next_transfer_in_the_same_group_is_served(
    stock: Stock, checkpoints: Checkpoints, fresh_b: Tokens
) -> None:
    stock.join(PACKED)
    receiving = stock.begin(checkpoints.b)
    with pytest.raises(ZeroDivisionError, match="the optimizer is broken"):
        stock.told([stock.trainer.send_and_fail.remote(checkpoints.b, 7, LIMIT_S)])
    stock.told(receiving)
    stock.end()
    receiving = stock.begin(checkpoints.b)
    stock.told([stock.trainer.send.remote(checkpoints.b, LIMIT_S), *receiving])
    stock.end()
    assert stock.tokens() == fresh_b
    stock.leave()


def test_an_engine_that_is_killed_inside_the_broadcast_is_an_error_at_the_deadline_and_the_other_one_has_to_be_killed_too(
    stock: Stock, checkpoints: Checkpoints
) -> None:
    limit_s = 10.0
    stock.join(PACKED)
    stock.alive = False
    receiving = stock.begin(checkpoints.b)
    began = time.monotonic()
    sending = stock.trainer.send_and_wait.remote(checkpoints.b, 7, limit_s)
    assert stock.told([stock.trainer.wait_reached.remote()]) == [True]
    support.kill_engine(stock.engines["r1"])
    stock.told([stock.trainer.release.remote()])
    with pytest.raises(TimeoutError, match=r"waited 10\.0 s for the slowest receiver; \d+ of \d+ bytes were sent"):
        stock.told([sending])
    assert time.monotonic() - began < 3 * limit_s
    with pytest.raises(ValueError, match=r"this group is lost \(waited 10\.0 s .* kill the engines that are stuck in it"):
        stock.told([stock.trainer.send.remote(checkpoints.b, limit_s)])
    assert ray.wait(receiving[:1], timeout=0)[0] == []  # nothing in a stock engine ends its waiting
    support.kill_engine(stock.engines["r0"])
    for each in receiving:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(each, timeout=support.CALL_LIMIT_S)
    stock.told([stock.trainer.close.remote()])
