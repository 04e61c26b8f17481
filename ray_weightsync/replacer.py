"""New engines in place of lost ones, made with the user's factory in the session's process; and the end of those that the session made."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from ray_weightsync.engines.ref import EngineLike, is_handle
from ray_weightsync.errors import ConfigError, WeightSyncError
from ray_weightsync.report import FleetStatus

logger = logging.getLogger(__name__)

EngineFactory = Callable[[], EngineLike]
"""Makes one more engine, like those attached. It is called in the session's process, on a thread, and may take as long as it needs."""


class Life(Protocol):
    """What is needed of the session."""

    def status(self) -> FleetStatus: ...
    def replace_lost(self, replica: str, engine: EngineLike) -> str: ...


class Replacer:
    """Makes engines with the user's factory where replicas were lost, and ends the engines that the session made itself.

    Args:
        life: The session.
        factory: Makes one engine; None: nothing is replaced.
        owns_made: Whether the engines that it makes are the session's, to be ended with it.
        max_attempts: How often one lost replica is to be replaced, or the session asked who is lost, before it is left at that.
        retry_s: Seconds between two attempts.
    """

    def __init__(self, life: Life, factory: EngineFactory | None, *, owns_made: bool, max_attempts: int, retry_s: float) -> None:
        self._life = life
        self._factory = factory
        self._owns_made = owns_made
        self._max_attempts = max_attempts
        self._retry_s = retry_s
        self._attempts: dict[str, int] = {}
        self._own: dict[str, ActorHandle[Any]] = {}
        self._lock = threading.Lock()
        self._working = False
        self._told_meanwhile = False
        self._closed = threading.Event()

    def own(self, engines: Mapping[str, ActorHandle[Any]], spec: object | None) -> None:
        """The engines that the session started, by replica id: they end with their replica, or with the session.

        Args:
            engines: The engines.
            spec: What they were started from, if it is to make more of them.
        """
        with self._lock:
            self._own.update(engines)
        if spec is not None:
            self._factory, self._owns_made = getattr(spec, "create", None), True

    def made(self, engines: Mapping[str, Any]) -> None:
        """Engines of the factory have joined, by replica id."""
        if self._owns_made:
            with self._lock:
                self._own.update({name: engine for name, engine in engines.items() if is_handle(engine)})
        if self._closed.is_set():
            self.close()

    def make(self, count: int) -> list[EngineLike]:
        """``count`` new engines.

        Raises:
            ConfigError: if there is no factory, or ``count`` is not a positive int.
            Exception: what the factory raises. Those that it had made are ended, if they are the session's.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"count must be an int of at least 1, not {count!r}")
        if self._factory is None:
            raise ConfigError("add() needs engines, or a session that was attached with an engine_factory")
        engines: list[EngineLike] = []
        try:
            for _ in range(count):
                engines.append(self._factory())
        except BaseException:
            self.end(engines)
            raise
        return engines

    def end(self, engines: Sequence[Any]) -> None:
        """End engines that were just made for nothing, if they are the session's."""
        if self._owns_made:
            _kill(engines)

    def end_retired(self, replica: str) -> None:
        """End the engine of a replica that has left, if it is the session's."""
        if (engine := self._let_go(replica)) is not None:
            _kill([engine])

    def _let_go(self, replica: str) -> ActorHandle[Any] | None:
        with self._lock:
            return self._own.pop(replica, None)

    def close(self) -> None:
        """End every engine that is the session's. Idempotent."""
        with self._lock:
            self._closed.set()
            engines, self._own = list(self._own.values()), {}
        _kill(engines)

    def on_status(self, status: FleetStatus) -> None:
        """What the follower tells: lost engines are replaced, on a thread of its own; the session's own end with their replica.

        One that another session took over is that one's.
        """
        for replica in status.replicas:
            if replica.taken_by is not None:
                self._let_go(replica.id)
            elif replica.state == "RETIRED":
                self.end_retired(replica.id)
        with self._lock:
            if self._factory is None or self._closed.is_set() or not self._wanted(status):
                return
            if self._working:
                self._told_meanwhile = True
                return
            self._working = True
        # Not on the follower's thread: an engine may take minutes to start, and routers are to hear of the fleet meanwhile.
        threading.Thread(target=self._replace_lost, name="rws-engine-factory", daemon=True).start()

    def _wanted(self, status: FleetStatus) -> list[str]:
        lost = [replica.id for replica in status.replicas if replica.lost and replica.replaced_by is None]
        return [name for name in lost if self._attempts.get(name, 0) < self._max_attempts]

    def _replace_lost(self) -> None:
        try:
            while wanted := self._next():
                for name in wanted:
                    if self._closed.is_set():
                        return
                    self._attempts[name] = self._attempts.get(name, 0) + 1
                    if not self._replace(name):
                        self._closed.wait(self._retry_s)
        except Exception:
            with self._lock:
                self._working = False
            if not self._closed.is_set():
                logger.exception("no engines could be made in place of lost ones")

    def _next(self) -> list[str]:
        """Who is to be replaced now. If nobody is, the work has ended: whoever is told of from then on begins it anew."""
        while not self._closed.is_set():
            with self._lock:
                self._told_meanwhile = False
            if wanted := self._wanted(self._status()):
                return wanted
            with self._lock:
                if not self._told_meanwhile:  # else of somebody who may have been lost after the session was asked
                    self._working = False
                    return []
        return []

    def _status(self) -> FleetStatus:
        """The fleet as it is. A coordinator that does not answer at once is asked again: nothing else may happen that would be told."""
        for _ in range(self._max_attempts - 1):
            try:
                return self._life.status()
            except ConfigError:
                raise  # the session is closed
            except WeightSyncError as error:
                logger.warning("who was lost cannot be found out yet: %s", error)
                self._closed.wait(self._retry_s)
        return self._life.status()

    def _replace(self, lost: str) -> bool:
        assert self._factory is not None
        made: list[Any] = []
        try:
            made = [self._factory()]
            new = self._life.replace_lost(lost, made[0])
        except Exception:  # the user's factory, or an engine that cannot be attached: tried again with the next one
            logger.exception("%s was lost, and attempt %d to replace it failed", lost, self._attempts[lost])
            self.end(made)
            return False
        logger.info("%s was lost; %s was made in its place", lost, new)
        self.made({new: made[0]})
        return True


def _kill(engines: Sequence[Any]) -> None:
    for engine in engines:
        if is_handle(engine):
            with contextlib.suppress(RayError):  # it is gone already
                ray.kill(engine)


def require_factory(factory: object) -> None:
    """Raise `ConfigError` unless ``factory`` is a function, or None."""
    if factory is not None and not callable(factory):
        raise ConfigError(f"engine_factory must be a function that makes an engine, not {type(factory).__name__}")
