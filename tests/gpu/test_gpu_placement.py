"""A trainer and an engine in a colocated placement run on one and the same GPU: `python -m pytest tests/gpu` on a machine with one.

Not yet run: no GPU was at hand.
"""

from __future__ import annotations

from typing import Any

import pytest
import ray
import torch

import ray_weightsync as rws

pytestmark = [pytest.mark.gpu(last_run=None), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LIMIT_S = 120.0


@ray.remote
class Process:
    def visible(self) -> list[str]:
        """UUIDs of the GPUs that torch sees here."""
        return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def seen(placed: rws.placement.Placed) -> list[Any]:
    actors = [Process.options(**place.options()).remote() for place in (*placed.trainers, *placed.engines)]
    return ray.get([actor.visible.remote() for actor in actors], timeout=LIMIT_S)


def test_a_colocated_trainer_and_engine_see_one_and_the_same_gpu(own_ray: None) -> None:
    with rws.placement.reserve(trainers=1, engines=1, layout="colocated") as placed:
        trainer, engine = seen(placed)
    assert trainer == engine
    assert len(engine) == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_separate_ones_see_different_gpus_in_the_order_of_their_numbers(own_ray: None) -> None:
    with rws.placement.reserve(trainers=1, engines=1) as placed:
        trainer, engine = seen(placed)
    assert len(trainer) == len(engine) == 1
    assert trainer != engine
