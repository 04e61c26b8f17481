"""The examples end with status 0, each in a process and on a cluster of its own, as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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


def test_placed_trainers_and_engines_are_grouped_and_synchronised() -> None:
    told = run(sys.executable, "examples/placement.py", env={"RAY_ADDRESS": ""})
    placed = next(line for line in told.splitlines() if line.startswith("placed: "))
    assert re.findall(r"(trainer|engine) (\d) node [0-9a-f]{8}", placed) == [
        *(("trainer", str(index)) for index in range(2)),
        *(("engine", str(index)) for index in range(3)),
    ]
    assert "group of 4: 0 sender | 1 r0 | 2 r1 | 3 r2" in told
    assert "every output equals the trainers'" in told
