"""Three raylets with two GPUs each that do not exist, and a driver of them; the tests' own process stays on its local Ray."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ray.raylets import Driver, Node, Raylets, raylets

NUM_NODES, CPUS, GPUS = 3, 4, 2


@pytest.fixture(scope="module")
def three() -> Iterator[Raylets]:
    with raylets(*[Node(num_cpus=CPUS, num_gpus=GPUS)] * NUM_NODES) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def driver(three: Raylets) -> Iterator[Driver]:
    with three.driver() as driver:
        yield driver
