"""The demo ends with status 0, in a process and on a cluster of its own, as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 240


def test_the_demo_proves_its_result() -> None:
    demo = [sys.executable, "examples/demo.py"]
    done = subprocess.run(demo, cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 15 outputs equal the trainer's, bit for bit" in done.stdout
    assert [f"round {number}:" in done.stdout for number in range(1, 6)] == [True] * 5
