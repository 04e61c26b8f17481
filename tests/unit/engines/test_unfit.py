"""Why an engine cannot take part, in words that say what to do; and which two are one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ray_weightsync.engines.facts import EngineFacts, WorkerFacts
from ray_weightsync.engines.ref import EngineRef
from ray_weightsync.engines.resolve import Engine, require_distinct, unfit
from ray_weightsync.errors import AttachError
from ray_weightsync.worker.identity import package_version

REF = EngineRef("gen")


def facts(**fields: Any) -> EngineFacts:
    workers = (WorkerFacts(nonce="n", rank=0, world_size=1, package_version=package_version(), incarnation="i0"),)
    sizes = {"world_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    return EngineFacts(**{"kind": "async", "backend": "rws", "workers": workers, "incarnation": "w", **sizes, **fields})


def attesting(workers: int) -> WorkerFacts:
    """A worker whose outcome speaks for so many."""
    return replace(facts().workers[0], attesting=workers)


@pytest.mark.parametrize(("tensor", "data"), [(1, 2), (2, 4)])
def test_data_parallel_engines_fit_whose_outcome_speaks_for_all_of_their_workers(tensor: int, data: int) -> None:
    sizes = {"tensor_parallel_size": tensor, "data_parallel_size": data, "world_size": tensor * data}
    assert unfit(facts(**sizes, workers=(attesting(tensor * data),) * tensor), REF) is None
    assert unfit(facts(**sizes, workers=(attesting(tensor),) * tensor), REF) is not None


def test_an_engine_started_with_our_arguments_fits() -> None:
    assert unfit(facts(), REF) is None
    assert unfit(facts(), EngineRef("gen", world_size=1)) is None


@pytest.mark.parametrize(
    ("found", "problem", "remedy"),
    [
        (facts(backend=None), "it has no weight-transfer backend, 'rws' is needed", "**ray_weightsync.vllm_engine_args()"),
        (facts(backend="nccl", workers=(), kind="sync"), "it is a synchronous LLM on vLLM's own 'nccl' backend", "hold an AsyncLLM"),
        (facts(backend="nccl", workers=(), data_parallel_size=2), "2 data-parallel engines on vLLM's own 'nccl'", "2 independent engines"),
        (facts(workers=()), "lack our worker extension", "**ray_weightsync.vllm_engine_args()"),
        (
            facts(data_parallel_size=2, world_size=2),
            "2 data-parallel engines that know nothing of each other, and only the first one's workers answer",
            "start 2 independent engines without data_parallel_size, and attach them all",
        ),
        (
            facts(data_parallel_size=2, world_size=2, data_parallel_outside=True, workers=(attesting(2),)),
            "only some of its deployment's 2 data-parallel engines (external or hybrid load balancing, or an offline rank)",
            "one engine that drives all its data-parallel ranks",
        ),
        (facts(in_step=False, step_problem="reply 1 is late"), "out of step with the calls (reply 1 is late)", "start a new engine"),
    ],
)
def test_what_was_found_and_what_to_do_are_said(found: EngineFacts, problem: str, remedy: str) -> None:
    said = unfit(found, REF)
    assert said is not None
    assert problem in said[0]
    assert remedy in said[1]


@pytest.mark.parametrize("kind", ["async", "http"])
def test_an_engine_on_vllms_own_backend_fits_since_a_session_may_be_able_to_serve_it(kind: str) -> None:
    assert unfit(facts(kind=kind, backend="nccl", workers=()), REF) is None


def test_another_world_size_than_configured_is_an_error_with_both_numbers() -> None:
    said = unfit(facts(world_size=4, tensor_parallel_size=4), EngineRef("gen", world_size=2))
    assert said is not None
    assert "it has 4 workers (tensor 4 x pipeline 1 x data 1), EngineRef(world_size=2) was given" in said[0]
    assert "the engine is believed" in said[1]


def test_another_package_version_in_the_workers_is_an_error_with_both() -> None:
    old = replace(facts().workers[0], package_version="0.0.9")
    said = unfit(facts(workers=(facts().workers[0], replace(old, rank=1))), REF)
    assert said is not None
    assert "0.0.9" in said[0]
    assert f"{package_version()} here" in said[0]


def test_a_synchronous_engine_is_refused_only_where_the_mixin_makes_its_actor_asynchronous() -> None:
    said = unfit(facts(kind="sync"), REF, own_actor=True)
    assert said is not None
    assert "EngineMixin" in said[0]
    assert unfit(facts(kind="sync"), REF) is None


def test_nothing_is_held_against_a_client_of_which_nothing_is_known() -> None:
    assert unfit(EngineFacts(kind="client"), REF) is None


def engine(name: str, found: EngineFacts, **ref: Any) -> Engine:
    return Engine(id=name, label=name, channel=SimpleNamespace(label=name), facts=found, ref=EngineRef("gen", **ref))  # type: ignore[arg-type]


def test_two_ways_to_one_engine_are_found_by_its_workers() -> None:
    with pytest.raises(AttachError, match=r"a .* and b .* are the same engine") as raised:
        require_distinct([engine("a", facts(incarnation="w1")), engine("b", facts(incarnation="w2"))])
    assert raised.value.replicas == ("a", "b")


def test_two_engines_in_one_process_are_two() -> None:
    silent = facts(workers=())
    require_distinct([engine("a", silent, attr="a"), engine("b", silent, attr="b")])
    with pytest.raises(AttachError, match="the same engine"):
        require_distinct([engine("a", silent, attr="a"), engine("b", silent)])


def test_engines_that_show_no_identity_are_not_called_the_same() -> None:
    unknown = EngineFacts(kind="client")
    require_distinct([engine("a", unknown), engine("b", unknown)])
