"""The demo ends with status 0, in a process and on a cluster of its own, as a user runs it."""

from __future__ import annotations

import os
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
