"""What a fault is: who, when, how. A validated, picklable value, and the two exceptions of the kit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ray_weightsync.config import require_choice
from ray_weightsync.errors import ConfigError, WeightSyncError

PHASES = ("preflight", "pause", "mark", "start", "update", "finish", "outcome", "commit", "cache", "resume", "unmark")
"""Phases of a round at the replica: each is a call of the coordinator's."""

RANK_PHASES = ("start", "load", "finish", "outcome")
"""Phases inside one worker."""

KINDS = ("raise", "hang", "late", "lost", "slow", "kill")
RANK_KINDS = ("raise", "hang", "slow", "kill", "corrupt")

Victim = Literal["replica", "coordinator"] | int


class InjectedFault(RuntimeError):
    """What a call raises that was made to fail; errors quote its text, ``made to fail in <phase>``."""


class FaultNotReached(WeightSyncError, TimeoutError):
    """The phase that a fault waits for was not reached in time. The fault is still armed."""


@dataclass(frozen=True, kw_only=True)
class FaultSpec:
    """One fault; see `Faults.inject` for the meaning of each field.

    Raises:
        ConfigError: naming the field and what is allowed.
    """

    replica: str
    phase: str
    kind: str
    rank: int | None = None
    times: int = 1
    seconds: float | None = None
    carried_out: bool = False
    silent: bool = False
    victim: Victim = "replica"

    def __post_init__(self) -> None:
        if not isinstance(self.replica, str) or not self.replica:
            raise ConfigError(f"replica must be the id of a replica, such as 'r0', not {self.replica!r}")
        if self.rank is not None:
            _require_int("rank", self.rank, least=0)
        _require_int("times", self.times, least=1)
        if self.phase == "load" and self.rank is None:
            raise ConfigError("phase 'load' is inside a worker: say rank=... (0 if there is one), or take 'update' for the replica")
        if self.kind == "corrupt" and self.rank is None:
            raise ConfigError("kind 'corrupt' happens inside a worker, in phase 'load': say rank=...")
        if self.rank is None or (self.kind == "kill" and self.phase in PHASES and self.phase not in RANK_PHASES):
            require_choice("phase", self.phase, PHASES)
            require_choice("kind", self.kind, KINDS)
        else:
            require_choice("phase of a rank", self.phase, RANK_PHASES)
            require_choice("kind of a rank", self.kind, RANK_KINDS)
        if self.kind == "corrupt" and self.phase != "load":
            raise ConfigError(f"kind 'corrupt' belongs to phase 'load', not {self.phase!r}")
        self._check_options()

    def _check_options(self) -> None:
        if self.kind == "slow":
            seconds = self.seconds
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
                raise ConfigError(f"kind 'slow' needs seconds=, a positive number, not {seconds!r}")
        elif self.seconds is not None:
            raise ConfigError(f"seconds= belongs to kind 'slow', not {self.kind!r}")
        for name, kind in (("carried_out", "hang"), ("silent", "corrupt")):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be a bool, not {getattr(self, name)!r}")
            if getattr(self, name) and self.kind != kind:
                raise ConfigError(f"{name}= belongs to kind {kind!r}, not {self.kind!r}")
        if self.victim != "replica" and (self.kind != "kill" or self.rank is not None):
            raise ConfigError("victim= belongs to kind 'kill', without rank=")
        if isinstance(self.victim, bool) or (isinstance(self.victim, int) and self.victim < 2):
            raise ConfigError(f"victim must be a process id of the coordinator's node, not {self.victim!r}")
        if not isinstance(self.victim, int):
            require_choice("victim", self.victim, ("replica", "coordinator"))

    @property
    def in_worker(self) -> bool:
        """Whether it strikes inside the worker ``rank``, not at the coordinator's call."""
        return self.rank is not None and self.phase in RANK_PHASES

    @property
    def holds(self) -> bool:
        """Whether it holds a call until it is released."""
        return self.kind in ("hang", "late")

    @property
    def words(self) -> str:
        """What the kit's own exceptions say."""
        return f"made to fail in {self.phase}"

    def __str__(self) -> str:
        where = f"{self.replica}, rank {self.rank}" if self.rank is not None else self.replica
        return f"{self.kind} in {self.phase} of {where}"


def _require_int(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be an int of at least {least}, not {value!r}")
