"""What a session offers to keep its fleet alive: repair, joins and leaves, sleep, subscribers, and replacements for what was lost.

The decisions are the coordinator's.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ray_weightsync.config import require_choice
from ray_weightsync.engines.ref import EngineLike, EngineRef, as_refs
from ray_weightsync.errors import ConfigError, WeightSyncError
from ray_weightsync.fleet.keyring import Keys, by_reference
from ray_weightsync.fleet.link import CoordinatorLink
from ray_weightsync.fleet.values import Settings
from ray_weightsync.follower import Follower
from ray_weightsync.replacer import Replacer
from ray_weightsync.report import FleetStatus, ReplicaStatus, SyncReport


class FleetLife:
    """The part of `WeightSync` that keeps the fleet alive."""

    _link: CoordinatorLink
    _settings: Settings
    _keys: Keys
    _targets: dict[str, Any]
    _follower: Follower
    _replacer: Replacer

    def __init__(self) -> None:
        self._naming = threading.Lock()
        self._joining: set[str] = set()

    def status(self) -> FleetStatus:
        """See `WeightSync.status`."""
        raise NotImplementedError

    def _require_open(self) -> None:
        raise NotImplementedError

    # --- repair -------------------------------------------------------------------------------------------------------------

    def heal(self, *replicas: str | ReplicaStatus) -> SyncReport:
        """Bring replicas to the version last committed, from its snapshot. The trainer is not needed and the others are not touched.

        Args:
            replicas: Ids, or replicas of a status; by default all that are QUARANTINED, STALE or JOINING.

        Raises:
            ConfigError: for an id that is unknown or retired.
            RoundAborted: nothing changed: there is no committed snapshot to heal from, or a round did not end.
            ReplicasLost: some could not be healed; they are fenced. The report says why.
            FleetTorn: no replica serves, afterwards or as before.
        """
        self._require_open()
        round_id, limit_s = uuid.uuid4().hex, self._settings.timeouts.connect_s
        self._link.reach()
        asked = self._link.submit("heal", round_id, [_id_of(replica) for replica in replicas])
        report: SyncReport = self._link.answer(asked, "heal", round_id=round_id, limit_s=limit_s, turns=2)
        return report

    # --- who is in the fleet ------------------------------------------------------------------------------------------------

    def add(self, engines: EngineLike | Sequence[EngineLike] | None = None, *, count: int = 1) -> tuple[str, ...]:
        """Take more engines in, also during a round. They are asked what they are, and no round is waited for.

        They are JOINING at first. The version last committed is brought to them when no round is in progress; see `wait_serving`.

        Args:
            engines: As for `attach`. Without them, ``count`` are made by the ``engine_factory``.
            count: How many to make.

        Returns:
            The ids of the new replicas.

        Raises:
            ConfigError: for a wrong argument.
            AttachError: if one cannot be attached; all were left as found, and none was added.
        """
        self._require_open()
        timeouts = self._settings.timeouts
        if engines is None:
            made = self._replacer.make(count)
            try:
                ids = self._add(made, limit_s=timeouts.heal_s)  # an engine may just be starting
            except BaseException:
                self._replacer.end(made)
                raise
            self._replacer.made(dict(zip(ids, made, strict=True)))
            return ids
        return self._add(engines, limit_s=timeouts.attach_s)

    def _add(self, engines: Any, *, limit_s: float) -> tuple[str, ...]:
        with self._named(engines) as refs:
            ids: tuple[str, ...] = self._link.ask("add", refs, self._kept(refs), limit_s, limit_s=self._join_s(limit_s))
            self._targets.update({name: ref.target for name, ref in zip(ids, refs, strict=True)})
            return ids

    @contextmanager
    def _named(self, engines: Any) -> Iterator[tuple[EngineRef, ...]]:
        """References with ids that are nobody else's, also not of engines that another thread is about to add."""
        with self._naming:
            refs = as_refs(engines, taken={*self._joining, *(replica.id for replica in self.status().replicas)})
            ids = {str(ref.id) for ref in refs}
            self._joining |= ids
        try:
            yield refs
        finally:
            with self._naming:
                self._joining -= ids

    def _kept(self, refs: Sequence[EngineRef]) -> Keys:
        """The literal api_keys of ``refs``, which a successor of the coordinator will want again."""
        new = by_reference(refs)
        with self._naming:
            self._keys = (*self._keys, *new)
        return new

    def replace(self, replica: str | ReplicaStatus, engine: EngineLike) -> str:
        """Take an engine in, in the place of a replica. That one is retired when no round is in progress; its engine is left running.

        To keep up capacity, `add` the new one first, `wait_serving`, and then `remove` the old one.

        Returns:
            The id of the new replica.

        Raises:
            ConfigError: for a wrong argument, or an id that is unknown or has left.
            AttachError: if the engine cannot be attached; nothing changed.
        """
        self._require_open()
        old = _id_of(replica)
        new = self._replace(old, engine, limit_s=self._settings.timeouts.attach_s)
        self._replacer.end_retired(old)
        return new

    def replace_lost(self, replica: str, engine: EngineLike) -> str:
        """`replace` for an engine that was just made, and may still be starting."""
        return self._replace(replica, engine, limit_s=self._settings.timeouts.heal_s)

    def _replace(self, replica: str, engine: EngineLike, *, limit_s: float) -> str:
        with self._named([engine]) as (ref,):
            new: str = self._link.ask("replace", replica, ref, self._kept([ref]), limit_s, limit_s=self._join_s(limit_s), turns=1)
            self._targets[new] = ref.target
            self._targets.pop(replica, None)
            return new

    def remove(self, replica: str | ReplicaStatus, *, drain_s: float | None = None) -> None:
        """Let a replica go: out of the serving set at once, retired when no round is in progress.

        Its engine is left running as it is; one that the session spawned is ended.

        Args:
            replica: Its id, or itself in a status.
            drain_s: Seconds to wait for the end of its requests.

        Raises:
            ConfigError: for an id that is unknown, or the last replica of the session. One that has left already is no error.
            RoundAborted, FleetTorn: if a round does not end; the replica stays.
        """
        self._require_open()
        if drain_s is not None:
            _require_seconds("drain_s", drain_s)
        old = _id_of(replica)
        self._link.ask("remove", old, drain_s, limit_s=self._settings.timeouts.connect_s + (drain_s or 0.0), turns=1)
        self._targets.pop(old, None)
        self._replacer.end_retired(old)

    def wait_serving(self, num: int | None = None, *, timeout_s: float) -> tuple[ReplicaStatus, ...]:
        """Wait until replicas serve.

        Args:
            num: How many at least; by default all that are not retired.
            timeout_s: Seconds to wait.

        Returns:
            Those that serve.

        Raises:
            ConfigError: for a wrong argument.
            WeightSyncError: if they do not in time, with who does not and why.
        """
        if num is not None and (isinstance(num, bool) or not isinstance(num, int) or num < 1):
            raise ConfigError(f"num must be None or an int of at least 1, not {num!r}")
        _require_seconds("timeout_s", timeout_s)
        began, status = time.monotonic(), self.status()
        if (serving := serving_enough(status, num)) is not None:
            return serving
        for _ in self._follower.events(timeout_s=timeout_s):
            status = self.status()  # what the follower heard of last may be older than what the caller did just now
            if (serving := serving_enough(status, num)) is not None:
                return serving
        waiting = {each.id: each.error or each.state for each in status.replicas if not each.serving and each.state != "RETIRED"}
        raise WeightSyncError(
            f"{len(status.serving)} replicas serve, {'all' if num is None else num} were waited for.",
            phase="wait_serving",
            replicas=tuple(waiting),
            elapsed_s=time.monotonic() - began,
            limit_s=timeout_s,
            engine_message="; ".join(f"{name}: {why}" for name, why in waiting.items()) or None,
            hint="heal() says what keeps a replica from serving; before the first version there is nothing to bring to them",
        )

    # --- colocation ---------------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Put all engines that can to sleep, when no round is in progress. They leave `serving`; requests in flight are aborted.

        Args:
            level: 1 keeps the weights in the host's memory; 2 gives them up, and a complete round or a repair has to bring them back.

        Raises:
            ConfigError: for another level, or if no engine can sleep.
            RoundAborted, FleetTorn: if a round does not end; nothing changed.
            WeightSyncError: if some did not; all others sleep.
        """
        self._require_open()
        require_choice("level", level, (1, 2))
        self._link.ask("sleep", level, limit_s=self._settings.timeouts.connect_s, turns=2)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Wake all engines that sleep up, when no round is in progress. One that is fully awake runs, unless it is fenced.

        Args:
            tags: ``"weights"`` or ``"kv_cache"``, to wake up a part. A round needs the weights only, and leaves the rest as found.

        Raises:
            As of `sleep`.
        """
        self._require_open()
        if isinstance(tags, str):
            raise ConfigError(f"tags must be a list such as ['weights'], not {tags!r}")
        for tag in tags or ():
            require_choice("tags", tag, ("weights", "kv_cache"))
        self._link.ask("wake_up", None if tags is None else list(tags), limit_s=self._settings.timeouts.connect_s, turns=2)

    # --- hearing of changes -------------------------------------------------------------------------------------------------

    def subscribe(self, callback: Callable[[FleetStatus], None]) -> Callable[[], None]:
        """Call ``callback`` with the fleet's status after each change (changes that follow one another closely may be told as one).

        It runs on the session's follower thread: it should not block, and what it raises is logged.

        Returns:
            A function that ends the subscription.
        """
        self._require_open()
        if not callable(callback):
            raise ConfigError(f"subscribe takes a function of the fleet's status, not {type(callback).__name__}")
        return self._follower.subscribe(callback)

    # --- deadlines ----------------------------------------------------------------------------------------------------------

    def _join_s(self, limit_s: float) -> float:
        timeouts = self._settings.timeouts
        return limit_s + timeouts.attach_s + timeouts.connect_s


def serving_enough(status: FleetStatus, num: int | None) -> tuple[ReplicaStatus, ...] | None:
    """Those that serve, if they are ``num`` or more (None: everyone who is not retired). Pure."""
    serving = tuple(replica for replica in status.replicas if replica.serving)
    members = [replica for replica in status.replicas if replica.state != "RETIRED"]
    wanted = max(len(members), 1) if num is None else num
    return serving if len(serving) >= wanted else None


def _id_of(replica: str | ReplicaStatus) -> str:
    name = replica.id if isinstance(replica, ReplicaStatus) else replica
    if not isinstance(name, str):
        raise ConfigError(f"a replica is named by its id, such as 'r0', or by its entry in a status, not by {name!r}")
    return name


def _require_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"{name} must be a number of seconds of at least 0, not {value!r}")
