"""How a call is answered by all ranks of an engine: each takes its steps, they agree, and the last one raises for all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ray_weightsync.worker import payload
from ray_weightsync.worker.seams import Agreement

logger = logging.getLogger(__name__)

MARKER = "rws: "
"""Starts the text of every error raised here, so that it is found inside whatever an engine wraps around it."""

Then = Callable[[], None] | None
"""What is left to be done once no rank complains."""


def answer(agreement: Agreement, info: Mapping[str, Any], *steps: Callable[[Mapping[str, Any]], Then], raises: bool | None = None) -> None:
    """Take ``steps``, and after each hear the complaints of all ranks; if there are none, do what the step returned.

    Every rank takes every step, whatever became of the one before: they must agree equally often.

    Args:
        agreement: How the ranks exchange words.
        info: The call's payload. Its ``limit_s``, in seconds, is for each step's agreement.
        steps: May raise.
        raises: Whether this rank raises for all. None: it does if it is the last of the agreement. Where the agreement is of several
            data-parallel engines, the last rank of each one has to.

    Raises:
        ValueError: on the rank that ``raises``, when any rank has something to complain about: `MARKER`, then each such rank's words after
            ``"rank N: "``, joined by ``"; "``.
    """
    told: list[str] = []
    for step in steps:
        limit_s = payload.AGREE_LIMIT_S
        words: str | None = None
        then: Then = None
        try:
            limit_s = payload.limit_s(info)
            then = step(info)
        except Exception as error:  # told through the agreement below; raising on one rank alone puts the engine out of step
            words = payload.words_of(error)
        complaints = _complaints(agreement, words, limit_s)
        if then is not None and not complaints:
            then()
        told += [each for each in complaints if each not in told]
    if told and (agreement.rank == agreement.world_size - 1 if raises is None else raises):
        raise ValueError(MARKER + "; ".join(told))


def _complaints(agreement: Agreement, words: str | None, limit_s: float) -> list[str]:
    """The complaints of all ranks, each after ``"rank N: "``."""
    try:
        everyone = agreement.gather(words, limit_s)
    except Exception as error:
        # Even a broken agreement must not raise on a rank that is not the last. The last one finds this rank silent.
        logger.warning("rank %d cannot reach the other ranks", agreement.rank, exc_info=True)
        everyone = [None] * agreement.world_size
        everyone[agreement.rank] = "; ".join(filter(None, (words, f"cannot agree with the other ranks: {payload.words_of(error)}")))
    return [f"rank {each}: {said}" for each, said in enumerate(everyone) if said is not None]
