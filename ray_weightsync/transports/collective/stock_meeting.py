"""How the sender and the workers of stock engines find each other: at a socket that is bound already, or by an NCCL unique id.

A unique id is bytes, which travel in the ``init_info`` itself: no store, no port of ours, no address that has to be the right one. But
there is no barrier either. Who joins by it goes straight into NCCL, which has no limit on its waiting, while one who comes to a socket
is told who is missing. NCCL's own connections are made over the interfaces that ``NCCL_SOCKET_IFNAME`` says, either way.
"""

from __future__ import annotations

import base64
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ray_weightsync.transports.collective.rendezvous import GroupError, listening

TAKES_UNIQUE_ID_SINCE = (0, 30)
"""The first vLLM whose ``nccl`` workers join by ``nccl_unique_id_b64``; an older one refuses the field."""

UNIQUE_ID_BYTES = 128
"""NCCL's ``NCCL_UNIQUE_ID_BYTES``."""

Means = socket.socket | bytes
"""What rank 0 joins with: a socket that listens where the workers were told, which is taken over; or the unique id that they were told."""


@dataclass(frozen=True)
class Meeting:
    """Where and by what a group meets.

    Attributes:
        means: What rank 0 joins with.
        told: The fields of vLLM's ``NCCLWeightTransferInitInfo`` by which a worker comes to the same meeting.
        shown: In words, for errors.
    """

    means: Means
    told: Mapping[str, Any]
    shown: str

    def close(self) -> None:
        """Close the socket, if there is one. Idempotent."""
        if isinstance(self.means, socket.socket):
            self.means.close()


def at_socket(address: str) -> Meeting:
    """A meeting at a socket of ``address``, which listens from now on. The caller's to close.

    Raises:
        ConfigError: if the address is not this machine's.
    """
    bound = listening(address)
    port: int = bound.getsockname()[1]
    return Meeting(bound, {"master_address": address, "master_port": port}, f"at {address}:{port}")


def by_unique_id(unique_id: bytes) -> Meeting:
    """A meeting by an id that was made in this process, which has to live until all have come. Good for one group.

    Raises:
        GroupError: if it is not as long as NCCL's are.
    """
    if len(unique_id) != UNIQUE_ID_BYTES:
        raise GroupError(f"an NCCL unique id has {UNIQUE_ID_BYTES} bytes, not {len(unique_id)}")
    return Meeting(unique_id, {"nccl_unique_id_b64": base64.b64encode(unique_id).decode()}, "by an NCCL unique id")


def place_told(init_info: object, transport: str) -> str:
    """Where workers were told to meet the sender, and what can be wrong with it; empty if they were told no place. Pure.

    Args:
        init_info: Of a backend of vLLM's own.
        transport: Its name for users.
    """
    if not isinstance(init_info, Mapping):
        return ""
    if "nccl_unique_id_b64" in init_info:
        return "NCCL itself chooses the interfaces; NCCL_SOCKET_IFNAME, set for trainer and engines, names them"
    if "master_address" not in init_info:
        return ""
    place = f"{init_info['master_address']}:{init_info.get('master_port')}"
    option = "Collective(interface=...)" if transport == "collective" else "Native(..., options={'master_address': ...})"
    return f"the workers were told to meet the sender at {place}; if they have no way there, {option} names another address"


def takes_unique_id(vllm: tuple[int, int] | None) -> bool:
    """Whether a group whose oldest vLLM is this one can meet by a unique id. One that is not known meets at a socket, as all can."""
    return vllm is not None and vllm >= TAKES_UNIQUE_ID_SINCE


def oldest_release(versions: Iterable[str | None]) -> tuple[int, int] | None:
    """Major and minor of the oldest of these versions of vLLM; None if there are none, or one of them cannot be told.

    Args:
        versions: As engines tell them (``EngineFacts.vllm_version``), such as ``"0.32.0+cpu"``; and the trainer's own.
    """
    releases = [re.match(r"v?(\d+)\.(\d+)(?![0-9])", version or "") for version in versions]
    known = [(int(found[1]), int(found[2])) for found in releases if found is not None]
    return min(known) if known and len(known) == len(releases) else None
