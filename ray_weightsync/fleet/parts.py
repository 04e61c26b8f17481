"""What the coordinator's parts share: one fleet, its snapshots, the turn to change them, and the work that runs beside."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from ray_weightsync.config import Timeouts
from ray_weightsync.errors import WeightSyncError
from ray_weightsync.fleet.chronicle import Chronicle
from ray_weightsync.fleet.claims import Claims
from ray_weightsync.fleet.roster import Roster
from ray_weightsync.fleet.staging import Staging
from ray_weightsync.fleet.stores import Stores
from ray_weightsync.fleet.turns import Turn
from ray_weightsync.fleet.values import Settings

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Parts:
    """One session's.

    Attributes:
        settings: What the session was attached with.
        roster: The fleet.
        staging: Its snapshots.
        claims: On its engines.
        turn: The right to touch engines.
        turn_bytes: Bytes of the weights that whoever has the turn brings to engines, also before their slot is had and while it is freed.
        chronicle: What a successor would have to know.
    """

    def __init__(self, name: str, settings: Settings, stores: Stores, claims: Claims, chronicle: Chronicle) -> None:
        self.settings = settings
        self.roster = Roster(name)
        self.staging = Staging(stores, settings.host, settings.timeouts, self.roster.unchanged, directory_option=settings.directory_option)
        self.claims = claims
        self.turn = Turn(self.roster.unchanged)
        self.turn_bytes = 0
        self.chronicle = chronicle
        self._background: set[asyncio.Task[Any]] = set()
        chronicle.follow(self)

    @property
    def timeouts(self) -> Timeouts:
        return self.settings.timeouts

    @property
    def longest_turn_s(self) -> float:
        """The longest that whoever has the turn may keep it, in seconds: grows with the weights that are here or on their way."""
        num_bytes = max(self.staging.num_bytes, self.turn_bytes)
        return self.timeouts.staging_s(num_bytes) + self.timeouts.round_s(num_bytes)

    def end_turn(self, holder: str) -> None:
        """Give the turn back if ``holder`` has it."""
        if self.turn.holder == holder:
            self.turn.release(holder)
            self.turn_bytes = 0
            self.roster.round_id = None
            self.chronicle.after()
            self.roster.changed("idle")

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work`` beside everything else; what it raises is logged unless it is told to somebody."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel_all(self) -> None:
        """End whatever still runs beside."""
        for task in list(self._background):
            task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, WeightSyncError):
            logger.error("a task of the coordinator failed", exc_info=error)
