"""Random fault schedules over rounds of one session, from one seed, and what is counted of them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ray

import ray_weightsync as rws
from ray_weightsync.testing import Faults
from tests.ray.faults.ground import LIMIT_S, PHASE_S, SLACK_S, Ground

PHASES = ("preflight", "pause", "mark", "start", "update", "finish", "outcome", "commit", "resume", "unmark")
RANK_FAULTS = [
    (phase, kind)
    for phase in ("start", "load", "finish", "outcome")
    for kind in ("raise", "slow", "corrupt")
    if kind != "corrupt" or phase == "load"
]
KINDS = {"raise": 40, "slow": 15, "lost": 15, "late": 6, "hang": 6, "kill": 3}
"""How often each kind is drawn: one that costs a deadline, or a new process, more rarely."""


@dataclass(frozen=True)
class Injected:
    """One fault of a schedule, in the words of `Faults.inject`."""

    replica: str
    phase: str
    kind: str
    rank: int | None = None

    def __str__(self) -> str:
        return f"{self.kind} in {self.phase} of {self.replica}{'' if self.rank is None else f', rank {self.rank}'}"


@dataclass(frozen=True)
class Schedule:
    """What happens around one round.

    Attributes:
        faults: Armed before it.
        kill_coordinator: The coordinator's process is killed after it.
        mend_with: What follows: ``"send"`` a new version, or ``"heal"`` first.
    """

    faults: tuple[Injected, ...]
    kill_coordinator: bool
    mend_with: str


def schedules(seed: int, count: int, replicas: tuple[str, ...]) -> Iterator[Schedule]:
    """``count`` schedules; the same ones for the same seed."""
    draw = random.Random(seed)
    for _ in range(count):
        faults = []
        for _ in range(draw.choices([0, 1, 2, 3], [1, 6, 3, 1])[0]):
            replica = draw.choice(replicas)
            if draw.random() < 0.25:
                phase, kind = draw.choice(RANK_FAULTS)
                faults.append(Injected(replica, phase, kind, rank=0))
            else:
                faults.append(Injected(replica, draw.choice(PHASES), draw.choices(list(KINDS), list(KINDS.values()))[0]))
        yield Schedule(tuple(faults), draw.random() < 0.02, draw.choice(["send", "heal"]))


@dataclass
class Counts:
    """What was tried and survived."""

    rounds: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.rounds + other.rounds, self.faults + other.faults, max(self.seconds, other.seconds))

    def __str__(self) -> str:
        rounds = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.rounds.items()))
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()))
        return f"{self.rounds.total()} schedules survived in {self.seconds:.0f} s ({rounds}); faults: {faults or 'none'}"


def run(ground: Ground, schedule: Schedule, counts: Counts) -> None:
    """One schedule: the round with its faults, the invariants, and one more round that makes all whole.

    Raises:
        AssertionError: if anything does not hold; its notes tell the schedule.
    """
    try:
        counts.rounds[_round(ground, schedule, counts)] += 1
        if schedule.kill_coordinator:
            counts.faults["kill of the coordinator"] += 1
            os.kill(ray.get(ground.sync.coordinator.__ray_call__.remote(lambda actor: os.getpid()), timeout=LIMIT_S), signal.SIGKILL)
            ground.wait_until_nothing_is_owed()
            ground.check()
        if schedule.mend_with == "heal":
            _heal(ground)
        ground.heal()
    except BaseException as error:
        error.add_note(f"the schedule was: {schedule}")
        raise


def _round(ground: Ground, schedule: Schedule, counts: Counts) -> str:
    holding = sum(fault.kind in ("hang", "late") for fault in schedule.faults)
    with Faults(ground.sync, limit_s=LIMIT_S) as faults:
        armed: list[tuple[Injected, Any]] = []
        for each in schedule.faults:
            options: dict[str, Any] = {"seconds": 0.1} if each.kind == "slow" else {}
            armed.append((each, faults.inject(each.replica, each.phase, each.kind, rank=each.rank, **options)))
        began = time.monotonic()
        try:
            report = ground.send()
            outcome = "committed" if not report.lost else "committed by some"
        except (rws.RoundAborted, rws.ReplicasLost, rws.FleetTorn) as error:
            outcome = type(error).__name__
        took_s = time.monotonic() - began
        assert took_s < (1 + 2 * holding) * PHASE_S + SLACK_S, f"it took {took_s:.1f} s"
        ground.check()
        for each, fault in armed:
            if each.kind != "kill" and fault.struck():
                counts.faults[each.kind] += 1
            elif each.kind == "kill":
                counts.faults["kill (armed)"] += 1
    return outcome


def _heal(ground: Ground) -> None:
    """Ask for a repair; it may say that there is nothing to repair from, or that somebody cannot be healed yet, and nothing else."""
    ground.wait_until_nothing_is_owed()
    with contextlib.suppress(rws.RoundAborted, rws.ReplicasLost, rws.FleetTorn):
        ground.sync.heal()
    ground.check()
