"""A user's own client behind a channel: a call of it that hangs or raises is nobody else's affair."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from ray_weightsync.engines.client_channel import ClientChannel
from ray_weightsync.protocol.channel import FINISH, START

MANY = 64
"""More than asyncio's executor has threads on any machine: it takes 32 at most."""


class Client:
    """Starts when ``gate`` is open, and cannot finish."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.held = threading.Semaphore(0)

    def start_weight_update(self) -> str:
        self.held.release()
        assert self.gate.wait(30)
        return "started"

    def finish_weight_update(self) -> None:
        raise StopIteration("no more answers")


def channel_to(client: Any) -> ClientChannel:
    return ClientChannel(client, label="mine")


def test_clients_that_hang_do_not_keep_threads_that_others_wait_for() -> None:
    async def story() -> None:
        clients = [Client() for _ in range(MANY)]
        calls = [asyncio.create_task(channel_to(client).call(START)) for client in clients]
        try:
            await asyncio.sleep(0)
            assert await asyncio.wait_for(asyncio.to_thread(lambda: "done"), 20) == "done"
            for client in clients:
                assert client.held.acquire(timeout=20)
        finally:
            for client in clients:
                client.gate.set()
        assert await asyncio.gather(*calls) == ["started"] * MANY

    asyncio.run(story())


def test_whatever_a_client_raises_ends_the_call() -> None:
    async def story() -> None:
        with pytest.raises(RuntimeError, match="no more answers"):
            await asyncio.wait_for(channel_to(Client()).call(FINISH), 20)

    asyncio.run(story())
