"""A fault is validated where it is written down, and a call is told apart by its phase."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest

from ray_weightsync.engines.facts import INSPECT
from ray_weightsync.errors import ConfigError, WeightSyncError
from ray_weightsync.protocol.channel import FINISH, GET_VERSION, INIT, PAUSE, RESET_PREFIX_CACHE, RESUME, SET_VERSION, START, UPDATE
from ray_weightsync.testing import FaultNotReached
from ray_weightsync.testing.phases import phase_of, phases_of
from ray_weightsync.testing.spec import KINDS, PHASES, RANK_PHASES, FaultSpec


def spec(**fields: Any) -> FaultSpec:
    return FaultSpec(**{"replica": "r0", "phase": "update", "kind": "raise", **fields})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"replica": ""}, "replica must be the id"),
        ({"phase": "udpate"}, "phase must be one of 'preflight', 'pause', .*not 'udpate'"),
        ({"kind": "explode"}, "kind must be one of 'raise', 'hang', 'late', 'lost', 'slow', 'kill', not 'explode'"),
        ({"phase": "load"}, "phase 'load' is inside a worker: say rank="),
        ({"kind": "corrupt"}, "kind 'corrupt' happens inside a worker, in phase 'load': say rank="),
        ({"rank": 0}, "phase of a rank must be one of 'start', 'load', 'finish', 'outcome', not 'update'"),
        ({"rank": 0, "phase": "load", "kind": "lost"}, "kind of a rank must be one of 'raise', 'hang', 'slow', 'kill', 'corrupt'"),
        ({"rank": 0, "phase": "finish", "kind": "corrupt"}, "kind 'corrupt' belongs to phase 'load', not 'finish'"),
        ({"rank": -1, "phase": "load"}, "rank must be an int of at least 0"),
        ({"rank": True, "phase": "load"}, "rank must be an int"),
        ({"times": 0}, "times must be an int of at least 1"),
        ({"kind": "slow"}, "kind 'slow' needs seconds="),
        ({"kind": "slow", "seconds": float("inf")}, "kind 'slow' needs seconds="),
        ({"seconds": 1.0}, "seconds= belongs to kind 'slow'"),
        ({"carried_out": True}, "carried_out= belongs to kind 'hang'"),
        ({"kind": "hang", "carried_out": 1}, "carried_out must be a bool"),
        ({"silent": True}, "silent= belongs to kind 'corrupt'"),
        ({"victim": "coordinator"}, "victim= belongs to kind 'kill'"),
        ({"kind": "kill", "victim": "driver"}, "victim must be one of 'replica', 'coordinator'"),
        ({"kind": "kill", "victim": 1}, "victim must be a process id"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_refused_by_its_name_with_what_is_allowed(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        spec(**fields)


def test_every_phase_takes_every_kind_of_its_level() -> None:
    for phase in PHASES:
        for kind in KINDS:
            assert not spec(phase=phase, kind=kind, seconds=1.0 if kind == "slow" else None).in_worker
    assert all(spec(phase=phase, kind="kill", rank=1).in_worker for phase in RANK_PHASES)


def test_a_worker_can_be_killed_in_the_phases_of_its_replica_too() -> None:
    assert not spec(phase="commit", kind="kill", rank=1).in_worker


def test_a_spec_travels_and_says_what_it_is() -> None:
    fault = spec(phase="load", kind="corrupt", rank=1, times=3)
    assert pickle.loads(pickle.dumps(fault)) == fault
    assert str(fault) == "corrupt in load of r0, rank 1"


def test_a_fault_that_was_not_reached_is_an_error_of_this_package_and_a_timeout() -> None:
    error = pickle.loads(pickle.dumps(FaultNotReached("not reached", phase="update", replicas=("r0",), limit_s=3.0)))
    assert isinstance(error, WeightSyncError)
    assert isinstance(error, TimeoutError)
    assert (type(error), error.phase, error.limit_s) == (FaultNotReached, "update", 3.0)


ROUND = [
    (INSPECT, ("nonce",), "preflight"),
    (INIT, ({"op": "see"},), "preflight"),
    (INIT, ({"op": "plan"},), "preflight"),
    (PAUSE, (), "pause"),
    (SET_VERSION, ("!rws:1",), "mark"),
    (START, (), "start"),
    (UPDATE, ({},), "update"),
    (FINISH, (), "finish"),
    (INIT, ({"op": "outcome"},), "outcome"),
    (SET_VERSION, ("v2",), "commit"),
    (RESET_PREFIX_CACHE, (), "cache"),
    (RESUME, (), "resume"),
]


def test_the_calls_of_a_round_have_its_phases() -> None:
    phases, started = phases_of([(verb, args, {}) for verb, args, _ in ROUND], started=False)
    assert phases == [phase for _, _, phase in ROUND]
    assert started


def test_a_label_is_put_back_before_start_and_committed_after_it_even_if_it_is_the_same() -> None:
    _, started = phase_of(SET_VERSION, ("!rws:1",), True)
    assert phase_of(SET_VERSION, ("v1",), started)[0] == "unmark"
    _, started = phase_of(START, (), started)
    assert phase_of(SET_VERSION, ("v1",), started)[0] == "commit"


def test_a_finish_without_a_start_is_the_preflights_flush() -> None:
    assert phase_of(FINISH, (), False)[0] == "preflight"


def test_a_call_of_no_phase_has_none() -> None:
    assert phase_of(GET_VERSION, (), True) == (None, True)


def test_the_kit_can_be_imported_where_there_is_no_vllm() -> None:
    code = "import sys, ray_weightsync.testing; print('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
