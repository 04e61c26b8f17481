"""Keeping a replica that may be torn from serving, also when it cannot be reached right now."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.round import RoundSpec
from ray_weightsync.fleet.steps import Call, StepFailed, Timeline, chain
from ray_weightsync.protocol.channel import PAUSE, SET_VERSION

logger = logging.getLogger(__name__)


def fence(replica: Replica, why: StepFailed, *, spec: RoundSpec, timeline: Timeline, putting_back: bool = False) -> Awaitable[None]:
    """Out of the serving set, now; paused, tombstone, its frozen requests back with their callers: when what is returned is awaited.

    What cannot be done because the replica owes an answer is done when it has answered; nobody waits for one that seems to be dead.
    """
    replica.lose_weights(str(why))
    # Where the label was on its way it may have reached the process that came after; else that one is none of our business.
    published = why.phase in ("commit", "cache", "resume") and not putting_back
    incarnation = None if published else replica.engine.facts.incarnation
    act = partial(
        fence_engine,
        replica,
        spec.tombstone,
        limit_s=spec.timeouts.resume_s,
        release=spec.policy.release_requests,
        timeline=timeline,
        incarnation=incarnation,
    )
    return _when_it_can_be(replica, why, act)


async def _when_it_can_be(replica: Replica, why: StepFailed, act: Callable[[], Awaitable[None]]) -> None:
    if replica.unanswered:
        after_answers(replica, act)
    elif why.failure.kind == "died":
        replica.left_unanswered(asyncio.ensure_future(act()))  # perhaps only the connection broke, and its requests are frozen
    else:
        await act()


async def fence_engine(
    replica: Replica, tombstone: str, *, limit_s: float, release: bool, timeline: Timeline, incarnation: str | None
) -> None:
    """Mark and pause the engine of a replica that is out of the serving set; with ``release`` its requests go back to their callers.

    A process that came since ``incarnation`` is left alone: it may be another session's. None: whichever answers is meant.
    """
    channel = replica.engine.channel
    mode = "abort" if release else "keep"
    calls = [
        Call("pause", limit_s, PAUSE, kwargs={"mode": mode, "clear_cache": False}),
        # After the pause: torn weights have the label already, and of whole ones no token is to carry it.
        Call("mark", limit_s, SET_VERSION, (tombstone,)),
    ]
    for call in calls:  # one by one: an engine that cannot be paused is marked all the same
        if not channel.supports(call.verb):
            continue
        try:
            await chain(replica, call.phase, [call], incarnation=incarnation, timeline=timeline)
        except StepFailed as failed:
            if failed.failure.kind == "died":
                logger.info("%s was not fenced, it is gone: %s", replica.id, failed)
                return
            replica.error = f"{replica.error}; and fencing it failed: {failed}"
            logger.error("%s could not be fenced: %s", replica.id, failed)


def after_answers(replica: Replica, act: Callable[[], Awaitable[None]]) -> None:
    """Do ``act`` when the replica has answered everything it owes. Until that is done, it counts as owing an answer still."""
    owed = list(replica.unanswered)

    async def later() -> None:
        await asyncio.wait(owed)
        await act()

    replica.left_unanswered(asyncio.ensure_future(later()))
