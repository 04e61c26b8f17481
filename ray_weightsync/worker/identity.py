"""What a worker is: the version of this package it runs, and the machine it runs on."""

from __future__ import annotations

import socket
from contextlib import suppress


def package_version() -> str:
    """The version of this package in this process, installed or found on a path."""
    from ray_weightsync import __version__  # here, as the package's own module imports much of the package

    return __version__


def node_ip() -> str:
    """The address under which this machine reaches others. Nothing is sent: connecting a datagram socket only picks a route."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # TEST-NET-1 of RFC 5737: routed like any other address, owned by nobody
        return str(probe.getsockname()[0])
    return "127.0.0.1"
