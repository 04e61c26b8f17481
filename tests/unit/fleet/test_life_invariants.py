"""Random lives of a fleet: rounds of every transport, repairs, joins, leaves, sleep, probes, deaths, restarts and faults."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ray_weightsync.config import FailurePolicy, Host
from tests.unit.fleet.lives import REPLICAS, Event, lived
from tests.unit.fleet.virtual_time import run

CALLS = (
    *("inspect", "see", "judge", "plan", "pause", "mark", "native", "start", "update", "finish", "outcome", "commit", "cache", "resume"),
    *("unmark", "sleep", "wake_up"),
)
SENDS = ("send", "send", "send again", "stage", "commit", "abandon")
LIVE = ("broadcast", "broadcast kept", "broadcast fails", "relay ipc", "relay nccl", "relay ipc update_weights")
OTHERS = ("heal", "check", "add", "replace", "remove", "sleep 1", "sleep 2", "wake", "wake weights", "refuse 0", "refuse 1", "hand over")
STEPS = st.lists(st.sampled_from(SENDS) | st.sampled_from(LIVE) | st.sampled_from(OTHERS), min_size=1, max_size=2, unique=True).map(tuple)
BEHIND = st.none() | st.sampled_from(["restart", "kill", "resume", "pause", "relabel", "store"])
PLACES = st.tuples(st.integers(0, REPLICAS - 1), st.sampled_from(CALLS))
FAULTS = st.dictionaries(PLACES, st.sampled_from(["raise", "die", "hang", "late", "delayed", "lost", "slow"]), max_size=3)
DEATHS = st.none() | st.none() | PLACES | st.just((0, None))
EVENTS = st.builds(Event, STEPS, BEHIND, FAULTS, DEATHS, st.none() | st.none() | PLACES)
POLICIES = st.builds(
    FailurePolicy,
    after_start=st.sampled_from(["quarantine", "all_or_none"]),
    min_serving=st.sampled_from([None, 1, 2]),
    auto_heal=st.booleans(),
    max_heals=st.just(2),
)
HOSTS = st.builds(Host, overlap=st.booleans())


@settings(max_examples=150, deadline=None, print_blob=True)
@given(st.lists(EVENTS, min_size=1, max_size=6), POLICIES, HOSTS)
def test_whatever_happens_to_a_fleet_the_promises_hold_and_it_can_be_made_whole(
    events: list[Event], policy: FailurePolicy, host: Host
) -> None:
    run(lived(events, policy=policy, host=host))
