"""The life of a fleet: what its session is asked for, what happens to its engines meanwhile, and what must hold afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from dataclasses import dataclass, field
from typing import Any

from ray_weightsync.config import Collective, FailurePolicy, Host, Native, Timeouts
from ray_weightsync.errors import WeightSyncError
from ray_weightsync.fleet.values import Way
from ray_weightsync.report import FleetStatus, SyncReport
from tests.unit.fleet.fake_engine import FakeEngine
from tests.unit.fleet.fakes import FakeFleet, FakeTrainerEngine, sealed
from tests.unit.fleet.test_invariants import require_true
from tests.unit.fleet.test_membership import resolved

REPLICAS = 3
TIMEOUTS = Timeouts(
    min_rate_bytes_per_s=1e12,
    **{each.name: 1 for each in dataclasses.fields(Timeouts) if each.name not in ("min_rate_bytes_per_s", "warn_every_s")},
)
POLL_S = 0.1

ASKED_AGAIN = ("add", "replace", "remove", "sleep", "wake", "refuse")
"""What is no round and is asked again by whoever lost the answer with the coordinator."""


@dataclass(frozen=True)
class Event:
    """One moment of a life.

    Attributes:
        steps: What the session is asked for, at once.
        behind: What happens to an engine or a store behind its back, before.
        faults: By the number of a member and the call, what goes wrong in it.
        dies_in: The coordinator dies when this member is in that call; or, with None for the call, after the steps.
        dies_again_in: So does its successor, before it has settled everything.
    """

    steps: tuple[str, ...] = ()
    behind: str | None = None
    faults: dict[tuple[int, str], str] = field(default_factory=dict)
    dies_in: tuple[int, str | None] | None = None
    dies_again_in: tuple[int, str] | None = None


class Life:
    """A fleet, and what happens to it."""

    def __init__(self, fleet: FakeFleet) -> None:
        self.fleet = fleet
        self.engines: dict[str, FakeEngine] = {engine.label: engine for engine in fleet.engines}
        self.bytes: dict[str, set[str]] = {}
        """By version, the snapshots that were sent under it."""
        self.taken: dict[str, tuple[str, bool, str]] = {}
        """Engines that another session has, and how it left them."""
        self.paused_by_owner: set[str] = set()
        self.report: SyncReport | None = None
        self.staged: list[str] = []
        self.ended: set[str] = set()
        """The rounds that had ended when a coordinator died."""
        self.events = 0

    async def live(self, event: Event) -> None:
        self.events += 1
        members = self.members
        if event.behind is not None and members:
            self._behind_our_back(members[self.events % len(members)], event.behind)
        for (index, call), fault in event.faults.items():
            if index < len(members):
                members[index].faults[call] = fault
        found, opened = self.fleet.coordinator.status(), len(self.fleet.opened)
        asked = [asyncio.ensure_future(self._ask(step, members, found, alone=len(event.steps) == 1)) for step in event.steps]
        if event.dies_in is not None:
            await self._die(event.dies_in, members, asked)
            if event.dies_again_in is not None:
                await self._die_settling(event.dies_again_in, members)
            await self.fleet.succeed()
            for step, each in zip(event.steps, asked, strict=True):
                if each.cancelled() and step.split()[0] in ASKED_AGAIN:
                    await self._ask(step, members, found, alone=False)
            await self._lost_answers(opened, found, alone=len(event.steps) == 1)
        elif asked:
            await asyncio.gather(*asked)
        await self.quiet()
        self.hold()

    @property
    def members(self) -> list[FakeEngine]:
        ours = [each.id for each in self.fleet.coordinator.status().replicas if each.state != "RETIRED" and each.id not in self.taken]
        return [self.engines[name] for name in ours]

    def _behind_our_back(self, engine: FakeEngine, what: str) -> None:
        match what:
            case "restart" if not engine.dead:
                engine.restart()
                self.paused_by_owner.discard(engine.label)
            case "kill":
                engine.dead = True
            case "resume":
                engine.paused = bool(engine.asleep)
                self.paused_by_owner.discard(engine.label)
            case "pause" if not engine.paused:
                engine.paused = True
                self.paused_by_owner.add(engine.label)
            case "relabel" if engine.version.startswith("!rws:"):
                engine.version = "relabelled"
            case "store" if "node" in self.fleet.stores.at:
                self.fleet.stores.kill("node")

    # --- the coordinator's death --------------------------------------------------------------------------------------------

    async def _die(self, where: tuple[int, str | None], members: list[FakeEngine], asked: list[asyncio.Future[None]]) -> None:
        index, call = where
        if call is None or index >= len(members):
            if asked:
                await asyncio.gather(*asked)
        else:
            members[index].gate(call)
            reached = asyncio.ensure_future(members[index].reached[call].wait())
            await asyncio.wait({reached, *asked}, return_when=asyncio.FIRST_COMPLETED if asked else asyncio.ALL_COMPLETED, timeout=60)
            await asyncio.sleep(POLL_S)  # the others go as far as they can without it
            reached.cancel()
        self.ended = set(self.fleet.coordinator.chronicle.outcomes)
        await self.fleet.kill_coordinator()
        for each in asked:
            if not each.cancelled():
                each.result()

    async def _die_settling(self, where: tuple[int, str], members: list[FakeEngine]) -> None:
        index, call = where
        self.fleet.coordinator = self.fleet.coordinator_of()
        if index < len(members):
            members[index].gate(call)
            reached = asyncio.ensure_future(members[index].reached[call].wait())
            settled = asyncio.ensure_future(self.fleet.coordinator.recover())
            await asyncio.wait({reached, settled}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(POLL_S)

    async def _lost_answers(self, opened: int, found: FleetStatus, *, alone: bool) -> None:
        """Whoever lost an answer with the coordinator asks its successor, and is told what holds."""
        for round_id in self.fleet.opened[opened:]:
            try:
                await self.fleet.coordinator.settled(round_id)
            except WeightSyncError as error:
                if alone and round_id not in self.ended:  # else it tells of the fleet before the death
                    require_true(error, self.fleet.coordinator.status(), before=found)

    # --- what is asked ------------------------------------------------------------------------------------------------------

    async def _ask(self, step: str, members: list[FakeEngine], found: FleetStatus, *, alone: bool) -> None:
        try:
            await self._step(step, members)
        except WeightSyncError as error:
            if alone:
                require_true(error, self.fleet.coordinator.status(), before=found)

    async def _step(self, step: str, members: list[FakeEngine]) -> None:
        fleet, coordinator, version = self.fleet, self.fleet.coordinator, "-".join([*step.split(), str(self.events)])
        match step.split():
            case ["send"]:
                self.report = await fleet.send(version)
            case ["send", "again"] if (label := coordinator.status().version) in fleet.sent and label != "v0":
                self.report = await fleet.send(label)
            case ["broadcast", *how]:
                way = Way(transport=Collective(keep_snapshot="kept" in how), reason="test")
                self.report = await fleet.broadcast(version, way=way, fails="fails" in how)
            case ["relay", backend, *how]:
                engine = FakeTrainerEngine(backend, fails_at=how[0] if how else None)
                self.report = await fleet.relay(version, engine=engine, way=Way(transport=Native(backend), reason="test"))
            case ["stage"]:
                ticket = await fleet.open(version)
                fleet.sent[version] = ticket.address["snapshot"]
                await coordinator.rounds.seal(ticket.snapshot, sealed(version))
                self.staged.append(ticket.snapshot)
            case ["commit"] if self.staged:
                self.report = await coordinator.rounds.commit(self.staged.pop())
            case ["abandon"]:
                await coordinator.rounds.abandon((await fleet.open(version)).snapshot, "the sender gave up")
            case ["refuse", index] if self.report is not None and int(index) < len(members):
                await coordinator.refuse(self.report, {members[int(index)].label: "the probe answered False"})
            case ["heal"]:
                await coordinator.repair.heal()
            case ["check"]:
                await coordinator.health.check()
            case ["add"]:
                await coordinator.membership.add([await resolved(self._new("n"))])
            case ["replace"] if members:
                await coordinator.membership.replace(members[0].label, await resolved(self._new("p")))
            case ["remove"] if members:
                await coordinator.membership.remove(members[-1].label)
            case ["sleep", level]:
                await coordinator.sleep_mode.sleep(int(level))
            case ["wake", *tags]:
                await coordinator.sleep_mode.wake_up(tags or None)
            case ["hand", "over"] if members:
                await self._hand_over(members[-1])

    def _new(self, kind: str) -> FakeEngine:
        label = f"{kind}{self.events}"
        if label not in self.engines:  # else whoever lost the answer asks again
            self.engines[label] = FakeEngine(label)
            self.fleet.engines.append(self.engines[label])
        return self.engines[label]

    async def _hand_over(self, engine: FakeEngine) -> None:
        """Another session takes an engine, and sends it weights of its own."""
        other = FakeFleet(name=f"other{self.events}", other=self.fleet, timeouts=TIMEOUTS)
        other.engines = [engine]
        try:
            await other.attach(take_over=True)
        except Exception as error:  # one that is dead or fails to answer is not attached to
            if not (engine.dead or isinstance(error, WeightSyncError)):
                raise
            return
        with contextlib.suppress(WeightSyncError):
            await other.send("theirs")
        await other.coordinator.chronicle.noted()
        while any(each.unanswered for each in other.coordinator._roster.replicas.values()):
            engine.release.set()
            await asyncio.sleep(POLL_S)
        self.taken[engine.label] = (engine.version, engine.paused, engine.weights)

    # --- what holds ---------------------------------------------------------------------------------------------------------

    async def quiet(self) -> None:
        """Faults end, late answers come, and whatever runs beside comes to its end."""
        for engine in self.engines.values():
            engine.faults.clear()
            engine.gates.clear()
            engine.release.set()
            engine.carry_out_what_is_owed()
        coordinator = self.fleet.coordinator
        while coordinator._parts.turn.holder is not None or any(each.unanswered for each in coordinator._roster.replicas.values()):
            await asyncio.sleep(POLL_S)
        while coordinator._parts._background - set(coordinator.health._looking.values()):
            await asyncio.sleep(POLL_S)
        await coordinator._parts.staging.settled()
        await coordinator.chronicle.noted()
        for engine in self.engines.values():
            engine.release.clear()

    def hold(self) -> None:
        for version, snapshot in (*self.fleet.sent.items(), *self.fleet.kept.items()):
            self.bytes.setdefault(version, set()).add(snapshot)
        status = self.fleet.coordinator.status()
        for told in status.replicas:
            engine = self.engines[told.id]
            alive_as_known = not engine.dead and told.incarnation == engine.incarnation
            if told.id in self.taken:
                assert told.state == "RETIRED" or told.incarnation != engine.incarnation, "at the latest when it is looked at"
                assert (engine.version, engine.paused, engine.weights) == self.taken[told.id], "it is another session's"
                continue
            if not engine.dead and engine.version in self.bytes:
                assert engine.weights in self.bytes[engine.version], f"{told.id}: a valid label means whole weights of that version"
            if told.serving:
                assert told.state == "SERVING"
                assert told.version == status.version, "no two serving replicas differ in version"
                if alive_as_known:
                    assert engine.version == told.version
                    assert not engine.paused or told.id in self.paused_by_owner, f"{told.id}: who may be sent requests answers them"
            if told.state == "RETIRED":
                assert not told.serving
            if told.lost:
                assert told.state in ("RETIRED", "QUARANTINED")
            assert told.state not in ("UPDATING",)
        assert (status.phase, status.round_id) == ("idle", None)
        assert self.fleet.coordinator._parts.turn.holder is None
        self._hold_no_more_than_is_needed()

    def _hold_no_more_than_is_needed(self) -> None:
        staging = self.fleet.coordinator._parts.staging
        known = {each.slot for each in (staging.committed, staging._ahead, *staging._open.values()) if each is not None}
        held = {slot for slots in self.fleet.stores.at.values() for slot, state in slots.items() if state in ("writing", "sealed")}
        assert held <= known, "a slot that nobody knows is never freed"

    async def ends_whole(self) -> None:
        """With no more faults: awake, looked at, sent to twice (one may have to find out who is gone), the fleet is of one version."""
        coordinator = self.fleet.coordinator
        for name in self.paused_by_owner:
            self.engines[name].paused = bool(self.engines[name].asleep)
        for act in (lambda: coordinator.sleep_mode.wake_up(None), coordinator.health.check):
            with contextlib.suppress(WeightSyncError):
                await act()
            await self.quiet()
        if not any(not engine.dead for engine in self.members):
            return
        report: Any = None
        for _ in range(2):
            try:
                report = await self.fleet.send("last")
                break
            except WeightSyncError:
                await self.quiet()
        status, members = coordinator.status(), [engine for engine in self.members if not engine.dead]
        assert report is not None, status
        assert {each.label for each in members} == set(report.committed) == set(status.serving)
        assert [(each.version, each.paused) for each in members] == [("last", False)] * len(members)


class Complaints(logging.Handler):
    """Errors that nobody was told of: whatever our own code did not foresee."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, WeightSyncError):
            self.errors.append(error)


async def lived(events: list[Event], *, policy: FailurePolicy, host: Host) -> None:
    """All of a life.

    Raises:
        AssertionError: if anything does not hold.
    """
    complaints = Complaints()
    logging.getLogger("ray_weightsync").addHandler(complaints)
    try:
        fleet = await FakeFleet(REPLICAS, timeouts=TIMEOUTS, on_failure=policy, transport=host).attach()
        life = Life(fleet)
        for event in events:
            await life.live(event)
        await life.ends_whole()
    finally:
        logging.getLogger("ray_weightsync").removeHandler(complaints)
    if complaints.errors:
        raise complaints.errors[0]
