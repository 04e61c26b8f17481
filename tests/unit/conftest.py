"""What tests of several rooms share."""

from __future__ import annotations

import pytest
import ray

from tests.unit.aside import Aside


@pytest.fixture
def in_ray(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address of this machine that no route would pick; this process is in a cluster of Ray's where its node has it."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.77")
    return "127.0.0.77"


@pytest.fixture
def aside() -> type[Aside]:
    return Aside
