"""One ground for a whole module, and more beside it: engines and a session take seconds to start, and each test leaves them whole.

What a call that hangs costs is its deadline. Those tests are carried out on the grounds beside, several at once, from the first test of
their module on; each then tells its own result when its turn comes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from tests.ray.faults.ground import LIMIT_S, Ground

WAITING = frozenset({"hang", "late"})
"""Kinds of faults that cost a deadline."""

BESIDE = 3

AHEAD = pytest.StashKey[Future[None]]()


class Grounds:
    """Serving fleets, each used by one test at a time. One that a test left broken is not used again."""

    def __init__(self) -> None:
        self._all: list[Ground] = []
        self._mine = threading.local()

    def run(self, item: pytest.Function) -> None:
        """Carry ``item`` out on this thread's ground."""
        if not hasattr(self._mine, "ground"):
            self._mine.ground = Ground()
            self._all.append(self._mine.ground)
        ground = self._mine.ground
        try:
            ground.heal()
            item.obj(ground=ground, **item.callspec.params)
            ground.heal()
        except BaseException:
            del self._mine.ground
            raise

    def close(self) -> None:
        with ExitStack() as each:
            for ground in self._all:
                each.callback(ground.close)


@pytest.fixture(scope="module")
def beside(request: pytest.FixtureRequest, ray_cluster: str) -> Iterator[None]:
    """Begin what only waits."""
    items = [each for each in request.session.items if isinstance(each, pytest.Function) and each.module is request.module]
    waiting = [each for each in items if hasattr(each, "callspec") and each.callspec.params.get("kind") in WAITING]
    with closing(Grounds()) as grounds, ThreadPoolExecutor(BESIDE) as pool:
        for item in waiting:
            item.stash[AHEAD] = pool.submit(grounds.run, item)
        yield
        for item in waiting:
            item.stash[AHEAD].cancel()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """The result of a test that was carried out beside the others."""
    if AHEAD not in pyfuncitem.stash:
        return None
    pyfuncitem.stash[AHEAD].result(4 * LIMIT_S)
    return True


@pytest.fixture(scope="module")
def shared_ground(ray_cluster: str) -> Iterator[list[Ground]]:
    grounds = [Ground()]
    yield grounds
    for ground in grounds:
        ground.close()


@pytest.fixture
def ground(request: pytest.FixtureRequest, beside: None, shared_ground: list[Ground]) -> Iterator[Ground]:
    """The module's ground, serving a version; one that a test left broken is not used again."""
    ground = shared_ground[-1]
    if AHEAD in request.node.stash:
        yield ground
        return
    try:
        ground.heal()
        yield ground
        ground.heal()
    except BaseException:
        shared_ground.append(Ground())
        raise
