"""A server's token reaches the server, and nothing that Ray stores or shows."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import ray

import ray_weightsync as rws
from ray_weightsync.fleet import cluster
from tests.ray.killing import kill
from tests.ray.session.conftest import LIMIT_S
from tests.unit.engines.test_server import Server, serving

TOKEN = "s3cret-hunter2"


@pytest.fixture
def server() -> Iterator[tuple[str, Server]]:
    stand_in = Server()
    with serving(stand_in) as url:
        yield url, stand_in


def stored() -> bytes:
    """All that Ray's control plane keeps for us."""
    return b"".join(cluster.get(key) or b"" for key in cluster.keys(""))


def state_of(sync: rws.WeightSync) -> list[tuple[str, str | None]]:
    return [(each.state, each.error) for each in sync.status().replicas]


def test_a_token_given_itself_reaches_the_server_and_nobody_else(server: tuple[str, Server]) -> None:
    url, stand_in = server
    with rws.WeightSync.attach([rws.EngineRef(url, api_key=TOKEN)]) as sync:
        assert set(stand_in.tokens) == {f"Bearer {TOKEN}"}
        assert TOKEN.encode() not in stored()
        assert state_of(sync) == [("STALE", None)]  # the stand-in says that it is paused
        assert TOKEN not in repr(sync)


def test_a_token_that_is_not_accepted_is_not_repeated(server: tuple[str, Server]) -> None:
    url, stand_in = server
    stand_in.answer = lambda route, body: (401, {"error": "Unauthorized"})  # type: ignore[method-assign]
    with pytest.raises(rws.AttachError, match="the api_key given was not accepted") as raised:
        rws.WeightSync.attach([rws.EngineRef(url, api_key=TOKEN)])
    assert TOKEN not in str(raised.value)


@pytest.mark.parametrize("end", ["its process is killed", "it is killed for good"])
def test_a_successor_of_the_coordinator_has_the_token_again(server: tuple[str, Server], end: str) -> None:
    url, stand_in = server
    with rws.WeightSync.attach([rws.EngineRef(url, api_key=TOKEN)]) as sync:
        before = sync.coordinator
        pid = ray.get(before.__ray_call__.remote(lambda actor: os.getpid()), timeout=LIMIT_S)
        if end == "its process is killed":
            os.kill(pid, signal.SIGKILL)
        else:
            kill(before)
        stand_in.tokens.clear()
        with pytest.raises(rws.RoundAborted):  # nothing to heal from; answered when the successor has settled everything
            sync.heal()
        assert state_of(sync) == [("STALE", None)]
        assert set(stand_in.tokens) == {f"Bearer {TOKEN}"}
        assert TOKEN.encode() not in stored()
