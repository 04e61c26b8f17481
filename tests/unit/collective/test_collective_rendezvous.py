"""The value that Ray carries, and the socket behind it."""

from __future__ import annotations

import json
import pickle
import socket
from typing import Any

import pytest

from ray_weightsync.config import Collective
from ray_weightsync.errors import ConfigError
from ray_weightsync.transports.collective.receiver import CollectiveReceiver
from ray_weightsync.transports.collective.rendezvous import GroupError, Rendezvous, RendezvousServer, address_of

GROUP: dict[str, Any] = {
    "id": "0" * 32,
    "backend": "gloo",
    "address": "10.0.0.1",
    "port": 4711,
    "world_size": 4,
    "bucket_bytes": 4096,
    "num_buckets": 2,
    "rank_offset": 2,
}


def can_bind(port: int) -> bool:
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def test_the_socket_is_bound_from_the_start_and_free_after_the_end() -> None:
    with RendezvousServer(address="127.0.0.1") as server:
        port = server.meeting.port
        assert not can_bind(port)
        server.close()
        assert can_bind(port)
        server.close()


def test_workers_are_told_an_address_and_no_name() -> None:
    with RendezvousServer(address="localhost") as server:
        assert server.meeting.address in ("127.0.0.1", "::1")


def test_every_group_is_another_one() -> None:
    with RendezvousServer(address="127.0.0.1") as one, RendezvousServer(address="127.0.0.1") as other:
        assert one.meeting.id != other.meeting.id
        assert one.meeting.port != other.meeting.port


def test_ray_and_json_carry_it() -> None:
    with RendezvousServer(options=Collective(bucket_bytes=8192, num_buckets=3), address="127.0.0.1") as server:
        rendezvous = server.meeting.of(3)
    assert pickle.loads(pickle.dumps(rendezvous)) == rendezvous
    assert Rendezvous.from_payload(json.loads(json.dumps(rendezvous.payload(2)))) == (rendezvous, 2)
    assert (rendezvous.bucket_bytes, rendezvous.num_buckets) == (8192, 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", "../x"),
        ("backend", "mpi"),
        ("address", ""),
        ("address", "localhost"),
        ("port", 0),
        ("port", True),
        ("world_size", 1),
        ("bucket_bytes", 64),
        ("num_buckets", 1),
        ("rank_offset", 0),
        ("rank_offset", 4),
        ("rank_offset", "1"),
    ],
)
def test_a_payload_that_no_group_can_have_is_refused_by_name(field: str, value: object) -> None:
    assert Rendezvous.from_payload(GROUP)[1] == 2
    with pytest.raises(GroupError, match=field):
        Rendezvous.from_payload({**GROUP, field: value})


def test_a_payload_with_other_fields_is_refused() -> None:
    wrong: list[object] = [None, [], {}, GROUP | {"more": 1}, {key: value for key, value in GROUP.items() if key != "port"}]
    for group in wrong:
        with pytest.raises(GroupError, match="a group has the fields"):
            Rendezvous.from_payload(group)


def test_an_interface_is_known_by_its_name() -> None:
    assert address_of("lo") == "127.0.0.1"
    with RendezvousServer(options=Collective(interface="lo")) as server:
        assert server.meeting.address == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"'nowhere0' has no IPv4 address here .* there are: .*lo"):
        address_of("nowhere0")


def test_without_an_interface_the_sender_is_met_at_its_nodes_address_in_ray(in_ray: str) -> None:
    with RendezvousServer() as server:
        assert server.meeting.address == in_ray
    with RendezvousServer(options=Collective(interface="lo")) as server:
        assert server.meeting.address == "127.0.0.1"


def test_an_address_that_is_not_this_machines_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        RendezvousServer(address="192.0.2.1")
    with RendezvousServer(address="127.0.0.1") as server, pytest.raises(GroupError, match="world_size"):
        server.meeting.of(1)


def test_a_worker_proves_that_it_reaches_the_senders_store_and_no_other() -> None:
    receiver = CollectiveReceiver()
    with RendezvousServer(address="127.0.0.1") as server:
        probe = server.meeting.probe()
        receiver.see(probe)
        receiver.see(probe)
        with pytest.raises(GroupError, match="is not the sender's"):
            receiver.see({**probe, "nonce": "f" * 32})
        for field in probe:
            with pytest.raises(ValueError, match=field):
                receiver.see({key: value for key, value in probe.items() if key != field})


def test_a_store_that_is_not_there_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_weightsync.transports.collective.receiver.SEE_LIMIT_S", 0.2)
    with RendezvousServer(address="127.0.0.1") as server:
        probe = server.meeting.probe()
    with pytest.raises(GroupError, match=r"cannot be reached from here within 0\.2 s"):
        CollectiveReceiver().see(probe)
