"""Engines that were started on one of vLLM's own weight-transfer backends: nothing of ours is in them, so they prove and undo nothing.

A round brings them like others, without ops and without an outcome. What follows from that is decided here: who may be in which session,
what becomes of one that failed, and which guarantees a report says are missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ray_weightsync.config import Auto, Collective, Native, transport_name
from ray_weightsync.engines.facts import EngineFacts
from ray_weightsync.engines.resolve import OUR_ARGS
from ray_weightsync.errors import AttachError
from ray_weightsync.fleet.choosing import BY_CHOICE
from ray_weightsync.fleet.replica import Left, Replica
from ray_weightsync.fleet.steps import StepFailed, Timeline, step
from ray_weightsync.protocol.channel import FINISH, PAUSE, START

if TYPE_CHECKING:
    from ray_weightsync.config import Timeouts
    from ray_weightsync.fleet.values import Settings


def served_by(transport: object, backend: str | None = None) -> str | None:
    """The backend whose stock engines ``transport`` can bring; None if it brings none. Pure.

    Where each round chooses, it is the ``backend`` that is asked for, if a round may choose that.
    """
    if isinstance(transport, Auto):
        return backend if backend in BY_CHOICE else None
    if isinstance(transport, Collective):
        return "nccl"
    return transport.backend if isinstance(transport, Native) else None


def unserved(facts: EngineFacts, served: str | None) -> str | None:
    """Why a stock engine cannot take part in what is brought by this way, or None. Pure.

    Args:
        facts: The engine's.
        served: The backend that the way serves, as of `served_by`; None where the bytes come from a kept snapshot.
    """
    if not facts.is_stock or facts.backend == served:
        return None
    way = "collective" if facts.backend == "nccl" else transport_name(Native(str(facts.backend)))
    reached = f"which only send_weights of a session with transport={way!r} reaches"
    return f"its weight-transfer backend is {facts.backend!r}, {reached}; or {OUR_ARGS}"


def mixed(replicas: Iterable[Replica]) -> str | None:
    """Why these cannot be members of one round: some are stock engines, some have our worker side. None if they can. Pure."""
    stock, guarded = [], []
    for replica in replicas:
        facts = replica.engine.facts
        if facts.is_stock:
            stock.append(f"{replica.id} ({facts.backend!r})")
        elif facts.kind != "client":
            guarded.append(replica.id)
    if not stock or not guarded:
        return None
    return f"{', '.join(stock)} were started on vLLM's own backend, {', '.join(guarded)} with vllm_engine_args(): one round brings one kind"


def refused(replicas: Sequence[Replica], settings: Settings) -> tuple[tuple[str, ...], str, str] | None:
    """Which of the engines of a session no round of it could bring to a version, why, and what to do. None if there are none. Pure."""
    facts = {replica.id: replica.engine.facts for replica in replicas}
    out = {name: why for name, each in facts.items() if (why := unserved(each, served_by(settings.transport, each.backend))) is not None}
    if out:
        said = "; ".join(f"{name}: {why}" for name, why in out.items())
        return tuple(out), said, "choose the transport by the engines, or start them anew"
    if (why := mixed(replicas)) is not None:
        return tuple(replica.id for replica in replicas), why, f"attach them in two sessions; or, of each that is not: {OUR_ARGS}"
    stock = tuple(replica.id for replica in replicas if replica.engine.facts.is_stock)
    if stock and settings.on_failure.after_start == "all_or_none":
        why = f"after_start='all_or_none' takes engines back to the version before; on vLLM's own backend {', '.join(stock)} cannot be"
        return stock, why, f"FailurePolicy(after_start='quarantine'); or, of each: {OUR_ARGS}"
    sync = tuple(name for name, each in facts.items() if each.kind == "sync")
    if sync and isinstance(settings.transport, Collective):
        why = (
            f"A broadcast has sender and engines at once, and {', '.join(sync)} hold a synchronous LLM, which does the requests before it "
            "first: the others would have given up by then"
        )
        return sync, why, "hold an AsyncLLM in the actor, or choose transport='host' or 'auto'"
    if sync and settings.on_failure.after_start == "all_or_none":
        why = (
            f"after_start='all_or_none' lets nobody serve a version before all are attested; {', '.join(sync)} hold a synchronous LLM, "
            "which has no pause: its next request runs with the new weights as soon as it has them, whatever becomes of the others"
        )
        return sync, why, "hold an AsyncLLM in the actor, or FailurePolicy(after_start='quarantine')"
    return None


def require_servable(replicas: Sequence[Replica], settings: Settings, *, phase: str) -> None:
    """Refuse engines that no round of this session could bring to a version.

    Raises:
        AttachError: naming them, and saying which transport would.
    """
    if (found := refused(replicas, settings)) is not None:
        names, why, hint = found
        raise AttachError(f"Nothing was changed. {why}.", phase=phase, replicas=names, hint=hint)


def ruined(replica: Replica) -> str | None:
    """Why a stock engine is of no use any more, or None. Pure.

    vLLM reads the workers' replies in order and stops at the first failure: with more than one worker the others' stay queued, and every
    later reply is one call old. So what is called a success then need not be one.
    """
    facts = replica.engine.facts
    if not facts.is_stock or replica.left is not Left.UNKNOWN or facts.world_size == 1:
        return None
    return (
        f"a call of an update failed in it, and it has {facts.world_size} workers on vLLM's own {facts.backend!r} backend: their replies "
        "may be out of step with the calls for good; only a new engine in its place helps"
    )


def leaves_out_of_step(replica: Replica, failed: StepFailed) -> bool:
    """Whether a call before *start* that failed may have put a stock engine's workers out of step, so that it serves no more. Pure."""
    return replica.engine.facts.is_stock and replica.engine.facts.world_size != 1 and failed.phase == "init"


async def flush(replica: Replica, *, timeouts: Timeouts, timeline: Timeline) -> None:
    """Bring a stock engine that is not `ruined` to where an update can begin: what the last one left would spoil it.

    One that is open is finished. vLLM itself closes one that fails, and keeps what was loaded: *start* and *finish* do away with that, and
    of one worker it does no harm if *start* is refused, as it is where an update is open after all. The weights are torn in any case.

    Raises:
        StepFailed: if it cannot be; it is left as it is.
    """
    if replica.engine.facts.paused is not True and replica.engine.channel.supports(PAUSE):
        pause = {"mode": "keep", "clear_cache": False}
        await step(replica, "preflight", PAUSE, limit_s=timeouts.pause_s, timeline=timeline, **pause)
    if replica.left is Left.UNKNOWN:
        try:
            await step(replica, "preflight", START, limit_s=timeouts.start_s, timeline=timeline)
        except StepFailed as failed:
            if failed.failure.kind != "raised":
                raise
    replica.left = Left.UNKNOWN
    await step(replica, "preflight", FINISH, limit_s=timeouts.finish_s, timeline=timeline)
    replica.left = Left.NOTHING


def missing_of(replica: Replica) -> list[str]:
    """The guarantees that a round cannot give for a stock engine, a sentence each. Pure."""
    facts, headers = replica.engine.facts, replica.headers
    told = [f"it was started on vLLM's own {facts.backend!r} backend: its workers do not attest the bytes that they received"]
    if headers is not None and headers.problem is not None:
        told.append(f"the plan was compared with nothing before the update: {headers.problem}")
    else:
        told.append("the plan was compared with the headers of its checkpoint, not loaded into a meta twin")
    told.append("it cannot be healed or added without the trainer: it serves with the next send_weights")
    if (facts.world_size or 2) > 1:
        told.append(f"it has {facts.world_size} workers, so once a call of an update fails in it, it has to be replaced")
    return [f"{replica.id}: {each}" for each in told]
