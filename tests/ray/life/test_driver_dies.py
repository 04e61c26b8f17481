"""The program that owns a session is killed with SIGKILL. What it attached to goes on, and nothing of the session stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import ray_weightsync as rws
from ray_weightsync.fleet.actor import find_coordinator
from tests.ray.conftest import POOL
from tests.ray.life.conftest import Traffic, left_of, store_files
from tests.ray.session.conftest import LIMIT_S, make_module, reset

ROOT = Path(__file__).parents[3]
WITHIN_S = 15.0


class Driver:
    """A program that owns a session on two engines of the pool."""

    def __init__(self, what: str, engine_pool: list[Any]) -> None:
        self.name = f"driven-{uuid.uuid4().hex[:8]}"
        self.ids = list(POOL[:2])
        self.engines = engine_pool[:2]
        address = ray.get_runtime_context().gcs_address
        command = [sys.executable, "-m", "tests.ray.life.driver", address, self.name, ",".join(self.ids), what]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line.strip())

    def wait_for(self, line: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while line not in self._lines:
            assert time.monotonic() < deadline, f"the driver did not come to {line}: {self._lines}"
            assert self.process.poll() is None, "the driver ended"
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(LIMIT_S)

    def state(self) -> list[tuple[str, bool]]:
        """Version label and whether it is paused, of each engine."""
        asked = [(engine.get_weight_version.remote(), engine.is_paused.remote()) for engine in self.engines]
        return [(ray.get(label, timeout=LIMIT_S), ray.get(paused, timeout=LIMIT_S)) for label, paused in asked]

    def end(self) -> None:
        self.kill()
        self._reader.join(LIMIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        reset(self.engines)


@pytest.fixture
def start_driver(engine_pool: list[Any]) -> Iterator[Callable[[str], Driver]]:
    drivers: list[Driver] = []

    def start(what: str) -> Driver:
        drivers.append(Driver(what, engine_pool))
        drivers[-1].wait_for("REACHED")
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.end()


def modules() -> dict[str, torch.nn.Module]:
    made = {}
    for version in (1, 2):
        torch.manual_seed(version)
        made[str(version)] = make_module()
    return made


def wait_until_nothing_is_left(name: str, files: list[str], *, within_s: float = WITHIN_S) -> None:
    deadline = time.monotonic() + within_s
    while True:
        left = [*left_of(name), *(each for each in os.listdir("/dev/shm") if each.startswith(tuple(files)))]
        if not left:
            return
        assert time.monotonic() < deadline, f"still there after {within_s:.0f} s: {left}"
        time.sleep(0.1)


@pytest.mark.parametrize("what", ["idle", "staging", "pause", "mark", "update", "outcome", "commit", "resume"])
def test_within_seconds_the_engines_run_and_nothing_of_the_session_is_left(start_driver: Callable[[str], Driver], what: str) -> None:
    driver = start_driver(what)
    files = store_files(driver.name)
    assert files
    assert any(each.startswith(tuple(files)) for each in os.listdir("/dev/shm"))
    with Traffic(driver.engines, {"default": torch.nn.Identity(), **modules()}) as traffic:
        driver.kill()
        wait_until_nothing_is_left(driver.name, files)
        version = "1" if what in ("idle", "staging") else "2"  # a commit on its way is carried to its end
        assert driver.state() == [(version, False)] * 2
        answered = len(traffic.answered)
        deadline = time.monotonic() + LIMIT_S
        while len(traffic.answered) < answered + 4:
            assert time.monotonic() < deadline, "the engines do not answer"
            time.sleep(0.02)
    with rws.WeightSync.attach(driver.ids, name=driver.name) as sync:
        assert sync.status().version == version
        assert len(sync.serving()) == 2
        sync.send_weights(make_module(), version="after")


def test_with_its_coordinator_dead_as_well_the_stores_go_and_a_session_of_that_name_settles_the_engines(
    start_driver: Callable[[str], Driver],
) -> None:
    driver = start_driver("outcome")
    files = store_files(driver.name)
    ray.kill(find_coordinator(driver.name))
    driver.kill()
    deadline = time.monotonic() + WITHIN_S
    while store_files(driver.name) or any(each.startswith(tuple(files)) for each in os.listdir("/dev/shm")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with rws.WeightSync.attach(driver.ids, name=driver.name) as sync:
        sync.send_weights(make_module(), version="after")
        assert len(sync.serving()) == 2
        assert driver.state() == [("after", False)] * 2
