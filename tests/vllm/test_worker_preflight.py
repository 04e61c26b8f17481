"""A plan is refused, in words that help, before anything changes: on a meta twin of every worker's model, with TP 1 and TP 2."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch

from ray_weightsync.weights.plan import ParamMeta, Plan
from tests.vllm.support import Driver, Pairs, Stage, plan_of

LAYER = "model.layers.1."
Q, K, V, OUT = (f"{LAYER}self_attn.{each}_proj.weight" for each in "qkvo")
GATE, UP, DOWN = (f"{LAYER}mlp.{each}_proj.weight" for each in ("gate", "up", "down"))
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def shaped(name: str, *shape: int) -> Callable[[Pairs], Pairs]:
    return lambda pairs: pairs | {name: torch.empty(shape, dtype=torch.bfloat16, device="meta")}


def typed(name: str, dtype: torch.dtype) -> Callable[[Pairs], Pairs]:
    return lambda pairs: pairs | {name: torch.empty(pairs[name].shape, dtype=dtype, device="meta")}


def without(*names: str) -> Callable[[Pairs], Pairs]:
    return lambda pairs: {name: tensor for name, tensor in pairs.items() if name not in names}


def only(*names: str) -> Callable[[Pairs], Pairs]:
    return lambda pairs: {name: pairs[name] for name in names}


def all_typed(dtype: torch.dtype) -> Callable[[Pairs], Pairs]:
    return lambda pairs: {name: torch.empty(tensor.shape, dtype=dtype, device="meta") for name, tensor in pairs.items()}


QKV_PARAM = "model.layers.1.self_attn.qkv_proj.weight"

REFUSED = {
    "a wrong shape": (shaped(DOWN, 7, 7), rf"at tensor '{DOWN}' \(bfloat16, shape \[7, 7\]; the parameter here has shape \[256, \d+\]\): "),
    "one dimension too many": (shaped(OUT, 1, 256, 256), f"'{OUT}'"),
    "one dimension too few": (shaped(OUT, 256 * 256), f"'{OUT}'"),
    "a norm of another size": (shaped(NORM, 128), f"'{NORM}'"),
    "a single element for a norm": (shaped(NORM, 1), NORM),
    "a shard of a fused layer too large": (shaped(Q, 512, 256), f"'{Q}'"),
    "padded rows of the vocabulary": (
        shaped(EMBED, 2048, 256),
        rf"'{EMBED}' \(bfloat16, shape \[2048, 256\]; the parameter here has shape \[\d+, 256\]\): AssertionError",
    ),
    "padded rows of the head": (shaped(HEAD, 2048, 256), f"'{HEAD}'"),
    "an unknown name": (shaped("model.layers.1.self_attn.z_proj.weight", 4, 4), "z_proj"),
    "an unknown layer": (shaped("model.layers.9.mlp.down_proj.weight", 256, 512), r"layers\.9"),
    "only q_proj of a fused layer": (without(K, V), f"{QKV_PARAM} would be given .* elements, from '{Q}': the rest is missing"),
    "all but v_proj": (without(V), f"{QKV_PARAM} would be given .* elements, from '{K}', '{Q}': the rest is missing"),
    "only gate_proj": (without(UP), f"model.layers.1.mlp.gate_up_proj.weight would be given .* elements, from '{GATE}'"),
    "no head": (without(HEAD), f"{HEAD} would be given nothing: it is missing from the plan"),
    "no norm": (without(NORM), f"{NORM} would be given nothing"),
    "one tensor alone": (only(Q), "would be given nothing.*; and [0-9]+ more"),
    "float32 for a bfloat16 norm": (
        typed(NORM, torch.float32),
        rf"{NORM} is bfloat16 in this engine and would be given float32: cast on the sender with cast\(",
    ),
    "float16 for a bfloat16 projection": (typed(Q, torch.float16), rf"{QKV_PARAM} is bfloat16 .* given float16 \(tensor '{Q}'\)"),
    "int8 for a bfloat16 embedding": (typed(EMBED, torch.int8), f"{EMBED} is bfloat16 in this engine and would be given int8"),
    "float32 throughout": (
        all_typed(torch.float32),
        r"is bfloat16 in this engine and would be given float32 \(\d+ other parameters likewise\): cast",
    ),
    "float8 throughout": (all_typed(torch.float8_e4m3fn), r"would be given float8_e4m3fn \(\d+ other"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_every_rank_by_name(engine: Driver, pairs_a: Pairs, case: str) -> None:
    change, words = REFUSED[case]
    refusal = engine.refusal(plan_of(change(pairs_a)))
    for rank in range(engine.world_size):
        said = re.search(rf"rank {rank}: (.*?)(?=; rank \d: |$)", refusal)
        assert said, refusal
        assert re.search(words, said[1]), said[1]


def test_a_model_of_another_size_is_refused(engine: Driver, pairs_a: Pairs) -> None:
    other = {name: torch.empty([2 * size for size in tensor.shape], dtype=tensor.dtype, device="meta") for name, tensor in pairs_a.items()}
    assert f"at tensor '{next(iter(other))}'" in engine.refusal(plan_of(other))


def test_another_target_than_the_main_model_is_refused(engine: Driver, pairs_a: Pairs) -> None:
    metadata = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in pairs_a.items()]
    assert "updates the main model only" in engine.refusal(Plan.from_metadata(metadata, target="draft"))


@pytest.mark.parametrize("order", ["as it is", "reversed", "mixed"])
def test_a_complete_plan_is_accepted_in_any_order_and_kept_by_every_worker(engine: Driver, pairs_a: Pairs, order: str) -> None:
    names = list(pairs_a)
    names = {"as it is": names, "reversed": names[::-1], "mixed": names[::3] + names[1::3] + names[2::3]}[order]
    plan = plan_of({name: pairs_a[name] for name in names})
    assert engine.refusal(plan) == ""
    for worker in engine.describe():
        assert plan.digest in worker["plans"]
        assert worker["unjudged"] == {}


def test_refusals_leave_the_live_model_alone_and_the_replies_in_step(engine: Driver, pairs_a: Pairs) -> None:
    tokens, parameters = engine.tokens(), engine.rpc("rws_test_identities")
    for case in ("a wrong shape", "only q_proj of a fused layer", "float32 throughout"):
        assert engine.refusal(plan_of(REFUSED[case][0](pairs_a)))
        engine.describe()
    assert engine.leftovers() == []
    assert engine.rpc("rws_test_identities") == parameters
    assert engine.tokens() == tokens


class TestInPieces:
    """A large plan is judged between the steps of an engine: here after every tensor, so that the small one of this model is large."""

    @pytest.fixture(autouse=True)
    def tiny_pieces(self, engine: Driver) -> Iterator[None]:
        engine.rpc("rws_test_pieces", 0.0)
        yield
        engine.rpc("rws_test_pieces", None)

    @pytest.mark.parametrize("case", ["a wrong shape", "only q_proj of a fused layer", "float32 throughout"])
    def test_the_words_are_those_of_a_judgement_at_once(self, engine: Driver, pairs_a: Pairs, case: str) -> None:
        plan = plan_of(REFUSED[case][0](pairs_a))
        at_once = engine.refusal(plan)
        engine.judge(plan)
        assert engine.looks_until_judged() > 5
        assert engine.refusal(plan) == at_once
        assert at_once

    def test_requests_run_between_the_pieces_with_the_live_weights(self, engine: Driver, pairs_a: Pairs) -> None:
        plan = plan_of({OUT: pairs_a[OUT]} | pairs_a)  # in an order that no other test has
        tokens = engine.tokens()
        engine.judge(plan)
        for _ in range(20):
            engine.describe()
        assert engine.tokens() == tokens, "half judged"
        assert engine.looks_until_judged() > 5
        assert engine.tokens() == tokens
        assert engine.leftovers() == []

    def test_a_round_in_between_is_whole_and_the_judgement_begins_anew(self, engine: Driver, stage: Stage, pairs_a: Pairs) -> None:
        staged, tokens = stage(pairs_a), engine.tokens()
        engine.preflight(staged.plan)
        other = plan_of(dict(sorted(pairs_a.items())))
        engine.judge(other)
        for _ in range(20):
            engine.describe()
        engine.bring(staged)
        assert [worker["judging"] for worker in engine.describe()] == [None] * engine.world_size
        assert engine.tokens() == tokens
        assert engine.refusal(other) == ""
        assert engine.leftovers() == []


MALFORMED = [
    None,
    [],
    7,
    "text",
    {},
    {"op": "dance"},
    {"op": "judge"},
    {"op": "plan", "plan": 7},
    {"op": "see", "transport": "x", "probe": {}},
]


@pytest.mark.parametrize("bad", MALFORMED, ids=str)
def test_a_malformed_call_is_refused_by_every_rank_and_the_replies_stay_in_step(engine: Driver, bad: object) -> None:
    with pytest.raises(Exception, match=r"rws: rank 0: .*" + ("; rank 1: " if engine.world_size == 2 else "")):
        engine.init(bad)
    engine.describe()
