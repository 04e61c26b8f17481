"""Engines that change hands between two sessions that live: how one lets go of them, and what the other has to learn again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from ray_weightsync.config import Timeouts, tombstone
from ray_weightsync.errors import AttachError, FleetTorn, RoundAborted, SessionConflict
from ray_weightsync.fleet.parts import Parts
from ray_weightsync.fleet.preflight import look
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.steps import Call, StepFailed, Timeline, chain
from ray_weightsync.protocol.channel import FINISH, PAUSE, SET_VERSION
from ray_weightsync.protocol.fanout import fan_out


async def hand_over(parts: Parts, identities: Sequence[str], *, to: str, limit_s: float) -> None:
    """Let the session ``to`` have the engines of these identities: after the round in progress, and out of this fleet for good.

    Raises:
        SessionConflict: if a round does not end, or an engine owes an answer, for ``limit_s`` seconds; all stay in this fleet.
    """
    began, turn = time.monotonic(), f"hand-over to {to}"
    wanted = [replica for replica in parts.roster.replicas.values() if parts.claims.identity(replica) in identities]

    def kept(why: str) -> SessionConflict:
        return SessionConflict(
            f"Nothing was changed: session {parts.roster.name!r} did not hand over {', '.join(replica.id for replica in wanted)}: {why}.",
            phase="hand over",
            elapsed_s=time.monotonic() - began,
            limit_s=limit_s,
            hint="see that session's status(), close it, or attach again later",
        )

    try:
        await parts.turn.take(turn, busy="wait", limit_s=limit_s)
    except (RoundAborted, FleetTorn) as error:
        raise kept(f"its round {parts.turn.holder} is still in progress") from error
    try:
        # What an engine owes us it may still carry out, in the middle of the other session's round.
        if not await _answered(wanted, max(0.0, limit_s - (time.monotonic() - began))):
            raise kept("an engine has not answered an earlier call yet")
        leaving = [replica for replica in wanted if parts.claims.identity(replica) in identities]  # it may have restarted meanwhile
        await parts.claims.release(leaving)
        for replica in leaving:
            parts.claims.retire(replica, to)
    finally:
        parts.end_turn(turn)


async def _answered(replicas: Sequence[Replica], limit_s: float) -> bool:
    owed = [call for replica in replicas for call in replica.unanswered]
    return not owed or not (await asyncio.wait(owed, timeout=limit_s))[1]


async def look_again(replicas: Sequence[Replica], timeouts: Timeouts) -> None:
    """Learn anew what engines hold that another session had until now.

    Raises:
        AttachError: if one cannot be asked.
    """
    looks = {replica.id: partial(look, replica, timeouts=timeouts, timeline=Timeline()) for replica in replicas}
    limit_s = timeouts.preflight_s + timeouts.status_s
    outcomes = await fan_out(looks, what="attach", limit_s=limit_s, warn_every_s=timeouts.warn_every_s)
    if outcomes.failures:
        raise AttachError(
            "An engine could not be inspected after another session had let go of it; it was left as found.",
            phase="attach",
            replicas=tuple(outcomes.failures),
            limit_s=limit_s,
            engine_message="; ".join(f"{name}: {failure.message}" for name, failure in outcomes.failures.items()),
            hint="attach again, or replace that engine",
        )


async def flush(replica: Replica, timeouts: Timeouts, *, allowed: bool) -> None:
    """End a weight update that another client left open; the replica is fenced until the next round.

    Raises:
        AttachError: if that is not ``allowed``, or cannot be done.
    """
    if not allowed:
        raise AttachError(
            f"{replica.id} has a weight update open that another client started; it was left as found.",
            phase="attach",
            replicas=(replica.id,),
            hint="end it there, or attach(..., take_over=True), which flushes it; the engine is then fenced until the next round",
        )
    timeline = Timeline()
    # Half-updated weights may be in there: marked and paused before the flush makes them look whole.
    calls = [
        Call("mark", timeouts.commit_s, SET_VERSION, (tombstone("flushed"),)),
        Call("pause", timeouts.pause_s, PAUSE, kwargs={"mode": "keep", "clear_cache": False}),
        Call("finish", timeouts.finish_s, FINISH),
    ]
    calls = [call for call in calls if replica.engine.channel.supports(call.verb)]
    try:
        await chain(replica, "attach", calls, incarnation=replica.engine.facts.incarnation, timeline=timeline)
        await look(replica, timeouts=timeouts, timeline=timeline)
    except StepFailed as failed:
        raise AttachError(
            f"{replica.id}: the weight update that another client left open could not be flushed ({failed.phase}). The engine may be "
            "paused and carry the label '!rws:flushed'; it was not attached.",
            phase="attach",
            replicas=(replica.id,),
            elapsed_s=failed.failure.elapsed_s,
            limit_s=failed.limit_s,
            engine_message=failed.failure.message,
            log_hint=replica.log_hint,
            hint="restart the engine",
        ) from failed
    replica.fenced_by_us = True
