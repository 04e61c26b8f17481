"""The host transport's warm round against the least it could cost, in one run: `make bench`.

For 1 and for 4 `TorchEngine`s: 256 MB in 200 tensors, digests on. The yardstick is measured beside it, interleaved: one memcpy of the
same bytes into touched memory, plus the time in which that many engine processes apply the same tensors from their own memory at once.
Figures are ratios; the machine's own speed drops out of them.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable

import ray
import torch

import ray_weightsync as rws
from ray_weightsync.report import PHASES

NUM_TENSORS = 200


def make_module(num_bytes: int) -> torch.nn.Module:
    """``NUM_TENSORS`` float32 parameters of equal size."""
    rows = num_bytes // NUM_TENSORS // 4 // 256
    module = torch.nn.Module()
    for index in range(NUM_TENSORS):
        module.register_parameter(f"weight_{index:03d}", torch.nn.Parameter(torch.randn(rows, 256), requires_grad=False))
    return module


@ray.remote(num_cpus=0)
class Applier:
    """An engine's share of the yardstick: parameters, and other weights for them in its own, touched memory."""

    def __init__(self, num_bytes: int) -> None:
        torch.set_num_threads(1)
        self._into = [parameter.data for parameter in make_module(num_bytes).parameters()]
        self._from = [parameter.data for parameter in make_module(num_bytes).parameters()]

    def apply(self) -> None:
        for into, values in zip(self._into, self._from, strict=True):
            into.copy_(values)


def seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def measure(num_bytes: int, replicas: int, rounds: int) -> tuple[float, list[float]]:
    """The median ratio of a warm round to its yardstick, and all of them."""
    module = make_module(num_bytes)
    flat = torch.cat([parameter.data.reshape(-1) for parameter in module.parameters()]).view(torch.uint8)
    touched = torch.zeros_like(flat)
    appliers = [Applier.remote(num_bytes) for _ in range(replicas)]
    ray.get([applier.apply.remote() for applier in appliers], timeout=300)
    ratios = []
    with rws.WeightSync.spawn(rws.TorchEngineSpec(lambda: make_module(num_bytes), num_replicas=replicas)) as sync:
        for warm_up in range(3):  # both slots are written and mapped once
            sync.send_weights(module, version=f"warm-up-{warm_up}")
        for number in range(rounds):
            with torch.no_grad():
                next(module.parameters()).add_(1)
            memcpy_s = seconds(lambda: touched.copy_(flat))
            apply_s = seconds(lambda: ray.get([applier.apply.remote() for applier in appliers], timeout=300))
            began = time.perf_counter()
            report = sync.send_weights(module, version=number)
            round_s = time.perf_counter() - began
            ratios.append(round_s / (memcpy_s + apply_s))
            print(
                f"  round {round_s * 1e3:7.1f} ms, memcpy {memcpy_s * 1e3:6.1f}, apply {apply_s * 1e3:6.1f}, ratio {ratios[-1]:.2f}", end=""
            )
            print("   " + "  ".join(f"{phase} {report.phases_s.get(phase, 0.0) * 1e3:.0f}" for phase in PHASES))
    for applier in appliers:
        ray.kill(applier)
    return statistics.median(ratios), ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ray.init("local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    rows = []
    for replicas in args.replicas:
        print(f"{args.megabytes} MB in {NUM_TENSORS} tensors to {replicas} engines")
        median, ratios = measure(args.megabytes << 20, replicas, args.rounds)
        rows.append((replicas, median, min(ratios), max(ratios)))
    ray.shutdown()
    print("engines  median  min  max   (warm round / (memcpy + applies))")
    for replicas, median, low, high in rows:
        print(f"{replicas:7d}  {median:6.2f}  {low:.2f}  {high:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
