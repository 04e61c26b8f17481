"""One process's way to the coordinator, which may die: a call then waits for the one that Ray restarts, or has a successor started.

What may be asked twice is asked again. A round is not: its successor is asked how it ended.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError

from ray_weightsync.config import Timeouts
from ray_weightsync.errors import AttachError, ConfigError, WeightSyncError
from ray_weightsync.fleet.actor import revive

logger = logging.getLogger(__name__)

AGAIN_S = 0.1
"""How long a coordinator that is being restarted is given before it is asked again, in seconds."""


class CoordinatorLost(Exception):
    """The coordinator died with the call. Whether it was carried out is not known here."""


class CoordinatorLink:
    """Thread-safe; shared by all that one process asks.

    Args:
        name: The session's name.
        handle: Its coordinator.
        timeouts: The session's deadlines.
    """

    def __init__(self, name: str, handle: ActorHandle[Any], *, timeouts: Timeouts) -> None:
        self.name = name
        self._handle = handle
        self._timeouts = timeouts
        self._reviving = threading.Lock()
        self._connection = _connection()

    @property
    def handle(self) -> ActorHandle[Any]:
        """The coordinator that answered last, or its successor."""
        return self._handle

    @handle.setter
    def handle(self, found: ActorHandle[Any]) -> None:
        self._handle = found

    @property
    def connected(self) -> bool:
        """Whether this process still has the connection to Ray that it had. Without it, a call would start or join another cluster."""
        return self._connection == _connection()

    def require_connected(self) -> None:
        """Raise `ConfigError` unless `connected`."""
        if not self.connected:
            raise ConfigError(
                f"Ray was shut down in this process, and session {self.name} ended with it",
                hint="ray.init(), and attach to the engines, or spawn them, anew",
            )

    def longest_turn_s(self) -> float:
        """How long the coordinator's present turn may take, in seconds: it knows the weights that are on their way, and what they allow.

        Raises:
            WeightSyncError: as of `ask`.
        """
        limit_s: float = self.ask("longest_turn_s", limit_s=self._timeouts.connect_s)
        return limit_s

    def ask(self, method: str, *args: Any, limit_s: float, turns: int = 0) -> Any:
        """Call the coordinator and return its answer, raising its own errors as they are. For what may be asked twice.

        Where the coordinator dies meanwhile, its successor is asked, and has as long again, and ``Timeouts.connect_s`` to come.

        Args:
            method: What is asked.
            args: With what.
            limit_s: Seconds that it may take, besides ``turns``.
            turns: Turns of the coordinator that it may have to wait for, or takes; see `longest_turn_s`.

        Raises:
            WeightSyncError: what the coordinator raised; or that it is gone, or did not answer in time.
        """
        began, allowed_s, again = time.monotonic(), limit_s, False
        while True:
            ref = self.submit(method, *args)
            try:
                return self.wait(ref, method, limit_s=allowed_s - (time.monotonic() - began), of_s=allowed_s, turns=turns)
            except CoordinatorLost as lost:
                if not again:  # what it was waited for until now may have been a turn, which is over
                    again, allowed_s = True, time.monotonic() - began + limit_s + self._timeouts.connect_s
                self._wait_for_another(method, lost, began, allowed_s)

    def reach(self) -> None:
        """Wait until a coordinator answers, before it is asked for what must not be asked twice.

        Raises:
            WeightSyncError: as of `ask`.
        """
        self.ask("settings", limit_s=self._timeouts.connect_s)

    def end(self, *, limit_s: float) -> None:
        """Close the session and end its coordinator, after the round that it may be at: killed in its middle, it left engines paused.

        Args:
            limit_s: Seconds that it may take besides that round.
        """
        try:
            self.ask("close", limit_s=limit_s, turns=1)
        except (WeightSyncError, RayError) as error:
            logger.warning("the coordinator of %s did not close cleanly (its stores' janitors free shared memory): %s", self.name, error)
        # Not when interrupted: it goes on with what it is at, and ends with its owner.
        with contextlib.suppress(RayError):  # it is gone already
            ray.kill(self._handle)

    def submit(self, method: str, *args: Any) -> Any:
        """Call the coordinator; what is returned is for `wait` or `answer`.

        Raises:
            ConfigError: if Ray was shut down in this process.
        """
        self.require_connected()
        return getattr(self._handle, method).remote(*args)

    def answer(self, ref: Any, method: str, *, round_id: str, limit_s: float, turns: int = 0) -> Any:
        """Wait for what a round's call comes to; if the coordinator died meanwhile, for what its successor made of the round.

        Limits as of `ask`.

        Raises:
            WeightSyncError: how the round ended; or that no coordinator answers.
        """
        try:
            return self.wait(ref, method, limit_s=limit_s, turns=turns)
        except CoordinatorLost as lost:
            logger.warning("the coordinator of %s died during %s; its successor is asked what became of it (%s)", self.name, method, lost)
        # It settles every replica first, each call with the deadline that it has in a round.
        return self.ask("settled", round_id, limit_s=2 * limit_s + self._timeouts.attach_s, turns=turns)

    def wait(self, ref: Any, method: str, *, limit_s: float, of_s: float | None = None, turns: int = 0) -> Any:
        """The answer to one call. Limits as of `ask`.

        Raises:
            CoordinatorLost: if the coordinator died.
            WeightSyncError: what it raised, or that it did not answer in time.
        """
        began, of_s, turns_s = time.monotonic(), limit_s if of_s is None else of_s, 0.0
        while True:
            try:
                return self._get(ref, limit_s + turns_s - (time.monotonic() - began))
            except GetTimeoutError as error:
                if isinstance(error, RayTaskError):  # one that the coordinator raised
                    raise
                # Asked only now: the turn that has to be waited for may have begun after the call.
                longer_s = turns * self.longest_turn_s() if turns else 0.0
                if longer_s <= turns_s:
                    raise self._silent(method, of_s + turns_s) from error
                turns_s = longer_s

    def wait_aside(self, ref: Any, method: str, *, limit_s: float) -> Any:
        """`wait` for a thread beside the user's own, which may shut Ray down meanwhile: Ray ends the process of whoever waits inside it."""
        try:
            return self._answer(lambda: ref.future().result(timeout=limit_s))
        except TimeoutError as error:
            raise self._silent(method, limit_s) from error

    def _get(self, ref: Any, limit_s: float) -> Any:
        return self._answer(lambda: ray.get(ref, timeout=max(0.0, limit_s)))

    def _answer(self, waited_for: Callable[[], Any]) -> Any:
        try:
            return waited_for()
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, WeightSyncError):
                raise cause from None
            raise
        except RayActorError as error:
            lines = [line for line in str(error).splitlines() if line.strip()]  # an error in its constructor is told last
            raise CoordinatorLost(" ... ".join(dict.fromkeys((lines[0], lines[-1])))) from error

    def _wait_for_another(self, method: str, lost: CoordinatorLost, began: float, limit_s: float) -> None:
        waited_s = time.monotonic() - began
        if waited_s + AGAIN_S >= limit_s:
            raise self._silent(method, limit_s) from lost
        time.sleep(AGAIN_S)
        if not isinstance(lost.__cause__, ActorUnavailableError):  # Ray restarts that one itself
            self._revive(method, lost)

    def _revive(self, method: str, lost: CoordinatorLost) -> None:
        with self._reviving:
            try:
                found = revive(self.name)
            except AttachError as error:
                raise WeightSyncError(
                    "The coordinator is gone, and left no journal: the session was closed, or it died while it attached. What holds stands "
                    "in the engines' own version labels ('!rws:' means torn or not committed).",
                    phase=method,
                    engine_message=str(lost),
                    hint="WeightSync.attach the engines again: it reads the labels",
                ) from error
            if found != self._handle:
                logger.warning("the coordinator of %s is gone; a successor takes its place", self.name)
                self._handle = found

    def _silent(self, method: str, limit_s: float) -> WeightSyncError:
        return WeightSyncError(
            "The coordinator did not answer; what holds now is not known here.",
            phase=method,
            elapsed_s=limit_s,
            limit_s=limit_s,
            hint="ask status()",
        )


def _connection() -> tuple[str | None, str] | None:
    """The cluster that this process is connected to, and the job it is there; None without any."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return getattr(context, "gcs_address", None), context.get_job_id()  # Ray Client does not tell the first
