"""One ground for a whole module: engines and a session take seconds to start, and each test leaves them whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ray.faults.ground import Ground


@pytest.fixture(scope="module")
def shared_ground(ray_cluster: str) -> Iterator[list[Ground]]:
    grounds = [Ground()]
    yield grounds
    for ground in grounds:
        ground.close()


@pytest.fixture
def ground(shared_ground: list[Ground]) -> Iterator[Ground]:
    """The module's ground, serving a version; one that a test left broken is not used again."""
    ground = shared_ground[-1]
    try:
        ground.heal()
        yield ground
        ground.heal()
    except BaseException:
        shared_ground.append(Ground())
        raise
