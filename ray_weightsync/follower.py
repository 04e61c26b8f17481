"""Following a coordinator: one daemon thread per process and fleet that hears of every change and passes it on.

It also notices, without being asked, that the coordinator died: it waits for the one that Ray restarts, or has a successor started.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError

from ray_weightsync.config import Timeouts
from ray_weightsync.errors import WeightSyncError
from ray_weightsync.fleet.link import CoordinatorLink, CoordinatorLost
from ray_weightsync.report import FleetStatus

logger = logging.getLogger(__name__)

Subscriber = Callable[[FleetStatus], None]


class Follower:
    """The fleet as last heard of. Thread-safe.

    Args:
        link: The way to the session's coordinator.
        status: The fleet as known now.
        timeouts: The session's deadlines.
        logs_changes: Write an INFO line for each state change of a replica, and each new table of ranks; for the session's owner.
    """

    def __init__(self, link: CoordinatorLink, status: FleetStatus, *, timeouts: Timeouts, logs_changes: bool = False) -> None:
        self._link = link
        self._timeouts = timeouts
        self._status = status
        self._logged = status
        self._logs_changes = logs_changes
        self._news = threading.Condition()
        self._subscribers: dict[object, Subscriber] = {}
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._gone: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self._link.name, self._link.handle, self._status, self._timeouts))

    @property
    def status(self) -> FleetStatus:
        """The fleet as last heard of. The first read starts the thread."""
        self.start()
        with self._news:
            return self._status

    def begin(self, status: FleetStatus) -> None:
        """Follow from ``status`` on."""
        with self._news:
            self._status = self._logged = status
        self.start()

    def start(self) -> None:
        """Follow from now on. Idempotent."""
        with self._news:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._follow, name=f"rws-follow-{self._link.name}", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop following; whoever waits for news is told. Idempotent."""
        self._closed.set()
        self._end("the session was closed")

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Have ``subscriber`` called after each change, on the follower's thread, until the returned function is called."""
        key = object()
        with self._news:
            self._subscribers[key] = subscriber

        def unsubscribe() -> None:
            with self._news:
                self._subscribers.pop(key, None)

        return unsubscribe

    def events(self, *, timeout_s: float | None = None) -> Iterator[FleetStatus]:
        """Yield the fleet as it is, then anew after each change; see `FleetView.events`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        status = self.status
        while True:
            yield status
            with self._news:
                while self._status is status and self._gone is None:
                    left = self._timeouts.warn_every_s if deadline is None else deadline - time.monotonic()
                    if left <= 0:
                        return
                    self._news.wait(left)
                if self._status is status:
                    raise WeightSyncError("The coordinator is gone; this view is no longer kept up to date.", engine_message=self._gone)
                status = self._status

    # --- the thread ---------------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        try:
            self._go_on()
        except Exception as error:  # whoever waits for news would wait for ever
            logger.exception("following %s ended", self._link.name)
            self._end(f"{type(error).__name__}: {error}")

    def _go_on(self) -> None:
        sequence, limit_s = self._status.sequence, self._timeouts.health_interval_s
        while not self._closed.is_set():
            if not self._link.connected:
                self._end("Ray was shut down in this process")
                return
            try:
                asked = self._link.submit("watch", sequence, limit_s)
                status: FleetStatus = self._link.wait_aside(asked, "watch", limit_s=limit_s + self._timeouts.status_s)
            except WeightSyncError:
                continue  # a busy node; the view stays as it is until the coordinator answers
            except (CoordinatorLost, RayError) as lost:
                if self._closed.is_set() or not self._link.connected:
                    continue
                try:  # Ray restarts it, or this has a successor started, which counts changes anew
                    status = self._link.ask("status", limit_s=self._timeouts.connect_s)
                except (WeightSyncError, RayError) as error:
                    self._end(f"{lost}; {error}")
                    return
            sequence = status.sequence
            self._publish(status)

    def _publish(self, status: FleetStatus) -> None:
        with self._news:
            if status == self._status:
                return
            self._status = status
            self._news.notify_all()
            subscribers = list(self._subscribers.values())
        if self._logs_changes:
            for line in changes(self._logged, status):
                logger.info("%s: %s", self._link.name, line)
            self._logged = settled(self._logged, status)
        for subscriber in subscribers:
            try:
                subscriber(status)
            except Exception:  # a user's own code: it must not keep the others, or us, from hearing of changes
                logger.exception("a subscriber of %s failed", self._link.name)

    def _end(self, why: str) -> None:
        with self._news:
            self._gone = self._gone or why
            self._news.notify_all()


def nothing_known(name: str) -> FleetStatus:
    """The status of a fleet that nobody has joined yet."""
    return FleetStatus(name=name, version=None, ordinal=0, epoch=0, phase="idle", round_id=None, replicas=(), sequence=-1)


def changes(before: FleetStatus, after: FleetStatus) -> list[str]:
    """A line if the ranks are others, and one for each replica whose state is. What a round goes through meanwhile is no line. Pure."""
    known = {replica.id: replica for replica in before.replicas}
    lines = [after.ranks] if after.ranks not in (None, before.ranks) else []
    for replica in after.replicas:
        state = known[replica.id].state if replica.id in known else None
        if replica.state in (state, "UPDATING"):
            continue
        why = f" ({replica.error})" if replica.error else ""
        lines.append(f"{replica.id}: {f'{state} -> ' if state else ''}{replica.state}{why}")
    return lines


def settled(before: FleetStatus, after: FleetStatus) -> FleetStatus:
    """``after``, with replicas in the middle of an update as they were ``before``. Pure."""
    known = {replica.id: replica for replica in before.replicas}
    replicas = tuple(known.get(each.id, each) if each.state == "UPDATING" else each for each in after.replicas)
    return dataclasses.replace(after, replicas=replicas)


def _rebuild(name: str, coordinator: ActorHandle[Any], status: FleetStatus, timeouts: Timeouts) -> Follower:
    return Follower(CoordinatorLink(name, coordinator, timeouts=timeouts), status, timeouts=timeouts)
