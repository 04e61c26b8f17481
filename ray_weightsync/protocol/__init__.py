"""What vLLM speaks: payloads, channels to one engine, fan-out to many, and the two public clients.

Importing this imports neither torch nor vLLM; Ray and requests come with the names that need them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ray_weightsync.protocol.channel import Channel
from ray_weightsync.protocol.client import VLLMWeightSyncClient
from ray_weightsync.protocol.fanout import Outcomes, fan_out
from ray_weightsync.protocol.messages import Payload, PerReplica
from ray_weightsync.protocol.reading import died, words

if TYPE_CHECKING:
    from ray_weightsync.protocol.http_channel import HTTPChannel
    from ray_weightsync.protocol.http_client import HTTPVLLMWeightSyncClient
    from ray_weightsync.protocol.ray_channel import ActorChannel
    from ray_weightsync.protocol.ray_client import RayVLLMWeightSyncClient

__all__ = [
    "ActorChannel",
    "Channel",
    "HTTPChannel",
    "HTTPVLLMWeightSyncClient",
    "Outcomes",
    "Payload",
    "PerReplica",
    "RayVLLMWeightSyncClient",
    "VLLMWeightSyncClient",
    "died",
    "fan_out",
    "words",
]

_LAZY = {
    "ActorChannel": "ray_channel",
    "HTTPChannel": "http_channel",
    "HTTPVLLMWeightSyncClient": "http_client",
    "RayVLLMWeightSyncClient": "ray_client",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
