"""What a view reads out of an output, and what the driver's log says of a change: pure functions."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from ray_weightsync.config import Timeouts
from ray_weightsync.errors import ConfigError, WeightSyncError
from ray_weightsync.follower import Follower, changes, nothing_known, settled
from ray_weightsync.report import FleetStatus, ReplicaStatus
from ray_weightsync.session_life import serving_enough
from ray_weightsync.view import FleetView, versions_in


@dataclass
class Span:
    version: str
    start: int = 0
    end: int = 1


@dataclass
class Sequence:
    weight_versions: list[Span] | None


@dataclass
class Output:
    outputs: list[Sequence]


class Known:
    """Stands for a follower that has heard of one status."""

    def __init__(self, status: FleetStatus) -> None:
        self.status = status


def replica(name: str, state: str = "SERVING", error: str | None = None) -> ReplicaStatus:
    return ReplicaStatus(
        id=name,
        state=state,
        serving=state == "SERVING",
        version="1",
        attested=True,
        incarnation="i",
        node_id=None,
        world_size=1,
        error=error,
    )


def fleet(*replicas: ReplicaStatus, **fields: Any) -> FleetStatus:
    return replace(nothing_known("f"), replicas=replicas, **fields)


@pytest.mark.parametrize(
    ("output", "versions"),
    [
        (7, ["7"]),
        ("v7", ["v7"]),
        (Output([Sequence([Span("v1"), Span("v2")]), Sequence([Span("v3")])]), ["v1", "v2", "v3"]),
        (Output([Sequence(None)]), []),
        ({"outputs": [{"weight_versions": [("v1", 0, 4), ("v2", 4, 9)]}]}, ["v1", "v2"]),
        ({"outputs": [{"token_ids": []}]}, []),
    ],
)
def test_the_versions_of_an_output_are_found_in_every_form_that_engines_give(output: object, versions: list[str]) -> None:
    assert versions_in(output) == versions


@pytest.mark.parametrize("output", [None, 1.5, True, b"v1", object(), ["v1"], {"text": "v1"}])
def test_what_is_no_output_is_refused(output: object) -> None:
    with pytest.raises(ConfigError, match="staleness takes"):
        versions_in(output)


@pytest.mark.parametrize(
    ("output", "age"),
    [
        ("c", 0),
        ("adopted", 3),
        (Output([Sequence([Span("b"), Span("c")])]), 1),
        (Output([Sequence([Span("c")]), Sequence([Span("a")])]), 2),
        (Output([Sequence([Span("c"), Span("!rws:1")])]), None),
        (Output([Sequence([Span("c"), Span("forgotten")])]), None),
        (Output([]), None),
    ],
)
def test_staleness_goes_by_the_oldest_version_and_is_unknown_if_one_is(output: object, age: int | None) -> None:
    status = fleet(version="c", ordinal=3, ordinals={"adopted": 0, "a": 1, "b": 2, "c": 3})
    assert FleetView(Known(status)).staleness(output) == age  # type: ignore[arg-type]


def test_who_sleeps_and_so_serves_nothing_is_said() -> None:
    sleeper = replace(replica("r1"), serving=False, asleep=True)
    assert str(fleet(replica("r0"), sleeper)).splitlines()[1:] == ["  r0: SERVING, version 1", "  r1: SERVING, asleep, version 1"]


def test_a_change_of_state_is_one_line_and_what_a_round_goes_through_is_none() -> None:
    before = fleet(replica("r0"), replica("r1"))
    during = fleet(replica("r0", "UPDATING"), replica("r1", "UPDATING"))
    after = fleet(replica("r0"), replica("r1", "QUARANTINED", "torn"), replica("r2", "JOINING"))
    assert changes(before, during) == []
    assert changes(settled(before, during), after) == ["r1: SERVING -> QUARANTINED (torn)", "r2: JOINING"]
    assert changes(after, after) == []


def test_the_ranks_of_a_broadcast_are_one_line_of_the_drivers_log_until_they_change(caplog: pytest.LogCaptureFixture) -> None:
    begun, table = fleet(replica("r0")), "group of 2: 0 sender | 1 r0"
    link: Any = SimpleNamespace(name="f")
    with caplog.at_level(logging.INFO, logger="ray_weightsync.follower"):
        follower = Follower(link, begun, timeouts=Timeouts(), logs_changes=True)
        for sequence, ranks in enumerate([None, table, table, None, table]):
            follower._publish(replace(begun, sequence=sequence, ranks=ranks))
    assert caplog.messages == [f"f: {table}"] * 2  # None: a successor of the coordinator, which has seen no broadcast yet


def test_a_follower_waits_outside_of_ray_and_ends_when_that_is_shut_down() -> None:
    """Its link has no other way to wait: Ray would end the process of whoever waits inside it then."""
    news = fleet(replica("r0"))
    link = SimpleNamespace(name="f", connected=True, submit=lambda *asked: None)

    def wait_aside(*asked: Any, **limits: Any) -> FleetStatus:
        link.connected = False
        return news

    link.wait_aside = wait_aside
    events = Follower(link, nothing_known("f"), timeouts=Timeouts()).events(timeout_s=30)  # type: ignore[arg-type]
    heard: list[FleetStatus] = []
    with pytest.raises(WeightSyncError, match="Ray was shut down in this process"):
        heard.extend(events)
    assert heard[-1] is news


def test_all_means_everyone_who_is_not_retired_and_never_nobody() -> None:
    retired, waiting = replica("r0", "RETIRED"), replica("r1", "JOINING")
    assert serving_enough(fleet(), None) is None
    assert serving_enough(fleet(retired), None) is None
    assert serving_enough(fleet(retired, replica("r2")), None) == (replica("r2"),)
    assert serving_enough(fleet(waiting, replica("r2")), None) is None
    assert serving_enough(fleet(waiting, replica("r2")), 1) == (replica("r2"),)


def test_whoever_waits_for_news_is_told_when_they_end_for_a_reason_that_nobody_foresaw() -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("the process is running out of threads")

    follower = Follower(SimpleNamespace(name="f", connected=True, submit=broken), fleet(), timeouts=Timeouts())  # type: ignore[arg-type]
    events = follower.events(timeout_s=10)
    next(events)
    with pytest.raises(WeightSyncError, match="running out of threads"):
        next(events)
