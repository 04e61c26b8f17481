"""The examples end with status 0, run as a user runs them: in a process of their own, or as jobs of a cluster."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 240


def run(*command: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_demo_proves_its_result() -> None:
    told = run(sys.executable, "examples/demo.py")
    assert "All 15 outputs equal the trainer's, bit for bit" in told
    assert [f"round {number}:" in told for number in range(1, 6)] == [True] * 5


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Ray cluster with a dashboard, which jobs are submitted to; yields the environment that finds it."""
    with contextlib.ExitStack() as sockets:
        bound = [sockets.enter_context(socket.socket()) for _ in range(3)]
        for each in bound:
            each.bind(("127.0.0.1", 0))
        port, dashboard, agent = (each.getsockname()[1] for each in bound)
    env = {"RAY_AUTH_MODE": "disabled", "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}"}
    # The agent that starts jobs listens on a fixed port unless told otherwise, and the tests' own cluster has it already.
    ports = [f"--port={port}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
    address = ["--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", *ports]
    head = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=4", "--disable-usage-stats", *address],
        env={**os.environ, **env, "RAY_TMPDIR": "/tmp"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert head.stdout is not None
        for line in head.stdout:  # ends with the process, if it cannot start
            if "--block" in line or "Ray runtime started" in line:
                break
        assert head.poll() is None, "the cluster did not start"
        yield env
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        try:
            head.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
            head.wait(timeout=60)
        if head.stdout is not None:
            head.stdout.close()


def run_as_job(example: str, cluster: dict[str, str]) -> str:
    submit = (sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--working-dir", ".", "--", sys.executable, example)
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return run(*submit, env=cluster)
        except AssertionError as error:  # a young cluster takes a while to find the agent that starts jobs, and says only this
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise


def test_the_job_ends_with_the_jobs_status(cluster: dict[str, str]) -> None:
    told = run_as_job("examples/job.py", cluster)
    assert "every output equals the trainer's" in told
    assert "succeeded" in told


def test_a_job_places_trainers_and_engines_groups_them_and_broadcasts_to_the_group(cluster: dict[str, str]) -> None:
    told = run_as_job("examples/placement.py", cluster)
    placed = next(line for line in told.splitlines() if line.startswith("placed: "))
    assert re.findall(r"(trainer|engine) (\d) node [0-9a-f]{8}", placed) == [
        *(("trainer", str(index)) for index in range(2)),
        *(("engine", str(index)) for index in range(3)),
    ]
    assert told.count("by collective, group of 4: 0 sender | 1 r0 | 2 r1 | 3 r2") == 3
    assert "every output equals the trainers'" in told
    assert "succeeded" in told
