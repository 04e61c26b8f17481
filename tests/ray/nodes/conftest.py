"""Three raylets of this machine, each with a shared-memory directory of its own, and a driver on the first."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.ray.nodes import crossing, stories
from tests.ray.raylets import Driver, Node, Raylets, raylets

LIMIT_S = 60.0


@dataclass
class Ground:
    """The nodes, their directories, and the driver in which stories are told."""

    cluster: Raylets
    driver: Driver
    directories: dict[str, str]

    def add_node(self) -> str:
        """One more node with a directory of its own; its id."""
        path = tempfile.mkdtemp(prefix="rws-tests-", dir="/dev/shm")
        node_id = self.cluster.add(Node(env={crossing.VARIABLE: path}, resources={stories.ROAMING: 1}))
        self.directories[node_id] = path
        return node_id

    def files(self, node_id: str) -> list[str]:
        """What lies in the directory of a node."""
        return sorted(os.listdir(self.directories[node_id]))

    def wait_until_empty(self) -> None:
        """Nothing of ours may be left in any of the directories."""
        deadline = time.monotonic() + LIMIT_S
        while left := {node_id: files for node_id in self.directories if (files := self.files(node_id))}:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    paths = [tempfile.mkdtemp(prefix="rws-tests-", dir="/dev/shm") for _ in range(3)]
    directories: dict[str, str] = {}
    try:
        nodes = [Node(env={crossing.VARIABLE: path}, resources={stories.ROAMING: 1} if path == paths[2] else {}) for path in paths]
        with raylets(*nodes) as cluster, cluster.driver() as driver:
            directories.update(zip(cluster.node_ids, paths, strict=True))
            driver.call(stories.start_engines, cluster.node_ids)
            yield Ground(cluster, driver, directories)
    finally:
        for path in {*paths, *directories.values()}:
            shutil.rmtree(path)
