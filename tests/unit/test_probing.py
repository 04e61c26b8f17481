"""The user's probe: what counts as a complaint."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ray_weightsync.probing import complaints, probed


def test_who_answers_something_true_is_not_complained_of() -> None:
    assert complaints(lambda engine: engine == "fine", {"r0": "fine", "r1": "fine"}, limit_s=60) == {}


@pytest.mark.parametrize("answer", [False, None, 0, ""])
def test_any_other_answer_is_a_complaint_in_the_replicas_name(answer: Any) -> None:
    said = complaints(lambda engine: answer if engine == 1 else True, {"r0": 0, "r1": 1}, limit_s=60)
    assert said == {"r1": f"the probe answered {answer!r}"}


def test_what_it_raises_is_a_complaint_in_its_words() -> None:
    def probe(engine: str) -> bool:
        raise SystemExit("cannot reach the verifier")

    assert complaints(probe, {"r0": "engine"}, limit_s=60) == {"r0": "the probe raised SystemExit: cannot reach the verifier"}


def test_one_that_does_not_answer_costs_one_deadline_and_is_left_to_itself() -> None:
    gate = threading.Event()
    said = complaints(lambda engine: engine or gate.wait(60), {"r0": 1, "r1": 0, "r2": 0}, limit_s=0.2)
    gate.set()
    assert said == dict.fromkeys(("r1", "r2"), "the probe did not answer within 0.2 s")


def test_engines_are_probed_beside_one_another() -> None:
    together = threading.Barrier(3, timeout=60)
    assert complaints(lambda engine: together.wait() >= 0, {"r0": 0, "r1": 1, "r2": 2}, limit_s=60) == {}


def test_an_engine_that_is_replaced_meanwhile_is_no_error() -> None:
    class Engines(dict[str, str]):
        """Each leaves as soon as somebody has seen that it is there."""

        def __contains__(self, name: object) -> bool:
            return self.pop(str(name), None) is not None

    report: Any = SimpleNamespace(committed=("r0",))

    def refuse(*args: Any) -> Any:
        raise AssertionError("nothing is wrong with it")

    assert probed(lambda: report, lambda engine: True, Engines(r0="engine"), refuse=refuse, limit_s=60) is report
