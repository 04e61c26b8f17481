"""What is loaded under names of one memory has to be one value."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ray_weightsync.worker.ties import agreeing

TIES = {"embed": frozenset({"head"}), "head": frozenset({"embed"})}


def test_pairs_that_agree_pass_as_they_are_in_their_order() -> None:
    pairs = [("head", torch.ones(2, 3)), ("other", torch.zeros(1)), ("embed", torch.ones(2, 3))]
    passed = list(agreeing(iter(pairs), TIES))
    assert [name for name, _ in passed] == ["head", "other", "embed"]
    assert all(came is went for (_, came), (_, went) in zip(passed, pairs, strict=True))


def test_one_name_alone_has_nothing_to_agree_with() -> None:
    assert len(list(agreeing([("head", torch.ones(2))], TIES))) == 1


@pytest.mark.parametrize("order", [("embed", "head"), ("head", "embed")])
def test_the_second_of_two_that_differ_is_not_handed_on_and_both_are_named(order: tuple[str, str]) -> None:
    first, second = order
    pairs = agreeing([(first, torch.zeros(4)), (second, torch.tensor([0.0, 0.0, 0.0, 1.0]))], TIES)
    assert next(pairs)[0] == first
    with pytest.raises(ValueError, match=f"{first} and {second} are one tensor in the engine's model, and different values were sent"):
        next(pairs)


def test_the_same_nan_agrees_and_a_negative_zero_differs() -> None:
    nan = torch.full((2,), float("nan"))
    assert len(list(agreeing([("embed", nan), ("head", nan.clone())], TIES))) == 2
    with pytest.raises(ValueError, match="different values"):
        list(agreeing([("embed", torch.tensor([0.0])), ("head", torch.tensor([-0.0]))], TIES))


@pytest.mark.parametrize("other", [torch.zeros(4), torch.zeros(2, 2, dtype=torch.int32)])
def test_equal_bytes_of_another_shape_or_dtype_differ(other: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="different values"):
        list(agreeing([("embed", torch.zeros(2, 2)), ("head", other)], TIES))


def test_a_loader_may_write_to_the_first_before_the_second_comes() -> None:
    def loaded() -> Iterator[str]:
        for name, tensor in agreeing([("embed", torch.ones(3)), ("head", torch.ones(3))], TIES):
            tensor.neg_()
            yield name

    assert list(loaded()) == ["embed", "head"]


def test_all_of_three_have_to_agree() -> None:
    ties = {name: frozenset("abc") - {name} for name in "abc"}
    same = torch.ones(2)
    assert len(list(agreeing([(name, same) for name in "abc"], ties))) == 3
    with pytest.raises(ValueError, match="a and c are one tensor"):
        list(agreeing([("a", same), ("b", same), ("c", torch.zeros(2))], ties))
