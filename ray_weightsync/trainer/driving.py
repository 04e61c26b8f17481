"""Having a trainer actor send: from the session's process."""

from __future__ import annotations

import logging
import time
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from ray_weightsync.errors import WeightSyncError
from ray_weightsync.fleet.link import CoordinatorLink
from ray_weightsync.fleet.turns import Busy
from ray_weightsync.fleet.values import Settings

logger = logging.getLogger(__name__)


def through_trainer(
    trainer: ActorHandle[Any],
    what: str,
    link: CoordinatorLink,
    settings: Settings,
    version: int | str,
    busy: Busy,
) -> Any:
    """Have a `TrainerMixin` actor send or stage (``what``) what its ``weight_source`` returns, and wait for what comes of it.

    Raises:
        WeightSyncError: how the round ended; or that the trainer is gone, or did not come to it.
    """
    ref = getattr(trainer, f"rws_{what}_weights").remote(link.name, link.handle, settings, version, busy)
    timeouts = settings.timeouts
    limit_s = timeouts.gather_s  # the trainer may be busy with a step of its own first
    began = time.monotonic()
    while not ray.wait([ref], timeout=timeouts.warn_every_s)[0]:
        waited_s = time.monotonic() - began
        # Its own round, and perhaps another one before it: how large they are, the coordinator knows.
        if waited_s > limit_s and waited_s > (limit_s := timeouts.gather_s + 2 * link.longest_turn_s()):
            raise WeightSyncError(
                f"The trainer has not come to {what} version {version}; it may do so yet.",
                phase=what,
                elapsed_s=waited_s,
                limit_s=limit_s,
                hint="see status(); Timeouts(gather_s=...) allows more time",
            )
        logger.info("waiting for the trainer to %s version %s, %.0f s", what, version, waited_s)
    try:
        return ray.get(ref, timeout=timeouts.status_s)
    except RayTaskError as error:
        if isinstance(error.cause, WeightSyncError):
            raise error.cause from None
        raise
    except RayActorError as error:
        raise WeightSyncError(
            "The trainer is gone. A round that it had only staged is given up by the coordinator; status() says what serves.",
            phase=what,
            engine_message=str(error),
            hint="start a new trainer and attach again",
        ) from error
