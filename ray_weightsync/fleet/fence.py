"""Keeping a replica that may be torn from serving, also when it cannot be reached right now."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.round import RoundSpec
from ray_weightsync.fleet.states import ReplicaEvent
from ray_weightsync.fleet.steps import Call, StepFailed, Timeline, chain
from ray_weightsync.protocol.channel import PAUSE, SET_VERSION

logger = logging.getLogger(__name__)


async def fence(replica: Replica, why: StepFailed, *, spec: RoundSpec, timeline: Timeline) -> None:
    """Out of the serving set, tombstone, paused; its frozen requests go back to their callers.

    What cannot be done because the replica owes an answer is done when it has answered.
    """
    replica.happen(ReplicaEvent.FAIL, error=str(why))
    replica.version = None
    replica.fenced_by_us = True
    if why.failure.kind == "died" and why.phase not in ("commit", "cache", "resume"):
        return  # and where the label was on its way, it may have reached the process that came after
    act = partial(_fence_engine, replica, why, spec=spec, timeline=timeline)
    if replica.unanswered:
        after_answers(replica, act)
    else:
        await act()


async def _fence_engine(replica: Replica, why: StepFailed, *, spec: RoundSpec, timeline: Timeline) -> None:
    channel, limit_s = replica.engine.channel, spec.timeouts.resume_s
    mode = "abort" if spec.policy.release_requests else "keep"
    calls = [
        Call("mark", limit_s, SET_VERSION, (spec.tombstone,)),
        Call("pause", limit_s, PAUSE, kwargs={"mode": mode, "clear_cache": False}),
    ]
    for call in calls:  # one by one: an engine that cannot be marked is paused all the same
        if not channel.supports(call.verb):
            continue
        try:
            await chain(replica, call.phase, [call], incarnation=None, timeline=timeline)
        except StepFailed as failed:
            replica.error = f"{replica.error}; and fencing it failed: {failed}"
            logger.error("%s could not be fenced: %s", replica.id, failed)


def after_answers(replica: Replica, act: Callable[[], Awaitable[None]]) -> None:
    """Do ``act`` when the replica has answered everything it owes. Until that is done, it counts as owing an answer still."""
    owed = list(replica.unanswered)

    async def later() -> None:
        await asyncio.wait(owed)
        await act()

    replica.left_unanswered(asyncio.ensure_future(later()))
