"""What a user submits as a Ray job runs as one, on a cluster of three raylets.

The cluster is what ``benchmarks/local_cluster.py`` starts, in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 240
CARRIED = ("host", "host+overlap", "collective", "collective+snapshot")


def directories() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("rws-local-cluster-")}


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """Three raylets, to which jobs are submitted; yields the environment that finds them. Nothing of them stays."""
    before = directories()
    found = 'echo "found $RAY_ADDRESS $RAY_API_SERVER_ADDRESS"; exec cat'  # until its input is closed
    starter = subprocess.Popen(
        [sys.executable, "benchmarks/local_cluster.py", "--nodes", "3", "--cpus", "11", "--", "sh", "-c", found],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert starter.stdout is not None
        said = next((line.split() for line in starter.stdout if line.startswith("found ")), None)  # it ends with the process
        assert said is not None, "the cluster did not start"
        yield {"RAY_ADDRESS": said[1], "RAY_API_SERVER_ADDRESS": said[2]}
    finally:
        try:
            starter.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(starter.pid, signal.SIGKILL)
            starter.communicate()
    assert starter.returncode == 0
    assert directories() <= before


def submit(cluster: dict[str, str], *command: str) -> tuple[int, str]:
    """The status and the output of a job, as ``ray job submit`` tells them."""
    # Without a working directory: each of these nodes would unpack it into the one folder that they share, under the others' feet.
    script, *arguments = command
    entry = [sys.executable, str(REPOSITORY / script), *arguments]
    start = (sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--", *entry)
    env, deadline = {**os.environ, **cluster}, time.monotonic() + LIMIT_S
    while True:
        done = subprocess.run(start, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=LIMIT_S)
        told = done.stdout + done.stderr
        # A young cluster takes a while to find the agent that starts jobs, and says only this.
        if "No available agent" not in told or time.monotonic() > deadline:
            return done.returncode, told


def test_a_job_ends_with_the_jobs_status(cluster: dict[str, str]) -> None:
    status, told = submit(cluster, "examples/job.py")
    assert status == 0, told
    assert "every output equals the trainer's" in told
    assert "succeeded" in told


def test_a_job_places_trainers_and_engines_groups_them_and_broadcasts_to_the_group(cluster: dict[str, str]) -> None:
    status, told = submit(cluster, "examples/placement.py")
    assert status == 0, told
    placed = next(line for line in told.splitlines() if line.startswith("placed: "))
    assert re.findall(r"(trainer|engine) (\d) node [0-9a-f]{8}", placed) == [
        *(("trainer", str(index)) for index in range(2)),
        *(("engine", str(index)) for index in range(3)),
    ]
    assert told.count("by collective, group of 4: 0 sender | 1 r0 | 2 r1 | 3 r2") == 3
    assert "every output equals the trainers'" in told


def test_the_benchmark_measures_host_and_collective_between_three_nodes(cluster: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "cluster.json"
    sizes = ("--megabytes", "1", "--rounds", "1", "--warm-up", "1", "--link-megabytes", "16")
    directory = ("--directory", "$RWS_SHM")
    # Ten engines have no node each: that is recorded, and three are measured.
    status, told = submit(cluster, "benchmarks/cluster.py", "--cpus", "--engines", "10", "3", *sizes, *directory, "--out", str(out))
    assert status == 1, told
    document = json.loads(out.read_text())
    assert len({node["node_id"] for node in document["nodes"]}) == 3
    assert document["versions"]["ray"]
    assert document["arguments"]["directory"] == "$RWS_SHM"
    of_ten, of_three = ([each for each in document["measurements"] if each["case"]["engines"] == count] for count in (10, 3))
    assert {each["status"] for each in of_ten} == {"failed"}
    assert all("There is no room for this placement" in each["reason"] for each in of_ten)

    measured = {each["case"]["transport"]: each for each in of_three if each["status"] == "measured"}
    assert tuple(measured) == CARRIED, told
    for name, each in measured.items():
        assert each["ranks"] == "group of 4: 0 sender | 1 r0 | 2 r1 | 3 r2"
        assert len({place.split(" node ")[1] for place in each["placed"] if place.startswith("engine")}) == 3
        (row,) = each["rounds"]
        assert row["transport"] == name.split("+")[0]
        assert list(row["replicas"]) == ["r0", "r1", "r2"]
        assert row["num_bytes"] == each["summary"]["num_bytes"] == 200 * 5 * 256 * 4
        assert each["summary"]["moving_phase"] == ("relay" if name.startswith("host") else "update")
        assert each["summary"]["share_of_link"] > 0
        assert each["link"]["from"] != each["link"]["to"]
    others = {each["case"]["transport"]: each for each in of_three if each["case"]["transport"] not in measured}
    assert set(others) == {"native:ipc", "native:nccl", "native:nccl_m2n"}
    assert {each["status"] for each in others.values()} == {"not available"}
    assert all("one of vLLM's own backends, which need GPUs" in each["reason"] for each in others.values())

    assert "engine_per_node  3        1   host " in told
    image = out.with_suffix(".png")
    assert f"written: {out}" in told
    assert f"written: {image}" in told
    assert image.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert image.stat().st_size > 20_000
