"""Makes `engine_actors` importable for the tests here; Ray's workers get what they need of it by value and never import it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.cloudpickle

sys.path.insert(0, str(Path(__file__).parent))

import engine_actors

from ray_weightsync.worker.identity import package_version

ray.cloudpickle.register_pickle_by_value(engine_actors)


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    """`engine_actors.make`, with workers of this package version; ends what it made."""
    made = []

    def start(cls: type, *args: Any, **fields: Any) -> Any:
        if issubclass(cls, engine_actors.Core | engine_actors.Holder | engine_actors.SyncHolder | engine_actors.MixedSync):
            fields.setdefault("package_version", package_version())
        made.append(engine_actors.make(cls, *args, **fields))
        return made[-1]

    yield start
    for handle in made:
        ray.kill(handle)
