"""Five training steps, and after each the weights go to three engines. No GPU, no vLLM: `make demo`.

Every engine's output on a fixed input must equal the trainer's, bit for bit; the exit status says whether it did.
"""

from __future__ import annotations

import logging
import sys
import time

import ray
import torch
from rich.console import Console
from rich.table import Table

import ray_weightsync as rws

STEPS = 5
REPLICAS = 3


def make_model() -> torch.nn.Module:
    """A small network; engines start from other random weights than the trainer."""
    return torch.nn.Sequential(
        torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 16)
    )


@ray.remote(num_cpus=0)
class Trainer(rws.TrainerMixin):
    """Fits random data; what it sends is the state between two steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.inputs, self.targets = torch.randn(64, 256), torch.randn(64, 16)

    def weight_source(self) -> torch.nn.Module:
        return self.model

    def step(self) -> float:
        loss = torch.nn.functional.mse_loss(self.model(self.inputs), self.targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.model(inputs)


def main() -> int:
    console = Console()
    began = time.monotonic()
    ray.init("local", num_cpus=4, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    trainer = Trainer.remote()
    fixed_input = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
    reports, wrong = [], 0
    with rws.WeightSync.spawn(rws.TorchEngineSpec(make_model, num_replicas=REPLICAS), trainers=[trainer]) as sync:
        for step in range(1, STEPS + 1):
            loss = ray.get(trainer.step.remote(), timeout=60)
            report = sync.send_weights(version=step)
            reports.append(report)
            expected = ray.get(trainer.forward.remote(fixed_input), timeout=60)
            outputs = ray.get([engine.forward.remote(fixed_input) for engine in sync.engines], timeout=60)
            versions = ray.get([engine.get_weight_version.remote() for engine in sync.engines], timeout=60)
            equal = sum(torch.equal(output, expected) and version == str(step) for output, version in zip(outputs, versions, strict=True))
            wrong += REPLICAS - equal
            told = f"loss {loss:.4f}, version {report.version} on {len(report.committed)} engines, {equal} of {REPLICAS} outputs equal"
            console.print(f"round {step}: {told}")
    ray.shutdown()

    table = Table("round", "version", "MB", "GB/s", "stage s", "pause s", "apply s", "replicas", title="What each round did")
    for number, report in enumerate(reports, 1):
        seconds = (report.phases_s["stage"], report.pause_s, report.apply_s)
        size, rate = f"{report.num_bytes / 1e6:.1f}", f"{report.gigabytes_per_s:.2f}"
        table.add_row(str(number), str(report.version), size, rate, *(f"{each:.4f}" for each in seconds), str(len(report.committed)))
    console.print(table)
    if wrong:
        console.print(f"[red]{wrong} outputs differ from the trainer's[/red]")
        return 1
    console.print(f"All {STEPS * REPLICAS} outputs equal the trainer's, bit for bit. {time.monotonic() - began:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
