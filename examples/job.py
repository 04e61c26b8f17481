"""A Ray job that trains and sends: `ray job submit --working-dir . -- python examples/job.py`.

Spawns two engines and a trainer actor on whatever the job's cluster is, runs three rounds and ends with the job's status:
0 when every engine answered with the trainer's output after every round, 1 otherwise.
"""

from __future__ import annotations

import sys

import ray
import torch

import ray_weightsync as rws


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))


@ray.remote(num_cpus=0)
class Trainer(rws.TrainerMixin):
    def __init__(self) -> None:
        self.model = make_model()

    def weight_source(self) -> torch.nn.Module:
        return self.model

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=1e-2)

    @torch.no_grad()
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.model(inputs)


def main() -> int:
    ray.init()
    trainer = Trainer.remote()
    inputs = torch.ones(4, 64)
    with rws.WeightSync.spawn(rws.TorchEngineSpec(make_model, num_replicas=2), trainers=[trainer]) as sync:
        for version in ("step-1", "step-2", "step-3"):
            ray.get(trainer.step.remote(), timeout=60)
            print(sync.send_weights(version=version))
            expected = ray.get(trainer.forward.remote(inputs), timeout=60)
            for output in ray.get([engine.forward.remote(inputs) for engine in sync.engines], timeout=60):
                if not torch.equal(output, expected):
                    print(f"{version}: an engine's output differs from the trainer's")
                    return 1
    print("every output equals the trainer's")
    return 0


if __name__ == "__main__":
    sys.exit(main())
