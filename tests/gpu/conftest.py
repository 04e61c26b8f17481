"""What tests on a machine with GPUs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    """A local Ray, unless this run has one already."""
    ours = not ray.is_initialized()
    if ours:
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    if ours:
        ray.shutdown()
