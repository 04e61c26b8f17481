"""Whoever fails wherever: nothing torn is attested, the replies stay in step, and the next complete round is right."""

from __future__ import annotations

import pytest

import ray_weightsync as rws
from tests.vllm.support import LEFT_FENCED, Driver, Pairs, Stage

Tokens = dict[int, list[list[int]]]


WHO = [(1, "all"), (2, "first"), (2, "last"), (2, "all")]


@pytest.mark.parametrize(("engine", "who"), WHO, indirect=["engine"], ids=[f"tp{tp}-{who}" for tp, who in WHO])
@pytest.mark.parametrize("step", ["start", "load", "finish"])
def test_a_failing_rank_is_named_and_a_good_round_follows(
    engine: Driver, stage: Stage, pairs_a: Pairs, pairs_b: Pairs, fresh_b: Tokens, step: str, who: str
) -> None:
    last = engine.world_size - 1
    ranks = {"first": [0], "last": [last], "all": list(range(engine.world_size))}[who]
    staged = stage(pairs_b)
    engine.preflight(staged.plan)
    engine.pause()
    engine.fail(ranks, step)
    engine.transfer(staged)
    complaint = engine.complaint(staged)
    assert [f"rank {rank}: " in complaint for rank in range(engine.world_size)] == [rank in ranks for rank in range(engine.world_size)]
    assert f"made to fail in {step}" in complaint
    for worker in engine.describe():
        assert (worker["failure"] is not None) == (worker["rank"] in ranks)
    assert engine.leftovers() == []
    engine.rpc("rws_test_heal")
    engine.transfer(staged)
    engine.outcome(staged)
    engine.resume()
    assert engine.tokens() == fresh_b[engine.world_size]


def test_a_layer_that_the_loader_leaves_out_is_found_at_finish(
    engine: Driver, stage: Stage, pairs_a: Pairs, pairs_b: Pairs, fresh_b: Tokens
) -> None:
    """vLLM keeps the layer's old weights, and a line in the log is all that it says."""
    engine.bring(stage(pairs_a))
    staged = stage(pairs_b)
    engine.preflight(staged.plan)
    engine.pause()
    engine.fail([0], "skip")
    engine.transfer(staged)
    complaint = engine.complaint(staged)
    assert complaint == "rws: rank 0: finish_weight_update: RuntimeError: model.layers.2.mlp.down_proj got no weights at all"
    engine.rpc("rws_test_heal")
    engine.transfer(staged)
    engine.outcome(staged)
    engine.resume()
    assert engine.tokens() == fresh_b[engine.world_size]


def test_a_reload_that_somebody_left_open_in_the_workers_is_flushed_first(
    engine: Driver, stage: Stage, pairs_b: Pairs, fresh_b: Tokens
) -> None:
    engine.pause()
    engine.rpc("rws_test_leave_open")
    assert engine.leftovers()
    staged = stage(pairs_b)
    engine.preflight(staged.plan)
    engine.transfer(staged)
    engine.outcome(staged)
    engine.resume()
    assert engine.tokens() == fresh_b[engine.world_size]


@pytest.mark.parametrize("step", ["load", "finish"])
def test_no_worker_holds_a_snapshot_after_its_round(engine: Driver, stage: Stage, pairs_b: Pairs, step: str) -> None:
    staged = stage(pairs_b)
    engine.preflight(staged.plan)
    engine.pause()
    engine.fail(range(engine.world_size), step)
    engine.transfer(staged)
    assert engine.rpc("rws_test_maps") == [[]] * engine.world_size
    engine.rpc("rws_test_heal")
    engine.transfer(staged)
    engine.outcome(staged)
    engine.resume()
    assert engine.rpc("rws_test_maps") == [[]] * engine.world_size


def test_different_ranks_may_fail_in_different_steps(engine_tp2: Driver, fresh_a: Tokens, stage: Stage, pairs_a: Pairs) -> None:
    staged = stage(pairs_a)
    engine_tp2.preflight(staged.plan)
    engine_tp2.pause()
    engine_tp2.fail([0, 1], "load", "finish")
    engine_tp2.new_round()
    engine_tp2.call("start_weight_update")
    engine_tp2.fail([0], "finish")
    engine_tp2.call("update_weights", engine_tp2.update_info(staged))
    engine_tp2.call("finish_weight_update")
    assert "rank 0: " in engine_tp2.complaint(staged)
    engine_tp2.rpc("rws_test_heal")
    engine_tp2.transfer(staged)
    engine_tp2.outcome(staged)
    engine_tp2.resume()
    assert engine_tp2.tokens() == fresh_a[2]


@pytest.mark.parametrize("cut", ["only q_proj", "all but v_proj", "half of the tensors"])
def test_an_incomplete_update_is_never_attested_even_if_nobody_checked_the_plan_first(
    engine: Driver, stage: Stage, pairs_a: Pairs, pairs_b: Pairs, fresh_a: Tokens, cut: str
) -> None:
    """The plan is not known to the workers, which alone refuses it: what the preflight did not accept cannot be loaded."""
    engine.bring(stage(pairs_a))
    left_out = {"only q_proj": ("k_proj", "v_proj"), "all but v_proj": ("v_proj",), "half of the tensors": ("mlp", "lm_head")}[cut]
    staged = stage({name: tensor for name, tensor in pairs_b.items() if not any(part in name for part in left_out)})
    engine.pause()
    engine.transfer(staged)
    assert "is not known here" in engine.complaint(staged)
    engine.resume()
    assert engine.tokens() == fresh_a[engine.world_size]


def test_an_older_epoch_is_refused_and_changes_nothing(
    engine: Driver, stage: Stage, pairs_a: Pairs, pairs_b: Pairs, fresh_a: Tokens
) -> None:
    engine.bring(stage(pairs_a))
    staged = stage(pairs_b)
    engine.preflight(staged.plan)
    engine.pause()
    engine.new_round()
    newest, engine.epoch = engine.epoch, 0
    engine.call("start_weight_update")
    engine.call("update_weights", engine.update_info(staged))
    engine.call("finish_weight_update")
    assert "epoch 0 of this update is older than" in engine.complaint(staged)
    engine.epoch = newest
    engine.resume()
    assert engine.tokens() == fresh_a[engine.world_size]


def test_two_updates_in_one_session_are_not_attested(engine: Driver, stage: Stage, pairs_a: Pairs, fresh_a: Tokens) -> None:
    staged = stage(pairs_a)
    engine.preflight(staged.plan)
    engine.pause()
    engine.new_round()
    engine.call("start_weight_update")
    for _ in range(2):
        engine.call("update_weights", engine.update_info(staged))
    engine.call("finish_weight_update")
    assert "update_weights came twice" in engine.complaint(staged)
    engine.transfer(staged)
    engine.outcome(staged)
    engine.resume()
    assert engine.tokens() == fresh_a[engine.world_size]


@pytest.mark.parametrize("bad", [None, 7, [], {}, {"transport": "x"}, {"slot": "x"}, {"epoch": "1"}], ids=str)
def test_a_malformed_update_is_recorded_and_the_replies_stay_in_step(
    engine: Driver, stage: Stage, pairs_a: Pairs, fresh_a: Tokens, bad: object
) -> None:
    if bad == [] and engine.world_size:
        bad = [[]] * engine.world_size  # a list is vLLM's way to say one payload per rank
    staged = stage(pairs_a)
    engine.preflight(staged.plan)
    engine.pause()
    engine.new_round()
    engine.call("start_weight_update")
    engine.call("update_weights", engine.update_info(staged) | bad if isinstance(bad, dict) and bad else bad)
    engine.call("finish_weight_update")
    assert "update_weights: " in engine.complaint(staged)
    engine.describe()
    engine.transfer(staged)
    engine.outcome(staged)
    engine.resume()
    assert engine.tokens() == fresh_a[engine.world_size]


def test_a_snapshot_that_is_gone_is_told(engine: Driver, stage: Stage, pairs_a: Pairs) -> None:
    staged = stage(pairs_a)
    engine.preflight(staged.plan)
    staged.address["name"] = staged.address["name"][:-1] + "99"
    engine.pause()
    engine.transfer(staged)
    complaint = engine.complaint(staged)
    assert "FileNotFoundError" in complaint or "not there" in complaint
    engine.resume()


def test_a_second_start_is_vllms_error_and_the_open_session_can_be_ended(
    engine_tp1: Driver, fresh_a: Tokens, stage: Stage, pairs_a: Pairs
) -> None:
    """With one worker only: vLLM raises this itself, on every rank, and an engine with more is out of step afterwards."""
    staged = stage(pairs_a)
    engine_tp1.preflight(staged.plan)
    engine_tp1.pause()
    engine_tp1.new_round()
    engine_tp1.call("start_weight_update")
    with pytest.raises(Exception, match="already"):
        engine_tp1.call("start_weight_update")
    engine_tp1.call("update_weights", engine_tp1.update_info(staged))
    engine_tp1.call("finish_weight_update")
    engine_tp1.outcome(staged)
    engine_tp1.resume()
    assert engine_tp1.tokens() == fresh_a[1]


@pytest.fixture
def doomed(engine_tp2: Driver) -> Driver:
    """The TP 2 engine, for the last test of the run: what it goes through cannot be undone."""
    return engine_tp2


def test_an_engine_that_somebody_elses_failing_call_put_out_of_step_is_found_by_the_nonce(
    doomed: Driver, engine_tp1: Driver, pairs_a: Pairs, pairs_b: Pairs, fresh_a: Tokens
) -> None:
    """Before any byte is sent to it, in a session that has used it and in a new one; it cannot be healed, only replaced."""
    engines = [rws.EngineRef(each.handle, attr="llm") for each in (engine_tp1, doomed)]
    doomed.describe()
    with rws.WeightSync.attach(engines, on_failure=LEFT_FENCED) as sync:
        sync.send_weights(pairs_a, version="good")
        with pytest.raises(Exception, match="somebody else's failure"):
            doomed.rpc("rws_test_raise", 0)
        with pytest.raises(rws.RoundAborted, match=r"out of step with the calls .* start a new engine in its place") as caught:
            sync.send_weights(pairs_b, version="first")
        assert (caught.value.phase, caught.value.replicas) == ("preflight", ("r1",))
        assert engine_tp1.call("get_weight_version") == "good"
        assert engine_tp1.call("is_paused") is False
        assert engine_tp1.tokens() == fresh_a[1]
        assert [each.id for each in sync.serving()] == ["r0"]
        report = sync.send_weights(pairs_b, version="second")
        assert report.committed == ("r0",)
        assert any("r1" in note and "out of step" in note for note in report.notes)
    with pytest.raises(rws.AttachError, match=r"(?s)r1 .*out of step.*start a new engine in its place"):
        rws.WeightSync.attach(engines)
    told = doomed.rpc("rws_describe", "fresh nonce")
    assert told[0]["nonce"] == "fresh nonce"
    assert "fresh nonce" not in str(told[1]), "rank 1 answers an earlier call"
    with rws.WeightSync.attach(engines[:1], on_failure=LEFT_FENCED) as sync:
        assert sync.send_weights(pairs_b, version="without it").committed == ("r0",)
