"""A model of very many tiny tensors: what a round costs for each, and how long its preflight keeps a request waiting.

The yardstick for the round is one engine process that applies the same tensors from its own memory, measured beside it in one run; what
is above it is ours. The preflight is measured from outside: the latency of requests that a client sends one after the other, while the
plan is judged, and once more while the same weights are staged again, which judges nothing.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import threading
import time
from typing import Any

import ray
import torch

import ray_weightsync as rws

PROMISED_US = 30.0
"""Our own cost a tensor and round, in microseconds."""


class ManyTensors(torch.nn.Module):
    """``num_tensors`` parameters of four numbers; a forward uses one of them."""

    def __init__(self, num_tensors: int) -> None:
        super().__init__()
        for index in range(num_tensors):
            self.register_parameter(f"weight_{index:05d}", torch.nn.Parameter(torch.ones(4), requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight_00000


@ray.remote(num_cpus=0)
class Applier:
    """Tensors, and other values for them in its own memory."""

    def __init__(self, num_tensors: int) -> None:
        torch.set_num_threads(1)
        self._into, self._from = ([each.data for each in ManyTensors(num_tensors).parameters()] for _ in range(2))

    def apply(self) -> None:
        for into, values in zip(self._into, self._from, strict=True):
            into.copy_(values)


@ray.remote(num_cpus=0, max_concurrency=2)
class Client:
    """Sends one request after the other, and notes how long each took."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def run(self, engine: Any) -> list[float]:
        """The seconds of each request until `end`."""
        self._ended.clear()
        seconds: list[float] = []
        x = torch.ones(4)
        while not self._ended.is_set():
            began = time.perf_counter()
            ray.get(engine.forward.remote(x), timeout=60)
            seconds.append(time.perf_counter() - began)
        return seconds

    def end(self) -> None:
        self._ended.set()


def told(what: str, seconds: list[float]) -> None:
    ordered = sorted(seconds)
    percentile = ordered[int(0.99 * (len(ordered) - 1))]
    median_ms, percentile_ms, longest_ms = (each * 1e3 for each in (ordered[len(ordered) // 2], percentile, ordered[-1]))
    print(f"  requests {what}: {len(ordered)}, median {median_ms:.1f} ms, 99 % {percentile_ms:.1f}, longest {longest_ms:.1f}")


def measure(num_tensors: int, rounds: int) -> float:
    """Our own microseconds a tensor, the median of ``rounds`` warm rounds."""
    module = ManyTensors(num_tensors)
    applier, client = Applier.remote(num_tensors), Client.remote()
    ray.get(applier.apply.remote(), timeout=300)
    own_us = []
    with rws.WeightSync.spawn(rws.TorchEngineSpec(lambda: ManyTensors(num_tensors), num_replicas=1)) as sync:
        # Staging pauses nobody; it returns when the bytes are sealed and no replica refused the plan, which it has to judge once.
        for what in ("while the plan is judged", "while it is staged again"):
            requests = client.run.remote(sync.engines[0])
            sync.stage_weights(module, version=what)
            ray.get(client.end.remote(), timeout=60)
            told(what, ray.get(requests, timeout=60))
        for number in range(rounds):
            began = time.perf_counter()
            ray.get(applier.apply.remote(), timeout=300)
            apply_s = time.perf_counter() - began
            began = time.perf_counter()
            sync.send_weights(module, version=number)
            own_us.append((time.perf_counter() - began - apply_s) / num_tensors * 1e6)
    for actor in (applier, client):
        ray.kill(actor)
    return statistics.median(own_us)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="+", default=[10_000, 37_000])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ray.init("local", log_to_driver=False, logging_level=logging.WARNING, include_dashboard=False)
    worst = 0.0
    for num_tensors in options.tensors:
        print(f"{num_tensors} tensors:")
        own_us = measure(num_tensors, options.rounds)
        worst = max(worst, own_us)
        print(f"  our own cost of a round: {own_us:.1f} us a tensor (promised: <= {PROMISED_US:.0f})")
    ray.shutdown()
    return 0 if worst <= PROMISED_US else 1


if __name__ == "__main__":
    sys.exit(main())
