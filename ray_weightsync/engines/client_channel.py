"""A user's own `VLLMWeightSyncClient` as a channel. It has the protocol's four verbs, and nothing can be learned through it."""

from __future__ import annotations

import asyncio
from typing import Any

from ray_weightsync.protocol.chain import StepByStep
from ray_weightsync.protocol.channel import REQUIRED_VERBS, unsupported
from ray_weightsync.protocol.client import VLLMWeightSyncClient
from ray_weightsync.protocol.threads import in_daemon_thread


class ClientChannel(StepByStep):
    """Calls a synchronous client on threads, one call at a time: such clients hold connections that are not thread-safe."""

    def __init__(self, client: VLLMWeightSyncClient, *, label: str) -> None:
        self.label = label
        self._client = client
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"ClientChannel({self.label}, {type(self._client).__name__})"

    def supports(self, verb: str) -> bool:
        """True for the four required verbs."""
        return verb in REQUIRED_VERBS

    async def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``verb`` of the client; see `Channel`. A call cannot be cancelled once it runs.

        Raises:
            UnsupportedError: for any but the four required verbs.
        """
        if not self.supports(verb):
            raise unsupported(verb, (self.label,))
        async with self._turn:
            # Not asyncio's executor: a client that hangs would hold one of its few threads, which others wait for.
            return await in_daemon_thread(lambda: getattr(self._client, verb)(*args, **kwargs))
