"""A Ray cluster of several nodes on this machine, for as long as a command runs in it.

::

    python benchmarks/local_cluster.py --nodes 3 -- python benchmarks/cluster.py --cpus --directory '$RWS_SHM'
    python benchmarks/local_cluster.py --nodes 3 -- ray job submit -- python "$PWD/examples/job.py"

Each node has a shared-memory directory of its own, as machines have; the environment variable RWS_SHM names it there. The command finds the
cluster by RAY_ADDRESS, and where jobs are submitted by RAY_API_SERVER_ADDRESS. Its status is the script's. Jobs are submitted without
--working-dir here: the nodes of one machine share the folder into which each one unpacks it anew, also while a job runs from there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

from ray.cluster_utils import Cluster

VARIABLE = "RWS_SHM"
END_S = 30.0
"""How long a command that was told to end may take, in seconds."""


@contextlib.contextmanager
def local_cluster(nodes: int, *, cpus: int) -> Iterator[dict[str, str]]:
    """Start nodes of so many CPUs each, the first one being the head; yields the environment variables that find them."""
    directories = [tempfile.mkdtemp(prefix="rws-local-cluster-", dir="/dev/shm") for _ in range(nodes)]
    cluster = Cluster()
    try:
        for directory in directories:
            cluster.add_node(
                num_cpus=cpus,
                env_vars={VARIABLE: directory},
                object_store_memory=1 << 30,
                include_dashboard=cluster.head_node is None,
                dashboard_port=None,  # any free ones
                dashboard_agent_listen_port=None,
            )
        yield {"RAY_ADDRESS": str(cluster.address), "RAY_API_SERVER_ADDRESS": f"http://{cluster.webui_url}"}
    finally:
        cluster.shutdown()
        for directory in directories:
            shutil.rmtree(directory)


def run(command: Sequence[str], env: dict[str, str]) -> int:
    """The status of the command. Ends it if this process is told to end."""
    process = subprocess.Popen(command, env={**os.environ, **env})
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--cpus", type=int, default=4, help="of each node; as many as are claimed need not be there")
    parser.add_argument("command", nargs="+", help="after --")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with local_cluster(options.nodes, cpus=options.cpus) as env:
        return run(options.command, env)


if __name__ == "__main__":
    sys.exit(main())
