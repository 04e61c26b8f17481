"""How a group with stock engines meets, chosen by the oldest vLLM in it."""

from __future__ import annotations

import socket

import pytest

from ray_weightsync.transports.collective.rendezvous import GroupError
from ray_weightsync.transports.collective.stock_meeting import at_socket, by_unique_id, oldest_release, takes_unique_id


@pytest.mark.parametrize(
    ("versions", "oldest"),
    [
        (["0.32.0"], (0, 32)),
        (["0.32.0+cpu", "0.28.1", "v1.0.0"], (0, 28)),
        (["0.9.2", "0.30.0"], (0, 9)),
        (["0.31.0rc1.dev5+gabc", "1.2"], (0, 31)),
        (["0.32.0", None], None),
        (["0.32.0", "dev"], None),
        (["dev"], None),
        ([], None),
    ],
)
def test_the_oldest_release_counts_and_one_that_cannot_be_told_makes_it_unknown(
    versions: list[str | None], oldest: tuple[int, int] | None
) -> None:
    assert oldest_release(versions) == oldest


@pytest.mark.parametrize(("oldest", "taken"), [(None, False), ((0, 29), False), ((0, 30), True), ((0, 32), True), ((1, 0), True)])
def test_a_unique_id_is_for_vllm_0_30_and_later(oldest: tuple[int, int] | None, taken: bool) -> None:
    assert takes_unique_id(oldest) is taken


def test_a_meeting_at_a_socket_listens_until_it_is_closed() -> None:
    meeting = at_socket("127.0.0.1")
    place = (meeting.told["master_address"], meeting.told["master_port"])
    with socket.create_connection(place, timeout=30):
        pass
    assert meeting.shown == f"at 127.0.0.1:{place[1]}"
    meeting.close()
    meeting.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(place, timeout=30)


@pytest.mark.parametrize("length", [0, 127, 129])
def test_what_is_no_unique_id_is_refused_before_an_engine_is_told(length: int) -> None:
    with pytest.raises(GroupError, match=f"has 128 bytes, not {length}"):
        by_unique_id(bytes(length))
