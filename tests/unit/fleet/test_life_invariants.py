"""Random lives of a fleet: rounds of every transport, repairs, joins, leaves, sleep, probes, deaths, restarts and faults."""

from __future__ import annotations

from hypothesis import example, given, settings
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
HOSTS = st.builds(Host, overlap=st.booleans(), num_slots=st.integers(2, 3))
NO_HEALING = FailurePolicy(auto_heal=False)


@settings(max_examples=150, deadline=None, print_blob=True)
@given(st.lists(EVENTS, min_size=1, max_size=6), POLICIES, HOSTS)
# One that joins has not the version that was found.
@example([Event(("add",)), Event(("remove",), "restart"), Event(("send",), "kill")], NO_HEALING, Host())
# One that was believed asleep is found awake.
@example([Event(("sleep 1",), None, {(0, "sleep"): "hang"}), Event(("send",))], NO_HEALING, Host())
# Nobody serves, and two have the version: they are half awake.
@example(
    [Event(("send",)), Event(("sleep 2",)), Event(("wake weights",), None, {(0, "wake_up"): "raise"}), Event(("heal",))], NO_HEALING, Host()
)
# A pause that its owner had ended was left to them.
@example([Event(("send",), "pause"), Event(("send",), None, {(1, "start"): "raise"})], NO_HEALING, Host())
# A removal that the journal knew as begun was nobody's.
@example([Event(("send", "remove")), Event(("send again", "remove"), dies_in=(2, "inspect"))], NO_HEALING, Host())
# A mark of a sleep that failed counted as another round's.
@example([Event(("sleep 2",), None, {(0, "sleep"): "raise"}), Event(("wake",))], NO_HEALING, Host())
# What a staged version knew of the fleet was older than a round between: the label before came onto the weights after.
@example([Event(("stage",)), Event(("relay nccl",)), Event(("commit",), None, {(1, "mark"): "hang"})], NO_HEALING, Host())
@example([Event(("stage",)), Event(("relay nccl", "add")), Event(("commit",))], NO_HEALING, Host())
# A process that is another session's by now was fenced.
@example([Event(("stage",)), Event(("hand over",), "restart"), Event(("commit",))], NO_HEALING, Host())
# So was one put to sleep.
@example([Event(("broadcast",)), Event(("hand over", "sleep 1"), "restart")], NO_HEALING, Host())
# A pause that a dead coordinator had asked for came late, and was taken for the owner's.
@example([Event(("broadcast",), None, {(1, "pause"): "delayed"}, (3, "pause")), Event(("send",))], NO_HEALING, Host())
# So was the pause of one that its owner had resumed before a probe refused it.
@example(
    [Event(("send",), "pause"), Event(("send",), "pause"), Event(("send",)), Event(("refuse 1",), "resume"), Event(("send",))],
    NO_HEALING,
    Host(),
)
def test_whatever_happens_to_a_fleet_the_promises_hold_and_it_can_be_made_whole(
    events: list[Event], policy: FailurePolicy, host: Host
) -> None:
    run(lived(events, policy=policy, host=host))
