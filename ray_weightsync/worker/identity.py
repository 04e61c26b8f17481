"""What a worker is: the version of this package it runs, the machine it runs on, what of its engine is in memory."""

from __future__ import annotations

import importlib.util
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

RESIDENT = ("weights", "kv_cache")
"""What an engine has in memory unless it sleeps."""


def package_version() -> str:
    """The version of this package in this process, installed or found on a path."""
    from ray_weightsync import __version__  # here, as the package's own module imports much of the package

    return __version__


def is_installed(module: str) -> bool:
    """Whether a module can be found. It is not imported, but the packages that it lies in are."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # one of those is missing
        return False


def node_ip() -> str:
    """The address of this machine in Ray, if this process is connected to one; else the one by which it reaches others.

    Ray's is the one that whoever started the nodes chose for traffic between them (``ray start --node-ip-address``). Nothing is sent
    otherwise: connecting a datagram socket only picks a route.
    """
    ray = sys.modules.get("ray")  # what is not imported is not connected
    if ray is not None and ray.is_initialized():
        return str(ray.util.get_node_ip_address())
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # TEST-NET-1 of RFC 5737: routed like any other address, owned by nobody
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def resident() -> Sequence[str]:
    """Which of ``"weights"`` and ``"kv_cache"`` are in memory, as vLLM's sleep mode has left them.

    From outside, a sleeping engine and a paused one look alike; the allocator of sleep mode knows. It exists only where it
    was used, so it is looked for among the modules already imported (it cannot be imported without CUDA).
    """
    asleep: set[str] = set()
    for module, name in (("vllm.device_allocator.cumem", "CuMemAllocator"), ("vllm.device_allocator.xpumem", "XpuMemAllocator")):
        allocator = getattr(getattr(sys.modules.get(module), name, None), "instance", None)
        for data in getattr(allocator, "pointer_to_data", {}).values():
            if data.is_asleep:
                asleep.add(data.tag)
    return tuple(each for each in RESIDENT if each not in asleep)
