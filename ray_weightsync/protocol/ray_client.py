"""`RayVLLMWeightSyncClient`: the control plane of engines that are Ray actors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from ray.actor import ActorHandle

from ray_weightsync.errors import AttachError, ConfigError
from ray_weightsync.protocol import channel as verbs
from ray_weightsync.protocol import remote
from ray_weightsync.protocol.blocking import BlockingClient, Call
from ray_weightsync.protocol.messages import IPC_HANDLES, Payload, plain
from ray_weightsync.protocol.ray_channel import ActorChannel


class RayVLLMWeightSyncClient(BlockingClient):
    """Drives vLLM engines that are Ray actors, all at once.

    Usable alone, and by vLLM's own trainer engines as their client. Neither side needs a class of the other's: payloads travel as
    plain data. No call is ever repeated, whatever ``max_task_retries`` the actors were made with.

    Args:
        handles: One handle, or several, of actors whose class has the protocol's methods (as ``AsyncLLM`` and ``LLM`` do).
        timeout: Seconds until an engine that has not answered counts as failed, for each call.

    Raises:
        ConfigError: if there is no handle, one is given twice, or one is no actor handle.
        AttachError: if an actor's class lacks a method of the protocol; the error names it.
    """

    def __init__(self, handles: ActorHandle[Any] | Sequence[ActorHandle[Any]], timeout: float = 300) -> None:
        several: list[Any] = list(handles) if isinstance(handles, list | tuple) else [handles]
        for index, handle in enumerate(several):
            if not isinstance(handle, ActorHandle):
                raise ConfigError(f"handles[{index}] must be a Ray actor handle, not {type(handle).__name__}")
            if handle in several[:index]:
                raise ConfigError(f"handles[{index}] is the same actor as handles[{several.index(handle)}]")
            if missing := ActorChannel.missing_verbs(handle):
                raise AttachError(
                    f"handles[{index}] ({handle}) is no vLLM engine: it lacks {', '.join(missing)}",
                    replicas=(_label(index, handle),),
                    hint="an actor that holds its engine in an attribute is attached with WeightSync and EngineRef(handle, attr=...)",
                )
        self._actors = [ActorChannel(handle, label=_label(index, handle)) for index, handle in enumerate(several)]
        super().__init__(self._actors, timeout=timeout)

    def get_world_size(self) -> list[int]:
        """Workers of each engine (TP x PP x DP), read from its ``vllm_config`` where it has no method that tells.

        Raises:
            UnsupportedError: if an actor has neither.
            EngineCallError: see the class.
        """
        if all(channel.supports(verbs.WORLD_SIZE) for channel in self._actors):
            return super().get_world_size()
        sizes = self._run(verbs.WORLD_SIZE, [_size_reader(channel) for channel in self._actors])
        unknown = tuple(label for label, size in zip(self.labels, sizes, strict=True) if size is None)
        if unknown:
            raise verbs.unsupported(verbs.WORLD_SIZE, unknown)
        return [int(size) for size in sizes]

    def _data_parallel_places(self) -> list[tuple[int, int] | None]:
        return self._run("data_parallel_place", [partial(channel.run, remote.data_parallel_place, "") for channel in self._actors])

    def _payload_calls(self, verb: str, payloads: Sequence[Payload]) -> list[Call]:
        what = "init_info" if verb == verbs.INIT else "update_info"
        # CUDA IPC handles are no plain data, but travel through Ray as they are.
        ready = {id(each): plain(each, what=what, opaque=(IPC_HANDLES,)) for each in payloads}
        return [partial(channel.call, verb, ready[id(each)]) for channel, each in zip(self._actors, payloads, strict=True)]


def _size_reader(channel: ActorChannel) -> Call:
    if channel.supports(verbs.WORLD_SIZE):
        return lambda: channel.call(verbs.WORLD_SIZE)
    return lambda: channel.run(remote.world_size, "")


def _label(index: int, handle: ActorHandle[Any]) -> str:
    found = re.fullmatch(r"Actor\((.+), ([0-9a-f]+)\)", repr(handle))
    return f"engine {index}" if found is None else f"engine {index} ({found[1]} {found[2][:8]})"
