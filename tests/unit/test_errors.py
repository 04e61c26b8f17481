"""Errors keep their type and their fields on every way they travel, and say the most important thing first."""

from __future__ import annotations

import inspect
import pickle

import pytest

from ray_weightsync import errors
from ray_weightsync.errors import CallFailure, ConfigError, EngineCallError, FleetTorn, ReplicasLost, RoundAborted, WeightSyncError

TREE = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, WeightSyncError)]


@pytest.mark.parametrize("cls", TREE, ids=lambda cls: cls.__name__)
def test_an_error_survives_pickling_with_all_its_fields(cls: type[WeightSyncError]) -> None:
    error = cls(
        "what holds", phase="update", replicas=("r1",), elapsed_s=1.5, limit_s=2.0, engine_message="boom", log_hint="here", hint="do this"
    )
    if isinstance(error, EngineCallError):
        error.failures["r1"] = CallFailure(message="boom", kind="raised", elapsed_s=1.5)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert copy.__dict__ == error.__dict__
    assert str(copy) == str(error)
    assert copy.args == error.args


@pytest.mark.parametrize("cls", TREE, ids=lambda cls: cls.__name__)
def test_every_class_is_drawn_in_the_tree_of_the_module(cls: type[WeightSyncError]) -> None:
    assert cls.__name__ in (errors.__doc__ or "")


def test_the_text_says_what_holds_then_who_where_how_long_the_words_the_log_and_what_to_do() -> None:
    error = RoundAborted(
        "Nothing changed.",
        phase="pause",
        replicas=("r0", "r2"),
        elapsed_s=60.0,
        limit_s=60.0,
        engine_message="no",
        log_hint="ray logs",
        hint="call again",
    )
    text = str(error)
    order = ["Nothing changed.", "r0, r2", "pause", "60.0 s of 60.0 s", "no", "ray logs", "call again"]
    assert [text.index(each) for each in order] == sorted(text.index(each) for each in order)


def test_words_are_not_ascribed_to_an_engine_which_may_not_have_said_them() -> None:
    assert str(WeightSyncError("What holds.", engine_message="no such file")) == "What holds.\nCause: no such file"


def test_what_is_not_known_is_not_said() -> None:
    assert str(WeightSyncError("plain")) == "plain"


def test_a_config_error_is_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)


def test_the_three_ends_of_a_round_are_told_apart_by_type_alone() -> None:
    ends = (RoundAborted, ReplicasLost, FleetTorn)
    assert not any(issubclass(one, other) for one in ends for other in ends if one is not other)
