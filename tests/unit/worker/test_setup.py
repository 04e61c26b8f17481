"""Engines that an update would spoil are refused with the sentence that helps; what it takes away is said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ray_weightsync.worker.setup import losses, refusals


def config(*, eplb: bool = False, lora: object | None = None, speculates: str | None = None) -> Any:
    speculative = SimpleNamespace(method=speculates) if speculates else None
    return SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=eplb), lora_config=lora, speculative_config=speculative)


def test_a_plain_engine_is_neither_refused_nor_loses_anything() -> None:
    assert (refusals(config()), losses(config())) == ([], [])


def test_an_engine_that_moves_its_experts_is_refused() -> None:
    (words,) = refusals(config(eplb=True))
    assert "enable_eplb=False" in words


def test_an_engine_with_adapters_is_told_that_they_go() -> None:
    (words,) = losses(config(lora=object()))
    assert "load them again" in words
    assert refusals(config(lora=object())) == []


@pytest.mark.parametrize("method", ["eagle3", "mtp", "draft_model", "medusa", "something newer"])
def test_an_engine_with_a_draft_model_is_told_that_it_stays_as_it_was(method: str) -> None:
    (words,) = losses(config(speculates=method))
    assert f"({method}) keeps the weights it has" in words
    assert len(losses(config(speculates=method, lora=object()))) == 2


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix"])
def test_guesses_that_need_no_model_are_no_loss(method: str) -> None:
    assert losses(config(speculates=method)) == []


def test_a_configuration_of_another_version_without_these_fields_is_neither() -> None:
    assert (refusals(SimpleNamespace()), losses(SimpleNamespace())) == ([], [])
