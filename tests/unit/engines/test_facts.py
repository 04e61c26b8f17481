"""How an engine's answer becomes facts."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest

from ray_weightsync.engines.facts import DeviceFacts, EngineFacts, WorkerFacts, facts_of


def worker(rank: int = 0, **fields: Any) -> dict[str, Any]:
    told = {"nonce": "n", "rank": rank, "world_size": 2, "package_version": "1.0", "plans": ["p"], "unjudged": {"p": ["q"]}}
    return {**told, "resident": ["weights"], "update_open": False, "epoch": 3, "incarnation": f"i{rank}", **fields}


def told(**fields: Any) -> dict[str, Any]:
    sizes = {"num_workers": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    return {"kind": "async", "backend": "rws", "version": "v1", "paused": False, **sizes, "workers": [worker(0), worker(1)], **fields}


class TestVersionAndPause:
    def test_default_is_what_the_engine_says_and_missing_is_unknown(self) -> None:
        assert facts_of(told(version="default"), "n").version == "default"
        assert facts_of(told(version=None), "n").version is None
        without = told()
        del without["version"]
        assert facts_of(without, "n").version is None

    @pytest.mark.parametrize("version", ["", 7, ["v"]])
    def test_a_version_that_is_no_label_is_unknown(self, version: Any) -> None:
        assert facts_of(told(version=version), "n").version is None

    def test_an_engine_that_does_not_tell_whether_it_is_paused_is_not_known_to_run(self) -> None:
        assert facts_of(told(paused=None), "n").paused is None
        assert facts_of(told(paused=False), "n").paused is False

    def test_of_a_client_nothing_is_known(self) -> None:
        assert facts_of({"kind": "client"}, "n") == EngineFacts(kind="client")


class TestSizes:
    def test_the_world_is_all_workers_of_all_data_parallel_engines(self) -> None:
        facts = facts_of(told(data_parallel_size=3), "n")
        assert (facts.world_size, facts.tensor_parallel_size, facts.data_parallel_size) == (6, 2, 3)

    def test_an_unknown_size_is_not_one(self) -> None:
        assert facts_of(told(data_parallel_size=None), "n").world_size is None

    @pytest.mark.parametrize("size", [0, -1, "2", True, 1.5])
    def test_a_size_that_is_none_is_an_error(self, size: Any) -> None:
        with pytest.raises(ValueError, match="tensor_parallel_size must be a positive int"):
            facts_of(told(tensor_parallel_size=size), "n")


class TestIncarnation:
    def test_another_process_and_another_engine_in_the_same_process_are_both_another_incarnation(self) -> None:
        found = {facts_of(told(worker_id=w, instance_id=i), "n").incarnation for w, i in (("w1", "i1"), ("w1", "i2"), ("w2", "i1"))}
        assert len(found) == 3

    def test_an_engine_that_shows_no_identity_has_none(self) -> None:
        assert facts_of(told(), "n").incarnation is None


class TestInStep:
    def test_every_rank_echoed_the_nonce(self) -> None:
        facts = facts_of(told(), "n")
        assert facts.in_step
        assert [each.rank for each in facts.workers] == [0, 1]
        assert facts.package_version == "1.0"
        assert facts.workers[0].unjudged == {"p": ("q",)}

    @pytest.mark.parametrize(
        ("workers", "why"),
        [
            ([worker(0), worker(1, nonce="older")], "reply 1 answers an earlier question"),
            ([worker(0), None], "reply 1 is an earlier call's: a worker answered NoneType None"),
            ([worker(0), {"nonce": "an older one"}], "reply 1 is an earlier call's: a worker's description lacks"),
            ([worker(0), {"nonce": "n", "failure": "no GPU"}], "lacks package_version, rank, world_size (it says: no GPU)"),
            ([worker(0)], "1 workers answered, there are 2"),
            ([worker(0), worker(0)], "two workers answered for one rank"),
        ],
    )
    def test_a_reply_of_another_call_is_a_fact_and_no_worker_is_believed(self, workers: list[Any], why: str) -> None:
        facts = facts_of(told(workers=workers), "n")
        assert not facts.in_step
        assert why in str(facts.step_problem)
        assert facts.workers == ()

    def test_an_error_from_a_method_that_never_raises_is_an_earlier_calls(self) -> None:
        error = {"type_name": "ValueError", "names": ["ValueError"], "text": "rank 0: no", "trace": ""}
        facts = facts_of(told(workers=None, failed={"collective_rpc": error}), "n")
        assert not facts.in_step
        assert "rank 0: no" in str(facts.step_problem)

    def test_workers_that_cannot_be_asked_are_not_called_out_of_step(self) -> None:
        facts = facts_of(told(workers=None), "n")
        assert facts.in_step
        assert facts.workers == ()


class TestDevices:
    def test_a_gpu_is_the_same_whether_torch_or_the_management_library_names_it(self) -> None:
        by_torch = worker(0, device={"type": "cuda", "uuid": "1b2c"}, nccl=True)
        assert (
            WorkerFacts.from_wire(by_torch).device
            == DeviceFacts("cuda", "1b2c")
            == DeviceFacts.from_wire({"type": "cuda", "uuid": "GPU-1b2c"})
        )
        assert WorkerFacts.from_wire(by_torch).nccl

    @pytest.mark.parametrize("device", [None, "cuda", {}, {"uuid": "1b2c"}, {"type": None}])
    def test_a_worker_that_tells_no_device_is_not_taken_to_be_on_one(self, device: Any) -> None:
        assert WorkerFacts.from_wire(worker(0, device=device)).device is None
        assert WorkerFacts.from_wire(worker(0)).device is None
        assert not WorkerFacts.from_wire(worker(0, nccl="yes")).nccl

    def test_the_cpu_has_no_identity(self) -> None:
        assert WorkerFacts.from_wire(worker(0, device={"type": "cpu", "uuid": ""})).device == DeviceFacts("cpu")

    def test_what_the_configuration_says_counts_for_all_workers_or_not_at_all(self) -> None:
        device = {"type": "cuda", "uuid": "GPU-a"}
        assert facts_of(told(devices=[device, device]), "n").devices == (DeviceFacts("cuda", "a"),) * 2
        assert facts_of(told(devices=[device]), "n").devices == ()
        assert facts_of(told(devices=None), "n").devices == facts_of(told(), "n").devices == ()


def test_fields_of_a_later_package_version_are_ignored() -> None:
    assert WorkerFacts.from_wire(worker(0, something_new=1)).rank == 0


def test_facts_survive_a_pickle() -> None:
    facts = facts_of(told(), "n")
    assert pickle.loads(pickle.dumps(facts)) == facts


def test_the_names_of_this_room_load_neither_torch_nor_vllm_nor_ray() -> None:
    code = (
        "import sys, ray_weightsync.engines as e; e.EngineFacts, e.EngineRef, e.vllm_engine_args; "
        "assert not {'torch', 'vllm', 'ray'} & sys.modules.keys(), sys.modules.keys(); "
        "assert e.__all__ == sorted(e.__all__); assert set(e._HOME) == set(e.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there() -> None:
    import ray_weightsync.engines as engines

    for name in engines.__all__:
        assert getattr(engines, name) is not None
    with pytest.raises(AttributeError, match="no_such"):
        engines.no_such  # noqa: B018
