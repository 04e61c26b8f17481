"""A fleet as seen from a router or a rollout worker: local, picklable, kept up to date by the coordinator."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ray_weightsync.errors import ConfigError, WeightSyncError
from ray_weightsync.follower import Follower
from ray_weightsync.report import FleetStatus, ReplicaStatus


class FleetView:
    """Reads are local and never wait. The first read starts a daemon thread that follows the coordinator's changes.

    May be pickled and handed to other processes; each follows on its own, and goes on with a successor if the coordinator dies.
    """

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def __reduce__(self) -> tuple[Any, ...]:
        return (FleetView, (self._follower,))

    @property
    def status(self) -> FleetStatus:
        """The fleet as last heard of."""
        return self._follower.status

    @property
    def version(self) -> str | None:
        """Label of the version last committed, or adopted at attach; None if there is neither."""
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
        """The replicas that a router may send requests to. An engine that restarts is another ``incarnation`` behind the same id."""
        return tuple(replica for replica in self.status.replicas if replica.serving)

    def staleness(self, output: object) -> int | None:
        """How many commits the oldest weights in ``output`` are behind the present version; 0 if it is all of the present one.

        Args:
            output: A version, as it was committed or as its label; or what vLLM answered a request with: a ``RequestOutput``, or the
                dict of `VLLMEngineActor`'s ``generate``, whose ``weight_versions`` say which version made which token.

        Returns:
            None if a version is not known here (only the last 100 are), is a tombstone, or the output names none.

        Raises:
            ConfigError: if ``output`` is nothing of the kind.
        """
        labels, status = versions_in(output), self.status
        ordinals = [status.ordinals.get(label) for label in labels]  # a tombstone is never among them
        known = [ordinal for ordinal in ordinals if ordinal is not None]
        return status.ordinal - min(known) if labels and len(known) == len(labels) else None

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
            WeightSyncError: when the coordinator is gone and has no successor.
        """
        return self._follower.events(timeout_s=timeout_s)


def versions_in(output: object) -> list[str]:
    """The version labels in ``output``; see `FleetView.staleness`. Pure.

    Raises:
        ConfigError: if it can hold none.
    """
    if isinstance(output, int | str) and not isinstance(output, bool):
        return [str(output)]
    sequences = _field(output, "outputs")
    if not isinstance(sequences, Iterable) or isinstance(sequences, str):
        raise ConfigError(f"staleness takes a version or what an engine answered a request with, not {type(output).__name__}")
    spans = [span for each in sequences for span in _field(each, "weight_versions") or ()]
    return [str(span[0] if isinstance(span, tuple | list) else _field(span, "version")) for span in spans]


def _field(value: object, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
