"""Repair, health and sleep on two real engines, TP 1 and TP 2: from the committed snapshot, without the trainer."""

from __future__ import annotations

import pytest
import ray

import ray_weightsync as rws
from tests.vllm.support import CALL_LIMIT_S, PROMPTS, Driver, Pairs

Tokens = dict[int, list[list[int]]]


def attach(engines: list[Driver], *, auto_heal: bool) -> rws.WeightSync:
    return rws.WeightSync.attach(
        [rws.EngineRef(engine.handle, attr="llm") for engine in engines],
        on_failure=rws.FailurePolicy(auto_heal=auto_heal),
        timeouts=rws.Timeouts(health_interval_s=0.5),
    )


@pytest.mark.parametrize("auto_heal", [False, True], ids=["asked", "unasked"])
def test_a_torn_engine_is_brought_back_and_the_other_one_serves_on(
    engines: list[Driver], pairs_a: Pairs, pairs_b: Pairs, fresh_b: Tokens, auto_heal: bool
) -> None:
    with attach(engines, auto_heal=auto_heal) as sync:
        sync.send_weights(pairs_a, version="old")
        engines[1].fail([1], "load")
        with pytest.raises(rws.ReplicasLost):
            sync.send_weights(pairs_b, version="new")
        engines[1].rpc("rws_test_heal")
        request = engines[0].handle.generate.remote(PROMPTS[0], 200)
        if auto_heal:
            sync.wait_serving(timeout_s=CALL_LIMIT_S)
        else:
            assert sync.heal().committed == ("r1",)
        ((version, _, _),) = ray.get(request, timeout=CALL_LIMIT_S)[1]
        assert version == "new", "the other engine was not touched"
        assert [engine.call("get_weight_version") for engine in engines] == ["new"] * 2
        assert [engine.tokens() for engine in engines] == [fresh_b[1], fresh_b[2]]
        assert engines[1].call("is_paused") is False


def test_a_torn_engine_that_somebody_resumed_is_fenced_again(engines: list[Driver], pairs_a: Pairs, pairs_b: Pairs) -> None:
    with attach(engines, auto_heal=False) as sync:
        sync.send_weights(pairs_a, version="old")
        engines[1].fail([0], "finish")
        with pytest.raises(rws.ReplicasLost):
            sync.send_weights(pairs_b, version="new")
        engines[1].call("resume_generation")
        for _ in range(1000):
            if engines[1].call("is_paused"):
                break
        assert engines[1].call("is_paused") is True
        engines[1].rpc("rws_test_heal")
        assert sync.heal().committed == ("r1",)


def test_engines_that_sleep_leave_the_serving_set_until_they_are_woken_up(
    engines: list[Driver], pairs_a: Pairs, pairs_b: Pairs, fresh_b: Tokens
) -> None:
    with attach(engines, auto_heal=False) as sync:
        sync.send_weights(pairs_a, version="old")
        sync.sleep(level=1)
        assert sync.serving() == ()
        sync.wake_up()
        assert len(sync.serving()) == 2
        sync.sleep(level=2)
        assert all(engine.call("get_weight_version").startswith("!rws:") for engine in engines)
        sync.wake_up(["weights"])
        assert sync.send_weights(pairs_b, version="new").committed == ("r0", "r1")
        assert sync.serving() == ()
        assert [engine.call("is_paused") for engine in engines] == [True, True], "left as found"
        sync.wake_up(["kv_cache"])
        assert len(sync.serving()) == 2
        assert [engine.tokens() for engine in engines] == [fresh_b[1], fresh_b[2]]
