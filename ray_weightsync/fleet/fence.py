"""Keeping a replica that may be torn from serving, also when it cannot be reached right now."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from ray_weightsync.engines.resolve import inspect
from ray_weightsync.errors import CallFailure, EngineCallError
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.round import Member, RoundSpec
from ray_weightsync.fleet.states import ReplicaEvent
from ray_weightsync.fleet.steps import StepFailed, Timeline, step
from ray_weightsync.protocol.channel import PAUSE, SET_VERSION

logger = logging.getLogger(__name__)


async def fence(replica: Replica, why: StepFailed, *, spec: RoundSpec, timeline: Timeline) -> None:
    """Out of the serving set, tombstone, paused; its frozen requests go back to their callers.

    What cannot be done because the replica owes an answer is done when it has answered.
    """
    replica.happen(ReplicaEvent.FAIL, error=str(why))
    replica.version = None
    replica.fenced_by_us = True
    if why.failure.kind == "died":
        return
    act = partial(_fence_engine, replica, why, spec=spec, timeline=timeline)
    if replica.unanswered:
        after_answers(replica, act)
    else:
        await act()


async def _fence_engine(replica: Replica, why: StepFailed, *, spec: RoundSpec, timeline: Timeline) -> None:
    channel, limit_s = replica.engine.channel, spec.timeouts.resume_s
    try:
        if channel.supports(SET_VERSION):
            await step(replica, "mark", SET_VERSION, spec.tombstone, limit_s=limit_s, timeline=timeline)
        if channel.supports(PAUSE):
            mode = "abort" if spec.policy.release_requests else "keep"
            await step(replica, "pause", PAUSE, mode=mode, clear_cache=False, limit_s=limit_s, timeline=timeline)
    except StepFailed as failed:
        replica.error = f"{why}; and fencing it failed: {failed}"
        logger.error("%s could not be fenced: %s", replica.id, failed)


def after_answers(replica: Replica, act: Callable[[], Awaitable[None]]) -> None:
    """Do ``act`` when the replica has answered everything it owes. Until that is done, it counts as owing an answer still."""
    owed = list(replica.unanswered)

    async def later() -> None:
        await asyncio.wait(owed)
        await act()

    replica.left_unanswered(asyncio.ensure_future(later()))


async def same_process(member: Member, phase: str, *, limit_s: float, timeline: Timeline) -> None:
    """Make sure that the replica is still the process that was found: a label that Ray delivered to its successor proves nothing.

    Raises:
        StepFailed: if it restarted, or cannot be asked.
    """
    replica, began = member.replica, time.monotonic()
    try:
        facts: Any = await inspect(replica.engine, nonce=secrets.token_hex(8), limit_s=limit_s)
    except EngineCallError as error:
        (failure,) = error.failures.values()
        raise StepFailed(phase, failure, limit_s) from error
    finally:
        timeline.add(replica.id, phase, began, time.monotonic())
    if facts.incarnation != member.incarnation:
        replica.forget_incarnation()
        message = "the engine restarted in the middle of the round; it holds no weights of this session"
        raise StepFailed(phase, CallFailure(message=message, kind="died", elapsed_s=time.monotonic() - began), limit_s)
    replica.engine = replica.engine.with_facts(facts)
