"""What a checkpoint's headers say against a plan, and how an engine's process reads them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ray_weightsync.engines import told_headers
from ray_weightsync.engines.headers import Headers, headers_from, headers_of, problems_of
from ray_weightsync.weights.plan import ParamMeta, Plan
from tests.unit.fleet.fake_engine import FakeEngine

HEADERS = Headers(tensors={"embed": ("bfloat16", (8, 4)), "norm": ("bfloat16", (4,))}, dtype="bfloat16")


def plan(**tensors: tuple[torch.dtype, tuple[int, ...]]) -> Plan:
    return Plan.from_metadata([ParamMeta(name.replace("__", "."), dtype, shape) for name, (dtype, shape) in tensors.items()])


BF16 = torch.bfloat16
SAME: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"embed": (BF16, (8, 4)), "norm": (BF16, (4,))}


def test_the_checkpoints_own_plan_has_no_problem_in_any_order() -> None:
    assert problems_of(plan(**SAME), HEADERS) == ()
    assert problems_of(plan(norm=SAME["norm"], embed=SAME["embed"]), HEADERS) == ()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"norm": (BF16, (5,))}, "'norm' is bfloat16 of shape [4] there, and would be bfloat16 of shape [5]"),
        ({"norm": (torch.float16, (4,))}, "'norm' is bfloat16 of shape [4] there, and would be float16 of shape [4]"),
        ({"bias": (BF16, (4,))}, "its checkpoint has no tensor 'bias'"),
        ({"norm": None}, "the plan lacks 'norm'"),
        ({"lm_head__weight": (BF16, (8, 4))}, "its checkpoint has no tensor 'lm_head.weight'"),
    ],
)
def test_what_is_not_as_in_the_checkpoint_is_named(changed: dict[str, Any], said: str) -> None:
    tensors = {name: each for name, each in (SAME | changed).items() if each is not None}
    assert problems_of(plan(**tensors), HEADERS) == (said,)


def test_a_plan_of_some_tensors_need_not_have_the_others() -> None:
    some = Plan.from_metadata([ParamMeta("norm", BF16, (4,))], partial=True)
    assert problems_of(some, HEADERS) == ()


def test_of_many_the_first_are_named_and_the_rest_is_counted() -> None:
    many = Headers(tensors={f"t{index}": ("float32", (1,)) for index in range(5)} | dict(HEADERS.tensors))
    assert problems_of(plan(**SAME), many) == ("the plan lacks 't0', 't1', 't2', and 2 more",)


@pytest.mark.parametrize("tensors", [SAME, SAME | {"lm_head__weight": (BF16, (8, 4))}])
def test_a_head_that_is_the_embedding_may_be_sent_or_not(tensors: dict[str, Any]) -> None:
    tied = Headers(tensors=HEADERS.tensors, tied=True)
    assert problems_of(plan(**tensors), tied) == ()
    both = Headers(tensors={**HEADERS.tensors, "lm_head.weight": ("bfloat16", (8, 4))}, tied=True)
    assert problems_of(plan(**tensors), both) == ()


def test_tables_that_loaders_skip_need_not_be_sent() -> None:
    old = Headers(tensors={**HEADERS.tensors, "layers.0.rotary_emb.inv_freq": ("float32", (2,))})
    assert problems_of(plan(**SAME), old) == ()


def test_an_engine_that_casts_its_checkpoint_takes_the_dtype_that_it_computes_in_and_no_third_one() -> None:
    wide = Headers(tensors={"norm": ("float32", (4,))}, dtype="bfloat16")
    assert problems_of(plan(norm=(BF16, (4,))), wide) == ()
    assert problems_of(plan(norm=(torch.float32, (4,))), wide) == ()
    assert problems_of(plan(norm=(torch.float16, (4,))), wide) != ()
    packed = Headers(tensors={"norm": ("int32", (4,))}, dtype="bfloat16")
    assert problems_of(plan(norm=(BF16, (4,))), packed) != ()


def test_headers_that_could_not_be_read_speak_against_nothing() -> None:
    assert problems_of(plan(**SAME), Headers(problem="it is elsewhere")) == ()


def engine_on(model: object, **config: Any) -> Any:
    model_config = SimpleNamespace(model=str(model), dtype=torch.bfloat16, hf_text_config=SimpleNamespace(**config))
    return SimpleNamespace(llm=SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=None, model_config=model_config)))


def tensors() -> dict[str, torch.Tensor]:
    return {"embed": torch.zeros(8, 4, dtype=BF16), "norm": torch.zeros(4, dtype=BF16)}


def test_an_engines_process_reads_the_headers_of_its_checkpoint(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert headers_from(told_headers.tell(engine_on(tmp_path), "llm")) == HEADERS
    tied = headers_from(told_headers.tell(engine_on(tmp_path, tie_word_embeddings=True), "llm"))
    assert tied.tied


def test_only_the_files_of_the_index_are_read(tmp_path: Path) -> None:
    for name, tensor in tensors().items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    save_file({"other": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in tensors()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert headers_from(told_headers.tell(engine_on(tmp_path), "llm")) == HEADERS


def test_what_cannot_be_read_is_a_problem_in_words_and_never_an_error(tmp_path: Path) -> None:
    assert "is no directory" in str(headers_from(told_headers.tell(engine_on("org/model"), "llm")).problem)
    assert "holds no .safetensors file" in str(headers_from(told_headers.tell(engine_on(tmp_path), "llm")).problem)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    assert "is no safetensors file" in str(headers_from(told_headers.tell(engine_on(tmp_path), "llm")).problem)
    assert "cannot be read" in str(headers_from(told_headers.tell(object(), "")).problem)


def test_an_engine_that_is_not_reached_through_its_actor_shows_no_files() -> None:
    found = asyncio.run(headers_of(FakeEngine("r0"), limit_s=1.0))
    assert "not reached through its actor" in str(found.problem)
