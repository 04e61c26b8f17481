"""One local Ray and one pool of engines for the whole session: starting a cluster costs 3 to 10 seconds, so no test starts its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray

import ray_weightsync as rws
from tests.ray.session.conftest import make_module

NAMESPACE = "rws-tests"
NUM_CPUS = 8


@pytest.fixture(scope="session", autouse=True)
def ray_cluster() -> Iterator[str]:
    """Start a local Ray and yield the namespace its named actors live in. Actors must release what they take: there are 8 CPUs.

    ``"local"`` always starts a cluster of its own; without it, Ray would join whatever ``ray_current_cluster`` names, dead or alive.
    """
    ray.init(
        "local",
        num_cpus=NUM_CPUS,
        include_dashboard=False,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=256 << 20,
    )
    yield NAMESPACE
    ray.shutdown()


POOL = ("pool-0", "pool-1", "pool-2")
"""The names of the pool's engines."""


@pytest.fixture(scope="session")
def engine_pool(ray_cluster: str) -> Iterator[list[Any]]:
    """Three engines for all tests that leave engines whole: a fresh process takes seconds to import torch."""
    engines: list[Any] = [rws.TorchEngine.options(name=name).remote(make_module) for name in POOL]
    yield engines
    for engine in engines:
        ray.kill(engine)
