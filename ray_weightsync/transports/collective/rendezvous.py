"""Where the ranks of a group meet: a store that the sender's process serves on a socket that stays bound from the start.

There is no race for a free port: the kernel picks one for the socket that is then listened on. A group lives for one transfer. Its
id is random, the store answers nobody who does not know it, and the next transfer has another store, port and id.
"""

from __future__ import annotations

import fcntl
import ipaddress
import re
import secrets
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from ray_weightsync.config import MIN_BUCKET_BYTES, Collective
from ray_weightsync.errors import ConfigError
from ray_weightsync.transports.collective.store import StoreServer
from ray_weightsync.weights.tensor_spec import is_int
from ray_weightsync.worker.identity import node_ip

BackendName = Literal["gloo", "nccl"]
BACKENDS: tuple[BackendName, ...] = ("gloo", "nccl")
SENDER = 0
"""The sender's rank. A replica's workers follow from its ``rank_offset`` on."""

DEFAULTS = Collective()

_ID = re.compile(r"[0-9a-f]{32}")
_SIOCGIFADDR = 0x8915  # linux/sockios.h


class GroupError(ValueError):
    """A group cannot be joined, or broke: a member is gone, or gave up."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where a sender is to be met, before it is known by whom. Plain values; Ray or JSON carries it.

    Attributes:
        id: The group's id, 32 hex digits.
        backend: ``"gloo"`` or ``"nccl"``.
        address: Address of the sender's store, IPv4 or IPv6: a name would have to be looked up by every worker.
        port: Its port.
        bucket_bytes: Most bytes in one broadcast.
        num_buckets: Buckets that each side holds at a time. At least 2.
    """

    id: str
    backend: BackendName
    address: str
    port: int
    bucket_bytes: int
    num_buckets: int

    def __post_init__(self) -> None:
        for name, valid in (
            ("id", isinstance(self.id, str) and _ID.fullmatch(self.id)),
            ("backend", self.backend in BACKENDS),
            ("address", _is_address(self.address)),
            ("port", is_int(self.port) and 0 < self.port < 1 << 16),
            ("bucket_bytes", is_int(self.bucket_bytes) and self.bucket_bytes >= MIN_BUCKET_BYTES),
            ("num_buckets", is_int(self.num_buckets) and self.num_buckets >= 2),
        ):
            if not valid:
                raise GroupError(f"a group cannot have {name}={getattr(self, name)!r:.80}")

    def of(self, world_size: int) -> Rendezvous:
        """The rendezvous of a group of that many ranks, the sender's included.

        Raises:
            GroupError: if there are fewer than 2.
        """
        return Rendezvous(**asdict(self), world_size=world_size)

    def probe(self) -> dict[str, Any]:
        """What a worker needs to prove that it reaches this place; see `CollectiveReceiver.see`."""
        return {"address": self.address, "port": self.port, "nonce": self.id}


@dataclass(frozen=True, kw_only=True)
class Rendezvous(Meeting):
    """What a rank must know to join a group.

    Attributes:
        world_size: Ranks, the sender's included. At least 2.
    """

    world_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_int(self.world_size) or self.world_size < 2:
            raise GroupError(f"a group cannot have world_size={self.world_size!r:.80}")

    def payload(self, rank_offset: int) -> dict[str, Any]:
        """The ``group`` of an ``update_weights`` payload for a replica whose workers have the ranks from ``rank_offset`` on."""
        return {**asdict(self), "rank_offset": rank_offset}

    @classmethod
    def from_payload(cls, group: object) -> tuple[Rendezvous, int]:
        """Read what `payload` wrote: the rendezvous, and the ``rank_offset``. Nothing in it is trusted.

        Raises:
            GroupError: naming what is wrong.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(group, Mapping) or set(group) != names | {"rank_offset"}:
            found = sorted(map(str, group)) if isinstance(group, Mapping) else type(group).__name__
            raise GroupError(f"a group has the fields {sorted(names | {'rank_offset'})}, not {found}")
        rendezvous = cls(**{name: group[name] for name in names})
        offset = group["rank_offset"]
        if not is_int(offset) or not SENDER < offset < rendezvous.world_size:
            raise GroupError(f"rank_offset must be an int from {SENDER + 1} to {rendezvous.world_size - 1}, not {offset!r}")
        return rendezvous, offset


class RendezvousServer:
    """The store of one group, in the sender's process. A context manager; close it when the transfer is over, however it ended.

    Args:
        backend: ``"nccl"`` where sender and workers have GPUs, else ``"gloo"``.
        options: Bucket sizes, and the interface whose address the workers are told.
        address: The address to bind where ``options`` name no interface. None: this node's in Ray.

    Raises:
        ConfigError: if the interface is not there or has no IPv4 address, or the address is not this machine's.
        GroupError: for a backend that no group can have.
    """

    def __init__(
        self,
        *,
        backend: BackendName = "gloo",
        options: Collective = DEFAULTS,
        address: str | None = None,
    ) -> None:
        address = address_of(options.interface) if options.interface is not None else address or node_ip()
        bound = listening(address)
        try:
            self.meeting = Meeting(
                id=secrets.token_hex(16),
                backend=backend,
                address=bound.getsockname()[0],
                port=bound.getsockname()[1],
                bucket_bytes=options.bucket_bytes,
                num_buckets=options.num_buckets,
            )
            self._store = StoreServer(bound, self.meeting.id)
        except BaseException:
            bound.close()
            raise

    def close(self) -> None:
        """Close the store and its socket: whoever still waits for it fails at once. Idempotent."""
        self._store.close()

    def __enter__(self) -> RendezvousServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface, such as ``"eth0"``.

    Raises:
        ConfigError: if there is none, naming the interfaces that there are.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            there = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(f"interface {interface!r} has no IPv4 address here ({error.strerror}); there are: {there}") from error
    return socket.inet_ntoa(answer[20:24])


def local_address_towards(address: str, port: int) -> str:
    """The local address from which packets to ``address`` leave. Nothing is sent: connecting a datagram socket only picks a route.

    Raises:
        GroupError: if there is no route.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise GroupError(f"there is no way from here to {address}, the sender's address: {error}") from error


def listening(address: str) -> socket.socket:
    """A socket that listens on this address, on a port that the kernel picks. The caller's to close.

    Raises:
        ConfigError: if it is not this machine's.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"{address!r} is no address: {error}") from error
    try:
        bound.bind(target)
        bound.listen(socket.SOMAXCONN)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"the sender cannot listen on {address}: {error}", hint="name the interface that workers reach with Collective(interface=...)"
        ) from error
    return bound


def _is_address(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(ipaddress.ip_address(value))
    except ValueError:
        return False
