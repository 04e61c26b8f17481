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

import ray.cloudpickle

from ray_weightsync.engines import told as told_in_actor
from ray_weightsync.engines.facts import DESCRIBE, INSPECT, RWS_BACKEND, EngineFacts, facts_of
from ray_weightsync.engines.vllm_args import WORKER_EXTENSION
from ray_weightsync.errors import CallFailure, EngineCallError
from ray_weightsync.protocol import remote
from ray_weightsync.protocol.channel import COLLECTIVE_RPC, GET_VERSION, IS_PAUSED, KNOWN_VERBS, REQUIRED_VERBS, Channel
from ray_weightsync.protocol.ray_channel import SLICE_S, ActorChannel
from ray_weightsync.protocol.reading import ENGINE_DEAD, EngineRaised, EngineRestarted, died, words


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
            told = await _told(channel, nonce)
    except TimeoutError as error:
        raise _failed(channel, "unanswered", f"no answer within {limit_s:.1f} s", began, limit_s) from error
    except Exception as error:
        raise _failed(channel, "died" if died(error) else "raised", words(error), began, limit_s) from error
    for failure in told.get("failed", {}).values():
        if ENGINE_DEAD in failure["names"]:
            error = EngineRaised(**failure)
            raise _failed(channel, "died", words(error), began, limit_s) from error
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
    return {"kind": "client"}


def has_own_inspect(channel: Channel) -> bool:
    """Whether the engine is an actor of ours: an `EngineMixin` or a `TorchEngine`."""
    return isinstance(channel, ActorChannel) and channel.is_direct and hasattr(channel.handle, INSPECT)


async def _told_by_actor(channel: ActorChannel, nonce: str) -> dict[str, Any]:
    ray.cloudpickle.register_pickle_by_value(remote)  # `told` uses it; the actor's process need have neither
    token = uuid.uuid4().hex
    began = time.monotonic()
    told = await channel.run(
        told_in_actor.tell, channel.attr or "", token, SLICE_S, nonce, REQUIRED_VERBS, KNOWN_VERBS, WORKER_EXTENSION, DESCRIBE
    )
    while told is None:
        await asyncio.sleep(min(1.0, (time.monotonic() - began) * 0.005))
        try:
            told = await channel.run(remote.poll, token, SLICE_S)
        except LookupError as error:
            raise EngineRestarted("the actor's process was replaced while it was asked what it is") from error
    if "failed" not in told:
        # Only its own methods reach the engine: they take a request slot each, which is all that such an actor offers.
        await _ask_methods(channel, told, nonce)
    return dict(told)


async def _ask_methods(channel: ActorChannel, told: dict[str, Any], nonce: str) -> None:
    told["failed"] = {}
    if not channel.is_direct:
        return
    for key, verb in (("paused", IS_PAUSED), ("version", GET_VERSION)):
        if channel.supports(verb):
            told[key] = await channel.call(verb)
    if told["extension"] and told["backend"] == RWS_BACKEND and channel.supports(COLLECTIVE_RPC):
        told["workers"] = await channel.call(COLLECTIVE_RPC, DESCRIBE, args=(nonce,))
