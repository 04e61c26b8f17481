"""vLLM's worker backends under guard, on real engines of one and two workers that are driven by hand.

What a backend is asked to do is what vLLM's own do with a model; the bytes come out of files. vLLM's own ``nccl`` backend, unmodified,
receives from our sender over gloo.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import ray_weightsync as rws
from ray_weightsync.fleet.topology import Shape, group_of
from ray_weightsync.testing import Faults
from ray_weightsync.transports.collective.stock_format import StockFormat, update_info
from ray_weightsync.weights.digest import weights_digest
from ray_weightsync.weights.plan import ParamMeta, Plan
from tests.vllm import support
from tests.vllm.conftest import Checkpoints
from tests.vllm.stock_session import Midway
from tests.vllm.stock_trainer import start_trainer
from tests.vllm.support import CALL_LIMIT_S, Driver, Pairs, Stage, plan_of

Tokens = dict[int, list[list[int]]]

LATE = "model.layers.2.mlp.down_proj.weight"
EXTENSION = "tests.vllm.native_backends.Extension"


class NativeDriver(Driver):
    """A `Driver` of rounds that one of vLLM's backends carries."""

    def choose(self, backend: str = "ipc", init_info: Any = None, **fields: Any) -> None:
        """The op ``"native"`` of a new round, on a paused engine."""
        self.new_round()
        named = {"round": self.round, "epoch": self.epoch}
        self.init({"op": "native", "backend": backend, "init_info": init_info, "limit_s": 30, **named, **fields})

    def chosen_for(self, pairs: Pairs, backend: str, init_info: Any) -> Plan:
        """The plan of ``pairs``, accepted, and a new round that a new backend is to carry."""
        plan = plan_of(pairs)
        self.preflight(plan)
        self.choose(backend, init_info)
        return plan

    def part(self, plan: Plan, update_info: Any, backend: str = "ipc", **fields: Any) -> None:
        named = {"round": self.round, "epoch": self.epoch, "plan": plan.digest}
        info = {"transport": "native", "backend": backend, "limit_s": 30, "update_info": update_info, **named, **fields}
        self.call("update_weights", info)

    def session(self, plan: Plan, *parts: Any, backend: str = "ipc") -> None:
        self.call("start_weight_update")
        for each in parts:
            self.part(plan, each, backend)
        self.call("finish_weight_update")

    def verdict(self, pairs: Pairs, plan: Plan | None = None, **fields: Any) -> str:
        """The words in which the engine refuses to attest that it holds ``pairs``; empty if it does."""
        plan = plan or plan_of(pairs)
        expected = {"plan": plan.digest, "snapshot": self.round, "digest": weights_digest(pairs), "num_bytes": plan.weight_bytes}
        return self.complaint(support.Staged(plan, {}, {**expected, "num_tensors": len(plan.tensors), **fields}))

    def refuses(self, *args: Any, **kwargs: Any) -> str:
        """The words in which it refuses to `choose`."""
        return support._words(lambda: self.choose(*args, **kwargs))

    def asked(self) -> list[list[str]]:
        """What the backends of the last worker were asked to do."""
        made: list[list[str]] = self.rpc("rws_test_backends")[-1]
        return made


@pytest.fixture(scope="module")
def drivers(checkpoints: Checkpoints, fresh_b: Tokens) -> Iterator[dict[int, NativeDriver]]:
    handles = {tp: support.start_engine(checkpoints.a, tp, extension=EXTENSION) for tp in (1, 2)}
    support.started(*handles.values())
    yield {tp: NativeDriver(handle, tp) for tp, handle in handles.items()}
    for handle in handles.values():
        support.kill_engine(handle)


@pytest.fixture(scope="module")
def tokens_a(drivers: dict[int, NativeDriver]) -> Tokens:
    """Asked before the first update."""
    return {tp: driver.tokens() for tp, driver in drivers.items()}


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def native(request: pytest.FixtureRequest, drivers: dict[int, NativeDriver], tokens_a: Tokens) -> Iterator[NativeDriver]:
    driver = drivers[request.param]
    driver.rpc("rws_test_forget")
    driver.pause()
    yield driver
    driver.rpc("rws_test_heal")
    driver.call("resume_generation")
    assert driver.leftovers() == []


@pytest.fixture(scope="module")
def file_a(checkpoints: Checkpoints) -> str:
    return f"{checkpoints.a}/model.safetensors"


@pytest.fixture(scope="module")
def file_b(checkpoints: Checkpoints) -> str:
    return f"{checkpoints.b}/model.safetensors"


def parts(path: str, names: list[str], number: int = 3, **fields: Any) -> list[dict[str, Any]]:
    """The update infos that bring these names in so many parts."""
    size = -(-len(names) // number)
    return [{"path": path, "names": names[start : start + size], **fields} for start in range(0, len(names), size)]


def works_again(native: NativeDriver, pairs: Pairs, path: str, fresh: Tokens, init_info: Any = None) -> None:
    """A native round after whatever happened is whole, and served."""
    native.choose(init_info=init_info)
    native.session(plan_of(pairs), *parts(path, list(pairs)))
    assert native.verdict(pairs) == ""
    native.resume()
    assert native.tokens() == fresh[native.world_size]
    native.pause()


def test_what_came_in_several_parts_is_attested_and_served_and_so_is_the_way_back_with_the_same_backend(
    native: NativeDriver, pairs_a: Pairs, pairs_b: Pairs, file_a: str, file_b: str, tokens_a: Tokens, fresh_b: Tokens
) -> None:
    native.preflight(plan_of(pairs_b))
    native.init({"op": "see", "transport": "native", "probe": {"backend": "ipc"}})
    works_again(native, pairs_b, file_b, fresh_b, init_info={})
    works_again(native, pairs_a, file_a, tokens_a)
    assert native.asked() == [["init", *2 * ["start", "receive", "receive", "receive", "finish"]]]


def test_parts_may_come_in_any_order_and_one_for_each_rank(
    native: NativeDriver, pairs_a: Pairs, pairs_b: Pairs, file_a: str, file_b: str, fresh_b: Tokens
) -> None:
    plan = native.chosen_for(pairs_b, "ipc", {})
    given = parts(file_b, list(pairs_b)[::-1])
    native.session(plan, *([each] * native.world_size for each in given))
    assert native.verdict(pairs_b) == ""
    native.resume()
    assert native.tokens() == fresh_b[native.world_size]


def test_other_bytes_than_were_sealed_are_refused_by_every_rank(native: NativeDriver, pairs_a: Pairs, pairs_b: Pairs, file_a: str) -> None:
    plan = native.chosen_for(pairs_b, "ipc", {})
    native.session(plan, *parts(file_a, list(pairs_a)))
    told = native.verdict(pairs_b)
    wanted, came = weights_digest(pairs_b), weights_digest(pairs_a)
    assert told == "rws: " + "; ".join(f"rank {rank}: digest: expected {wanted}, received {came}" for rank in range(native.world_size))


def test_half_of_the_tensors_is_refused_nothing_half_loaded_is_completed_and_both_ways_work_afterwards(
    native: NativeDriver, stage: Stage, pairs_a: Pairs, pairs_b: Pairs, file_a: str, file_b: str, tokens_a: Tokens, fresh_b: Tokens
) -> None:
    plan = native.chosen_for(pairs_b, "ipc", {})
    native.session(plan, *parts(file_b, list(pairs_b)[::2]))
    assert f"{len(pairs_b) // 2} of {len(pairs_b)} tensors of the plan did not come" in native.verdict(pairs_b)
    assert native.leftovers() == []
    works_again(native, pairs_b, file_b, fresh_b)
    staged = stage(pairs_a)
    native.transfer(staged)
    native.outcome(staged)
    native.resume()
    assert native.tokens() == tokens_a[native.world_size]


def test_a_tensor_of_another_shape_than_the_plans_is_named_and_what_follows_it_is_received_but_not_loaded(
    native: NativeDriver, pairs_b: Pairs, file_b: str, fresh_b: Tokens, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    path = str(tmp_path / "wrong.safetensors")
    save_file(pairs_b | {LATE: pairs_b[LATE][:-1].clone()}, path)
    plan = native.chosen_for(pairs_b, "ipc", {})
    native.session(plan, *parts(path, list(pairs_b)))
    told = native.verdict(pairs_b)
    assert f"{LATE!r} came as bfloat16 [255, 512], in the plan it is bfloat16 [256, 512]" in told
    assert native.leftovers() == []
    works_again(native, pairs_b, file_b, fresh_b)


@pytest.mark.parametrize("who", ["first", "last"])
def test_receiving_that_fails_on_one_rank_keeps_replies_in_step_and_the_engine_comes_back_by_the_next_round(
    native: NativeDriver, pairs_b: Pairs, file_b: str, fresh_b: Tokens, who: str
) -> None:
    rank = 0 if who == "first" else native.world_size - 1
    plan = native.chosen_for(pairs_b, "ipc", {})
    native.session(plan, *parts(file_b, list(pairs_b), raise_after={str(rank): 4}))
    told = native.verdict(pairs_b)
    assert [f"rank {each}: update_weights: RuntimeError: made to fail in receive" in told for each in range(native.world_size)] == [
        each == rank for each in range(native.world_size)
    ]
    native.describe()
    assert native.leftovers() == []
    works_again(native, pairs_b, file_b, fresh_b)


@pytest.mark.parametrize("step", ["skip", "finish"])
def test_a_model_that_leaves_a_layer_out_or_fails_in_finish_is_found(
    native: NativeDriver, pairs_b: Pairs, file_b: str, fresh_b: Tokens, step: str
) -> None:
    plan = plan_of(pairs_b)
    native.preflight(plan)
    native.fail([0], step)
    native.choose(init_info={})
    native.session(plan, *parts(file_b, list(pairs_b)))
    told = native.verdict(pairs_b)
    words = {"skip": "model.layers.2.mlp.down_proj got no weights at all", "finish": "made to fail in finish"}[step]
    assert told.startswith("rws: rank 0: ")
    assert told.endswith(f"RuntimeError: {words}")
    assert native.leftovers() == []
    native.rpc("rws_test_heal")
    works_again(native, pairs_b, file_b, fresh_b)


def test_an_update_without_the_op_is_refused_and_the_old_weights_stay(
    native: NativeDriver, pairs_a: Pairs, pairs_b: Pairs, file_a: str, file_b: str, tokens_a: Tokens
) -> None:
    plan = plan_of(pairs_b)
    native.preflight(plan)
    works_again(native, pairs_a, file_a, tokens_a, init_info={})
    native.new_round()
    native.session(plan, *parts(file_b, list(pairs_b), 1))
    assert "op 'native' did not come before start_weight_update" in native.verdict(pairs_b)
    native.resume()
    assert native.tokens() == tokens_a[native.world_size]


def test_a_round_of_ours_takes_the_place_of_one_whose_backend_never_got_its_session(
    native: NativeDriver, stage: Stage, pairs_b: Pairs, fresh_b: Tokens
) -> None:
    staged = stage(pairs_b)
    native.preflight(staged.plan)
    native.choose(init_info={})
    native.bring(staged)
    assert native.tokens() == fresh_b[native.world_size]


def test_an_update_of_another_backend_is_refused(native: NativeDriver, pairs_b: Pairs, file_b: str, fresh_b: Tokens) -> None:
    plan = native.chosen_for(pairs_b, "ipc", {})
    native.session(plan, *parts(file_b, list(pairs_b), 1), backend="sparse_nccl")
    assert "this update is of backend 'sparse_nccl', the session was begun for 'ipc'" in native.verdict(pairs_b)
    assert "backend 'sparse_nccl' was to be used again, but this worker keeps a backend 'ipc'" in native.refuses("sparse_nccl")
    works_again(native, pairs_b, file_b, fresh_b)


@pytest.mark.parametrize("backend", ["carrier pigeon", "rws"])
def test_a_backend_that_this_vllm_lacks_is_refused_when_it_is_asked_for_and_when_it_is_to_be_made(
    native: NativeDriver, backend: str
) -> None:
    probe = {"op": "see", "transport": "native", "probe": {"backend": backend}}
    for told in (support._words(lambda: native.init(probe)), native.refuses(backend, {})):
        for rank in range(native.world_size):
            assert f"rank {rank}: the vLLM in this worker has no weight-transfer backend {backend!r} to delegate to" in told


def test_init_info_that_the_backend_does_not_understand_is_refused_before_anybody_joins(native: NativeDriver) -> None:
    assert "Invalid init_info for FromFile" in native.refuses("ipc", {"colour": "blue"})
    assert native.asked() == [["shutdown"]]
    assert "but this worker keeps none" in native.refuses("ipc")


@pytest.mark.parametrize("backend", ["ipc", "sharded_rdt"])
def test_a_rank_that_cannot_join_is_named_its_model_is_whole_and_the_next_session_is_ours(
    native: NativeDriver, stage: Stage, pairs_b: Pairs, fresh_b: Tokens, backend: str
) -> None:
    told = native.refuses(backend, {"refuse_on": [0]})
    assert told == "rws: rank 0: RuntimeError: made to fail in init"
    assert native.leftovers() == []
    native.bring(stage(pairs_b))
    assert native.tokens() == fresh_b[native.world_size]


def test_a_backend_that_loads_on_threads_of_its_own_serves_what_it_brought_and_attests_the_session_alone(
    native: NativeDriver, pairs_b: Pairs, file_b: str, fresh_b: Tokens
) -> None:
    plan = native.chosen_for(pairs_b, "sharded_rdt", {})
    native.session(plan, *parts(file_b, list(pairs_b)), backend="sharded_rdt")
    assert "nothing was received that could be attested" in native.verdict(pairs_b)
    assert native.verdict(pairs_b, attested=False) == ""
    assert "plan: expected" in native.verdict(pairs_b, plan_of(pairs_b | {"more": pairs_b[LATE]}), attested=False)
    native.resume()
    assert native.tokens() == fresh_b[native.world_size]


def test_such_a_backend_that_fails_is_waited_for_before_its_session_is_flushed(
    native: NativeDriver, pairs_b: Pairs, file_b: str, fresh_b: Tokens
) -> None:
    plan = native.chosen_for(pairs_b, "sharded_rdt", {})
    native.session(plan, *parts(file_b, list(pairs_b), raise_after={"0": 5}), backend="sharded_rdt")
    assert "rank 0: update_weights: RuntimeError: made to fail in receive" in native.verdict(pairs_b, attested=False)
    assert native.leftovers() == []
    works_again(native, pairs_b, file_b, fresh_b, init_info={})


def test_a_backend_that_writes_some_parameters_itself_and_loads_the_others_serves_both_also_after_a_round_of_ours(
    native: NativeDriver, stage: Stage, pairs_a: Pairs, pairs_b: Pairs, file_b: str, tokens_a: Tokens, fresh_b: Tokens
) -> None:
    plan = native.chosen_for(pairs_b, "nccl_m2n", {"names": list(pairs_b)})
    for again in (True, False):
        native.session(plan, *parts(file_b, list(pairs_b)), backend="nccl_m2n")
        assert native.verdict(pairs_b, attested=False) == ""
        native.resume()
        assert native.tokens() == fresh_b[native.world_size]
        native.pause()
        if again:
            native.bring(stage(pairs_a))
            assert native.tokens() == tokens_a[native.world_size]
            native.pause()
            native.choose("nccl_m2n")
    assert native.asked() == [["init", *2 * ["start", "receive", "receive", "receive", "finish"]]]


def test_such_a_backend_that_only_writes_reloads_nothing(
    native: NativeDriver, stage: Stage, pairs_a: Pairs, pairs_b: Pairs, file_b: str
) -> None:
    written = ["model.embed_tokens.weight", "model.norm.weight"]
    native.bring(stage(pairs_a | {name: pairs_b[name] for name in written}))
    wanted = native.tokens()
    native.bring(stage(pairs_a))
    assert native.tokens() != wanted
    native.pause()
    plan = Plan.from_metadata([ParamMeta(name, pairs_b[name].dtype, tuple(pairs_b[name].shape)) for name in written], partial=True)
    native.preflight(plan)
    native.choose("nccl_m2n", {"names": written})
    native.session(plan, *parts(file_b, written, 2), backend="nccl_m2n")
    assert native.verdict({name: pairs_b[name] for name in written}, plan, attested=False) == ""
    native.resume()
    assert native.tokens() == wanted


@pytest.mark.parametrize("after", [1, 3, 20])
def test_such_a_backend_that_fails_leaves_a_clean_state_and_its_next_session_is_whole(
    native: NativeDriver, pairs_b: Pairs, file_b: str, fresh_b: Tokens, after: int
) -> None:
    plan = plan_of(pairs_b)
    rank = native.world_size - 1
    native.preflight(plan)
    native.choose("nccl_m2n", {"names": list(pairs_b)})
    native.session(plan, *parts(file_b, list(pairs_b), 1, raise_after={str(rank): after}), backend="nccl_m2n")
    assert native.verdict(pairs_b, attested=False) == f"rws: rank {rank}: update_weights: RuntimeError: made to fail in receive"
    assert native.leftovers() == []
    native.choose("nccl_m2n")
    native.session(plan, *parts(file_b, list(pairs_b)), backend="nccl_m2n")
    assert native.verdict(pairs_b, attested=False) == ""
    native.resume()
    assert native.tokens() == fresh_b[native.world_size]


def test_patches_are_written_into_the_live_model_and_the_rest_of_it_stays(
    native: NativeDriver, stage: Stage, pairs_a: Pairs, pairs_b: Pairs, file_b: str
) -> None:
    touched = ["model.norm.weight", "model.layers.1.input_layernorm.weight"]
    native.bring(stage(pairs_a | {name: pairs_b[name] for name in touched}))
    wanted = native.tokens()
    native.bring(stage(pairs_a))
    assert native.tokens() != wanted
    plan = Plan.from_metadata([ParamMeta(name, pairs_b[name].dtype, tuple(pairs_b[name].shape)) for name in touched], partial=True)
    native.preflight(plan)
    native.pause()
    native.choose("sparse_nccl", {})
    native.session(plan, *parts(file_b, touched, 2), backend="sparse_nccl")
    assert native.verdict({name: pairs_b[name] for name in touched}, plan, attested=False) == ""
    native.resume()
    assert native.tokens() == wanted


def test_a_partial_plan_with_an_unknown_name_is_refused_before_the_round_and_by_ways_that_cannot_bring_it_in_the_round(
    native: NativeDriver, pairs_b: Pairs, file_b: str, fresh_b: Tokens
) -> None:
    def some(name: str) -> Plan:
        return Plan.from_metadata([ParamMeta(name, pairs_b[LATE].dtype, tuple(pairs_b[LATE].shape))], partial=True)

    assert "model.layers.9.mlp.down_proj.weight" in native.refusal(some("model.layers.9.mlp.down_proj.weight"))
    assert "shape" in native.refusal(Plan.from_metadata([ParamMeta(LATE, pairs_b[LATE].dtype, (9, 9))], partial=True))
    plan = some(LATE)
    native.preflight(plan)
    native.choose(init_info={})
    native.session(plan, *parts(file_b, [LATE]))
    assert "is partial; backend 'ipc' can only bring all of a model" in native.verdict({LATE: pairs_b[LATE]}, plan)
    works_again(native, pairs_b, file_b, fresh_b)


@pytest.fixture(scope="module")
def trainer(vllm_ray: None) -> Iterator[Any]:
    trainer = start_trainer()
    yield trainer
    ray.kill(trainer)


FORMS = {"packed": StockFormat(packed_buffer_size_bytes=1 << 19, packed_num_buffers=2), "one_by_one": StockFormat(packed=False)}


@pytest.mark.parametrize("form", FORMS)
def test_vllms_own_nccl_backend_is_attested_and_a_rank_whose_loader_fails_holds_up_nobody(
    native: NativeDriver, trainer: Any, checkpoints: Checkpoints, pairs_b: Pairs, fresh_b: Tokens, form: str
) -> None:
    plan = plan_of(pairs_b)
    native.preflight(plan)
    group = group_of([Shape(id="r0", world_size=native.world_size, tensor_parallel_size=native.world_size)])
    ray.get(trainer.open.remote(group.world_size, FORMS[form]), timeout=CALL_LIMIT_S)
    init_info = ray.get(trainer.init_info.remote(**group.init_payload("r0")), timeout=CALL_LIMIT_S)
    joining = trainer.join.remote(CALL_LIMIT_S)
    native.choose("nccl", init_info)
    ray.get(joining, timeout=CALL_LIMIT_S)

    def transfer() -> str:
        sending = trainer.send.remote(checkpoints.b, CALL_LIMIT_S)
        native.session(plan, update_info(plan), backend="nccl")
        digest: str = ray.get(sending, timeout=CALL_LIMIT_S)
        return digest

    native.fail([0], "raise in load")
    transfer()
    told = native.verdict(pairs_b)
    assert told == "rws: rank 0: update_weights: RuntimeError: made to fail in load_weights"
    native.rpc("rws_test_heal")
    native.choose("nccl")
    assert transfer() == weights_digest(pairs_b)
    assert native.verdict(pairs_b) == ""
    native.resume()
    assert native.tokens() == fresh_b[native.world_size]
    ray.get(trainer.close.remote(), timeout=CALL_LIMIT_S)


def test_a_worker_that_is_killed_in_a_broadcast_tears_the_other_engine_at_once_and_the_next_round_is_of_that_one_alone(
    drivers: dict[int, NativeDriver], pairs_a: Pairs, pairs_b: Pairs, fresh_b: Tokens
) -> None:
    """By a session, with our own receiver. The last test here: the engine of two workers is gone."""
    survivor = drivers[1]
    victim = drivers[2].describe()[1]["pid"]
    refs = [rws.EngineRef(driver.handle, attr="llm") for driver in drivers.values()]
    options = {"transport": rws.Collective(bucket_bytes=1 << 18, interface="lo"), "timeouts": rws.Timeouts(health_interval_s=3600)}
    with rws.WeightSync.attach(refs, on_failure=support.LEFT_FENCED, **options) as sync, Faults(sync) as faults:
        before = sync.send_weights(pairs_a, version="a")
        assert sync.status().ranks == "group of 4: 0 sender | 1 r0 | 2-3 r1 (TP 2)"
        half_way = faults.inject("r1", "load", "hang", rank=1)
        began: list[float] = []

        def kill() -> None:
            half_way.wait_reached(timeout_s=CALL_LIMIT_S)
            began.append(time.monotonic())
            os.kill(victim, signal.SIGKILL)

        with pytest.raises(rws.FleetTorn, match="r1") as caught:
            # Its half is sent by then, and not so much more that the sender waits for one who hangs.
            sync.send_weights(Midway(pairs_b, kill, after=len(pairs_b) // 2 + 3), version="torn")
        assert time.monotonic() - began[0] < 60, "nobody waits for the deadline of an update"
        assert caught.value.replicas == ("r0", "r1")
        received = re.search(r"(\d+) of (\d+) bytes were received", survivor.describe()[0]["failure"])
        assert received is not None
        assert 0 < int(received[1]) < int(received[2])
        assert survivor.call("get_weight_version").startswith("!rws:")
        assert survivor.call("is_paused")
        assert sync.serving() == ()
        report = sync.send_weights(pairs_b, version="b")
        assert report.committed == ("r0",)
        assert report.epoch > before.epoch
        assert sync.status().ranks == "group of 2: 0 sender | 1 r0"
        assert (survivor.call("get_weight_version"), survivor.call("is_paused")) == ("b", False)
        assert survivor.tokens() == fresh_b[1]
        assert survivor.leftovers() == []
