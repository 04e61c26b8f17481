"""Two hundred random fault schedules; `make soak` runs more, from other seeds."""

from __future__ import annotations

import os

import pytest

from tests.ray.faults.ground import Ground
from tests.ray.faults.schedules import Counts, run, schedules

SEED = int(os.environ.get("RWS_SEED", "20261129"))
COUNT = 200


@pytest.mark.timeout(1200)
def test_two_hundred_random_fault_schedules_are_survived(ground: Ground) -> None:
    print(f"seed {SEED} (RWS_SEED sets it)")
    counts = Counts()
    for schedule in schedules(SEED, COUNT, ("r0", "r1", "r2")):
        run(ground, schedule, counts)
    print(counts)
    assert counts.rounds.total() == COUNT
    assert {"RoundAborted", "ReplicasLost", "committed"} <= set(counts.rounds)


def test_the_same_seed_gives_the_same_schedules() -> None:
    names = ("r0", "r1", "r2")
    assert list(schedules(SEED, 50, names)) == list(schedules(SEED, 50, names)) != list(schedules(SEED + 1, 50, names))
