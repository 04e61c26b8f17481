"""A sender that cannot go on: the coordinator is told, and the caller hears what counts for most."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from ray.exceptions import RayError

from ray_weightsync.errors import RoundAborted, WeightSyncError

if TYPE_CHECKING:
    from ray_weightsync.fleet.link import CoordinatorLink
    from ray_weightsync.trainer.live import LiveSending

logger = logging.getLogger(__name__)


def give_up(
    link: CoordinatorLink,
    snapshot: str,
    error: BaseException,
    *,
    live: LiveSending | None,
    committed: Callable[[], Any] | None,
    limit_s: float,
) -> NoReturn:
    """Tell the coordinator that the weights could not be staged. Whether or not it can be told, the caller hears of ``error``.

    Args:
        link: The way to the coordinator.
        snapshot: What was being staged.
        error: What ended it.
        live: How the bytes went straight to the engines, if they did.
        committed: Waits for the end of a round in which engines were at it already; raises what holds now.
        limit_s: Seconds for the coordinator to answer.

    Raises:
        WeightSyncError: the round's own end, because of ``error``: where engines were at it and only the source failed, or `RoundAborted`.
        BaseException: else ``error`` itself, as it is.
    """
    why = f"{type(error).__name__}: {error}"
    try:
        link.ask("abandon", snapshot, f"the sender could not stage the weights: {why}", limit_s=limit_s)
    except (WeightSyncError, RayError) as silent:  # it gives the snapshot up by itself when the deadline for staging has passed
        logger.error("the coordinator of %s was not told that snapshot %s is given up: %s", link.name, snapshot, silent)
    if live is not None:
        live.close()  # whoever still waits to meet this process is told
    if committed is not None:
        try:
            committed()
        except WeightSyncError as verdict:
            if isinstance(error, Exception):
                raise verdict from error
            logger.error("interrupted; of the round that it ended: %s", verdict)
    if isinstance(error, WeightSyncError) or not isinstance(error, Exception):
        raise error
    raise RoundAborted(
        "Nothing changed: no engine was touched. The weights could not be staged.",
        phase="stage",
        engine_message=why,
        hint="mend the source and call again",
    ) from error
