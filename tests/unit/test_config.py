"""Values that users choose: refused when made, with the field's name, or good for the whole session."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from ray_weightsync.config import (
    Auto,
    Collective,
    FailurePolicy,
    Host,
    Native,
    Timeouts,
    as_transport,
    is_tombstone,
    version_label,
)
from ray_weightsync.errors import ConfigError


class TestVersionLabel:
    @pytest.mark.parametrize(
        ("version", "label"), [(0, "0"), (7, "7"), (-1, "-1"), ("step-9", "step-9"), ("数", "数"), ("a b", "a b"), ("v" * 256, "v" * 256)]
    )
    def test_ints_and_printable_strings_become_text(self, version: int | str, label: str) -> None:
        assert version_label(version) == label

    @pytest.mark.parametrize(
        "version", ["", None, 1.5, True, b"7", "x" * 257, "x" * 10_000, "a\nb", "a\tb", "a\x00", " a", "a ", "\ud800", "!rws:abc", ("a",)]
    )
    def test_everything_else_is_refused(self, version: Any) -> None:
        with pytest.raises(ConfigError, match="version"):
            version_label(version)

    def test_a_tombstone_is_recognised_and_nothing_else_is(self) -> None:
        assert is_tombstone("!rws:abc")
        assert not is_tombstone("rws")
        assert not is_tombstone(None)


class TestTimeouts:
    @pytest.mark.parametrize("field", [each.name for each in dataclasses.fields(Timeouts)])
    @pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), None, "60", True])
    def test_each_field_is_a_positive_finite_number(self, field: str, value: Any) -> None:
        with pytest.raises(ConfigError, match=field):
            Timeouts(**{field: value})

    def test_deadlines_of_phases_that_move_bytes_grow_with_them(self) -> None:
        timeouts = Timeouts(update_s=10, min_rate_bytes_per_s=1e6)
        assert timeouts.for_bytes("update", 0) == 10
        assert timeouts.for_bytes("update", 5_000_000) == 15

    def test_a_whole_round_is_allowed_at_least_the_sum_of_its_phases(self) -> None:
        timeouts = Timeouts()
        phases = (
            timeouts.pause_s
            + timeouts.start_s
            + timeouts.update_s
            + timeouts.finish_s
            + timeouts.attest_s
            + timeouts.commit_s
            + timeouts.resume_s
        )
        assert timeouts.round_s(0) >= phases


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Host(num_slots=1), "num_slots"),
        (lambda: Host(num_slots=True), "num_slots"),
        (lambda: Host(directory="relative"), "directory"),
        (lambda: Host(bucket_bytes=1), "at least 4096"),
        (lambda: Host(bucket_bytes=0), "bucket_bytes"),
        (lambda: Host(bucket_bytes=-1), "bucket_bytes"),
        (lambda: Collective(bucket_bytes=1), "bucket_bytes"),
        (lambda: Collective(num_buckets=1), "num_buckets"),
        (lambda: Collective(interface=""), "interface"),
        (lambda: Collective(keep_snapshot="yes"), "keep_snapshot"),  # type: ignore[arg-type]
        (lambda: Collective(host="/mnt/shm"), r"Collective\.host"),  # type: ignore[arg-type]
        (lambda: Auto(host=None), r"Auto\.host"),  # type: ignore[arg-type]
        (lambda: Native(""), "backend"),
        (lambda: FailurePolicy(after_start="hope"), "after_start"),  # type: ignore[arg-type]
        (lambda: FailurePolicy(min_serving=0), "min_serving"),
        (lambda: FailurePolicy(max_heals=-1), "max_heals"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(make: Any, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        make()


@pytest.mark.parametrize("value", [Timeouts(), FailurePolicy(), Auto(), Host(), Collective(), Native("ipc")])
def test_values_are_frozen_and_picklable(value: Any) -> None:
    assert pickle.loads(pickle.dumps(value)) == value
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, None)


def test_a_transport_is_named_or_given() -> None:
    assert as_transport("auto") == Auto()
    assert as_transport(Auto(host=Host(num_slots=3))) == Auto(host=Host(num_slots=3))
    assert as_transport("host") == Host()
    assert as_transport(Host(overlap=True)) == Host(overlap=True)
    assert as_transport("collective") == Collective()
    assert as_transport(Collective(keep_snapshot=True)) == Collective(keep_snapshot=True)
    assert as_transport("native:ipc") == as_transport(Native("ipc")) == Native("ipc")


@pytest.mark.parametrize("value", ["carrier pigeon", "native", None, 3])
def test_a_transport_that_is_not_there_is_refused_and_the_one_that_is_is_named(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"'host', .* an Auto, a Host"):
        as_transport(value)


def test_a_native_transport_names_a_backend() -> None:
    with pytest.raises(ConfigError, match="name of a vLLM weight-transfer backend"):
        as_transport("native:")


@pytest.mark.parametrize("options", [None, [("packed", True)], {1: True}])
def test_options_of_a_native_transport_are_keyword_arguments(options: Any) -> None:
    with pytest.raises(ConfigError, match="dict of keyword arguments"):
        Native("ipc", options=options)
