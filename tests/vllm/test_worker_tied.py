"""A tied model: on a CPU engine the head keeps a repacked copy of its own, so both names have to be sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.vllm.conftest import Checkpoints
from tests.vllm.support import Driver, Stage, checkpoint, plan_of, start_engine, started, stop_engine, tokens_of

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Tied:
    """An engine on one tied checkpoint, and a fresh engine's tokens of the other."""

    engine: Driver
    fresh_b: list[list[int]]


@pytest.fixture(scope="module")
def tied(checkpoints: Checkpoints) -> Iterator[Tied]:
    fresh, handle = start_engine(checkpoints.tied_b, 1), start_engine(checkpoints.tied_a, 1)
    try:
        started(fresh, handle)
        tokens = tokens_of(fresh)
    finally:
        stop_engine(fresh)
    yield Tied(Driver(handle, 1), tokens)
    stop_engine(handle)


@pytest.mark.parametrize(("sent", "missing"), [(EMBED, HEAD), (HEAD, EMBED)])
def test_one_name_alone_is_refused(tied: Tied, checkpoints: Checkpoints, sent: str, missing: str) -> None:
    pairs = checkpoint(checkpoints.tied_b)
    del pairs[missing]
    refusal = tied.engine.refusal(plan_of(pairs))
    assert f"{missing} would be given nothing: it is missing from the plan (a tied weight is sent under each of its names)" in refusal


def test_both_names_give_a_fresh_engines_output(tied: Tied, checkpoints: Checkpoints, stage: Stage) -> None:
    assert tied.engine.tokens() != tied.fresh_b
    staged = stage(checkpoint(checkpoints.tied_b))
    if "loader skips the plan's tensor of that name" in tied.engine.refusal(staged.plan):
        pytest.skip("this vLLM (0.28) cannot update a tied head on a CPU, and the preflight says so")
    tied.engine.bring(staged)
    assert tied.engine.tokens() == tied.fresh_b
