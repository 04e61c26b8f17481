"""How a trainer's weights get into a snapshot and the snapshot to the fleet, or straight to the fleet.

::

    trainer      metadata -> plan -> open ........ pack, digest ......... seal+commit .............. report
    coordinator              |-> allot, preflight (while the sender packs)  |-> pause, update, commit, resume
    with overlap             |-> preflight, pause, start, update (while the sender packs) .. seal -> outcome, commit, resume
    broadcast                |-> preflight, pause, start, group -> update (while the sender sends) .. seal -> outcome, commit, resume
    native                   |-> preflight, pause, init -> start, update, finish (as vLLM's engine asks) .. seal -> outcome, commit, resume
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import ray
import torch

from ray_weightsync.config import Auto, Collective, Host, Native, Transport, version_label
from ray_weightsync.errors import ConfigError, WeightSyncError
from ray_weightsync.fleet.choosing import not_from_gpu
from ray_weightsync.fleet.cluster import Process
from ray_weightsync.fleet.link import CoordinatorLink, CoordinatorLost
from ray_weightsync.fleet.turns import Busy
from ray_weightsync.fleet.values import Opening, Sealed, Settings, Ticket, Way
from ray_weightsync.report import SyncReport
from ray_weightsync.trainer.broadcasting import Broadcasting
from ray_weightsync.trainer.facts import sender_facts
from ray_weightsync.trainer.giving_up import give_up
from ray_weightsync.trainer.live import Kept, LiveSending
from ray_weightsync.trainer.native import EngineMaker, NativeEngines, Relaying, vllm_engine_maker
from ray_weightsync.trainer.staged import StagedWeights
from ray_weightsync.trainer.stock_trainer import stock_engine_maker
from ray_weightsync.transports.host.layout import SlotError
from ray_weightsync.transports.host.writer import SlotWriter
from ray_weightsync.transports.native.patches import Patches, is_patches
from ray_weightsync.weights.packing import Packed
from ray_weightsync.weights.plan import Plan
from ray_weightsync.weights.sources import SourceLike, WeightSource, as_source

logger = logging.getLogger(__name__)


class SnapshotSender:
    """One process's way to the coordinator: packs sources into snapshots. Keeps the slots mapped from round to round.

    Args:
        session: The session's name.
        link: The way to its coordinator.
        settings: The session's. Every wait here is longer than the coordinator's own for the same thing.
        engine_maker: Makes the trainer engine of a native transport: vLLM's own.
    """

    def __init__(
        self,
        session: str,
        link: CoordinatorLink,
        *,
        settings: Settings,
        engine_maker: Callable[[Native], EngineMaker] = vllm_engine_maker,
    ) -> None:
        self._session = session
        self._link = link
        self._settings = settings
        self._timeouts = settings.timeouts
        self._me = Process.this()
        self._writer = SlotWriter()
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._sent_plans: set[str] = set()
        self._engine_maker = engine_maker
        self._native: tuple[Transport, NativeEngines] | None = None

    def send(self, source: SourceLike, *, version: int | str, busy: Busy = "wait") -> SyncReport:
        """Stage and commit; the turn is kept in between."""
        if not (patched := is_patches(source)):
            source = as_source(source)  # which walks a whole module, and is not done twice
        way = self._way(source, patched)
        if (live := self._live(way)) is None:
            return self._send(source, version, busy, way, None)
        with live:
            return self._send(source, version, busy, way, live)

    def _way(self, source: Any, patched: bool) -> Way:
        """How this round goes. The coordinator, which knows the engines, is asked unless it can only be by host memory.

        Raises:
            RoundAborted, FleetTorn: if no transport reaches the engines, or not the one that was asked for.
        """
        asked = self._settings.way
        if asked is not None and isinstance(asked.transport, Host):
            return asked
        if asked is not None and asked.patches and not patched:
            # The way on after a round of patches that failed, and for engines that hold no version yet.
            return Way(transport=self._settings.host, reason="all weights are sent, and this transport sends patches alone")
        facts = sender_facts(source)
        if asked is None and facts.current is None:
            return Way(transport=self._settings.host, reason=f"auto: {not_from_gpu(facts)}")
        way: Way = self._link.ask("choose_transport", facts, limit_s=self._timeouts.connect_s)
        return way

    def _live(self, way: Way) -> LiveSending | None:
        """How the bytes get straight to the engines in this round; None if by a snapshot."""
        transport = way.transport
        if isinstance(transport, Collective):
            if way.stock is None:
                return Broadcasting(self._link, transport, self._timeouts)
            return self._relaying(transport, Native(way.stock), partial(stock_engine_maker, transport, self._timeouts))
        if isinstance(transport, Native):
            return self._relaying(transport, transport, partial(self._engine_maker, transport))
        return None

    def _relaying(self, transport: Transport, native: Native, maker: Callable[[], EngineMaker]) -> Relaying:
        if self._native is None or self._native[0] != transport:  # where each round chooses, the last one may have gone another way
            self._end_native()
            self._native = (transport, NativeEngines(self._link, maker()))
        return Relaying(self._link, native, self._timeouts, self._native[1])

    def _end_native(self) -> None:
        if self._native is not None:
            self._native[1].close()
            self._native = None

    def _send(self, source: SourceLike, version: int | str, busy: Busy, way: Way, live: LiveSending | None) -> SyncReport:
        began = time.monotonic()
        weights, plan, ticket = self._open(source, version, busy, way, live)
        pending: Any = None
        if live is not None or (ticket.address is not None and ticket.address["overlap"]):
            pending = self._link.submit("commit", ticket.snapshot, None, True)
        sealed = self._pack(weights, plan, ticket, began, pending, live)
        if pending is None:
            pending = self._link.submit("commit", ticket.snapshot, sealed, True)
        else:
            try:
                self._link.wait(self._link.submit("seal", ticket.snapshot, sealed, True), "seal", limit_s=self._round_s(plan.num_bytes))
            except (WeightSyncError, CoordinatorLost) as error:
                # The engines may be at it already: the commit's error says what holds now, the seal's does not.
                report: SyncReport = self._committed(pending, ticket, plan.num_bytes)
                if isinstance(error, CoordinatorLost):  # it had sealed, or the bytes were all there for its successor
                    return self._told(report, sealed.stage_s)
                raise
        report = self._committed(pending, ticket, plan.num_bytes)
        return self._told(report, sealed.stage_s)

    def stage(self, source: SourceLike, *, version: int | str, busy: Busy = "wait") -> StagedWeights:
        """Return when the snapshot is sealed and no replica refused it: the trainer may go on."""
        if not isinstance(self._settings.transport, Host | Auto):
            raise ConfigError(
                "stage_weights needs the host transport: with others the engines receive while they are paused, and nothing is kept before",
                hint="send_weights, or attach(..., transport='host')",
            )
        began = time.monotonic()
        weights, plan, ticket = self._open(source, version, busy, None, None)
        sealed = self._pack(weights, plan, ticket, began, None, None)
        self._link.answer(
            self._link.submit("seal", ticket.snapshot, sealed, False),
            "seal",
            round_id=ticket.snapshot,
            limit_s=self._round_s(plan.num_bytes),
        )
        return StagedWeights(
            session=self._session,
            snapshot=ticket.snapshot,
            version=version,
            weights_digest=sealed.digest,
            num_bytes=sealed.num_bytes,
            stage_s=time.monotonic() - began,
        )

    def commit(self, staged: StagedWeights) -> SyncReport:
        """Bring the fleet to a staged snapshot."""
        if not isinstance(staged, StagedWeights):
            raise ConfigError(f"commit_weights takes what stage_weights returned, not {type(staged).__name__}")
        if staged.session != self._session:
            raise ConfigError(f"these weights were staged in session {staged.session!r}, not in {self._session!r}")
        pending = self._link.submit("commit", staged.snapshot, None, False)
        limit_s = self._round_s(staged.num_bytes)  # besides the round of another sender, which it may have to wait for
        report: SyncReport = self._link.answer(pending, "commit", round_id=staged.snapshot, limit_s=limit_s, turns=1)
        return self._told(report, staged.stage_s)

    def close(self) -> None:
        """Unmap the slots, and shut a trainer engine down. Idempotent."""
        self._writer.close()
        self._end_native()

    def _committed(self, pending: Any, ticket: Ticket, num_bytes: int) -> SyncReport:
        report: SyncReport = self._link.answer(pending, "commit", round_id=ticket.snapshot, limit_s=self._round_s(num_bytes))
        return report

    def _open(
        self, source: SourceLike, version: int | str, busy: Busy, way: Way | None, live: LiveSending | None
    ) -> tuple[WeightSource, Plan, Ticket]:
        version_label(version)
        if busy not in ("wait", "raise"):
            raise ConfigError(f"busy must be 'wait' or 'raise', not {busy!r}")
        weights = as_source(source) if live is None else live.source(source)
        plan = self._plan(weights)
        opening = Opening(
            snapshot="",
            version=version,
            plan_digest=plan.digest,
            plan=None,
            node_id=ray.get_runtime_context().get_node_id(),
            busy=busy,
            sender=self._me,
            offer=None if live is None else live.offer,
            way=way,
        )
        # Besides the round of another sender, which it may have to wait for.
        limit_s = self._timeouts.staging_s(plan.num_bytes) + self._round_s(plan.num_bytes)
        ticket = None if plan.digest not in self._sent_plans else self._ticket(opening, limit_s)
        if ticket is None:  # the coordinator does not know this plan, forgot it among others, or is a successor
            ticket = self._ticket(replace(opening, plan=plan.to_wire()), limit_s)
        assert ticket is not None, "it was given the plan"
        self._sent_plans.add(plan.digest)
        return weights, plan, ticket

    def _ticket(self, opening: Opening, limit_s: float) -> Ticket | None:
        """The right to write a snapshot, which is given an id here; None if the coordinator does not know the plan."""
        snapshot = uuid.uuid4().hex
        pending = self._link.submit("open_snapshot", replace(opening, snapshot=snapshot))
        try:
            ticket: Ticket | None = self._link.wait(pending, "open_snapshot", limit_s=limit_s, turns=1)
        except CoordinatorLost as lost:
            logger.warning("the coordinator of %s died when a round was opened; its successor is asked (%s)", self._session, lost)
            # Under another id: one that only seemed to be gone is not to give this one its turn later.
            self._link.ask("abandon", snapshot, "its sender lost the answer", limit_s=limit_s)
            return None if opening.plan is None else self._ticket(opening, limit_s)
        except WeightSyncError:
            raise
        except BaseException as error:  # interrupted while it waited: it must not be given the turn later
            self._link.submit("abandon", snapshot, f"the sender was interrupted: {type(error).__name__}")
            raise
        return ticket

    def _round_s(self, num_bytes: int) -> float:
        return self._timeouts.round_s(num_bytes) + self._timeouts.status_s

    def _plan(self, source: WeightSource) -> Plan:
        """The plan of what the source declares; the last one again if nothing changed (37,000 tensors take a while to lay out)."""
        metadata, of_some = source.metadata(), isinstance(source, Patches)
        key = (of_some, *((each.name, each.dtype, tuple(each.shape)) for each in metadata))
        if key not in self._plans:
            self._plans = {key: Plan.from_metadata(metadata, partial=of_some)}
        return self._plans[key]

    def _pack(self, source: WeightSource, plan: Plan, ticket: Ticket, began: float, pending: Any, live: LiveSending | None) -> Sealed:
        try:
            packed = self._written(source, plan, ticket, live)
        except BaseException as error:
            committed = None if pending is None else partial(self._committed, pending, ticket, plan.num_bytes)
            give_up(self._link, ticket.snapshot, error, live=live, committed=committed, limit_s=self._timeouts.connect_s)
        return Sealed(digest=packed.digest, num_bytes=packed.num_bytes, num_tensors=packed.num_tensors, stage_s=time.monotonic() - began)

    def _written(self, source: WeightSource, plan: Plan, ticket: Ticket, live: LiveSending | None) -> Packed:
        """Pack ``source`` into the slot, send it to whoever is met, or both, as the ticket says."""
        if live is None:
            assert ticket.address is not None, "what does not go straight to the engines lies in a slot"
            return self._writer.write(ticket.address, plan, source, progress_bytes=ticket.progress_bytes)
        if ticket.address is None:
            return live.send(ticket.snapshot, source, plan)

        def fill(payload: torch.Tensor, progress: Callable[[int], None]) -> Packed:
            return live.send(ticket.snapshot, source, plan, kept=Kept(payload, progress, ticket.progress_bytes))

        try:
            return self._writer.fill(ticket.address, plan, fill)
        except (SlotError, OSError) as error:
            if live.begun:
                raise
            logger.warning("snapshot %s is sent and not kept: %s", ticket.snapshot, error)
            return live.send(ticket.snapshot, source, plan)

    def _told(self, report: SyncReport, blocked_s: float) -> SyncReport:
        report = replace(report, trainer_blocked_s=blocked_s)
        logger.info("%s", report.line())
        return report
