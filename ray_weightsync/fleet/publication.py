"""What lets an engine serve weights that are attested: the label, the end of what was computed with the old ones, the end of the pause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray_weightsync.fleet.steps import Call, StepFailed
from ray_weightsync.protocol.channel import RESET_ENCODER_CACHE, RESET_MM_CACHE, RESET_PREFIX_CACHE, RESUME, SET_VERSION, UNFINISHED

if TYPE_CHECKING:
    from ray_weightsync.fleet.replica import Replica
    from ray_weightsync.fleet.round import Member, RoundSpec


def publication(spec: RoundSpec, replica: Replica) -> list[Call]:
    """The label, and the end of what was computed with the old weights."""
    limit_s, engine = spec.timeouts.commit_s, replica.engine
    calls = [Call("commit", limit_s, SET_VERSION, (spec.label,))] if engine.channel.supports(SET_VERSION) else []
    if drops_caches(spec, replica):
        if engine.facts.is_multimodal:
            resets = [verb for verb in (RESET_MM_CACHE, RESET_ENCODER_CACHE) if engine.channel.supports(verb)]
            calls.extend(Call("cache", limit_s, verb) for verb in resets)
        if engine.channel.supports(UNFINISHED):
            calls.append(Call("count", limit_s, UNFINISHED))
        options = {"reset_running_requests": True, "reset_connector": bool(engine.facts.kv_connector)}
        calls.append(Call("cache", limit_s, RESET_PREFIX_CACHE, kwargs=options))
    return calls


def drops_caches(spec: RoundSpec, replica: Replica) -> bool:
    """Whether there is anything to drop: a `TorchEngine` keeps nothing between two requests."""
    engine = replica.engine
    return spec.cache == "recompute" and engine.facts.kind != "torch" and engine.channel.supports(RESET_PREFIX_CACHE)


def require_dropped(spec: RoundSpec, member: Member, answers: dict[str, Any]) -> None:
    """Note how many requests are computed anew.

    Raises:
        StepFailed: if the engine did not drop its prefix cache.
    """
    if not drops_caches(spec, member.replica):
        return
    member.recomputed = answers.get(UNFINISHED)
    if answers[RESET_PREFIX_CACHE] is not True:
        message = f"{RESET_PREFIX_CACHE} answered {answers[RESET_PREFIX_CACHE]!r}: KV computed with the old weights might be used again"
        raise StepFailed.refused("cache", message, spec.timeouts.commit_s)


def resumption(spec: RoundSpec, member: Member) -> list[Call]:
    """The end of the pause, if it is ours to end."""
    if not member.resume_is_ours or not member.replica.engine.channel.supports(RESUME):
        return []
    return [Call("resume", spec.timeouts.resume_s, RESUME)]
