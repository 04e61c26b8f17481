"""Ending a process with SIGKILL, on this node or on another one of the cluster."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import ray

from ray_weightsync.engines.facts import EngineFacts
from ray_weightsync.errors import ConfigError
from ray_weightsync.testing.spec import FaultSpec


def kill_here(pid: int) -> None:
    """End a process of this node. One that is gone already is what was asked for."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def require_victim(spec: FaultSpec, facts: EngineFacts) -> None:
    """Raise `ConfigError` unless the process that ``spec`` is to end is known."""
    if spec.victim == "replica" and spec.rank is None and facts.pid is None:
        raise ConfigError(
            f"{spec.replica} ({facts.kind}) does not say which process it is", hint="give its process id as victim=, if it is on this node"
        )
    if spec.rank is not None and spec.rank not in {worker.rank for worker in facts.workers}:
        raise ConfigError(f"{spec.replica} has no worker of rank {spec.rank}; it has {[worker.rank for worker in facts.workers]}")


async def kill_victim(spec: FaultSpec, facts: EngineFacts) -> None:
    """End what ``spec`` names; to be called in the coordinator's process.

    Args:
        spec: A fault of the kind ``"kill"``.
        facts: What is known of the replica now.

    Raises:
        ConfigError: if its process is not known.
    """
    require_victim(spec, facts)
    if spec.victim == "coordinator":
        kill_here(os.getpid())
    elif isinstance(spec.victim, int):
        kill_here(spec.victim)
    elif spec.rank is not None:
        worker = next(each for each in facts.workers if each.rank == spec.rank)
        await _kill_on(_node_at(worker.node_ip) or facts.node_id, worker.pid)
    else:
        assert facts.pid is not None
        await _kill_on(facts.node_id, facts.pid)


async def _kill_on(node_id: str | None, pid: int) -> None:
    if not ray.is_initialized() or node_id in (None, ray.get_runtime_context().get_node_id()):
        kill_here(pid)
        return
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task: Any = ray.remote(kill_here)
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    await task.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(pid)


def _node_at(address: str) -> str | None:
    """Ray's id of the node at an IP address; None if there is no such node."""
    nodes: Any = ray.nodes if ray.is_initialized() else list
    return next((str(node["NodeID"]) for node in nodes() if node["Alive"] and node["NodeManagerAddress"] == address), None)
