"""Who is in the fleet, what it serves, and whoever wants to hear of changes. Asks no engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ray_weightsync.config import AdoptPolicy, is_tombstone
from ray_weightsync.errors import ConfigError, FleetTorn, RoundAborted
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.states import ReplicaEvent, ReplicaState
from ray_weightsync.report import FleetStatus

AT_ONCE_S = 0.005
"""How long news wait for more of them, and let an answer go first, in seconds."""

SOON_S = 0.25
"""How long the phases of a round wait, in seconds: each one told costs the interpreters of both ends time in the middle of the round."""


class Roster:
    """The fleet of one session.

    Attributes:
        replicas: Every member, by id, in the order of joining.
        label: The version last committed (or adopted), None before the first.
        ordinal: How many versions this session has committed.
        ordinals: Their places in the order of commits, oldest first; 0 is the version that was adopted.
        epoch: Grows with every round; receivers refuse an older one.
        phase: The phase of the round in progress, or ``"idle"``.
        round_id: The round in progress, or None.
        sequence: Grows by one with every change.
        on_change: Called after every change, besides the watchers.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.replicas: dict[str, Replica] = {}
        self.label: str | None = None
        self.ordinal = 0
        self.epoch = 0
        self.phase = "idle"
        self.round_id: str | None = None
        self.ranks: str | None = None
        self.ordinals: dict[str, int] = {}
        self.on_change: Callable[[], None] = lambda: None
        self.sequence = 0
        self._news = asyncio.Event()
        self._told = 0
        self._told_routes: object = None
        self._telling: asyncio.TimerHandle | None = None

    def adopt(self, replicas: list[Replica], policy: AdoptPolicy) -> None:
        """Take engines in. If all report one version, none is paused and the policy allows, they count as serving it, unattested."""
        facts = [
            replica.engine.facts for replica in replicas if not replica.fenced_by_us and not is_tombstone(replica.engine.facts.version)
        ]
        versions = {each.version for each in facts}
        agreed = policy == "reported" and len(versions) == 1 and None not in versions and not any(each.paused for each in facts)
        for replica in replicas:
            self.replicas[replica.id] = replica
            label = replica.engine.facts.version
            if replica.fenced_by_us or is_tombstone(label):
                replica.found_torn()
                replica.happen(ReplicaEvent.FAIL, error=f"found with the label {label}: torn or not committed by an earlier session")
            else:
                replica.happen(ReplicaEvent.ADOPT if agreed else ReplicaEvent.INSPECT)
                replica.version = label
        if agreed:
            (self.label,) = versions
            self.ordinals[str(self.label)] = 0
        self.changed()

    def succeed(self, replicas: Iterable[Replica], *, label: str | None, ordinal: int, epoch: int, ordinals: Mapping[str, int]) -> None:
        """Go on where the coordinator before stood."""
        self.replicas = {replica.id: replica for replica in replicas}
        self.label, self.ordinal, self.epoch = label, ordinal, epoch
        self.ordinals = dict(ordinals)

    def join(self, replicas: Iterable[Replica]) -> None:
        """Take more engines in. They serve once a round or a repair has brought them to the committed version.

        Raises:
            ConfigError: if an id is taken.
        """
        joining = list(replicas)
        if taken := [replica.id for replica in joining if replica.id in self.replicas]:
            raise ConfigError(f"{', '.join(taken)} is the id of another replica of this session, perhaps a retired one")
        for replica in joining:
            if is_tombstone(replica.engine.facts.version):
                replica.found_torn()
            self.replicas[replica.id] = replica
        self.changed()

    def named(self, replica_id: str) -> Replica:
        """The replica with this id.

        Raises:
            ConfigError: if there is none; it names those there are.
        """
        if replica_id not in self.replicas:
            raise ConfigError(f"there is no replica {replica_id!r}; this session has {', '.join(self.replicas) or 'none'}")
        return self.replicas[replica_id]

    @property
    def members(self) -> list[Replica]:
        """Everyone who is not retired and not about to be, in the order of joining."""
        return [each for each in self.replicas.values() if each.state is not ReplicaState.RETIRED and not each.leaving]

    def commit(self, label: str) -> None:
        """A new version was committed."""
        self.label = label
        self.ordinal += 1
        self.ordinals.pop(label, None)  # one that was adopted before stands at its old place
        self.ordinals[label] = self.ordinal

    def was_committed_before(self, label: str) -> bool:
        """Whether ``label`` was committed by this session and is not the present version any more."""
        return self.ordinals.get(label, 0) > 0 and label != self.label

    def next_epoch(self) -> int:
        """A new epoch, above all that any worker has seen, an earlier session's too."""
        seen = [worker.epoch for replica in self.replicas.values() for worker in replica.engine.facts.workers]
        self.epoch = max([self.epoch, *seen]) + 1
        return self.epoch

    @property
    def serves(self) -> bool:
        """Whether some member holds the version; while the fleet has none, whether some member has the weights it came with."""
        whole = any(each.whole and not each.doubted for each in self.replicas.values())  # one that is about to leave may yet stay
        return whole or (self.label is None and any(each.state is not ReplicaState.QUARANTINED for each in self.members))

    @property
    def stands(self) -> str:
        """What whoever holds the version does with it, as a verb."""
        holders = [each for each in self.replicas.values() if each.whole]
        return "sleeps" if holders and all(each.asleep for each in holders) else "still serves"

    def unchanged(self, what: str, *, hint: str, **fields: Any) -> RoundAborted | FleetTorn:
        """The error for a call that changed nothing. Its type is by whether anybody serves: that may have ended before.

        Args:
            what: What was not done, in a sentence.
            hint: As ``fields``, of `WeightSyncError`.
            fields: See there.
        """
        if not self.serves:
            return FleetTorn(f"No replica serves. {what}", hint=f"{hint}; none may serve until a complete round makes it whole", **fields)
        still = f"version {self.label} {self.stands}" if self.label is not None else "the engines serve what they had"
        return RoundAborted(f"Nothing changed: {still}. {what}", hint=hint, **fields)

    def log_hints(self) -> dict[str, str | None]:
        """Where each replica's log is to be found."""
        return {replica.id: replica.log_hint for replica in self.replicas.values()}

    def status(self) -> FleetStatus:
        """What is known here."""
        return FleetStatus(
            name=self.name,
            version=self.label,
            ordinal=self.ordinal,
            epoch=self.epoch,
            phase=self.phase,
            round_id=self.round_id,
            replicas=tuple(replica.status() for replica in self.replicas.values()),
            sequence=self.sequence,
            ordinals=dict(list(self.ordinals.items())[-100:]),
            ranks=self.ranks,
        )

    def changed(self, phase: str | None = None) -> None:
        """Tell the watchers, and begin ``phase`` if one is given. What a router has to know is told at once, the rest by and by."""
        if phase is not None:
            self.phase = phase
        self.sequence += 1
        self.on_change()
        loop = asyncio.get_running_loop()
        due = loop.time() + (SOON_S if self._routes() == self._told_routes else AT_ONCE_S)
        if self._telling is None or due < self._telling.when():
            if self._telling is not None:
                self._telling.cancel()
            self._telling = loop.call_at(due, self._tell)

    def _routes(self) -> object:
        """Whom requests may be sent to, and what they get there."""
        return self.label, [(each.id, each.serving, each.version, each.engine.facts.incarnation) for each in self.replicas.values()]

    def _tell(self) -> None:
        self._telling, self._told, self._told_routes = None, self.sequence, self._routes()
        self._news.set()
        self._news = asyncio.Event()

    async def watch(self, sequence: int, *, limit_s: float) -> FleetStatus:
        """The status as soon as there is news after ``sequence``, or as it is after ``limit_s`` seconds."""
        deadline = time.monotonic() + limit_s
        while self._told <= sequence and (left := deadline - time.monotonic()) > 0:
            try:
                await asyncio.wait_for(self._news.wait(), left)
            except TimeoutError:
                break
        return self.status()
