"""``benchmarks/cluster.py`` whole, on three raylets that it starts itself, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 240
CARRIED = ("host", "host+overlap", "collective", "collective+snapshot")


def directories() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("rws-benchmark-")}


def test_every_transport_is_measured_between_three_nodes_and_nothing_stays(tmp_path: Path) -> None:
    out, before = tmp_path / "cluster.json", directories()
    sizes = ("--megabytes", "1", "--rounds", "1", "--warm-up", "1", "--link-megabytes", "16")
    done = subprocess.run(
        # Ten engines have no node each: that is recorded, and three are measured.
        [sys.executable, "benchmarks/cluster.py", "--cpus", "--local-raylets", "3", "--engines", "10", "3", *sizes, "--out", str(out)],
        cwd=REPOSITORY,
        env={**os.environ, "RAY_ADDRESS": ""},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert directories() <= before
    document = json.loads(out.read_text())
    assert len({node["node_id"] for node in document["nodes"]}) == 3
    assert document["versions"]["ray"]
    of_ten, of_three = ([each for each in document["measurements"] if each["case"]["engines"] == count] for count in (10, 3))
    assert {each["status"] for each in of_ten} == {"failed"}
    assert all("There is no room for this placement" in each["reason"] for each in of_ten)

    measured = {each["case"]["transport"]: each for each in of_three if each["status"] == "measured"}
    assert tuple(measured) == CARRIED, done.stdout + done.stderr
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
    others = [each for each in of_three if each["case"]["transport"] not in measured]
    assert {each["status"] for each in others} == {"not available"}
    assert all("one of vLLM's own backends, which need GPUs" in each["reason"] for each in others)

    assert "engine_per_node  3        1   host " in done.stdout
    assert f"written: {out}" in done.stdout
    assert ("no plot: " in done.stdout) is not out.with_suffix(".png").exists()
