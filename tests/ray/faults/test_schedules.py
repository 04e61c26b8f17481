"""Two hundred random fault schedules; `make soak` runs more, from other seeds."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.ray.faults.ground import Ground
from tests.ray.faults.schedules import Counts, Schedule, run, schedules

SEED = int(os.environ.get("RWS_SEED", "20261129"))
COUNT = 200
FLEETS = 4


@pytest.mark.timeout(1200)
def test_two_hundred_random_fault_schedules_are_survived(ray_cluster: str) -> None:
    print(f"seed {SEED} (RWS_SEED sets it)")
    drawn = list(schedules(SEED, COUNT, ("r0", "r1", "r2")))
    with ThreadPoolExecutor(FLEETS) as pool:  # what they do most is to wait for deadlines
        counts = sum(pool.map(survived, (drawn[first::FLEETS] for first in range(FLEETS))), start=Counts())
    print(counts)
    assert counts.rounds.total() == COUNT
    assert {"RoundAborted", "ReplicasLost", "committed"} <= set(counts.rounds)


def survived(drawn: list[Schedule]) -> Counts:
    """Run them on a fleet of their own."""
    counts, ground, began = Counts(), Ground(), time.monotonic()
    try:
        ground.heal()
        for schedule in drawn:
            run(ground, schedule, counts)
    finally:
        ground.close()
    counts.seconds = time.monotonic() - began
    return counts


def test_the_same_seed_gives_the_same_schedules() -> None:
    names = ("r0", "r1", "r2")
    assert list(schedules(SEED, 50, names)) == list(schedules(SEED, 50, names)) != list(schedules(SEED + 1, 50, names))
