"""`make soak SEED=1 N=1000`: as many random fault schedules as one likes. Exit status 1 at the first violation."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback

import ray

from tests.ray.faults.ground import Ground
from tests.ray.faults.schedules import Counts, run, schedules


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--n", type=int, default=200)
    args = parser.parse_args()
    print(f"seed {args.seed}, {args.n} schedules", flush=True)
    ray.init("local", num_cpus=4, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    counts, began, status = Counts(), time.monotonic(), 0
    ground = Ground()
    try:
        ground.heal()
        for number, schedule in enumerate(schedules(args.seed, args.n, ("r0", "r1", "r2"))):
            run(ground, schedule, counts)
            counts.seconds = time.monotonic() - began
            if number % 50 == 49:
                print(counts, flush=True)
    except Exception:
        traceback.print_exc()
        status = 1
    finally:
        counts.seconds = time.monotonic() - began
        ground.close()
        ray.shutdown()
    print(f"{'VIOLATION after ' if status else ''}{counts}; seed {args.seed}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
