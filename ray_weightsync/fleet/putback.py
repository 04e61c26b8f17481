"""Undoing what a round did before *start*: labels back, pauses of ours ended, also those that take effect late."""

from __future__ import annotations

import logging

from ray_weightsync.fleet.fence import after_answers, fence, same_process
from ray_weightsync.fleet.round import Member, RoundSpec
from ray_weightsync.fleet.states import ReplicaEvent
from ray_weightsync.fleet.steps import StepFailed, Timeline, step
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
            await fence(replica, failed, spec=spec, timeline=timeline)
        raise
    if owes and member.marked:
        replica.happen(ReplicaEvent.FAIL, error="a tombstone may yet be put on its label; it is taken off when the engine has answered")


async def _undo(member: Member, *, spec: RoundSpec, timeline: Timeline) -> None:
    replica, timeouts = member.replica, spec.timeouts
    if member.marked and member.label_as_found is not None:
        await step(replica, "mark", SET_VERSION, member.label_as_found, limit_s=timeouts.commit_s, timeline=timeline)
        await same_process(member, "mark", limit_s=timeouts.commit_s, timeline=timeline)
    if member.pause_asked_at is not None and not member.paused_as_found and member.label_as_found is not None:
        # Not a pause of its owner's, and not a replica that was torn before this round and stays fenced.
        await step(replica, "resume", RESUME, limit_s=timeouts.resume_s, timeline=timeline)


async def _again(member: Member, *, spec: RoundSpec, timeline: Timeline) -> None:
    try:
        await _undo(member, spec=spec, timeline=timeline)
    except StepFailed as failed:
        logger.error("%s was not put back after an aborted round: %s", member.replica.id, failed)
        await fence(member.replica, failed, spec=spec, timeline=timeline)
