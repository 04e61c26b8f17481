"""The session tests' fleets, and engines that outlive their process."""

from __future__ import annotations

from typing import Any

import pytest
import ray

import ray_weightsync as rws
from ray_weightsync.engines.facts import CONTROL_GROUP
from ray_weightsync.engines.torch_engine import TorchEngineActor
from tests.ray.session.conftest import LIMIT_S, Fleet, start_fleet

__all__ = ["start_fleet"]

QUICK = rws.Timeouts(health_interval_s=0.2)
HEALS = rws.FailurePolicy()

Restarting: Any = ray.remote(concurrency_groups={CONTROL_GROUP: 4}, max_concurrency=8, num_cpus=0, max_restarts=1)(TorchEngineActor)
"""An engine whose process Ray starts anew behind the same handle."""


def until(fleet: Fleet, what: Any) -> rws.FleetStatus:
    """The first status of which ``what`` holds."""
    for status in fleet.sync.view().events(timeout_s=LIMIT_S):
        if what(status):
            return status
    pytest.fail(f"not within {LIMIT_S} s: {fleet.sync.status()}")


def states(status: rws.FleetStatus) -> dict[str, str]:
    return {replica.id: replica.state for replica in status.replicas}
