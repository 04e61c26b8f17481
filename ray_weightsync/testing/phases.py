"""Which phase of a round a call belongs to, told from the verb and its arguments. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ray_weightsync.config import is_tombstone
from ray_weightsync.engines.facts import INSPECT
from ray_weightsync.protocol.chain import Step
from ray_weightsync.protocol.channel import (
    FINISH,
    INIT,
    PAUSE,
    RESET_ENCODER_CACHE,
    RESET_MM_CACHE,
    RESET_PREFIX_CACHE,
    RESUME,
    SET_VERSION,
    START,
    UPDATE,
)
from ray_weightsync.protocol.http_routes import SERVER_INFO

_ALWAYS = {
    INSPECT: "preflight",
    SERVER_INFO: "preflight",
    PAUSE: "pause",
    START: "start",
    UPDATE: "update",
    RESET_PREFIX_CACHE: "cache",
    RESET_MM_CACHE: "cache",
    RESET_ENCODER_CACHE: "cache",
    RESUME: "resume",
}


def phase_of(verb: str, args: tuple[Any, ...], started: bool) -> tuple[str | None, bool]:
    """The phase of one call, None if it belongs to no phase, and whether the update counts as started after it.

    Args:
        verb: The verb.
        args: Its positional arguments.
        started: Whether *start* was called since the last *mark*: before it a label is put back, after it one is committed, and a
            *finish* without it is the preflight's, which flushes what an earlier round left open.
    """
    if verb == START:
        return "start", True
    if verb == FINISH:
        return ("finish" if started else "preflight"), started
    if verb == SET_VERSION:
        if is_tombstone(str(args[0])):
            return "mark", False
        return ("commit" if started else "unmark"), started
    if verb == INIT:
        op = args[0].get("op") if args and isinstance(args[0], Mapping) else None
        return ("outcome" if op == "outcome" else "preflight"), started
    return _ALWAYS.get(verb), started


def phases_of(steps: Iterable[Step], started: bool) -> tuple[list[str | None], bool]:
    """`phase_of` for the calls of a chain."""
    phases = []
    for verb, args, _ in steps:
        phase, started = phase_of(verb, args, started)
        phases.append(phase)
    return phases, started
