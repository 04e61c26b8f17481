"""A fleet as seen from a router or a rollout worker: local, picklable, kept up to date by the coordinator."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from ray_weightsync.config import Timeouts
from ray_weightsync.errors import WeightSyncError
from ray_weightsync.report import FleetStatus, ReplicaStatus


class FleetView:
    """Reads are local and never wait. The first read starts a daemon thread that follows the coordinator's changes.

    May be pickled and handed to other processes; each follows on its own.
    """

    def __init__(self, coordinator: ActorHandle[Any], status: FleetStatus, *, timeouts: Timeouts) -> None:
        self._coordinator = coordinator
        self._status = status
        self._timeouts = timeouts
        self._news = threading.Condition()
        self._follower: threading.Thread | None = None
        self._gone: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self._coordinator, self._status, self._timeouts))

    @property
    def status(self) -> FleetStatus:
        """The fleet as last heard of."""
        with self._news:
            if self._follower is None:
                self._follower = threading.Thread(target=self._follow, name="rws-fleet-view", daemon=True)
                self._follower.start()
            return self._status

    @property
    def version(self) -> str | None:
        """Label of the version last committed; None before the first."""
        return self.status.version

    @property
    def ordinal(self) -> int:
        """Place of that version in the order of commits."""
        return self.status.ordinal

    @property
    def cache_salt(self) -> str:
        """A salt for requests that keeps KV of different versions apart (cache policy ``"salt"``)."""
        status = self.status
        return f"{status.name}:{status.ordinal}"

    def serving(self) -> tuple[ReplicaStatus, ...]:
        """The replicas that a router may send requests to."""
        return tuple(replica for replica in self.status.replicas if replica.serving)

    def wait_for_version(self, version: int | str, *, timeout_s: float) -> FleetStatus:
        """Wait until ``version`` has been committed; the fleet may have moved on to a later one.

        Raises:
            WeightSyncError: if it is not within ``timeout_s`` seconds, or the coordinator is gone.
        """
        began = time.monotonic()
        for status in self.events(timeout_s=timeout_s):
            if str(version) in (status.version, *status.committed):
                return status
        raise WeightSyncError(
            f"Version {version} was not committed; the fleet is at {self.version}.",
            phase="wait_for_version",
            elapsed_s=time.monotonic() - began,
            limit_s=timeout_s,
            hint="see status()",
        )

    def events(self, *, timeout_s: float | None = None) -> Iterator[FleetStatus]:
        """Yield the fleet as it is, then anew after each change (changes that follow one another closely may be told as one).

        Ends after ``timeout_s`` seconds.

        Raises:
            WeightSyncError: when the coordinator is gone.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        status = self.status
        while True:
            yield status
            with self._news:
                while self._status.sequence == status.sequence and self._gone is None:
                    left = self._timeouts.warn_every_s if deadline is None else deadline - time.monotonic()
                    if left <= 0:
                        return
                    self._news.wait(left)
                if self._gone is not None:
                    raise WeightSyncError("The coordinator is gone; this view is no longer kept up to date.", engine_message=self._gone)
                status = self._status

    def _follow(self) -> None:
        while True:
            limit_s = self._timeouts.health_interval_s
            try:
                ref: Any = self._coordinator.watch.remote(self._status.sequence, limit_s)
                status: Any = ray.get(ref, timeout=limit_s + self._timeouts.status_s)
            except GetTimeoutError:
                continue  # a busy node; the view stays as it is until the coordinator answers
            except RayError as error:
                with self._news:
                    self._gone = str(error)
                    self._news.notify_all()
                return
            with self._news:
                self._status = status
                self._news.notify_all()


def _rebuild(coordinator: ActorHandle[Any], status: FleetStatus, timeouts: Timeouts) -> FleetView:
    return FleetView(coordinator, status, timeouts=timeouts)
