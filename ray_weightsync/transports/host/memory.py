"""How much shared memory can still be had: the least of what the file system, the machine and the container's limit leave.

Asked before a slot is allocated. A tmpfs may be larger than the memory behind it, and there the kernel's answer to one page too many
is not an error but the OOM killer.
"""

from __future__ import annotations

import os
from pathlib import Path


def available_bytes(directory_fd: int, *, root: Path = Path("/")) -> int:
    """Bytes that a new file in the directory may take.

    Args:
        directory_fd: The open directory.
        root: Where ``proc`` and ``sys`` are found.
    """
    status = os.fstatvfs(directory_fd)
    limits = [status.f_bavail * status.f_frsize, _machine_bytes(root), _container_bytes(root)]
    return max(0, min(limit for limit in limits if limit is not None))


def _machine_bytes(root: Path) -> int | None:
    counts = _counts(root / "proc/meminfo")
    if "MemAvailable:" not in counts:
        return None
    return 1024 * (counts["MemAvailable:"] + counts.get("SwapFree:", 0))


def _container_bytes(root: Path) -> int | None:
    # cgroup v2 as seen from inside a container, whose own group is the root of what it sees
    group = root / "sys/fs/cgroup"
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except FileNotFoundError:
        return None
    if limit == "max":
        return None
    return int(limit) - used + _counts(group / "memory.stat").get("inactive_file", 0)  # the kernel drops cold cache before it refuses


def _counts(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return {}
    return {words[0]: int(words[1]) for words in map(str.split, lines) if len(words) >= 2}
