"""A tied model: on a CPU engine the head keeps a repacked copy of its own, so both names have to be sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

import ray_weightsync as rws
from tests.vllm.conftest import Checkpoints
from tests.vllm.support import LEFT_FENCED, Driver, Pairs, Stage, checkpoint, kill_engine, plan_of, start_engine, started, tokens_of

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
        kill_engine(fresh)
    yield Tied(Driver(handle, 1), tokens)
    kill_engine(handle)


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


class TiedModule(torch.nn.Module):
    """A trainer's model: the head is the embedding, and the class says so as transformers' classes do."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, pairs: Pairs) -> None:
        super().__init__()
        for name, tensor in pairs.items():
            *path, leaf = name.split(".")
            here: torch.nn.Module = self
            for part in path:
                if not hasattr(here, part):
                    here.add_module(part, torch.nn.Module())
                here = getattr(here, part)
            here.register_parameter(leaf, torch.nn.Parameter(tensor.clone()))
        self.lm_head.weight = self.model.embed_tokens.weight


def test_a_tied_module_is_sent_under_both_names_and_gives_a_fresh_engines_output(tied: Tied, checkpoints: Checkpoints) -> None:
    module = TiedModule(checkpoint(checkpoints.tied_b))
    with rws.WeightSync.attach([rws.EngineRef(tied.engine.handle, attr="llm")], on_failure=LEFT_FENCED) as sync:
        sync.send_weights(checkpoint(checkpoints.tied_a), version="a")
        assert tied.engine.tokens() != tied.fresh_b
        report = sync.send_weights(module, version="b")
        assert report.num_tensors == len(dict(module.named_parameters(remove_duplicate=False))) == len(dict(module.named_parameters())) + 1
        assert tied.engine.tokens() == tied.fresh_b


@pytest.mark.parametrize(("sent", "missing"), [(EMBED, HEAD), (HEAD, EMBED)])
def test_a_session_refuses_one_name_alone(tied: Tied, checkpoints: Checkpoints, sent: str, missing: str) -> None:
    source = rws.ModuleSource(TiedModule(checkpoint(checkpoints.tied_b)), skip=missing)
    with rws.WeightSync.attach([rws.EngineRef(tied.engine.handle, attr="llm")], on_failure=LEFT_FENCED) as sync:
        with pytest.raises(rws.RoundAborted, match=f"{missing} would be given nothing"):
            sync.send_weights(source, version="half")
        assert sync.status().ordinal == 0


def test_two_values_for_tied_names_are_an_error_that_names_both_before_any_engine_is_touched(tied: Tied, checkpoints: Checkpoints) -> None:
    module = TiedModule(checkpoint(checkpoints.tied_b))
    module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight + 1)
    tokens = tied.engine.tokens()
    with rws.WeightSync.attach([rws.EngineRef(tied.engine.handle, attr="llm")], on_failure=LEFT_FENCED) as sync:
        with pytest.raises(rws.ConfigError, match=f"{HEAD}.*{EMBED}.*differ"):
            sync.send_weights(module, version="torn")
        assert sync.status().ordinal == 0
    assert tied.engine.tokens() == tokens


def torn(checkpoints: Checkpoints) -> Pairs:
    """What a tied engine cannot hold: a plain state dict, of which nobody can tell that two of its tensors were to be one."""
    pairs = checkpoint(checkpoints.tied_b)
    pairs[HEAD] = pairs[HEAD].clone()
    pairs[HEAD].view(-1)[-1] += 1
    return pairs


@pytest.mark.parametrize("order", [(EMBED, HEAD), (HEAD, EMBED)])
def test_two_values_in_a_plain_state_dict_are_told_by_the_worker_and_the_next_round_is_whole(
    tied: Tied, checkpoints: Checkpoints, stage: Stage, order: tuple[str, str]
) -> None:
    pairs = torn(checkpoints)
    staged = stage(pairs, [*order, *(name for name in pairs if name not in order)])
    if "loader skips the plan's tensor of that name" in tied.engine.refusal(staged.plan):
        pytest.skip("this vLLM (0.28) cannot update a tied head on a CPU, and the preflight says so")
    tied.engine.pause()
    tied.engine.transfer(staged)
    first, second = order
    assert f"{first} and {second} are one tensor in the engine's model, and different values were sent" in tied.engine.complaint(staged)
    assert tied.engine.leftovers() == []
    tied.engine.resume()
    tied.engine.bring(stage(checkpoint(checkpoints.tied_b)))
    assert tied.engine.tokens() == tied.fresh_b


def test_a_session_fences_engines_that_were_sent_two_values(tied: Tied, checkpoints: Checkpoints) -> None:
    with rws.WeightSync.attach([rws.EngineRef(tied.engine.handle, attr="llm")], on_failure=LEFT_FENCED) as sync:
        sync.send_weights(checkpoint(checkpoints.tied_a), version="a")
        with pytest.raises(rws.FleetTorn, match=f"{EMBED} and {HEAD} are one tensor"):
            sync.send_weights(torn(checkpoints), version="torn")
        assert sync.serving() == ()
        sync.send_weights(checkpoint(checkpoints.tied_b), version="b")
        assert tied.engine.tokens() == tied.fresh_b
