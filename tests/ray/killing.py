"""Killing actors in tests: `ray.kill` only asks for it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import ray


def kill(handle: Any, *, limit_s: float = 60) -> None:
    """End an actor for good, and wait until it is gone."""
    ray.kill(handle)
    until_dead(handle, limit_s=limit_s)


def until_dead(handle: Any, *, limit_s: float = 60) -> None:
    """Wait until an actor is gone for good."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            ray.get(handle.__ray_call__.remote(lambda actor: None), timeout=limit_s)
        except ray.exceptions.ActorDiedError:
            return
        except ray.exceptions.RayActorError:  # on its way
            pass
        time.sleep(0.01)
    pytest.fail(f"{handle} still answers after {limit_s:.0f} s")
