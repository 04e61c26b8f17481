"""Fleets of `TorchEngine`s for the session tests."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch

import ray_weightsync as rws

LIMIT_S = 60


def make_module() -> torch.nn.Module:
    """What the engines serve: different random weights at each call, 10 KB of them."""
    return torch.nn.Sequential(torch.nn.Linear(16, 128), torch.nn.Tanh(), torch.nn.Linear(128, 4))


class Fleet:
    """Engines, a session on them, and what a test asks of both."""

    def __init__(self, engines: list[Any], sync: rws.WeightSync) -> None:
        self.engines = engines
        self.sync = sync

    def outputs(self, inputs: torch.Tensor) -> list[torch.Tensor]:
        return ray.get([engine.forward.remote(inputs) for engine in self.engines], timeout=LIMIT_S)  # type: ignore[no-any-return]

    def versions(self) -> list[str]:
        return ray.get([engine.get_weight_version.remote() for engine in self.engines], timeout=LIMIT_S)  # type: ignore[no-any-return]

    def paused(self) -> list[bool]:
        return ray.get([engine.is_paused.remote() for engine in self.engines], timeout=LIMIT_S)  # type: ignore[no-any-return]

    def serve(self, module: torch.nn.Module) -> bool:
        """Whether every engine's output equals the module's, bit for bit."""
        inputs = torch.arange(32, dtype=torch.float32).reshape(2, 16) / 7
        with torch.no_grad():
            expected = module(inputs)
        return all(torch.equal(output, expected) for output in self.outputs(inputs))


def reset(engines: list[Any]) -> None:
    """No update open, running, labelled as engines that were just started."""
    for engine in engines:
        ray.get(engine.__ray_call__.remote(lambda actor: actor._gate.update_open and actor.finish_weight_update()), timeout=LIMIT_S)
        ray.get([engine.resume_generation.remote(), engine.update_weight_version.remote("default")], timeout=LIMIT_S)


@pytest.fixture
def start_fleet(engine_pool: list[Any]) -> Iterator[Callable[..., Fleet]]:
    """Starts sessions on engines of the pool, or, with ``fresh`` or a class of its own, on new ones that end with the test."""
    sessions: list[rws.WeightSync] = []
    started: list[Any] = []

    def start(
        num_engines: int = 2, engine_class: Any = None, fresh: bool = False, engines: list[Any] | None = None, **options: Any
    ) -> Fleet:
        if engines is not None:
            engines = engines[:num_engines]
        elif engine_class is None and not fresh:
            engines = engine_pool[:num_engines]
        else:
            engines = [(engine_class or rws.TorchEngine).remote(make_module) for _ in range(num_engines)]
            started.extend(engines)
        # What a test finds fenced must not be healed while it looks; tests of repair say otherwise.
        options.setdefault("on_failure", rws.FailurePolicy(auto_heal=False))
        sessions.append(rws.WeightSync.attach(engines, name=f"test-{uuid.uuid4().hex[:8]}", **options))
        return Fleet(engines, sessions[-1])

    yield start
    for session in sessions:
        session.close()
    for engine in started:
        ray.kill(engine)
    reset(engine_pool)
