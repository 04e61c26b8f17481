"""Trainers and engines placed, grouped and synchronised: `ray job submit --working-dir . -- python examples/placement.py`.

Two data-parallel trainers and three engines get their CPUs in one piece, or an error says at once what the cluster lacks. After each of
three training steps the first trainer broadcasts the weights to a group of itself and all engines, whose ranks are printed. Status 0 when
every engine answered with the trainer's output after every step, 1 otherwise. On a cluster with GPUs say ``gpus=True`` and put the models
on them: the broadcast is then NCCL's instead of gloo's. Without a cluster, `python examples/placement.py` starts Ray itself.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import ray
import torch

import ray_weightsync as rws

TRAINERS, ENGINES, STEPS = 2, 3, 3


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))


@ray.remote
class Trainer(rws.TrainerMixin):
    """One of several that hold the same model and different data."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.model = make_model()
        self.data = torch.Generator().manual_seed(rank)

    def weight_source(self) -> torch.nn.Module:
        return self.model

    def gradients(self) -> list[torch.Tensor]:
        inputs, targets = torch.randn(32, 64, generator=self.data), torch.randn(32, 8, generator=self.data)
        loss = torch.nn.functional.mse_loss(self.model(inputs), targets)
        return list(torch.autograd.grad(loss, list(self.model.parameters())))

    @torch.no_grad()
    def step(self, gradients: list[list[torch.Tensor]]) -> None:
        for parameter, *parts in zip(self.model.parameters(), *gradients, strict=True):
            parameter -= 0.1 * torch.stack(parts).mean(0)

    @torch.no_grad()
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.model(inputs)


def main() -> int:
    if os.environ.get("RAY_ADDRESS"):
        ray.init()
    else:
        ray.init("local", num_cpus=4, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    with rws.placement.reserve(trainers=TRAINERS, engines=ENGINES, gpus=False, cpus_per_process=0.5, timeout_s=60) as placed:
        print(f"placed: {placed}")
        trainers = [Trainer.options(**place.options()).remote(place.index) for place in placed.trainers]
        spec = rws.TorchEngineSpec(make_model, num_replicas=ENGINES, placement=placed)
        with rws.WeightSync.spawn(spec, trainers=trainers[:1], transport="collective") as sync:
            return train(trainers, sync)


def train(trainers: list[ray.actor.ActorHandle[Any]], sync: rws.WeightSync) -> int:
    inputs = torch.ones(4, 64)
    for version in range(1, STEPS + 1):
        gradients = ray.get([trainer.gradients.remote() for trainer in trainers], timeout=60)
        ray.get([trainer.step.remote(gradients) for trainer in trainers], timeout=60)
        report = sync.send_weights(version=version)
        print(f"{report}\nby {report.transport}, {sync.status().ranks}")
        expected = ray.get([trainer.forward.remote(inputs) for trainer in trainers], timeout=60)
        outputs = ray.get([engine.forward.remote(inputs) for engine in sync.engines], timeout=60)
        if not all(torch.equal(output, expected[0]) for output in (*expected, *outputs)):
            print(f"step {version}: an engine's output differs from the trainers'")
            return 1
    print("every output equals the trainers'")
    return 0


if __name__ == "__main__":
    sys.exit(main())
