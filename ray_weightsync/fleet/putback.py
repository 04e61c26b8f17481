"""Undoing what a round did before *start*: labels back, pauses of ours ended, also those that take effect late."""

from __future__ import annotations

import logging

from ray_weightsync.fleet.fence import after_answers, fence
from ray_weightsync.fleet.round import Member, RoundSpec
from ray_weightsync.fleet.states import ReplicaEvent
from ray_weightsync.fleet.steps import Call, StepFailed, Timeline, chain
from ray_weightsync.protocol.channel import RESUME, SET_VERSION

logger = logging.getLogger(__name__)


async def put_back(member: Member, *, spec: RoundSpec, timeline: Timeline) -> None:
    """Leave the replica as it was found. One that cannot be is fenced; one that owes an answer is put back again when it has answered.

    Raises:
        StepFailed: if it could not be put back.
    """
    replica = member.replica
    owes = bool(replica.unanswered)
    if owes:
        # A pause or a mark of ours may yet take effect. Undone now, as far as it goes, and once more after the answer.
        after_answers(replica, lambda: _again(member, spec=spec, timeline=timeline))
    try:
        await _undo(member, spec=spec, timeline=timeline)
    except StepFailed as failed:
        if owes:
            replica.happen(ReplicaEvent.FAIL, error=f"not put back yet after an aborted round: {failed}")
            replica.fenced_by_us = True
        else:
            await fence(replica, failed, spec=spec, timeline=timeline, putting_back=True)
        raise
    if owes and member.marked:
        replica.happen(ReplicaEvent.FAIL, error="a tombstone may yet be put on its label; it is taken off when the engine has answered")


async def _undo(member: Member, *, spec: RoundSpec, timeline: Timeline) -> None:
    if member.torn_as_found:
        return  # it stays fenced
    calls = []
    if member.marked and member.label_as_found is not None:
        calls.append(Call("mark", spec.timeouts.commit_s, SET_VERSION, (member.label_as_found,)))
    if member.pause_asked_at is not None and not member.paused_as_found:
        calls.append(Call("resume", spec.timeouts.resume_s, RESUME))
    if calls:
        # Meant for the process that was found: another one in its place holds other weights than that label's.
        await chain(member.replica, calls[0].phase, calls, incarnation=member.incarnation, timeline=timeline)


async def _again(member: Member, *, spec: RoundSpec, timeline: Timeline) -> None:
    try:
        await _undo(member, spec=spec, timeline=timeline)
    except StepFailed as failed:
        logger.error("%s was not put back after an aborted round: %s", member.replica.id, failed)
        await fence(member.replica, failed, spec=spec, timeline=timeline, putting_back=True)
