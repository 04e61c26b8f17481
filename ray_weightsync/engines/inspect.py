"""How facts are learned: one round trip, nothing that changes the engine, and no RPC that could raise on one worker alone.

An actor of ours tells them itself (`facts.INSPECT`, which answers although its request slots are taken). Into any other actor the
functions of `told` travel by value. A server is read through its routes.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from typing import Any

from ray_weightsync.engines import told as told_in_actor
from ray_weightsync.engines.facts import DESCRIBE, INSPECT, RWS_BACKEND, EngineFacts, facts_of
from ray_weightsync.engines.unreached import Unreached
from ray_weightsync.engines.vllm_args import WORKER_EXTENSION
from ray_weightsync.errors import CallFailure, EngineCallError, UnsupportedError
from ray_weightsync.protocol.channel import COLLECTIVE_RPC, GET_VERSION, IS_PAUSED, WORLD_SIZE, Channel
from ray_weightsync.protocol.http_channel import HTTPCallError, HTTPChannel
from ray_weightsync.protocol.http_routes import SERVER_INFO
from ray_weightsync.protocol.ray_channel import ActorChannel
from ray_weightsync.protocol.reading import ENGINE_DEAD, EngineRaised, died, words


async def ask(channel: Channel, nonce: str, *, limit_s: float) -> EngineFacts:
    """What the engine behind ``channel`` is and holds now.

    Args:
        channel: The engine's channel.
        nonce: Echoed by every worker; use each one once.
        limit_s: Seconds to wait for the answer.

    Returns:
        The facts. An engine whose workers are out of step is a fact (``in_step``), and what does not tell is None.

    Raises:
        EngineCallError: if the engine's process or core is dead (``failures[label].kind == "died"``), if it does not answer in time
            (``"unanswered"``), or if it cannot be read (``"raised"``). The engine is as it was.
    """
    began = time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            told = await _told(await channel.reached() if isinstance(channel, Unreached) else channel, nonce)
    except TimeoutError as error:
        raise _failed(channel, "unanswered", f"no answer within {limit_s:.1f} s", began, limit_s) from error
    except Exception as error:
        raise _failed(channel, "died" if died(error) else "raised", words(error), began, limit_s) from error
    for failure in told.get("failed", {}).values():
        if ENGINE_DEAD in failure["names"]:
            raised = EngineRaised(**failure)
            raise _failed(channel, "died", words(raised), began, limit_s) from raised
    try:
        return facts_of(told, nonce)
    except (ValueError, TypeError, KeyError) as error:
        raise _failed(channel, "raised", f"its description cannot be read: {error!r}", began, limit_s) from error


def _failed(channel: Channel, kind: str, message: str, began: float, limit_s: float) -> EngineCallError:
    elapsed_s = time.monotonic() - began
    verdict = {"died": "is dead", "unanswered": "did not answer", "raised": "could not be inspected"}[kind]
    return EngineCallError(
        f"{channel.label} {verdict}",
        failures={channel.label: CallFailure(message=message, kind=kind, elapsed_s=elapsed_s)},
        phase="inspect",
        replicas=(channel.label,),
        elapsed_s=elapsed_s,
        limit_s=limit_s if kind == "unanswered" else None,
        engine_message=message if kind != "unanswered" else None,
    )


async def _told(channel: Channel, nonce: str) -> Mapping[str, Any]:
    if isinstance(channel, ActorChannel):
        if has_own_inspect(channel):
            return dict(await channel.call(INSPECT, nonce))
        return await _told_by_actor(channel, nonce)
    if isinstance(channel, HTTPChannel):
        return await _told_by_server(channel, nonce)
    if channel.supports(INSPECT):
        return dict(await channel.call(INSPECT, nonce))
    return {"kind": "client"}


def has_own_inspect(channel: Channel) -> bool:
    """Whether the engine is an actor of ours: an `EngineMixin` or a `TorchEngine`."""
    return isinstance(channel, ActorChannel) and channel.is_direct and hasattr(channel.handle, INSPECT)


async def _told_by_actor(channel: ActorChannel, nonce: str) -> dict[str, Any]:
    token = uuid.uuid4().hex
    told = await channel.run_long(told_in_actor.tell, token, nonce, doing="while it was asked what it is")
    if "failed" not in told:
        # Only its own methods reach the engine: they take a request slot each, which is all that such an actor offers.
        await _ask_methods(channel, told, nonce)
    return told


async def _ask_methods(channel: ActorChannel, told: dict[str, Any], nonce: str) -> None:
    told["failed"] = {}
    if not channel.is_direct:
        return
    for key, verb in (("paused", IS_PAUSED), ("version", GET_VERSION)):
        if channel.supports(verb):
            told[key] = await channel.call(verb)
    if told["extension"] and told["backend"] == RWS_BACKEND and channel.supports(COLLECTIVE_RPC):
        told["workers"] = await channel.call(COLLECTIVE_RPC, DESCRIBE, args=(nonce,))


async def _told_by_server(channel: HTTPChannel, nonce: str) -> dict[str, Any]:
    info = await channel.call(SERVER_INFO)
    config = info["vllm_config"]
    parallel = _part(config, "parallel_config")
    told: dict[str, Any] = {
        "kind": "http",
        "tensor_parallel_size": parallel.get("tensor_parallel_size"),
        "pipeline_parallel_size": parallel.get("pipeline_parallel_size"),
        "data_parallel_size": parallel.get("data_parallel_size"),
        "data_parallel_index": parallel.get("data_parallel_index"),
        "data_parallel_outside": told_in_actor.data_parallel_outside(parallel),
        "num_workers": await channel.call(WORLD_SIZE, include_dp=False),
        "instance_id": config.get("instance_id"),
        "backend": _part(config, "weight_transfer_config").get("backend"),
        "kv_connector": _part(config, "kv_transfer_config").get("kv_connector"),
        "vllm_version": _part(info, "system_env").get("vllm_version"),
        "failed": {},
    }
    told["paused"], told["version"] = await asyncio.gather(_if_there(channel, IS_PAUSED), _if_there(channel, GET_VERSION))
    # By its exact name only: whether another class derives from ours cannot be seen from here.
    if told["backend"] == RWS_BACKEND and parallel.get("worker_extension_cls") == WORKER_EXTENSION:
        try:
            told["workers"] = await channel.call(COLLECTIVE_RPC, DESCRIBE, args=(nonce,))
        except HTTPCallError as error:
            if error.status != 500:
                raise
            told["failed"]["collective_rpc"] = {"type_name": "HTTPCallError", "names": (), "text": str(error), "trace": ""}
    return told


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = config.get(name)
    return part if isinstance(part, Mapping) else {}


async def _if_there(channel: HTTPChannel, verb: str) -> Any:
    """What ``verb`` answers, or None where this server's vLLM is too old to have it."""
    try:
        return await channel.call(verb)
    except UnsupportedError:
        return None
