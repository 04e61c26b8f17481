"""Clusters of several raylets on this machine, and drivers of them in processes of their own.

The tests' own process is connected to the one local Ray of the session (`ray_cluster`), and a process can be connected to one only.
So what needs several nodes runs in a `Driver`: a process that is connected to them, and calls module-level functions for the test.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any, ParamSpec, TypeVar

import ray
from ray.cluster_utils import Cluster
from ray.experimental import internal_kv

P = ParamSpec("P")
T = TypeVar("T")

SOON_NOTICED = {"health_check_period_ms": 500}
"""Ray asks a node how it is every 3 s, and takes it for dead when it was not there five times. One that is slow has its 10 s each time."""

START_LIMIT_S = 90.0
CALL_LIMIT_S = 120.0
NAMESPACE = "rws-raylets"


@dataclass(frozen=True, kw_only=True)
class Node:
    """One raylet to start. What it claims to have need not exist.

    Attributes:
        resources: Custom resources.
        env: Environment variables of the raylet, which its workers inherit.
    """

    num_cpus: int = 4
    num_gpus: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    object_store_memory: int = 100 << 20


class Driver:
    """A process that is connected to the raylets. Its job ends with it."""

    def __init__(self, address: str) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_connect, initargs=(address,))
        self.pid = self._pool.submit(os.getpid).result(START_LIMIT_S)

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``function(*args, **kwargs)`` there; a function of a module. Raises what it raises."""
        return self._pool.submit(function, *args, **kwargs).result(CALL_LIMIT_S)

    def kill(self) -> None:
        """SIGKILL: nothing of it runs any more, no exit handler either."""
        os.kill(self.pid, signal.SIGKILL)
        self._pool.shutdown()

    def close(self) -> None:
        """End the process as a program ends."""
        self._pool.submit(ray.shutdown).result(CALL_LIMIT_S)
        self._pool.shutdown()


def _connect(address: str) -> None:
    ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)


class Raylets:
    """A running cluster.

    Attributes:
        address: What ``ray.init`` takes.
        node_ids: Ray's ids, in the order in which the nodes were asked for.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._cluster = Cluster(shutdown_at_exit=False)
        self._nodes: list[Any] = []
        self.node_ids: list[str] = []
        try:
            for node in nodes:
                self.add(node)
        except BaseException:
            self.close()
            raise
        self.address = str(self._cluster.address)

    def add(self, node: Node) -> str:
        """Start one more node, and return its id when it is there."""
        started = self._cluster.add_node(
            num_cpus=node.num_cpus,
            num_gpus=node.num_gpus,
            resources=dict(node.resources),
            env_vars=dict(node.env) or None,
            object_store_memory=node.object_store_memory,
            include_dashboard=False,
            dashboard_agent_listen_port=None,  # any free one
            **({} if self._nodes else {"_system_config": SOON_NOTICED}),
        )
        self._nodes.append(started)
        self.node_ids.append(str(started.node_id))
        return self.node_ids[-1]

    def kill(self, node_id: str) -> None:
        """End a node and all that runs on it, without a goodbye. Not the first one, which is the cluster's head."""
        self._cluster.remove_node(self._nodes[self.node_ids.index(node_id)], allow_graceful=False)

    @contextmanager
    def driver(self) -> Iterator[Driver]:
        """A new process that is connected to them."""
        driver = Driver(self.address)
        try:
            yield driver
        finally:
            if _runs(driver.pid):
                driver.close()

    def close(self) -> None:
        self._cluster.shutdown()
        if ray.is_initialized():  # Cluster forgets with its own connection also that of this process to the Ray of the other tests
            internal_kv._initialize_internal_kv(ray._private.worker.global_worker.gcs_client)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def raylets(*nodes: Node) -> Iterator[Raylets]:
    """Start a cluster of ``nodes``, the first one being its head. About 5 s each."""
    cluster = Raylets(nodes)
    try:
        yield cluster
    finally:
        cluster.close()
