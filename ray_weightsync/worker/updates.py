"""What an engine worker remembers of an update, and how its workers answer for it together.

Engine-agnostic: the vLLM backend and `TorchEngine` both drive a `WorkerUpdates`. It owns the course of a session (start,
update, finish; what of it counts as complete is said by `record`), and the rule that keeps engines with several workers in step:

    **record, agree, the last rank raises.**  vLLM's executors read replies rank by rank and stop at the first failure. The
    unread replies stay queued, every later reply is one call old, and a torn replica answers "OK" (seen on a real TP 2
    engine). So `start`, `update` and `finish` never raise for anything of ours: they record. `init` (a separate call) lets
    the ranks exchange what they recorded; only the last rank, whose reply is read last, raises - with every rank's words.

It deliberately knows neither how weights get into a model (`ModelLoader`), nor how ranks talk (`Agreement`), nor how bytes
arrive (`Receiver`).

`KeyboardInterrupt`, `SystemExit` and other exceptions that are not `Exception` do escape: they mean that this process is
being ended. To record them would keep a worker alive that its executor wants gone; the engine they leave behind is dead.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ray_weightsync.worker import payload
from ray_weightsync.worker.answering import Then, complaints
from ray_weightsync.worker.course import ByReceivers, Chosen, Course, Delegate, receiver_of
from ray_weightsync.worker.device import has_nccl, told_device
from ray_weightsync.worker.identity import RESIDENT, node_ip, package_version
from ray_weightsync.worker.plans import WorkerPlans
from ray_weightsync.worker.receiver import Receiver
from ray_weightsync.worker.record import Asked, Session
from ray_weightsync.worker.seams import Agreement, ModelLoader

logger = logging.getLogger(__name__)

MARKER = "rws: "
"""Starts the text of every error raised here, so that it is found inside whatever an engine wraps around it."""

_CPU = torch.device("cpu")


class WorkerUpdates:
    """One worker's part in updates. Calls come one at a time, as an engine's RPCs do; it is not thread-safe.

    Args:
        model: The way into this worker's model.
        agreement: How this worker's words reach the other ranks of its engine.
        receivers: One receiver per transport this worker can receive from, by its name on the wire.
        resident: Tells which of ``"weights"`` and ``"kv_cache"`` are in memory now.
        device: Where the model is.
        everyone: How the workers of all data-parallel engines agree on an outcome, where they can. None: as ``agreement``.
    """

    def __init__(
        self,
        model: ModelLoader,
        agreement: Agreement,
        receivers: Mapping[str, Receiver],
        *,
        resident: Callable[[], Sequence[str]] = lambda: RESIDENT,
        device: torch.device = _CPU,
        everyone: Agreement | None = None,
    ) -> None:
        self._model = model
        self._agreement = agreement
        self._everyone = everyone or agreement
        self._receivers = dict(receivers)
        self._resident = resident
        self._device = told_device(device)
        self._nccl = device.type == "cuda" and has_nccl()
        self._plans = WorkerPlans(model)
        self._ours = ByReceivers(model, self._receivers, self._record, self._plans.use)
        self._course: Course = self._ours
        self._prepared: Chosen | None = None
        self._chosen: Chosen | None = None
        self._session: Session | None = None
        self._open = False
        self._epoch = 0
        self._incarnation = uuid.uuid4().hex
        self._node_ip = node_ip()

    # -- calls that answer: all ranks agree, the last one raises ----------------------------------------------------------

    def init(self, info: Mapping[str, Any]) -> None:
        """Carry out one ``init_weight_transfer_engine`` payload: op ``"see"``, ``"judge"``, ``"plan"``, ``"native"`` or
        ``"outcome"``.

        ``"judge"`` only begins what ``"plan"`` finishes: each `describe` in between does a piece of it, so that a request in flight
        waits for milliseconds and not for all of it.

        ``"native"`` gives the next session, of the round and epoch that it names, to a delegate: vLLM's own backend ``backend``, made
        anew with ``init_info``, or used again where that is None. It may block until the sender is met, so the engine has to be paused;
        the other ops are safe while requests are served. Every rank has to receive it.

        Raises:
            ValueError: on the last rank, when any rank has something to complain about: `MARKER`, then each such rank's
                words after ``"rank N: "``, joined by ``"; "``.
        """
        op = info.get("op") if isinstance(info, Mapping) else None
        if op == "native":
            # In two steps: none goes to meet the sender, who waits for all of them, if another cannot.
            told = complaints(self._agreement, info, self._prepare, self._join)
        elif op == "outcome":
            # vLLM returns one data-parallel engine's answer and drops the others'. So whichever answers, answers for all.
            told = complaints(self._everyone, info, self._carry_out)
        else:
            told = complaints(self._agreement, info, self._carry_out)
        if told and self._agreement.rank == self._agreement.world_size - 1:
            raise ValueError(MARKER + "; ".join(told))

    def _carry_out(self, info: Mapping[str, Any]) -> Then:
        op = payload.text(info, "op")
        if op == "see":
            receiver_of(self._receivers, info).see(payload.mapping(info, "probe"))
        elif op in ("judge", "plan"):
            self._require_closed("a plan cannot be checked")
            plan = payload.mapping(info, "plan")
            if op == "plan":
                # Kept only when no rank refused: a worker that lists a plan which another rank cannot load would let the next
                # round skip its preflight.
                return partial(self._plans.keep, self._plans.judged(plan))
            self._plans.judge(plan)
        elif op == "outcome":
            if (words := self._verdict(info)) is not None:
                raise ValueError(words)
        else:
            raise payload.Malformed(f"unknown op {op!r}; this worker knows 'see', 'judge', 'plan', 'native' and 'outcome'")
        return None

    def _prepare(self, info: Mapping[str, Any]) -> Callable[[], None]:
        self._prepared = self._chosen = None
        self._require_closed("a backend cannot be made")
        delegate = receiver_of(self._receivers, {"transport": "native"})
        if not isinstance(delegate, Delegate):
            raise ValueError("this worker's receiver of transport 'native' takes no sessions of its own")
        chosen = Chosen(delegate, payload.text(info, "round"), payload.count(info, "epoch"))
        self._require_current(chosen.epoch)
        delegate.prepare(info)
        return partial(setattr, self, "_prepared", chosen)

    def _join(self, info: Mapping[str, Any]) -> Then:
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            return None  # some rank complained: this one only answers
        prepared.delegate.join()
        return partial(setattr, self, "_chosen", prepared)

    # -- calls that only record --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open a session. Never raises; whatever goes wrong is told by the outcome."""
        over_open = self._open
        self._session = session = Session()
        chosen, self._chosen = self._chosen, None
        self._record("start_weight_update", self._plans.stop_judging)  # the twin is made of what is about to change
        self._open = True
        if over_open:
            session.failures.append("start_weight_update came while an update was open")
            return  # the model is mid-load; finish flushes it
        self._record("start_weight_update", partial(self._begin, session, chosen))

    def _begin(self, session: Session, chosen: Chosen | None) -> None:
        self._course = self._ours
        if chosen is not None:
            session.round, session.epoch = chosen.round, chosen.epoch
            self._course = chosen.delegate.course()
        self._course.start()

    def update(self, info: Mapping[str, Any]) -> None:
        """Receive and load what ``info`` names. Never raises; whatever goes wrong is told by the outcome.

        Args:
            info: An ``update_weights`` payload: ``transport``, ``round``, ``epoch``, ``plan`` (digest), ``limit_s`` (seconds
                that a receiver may wait for the sender), and what the transport needs.
        """
        if not self._open or self._session is None:
            self._session = Session(failures=["update_weights came without start_weight_update"], finished=True)
            return
        session = self._session
        session.updates += 1
        if session.updates > 1 and not self._course.many_updates:
            session.failures.append("update_weights came twice in one session")
            return  # a group is joined once
        # Nothing is loaded into a model that is not ready for it, and others may wait for what goes through here; finish flushes.
        self._record("update_weights", partial(self._course.drop if session.failures else partial(self._load, session), info))

    def _load(self, session: Session, info: Mapping[str, Any]) -> None:
        named = payload.text(info, "round"), payload.count(info, "epoch")
        plan, transport = payload.text(info, "plan"), payload.text(info, "transport")
        if self._course is not self._ours and transport != "native" and session.updates == 1:
            # The round that chose the delegate was given up before it began; this session is another's.
            self._course.finish()
            self._course, session.round = self._ours, None
            self._course.start()
        if session.round is not None and named != (session.round, session.epoch):
            begun = f"round {session.round} of epoch {session.epoch}"
            raise ValueError(f"this update is of round {named[0]} of epoch {named[1]}, the session was begun for {begun}")
        if session.plan not in (None, plan):
            raise ValueError(f"this update is of plan {plan}, the session's first was of plan {session.plan}")
        (session.round, session.epoch), session.plan = named, plan
        payload.limit_s(info)
        self._require_current(named[1])
        self._epoch = named[1]
        receiver_of(self._receivers, info)
        session.received = self._course.update(self._plans.use(plan), info)

    def finish(self) -> None:
        """Close the session: the model is complete, or flushed, and ready for the next start. Never raises."""
        if not self._open or self._session is None:
            self._session = Session(failures=["finish_weight_update came without start_weight_update"], finished=True)
            return
        session = self._session
        self._record("finish_weight_update", self._course.finish)
        session.finished = True
        self._open = False

    def _record(self, verb: str, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:
            # The traceback belongs into the engine's log: the words that travel are for whoever sent the weights.
            logger.warning("rank %d: %s failed; the outcome of this round will say so", self._agreement.rank, verb, exc_info=True)
            assert self._session is not None
            self._session.failures.append(f"{verb}: {payload.words_of(error)}")

    def _require_closed(self, what: str) -> None:
        if self._open:
            raise ValueError(f"{what} while an update is open; call finish_weight_update first")

    def _require_current(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise ValueError(f"epoch {epoch} of this update is older than {self._epoch}, which this worker has seen")

    # -- what holds --------------------------------------------------------------------------------------------------------

    def _verdict(self, info: Mapping[str, Any]) -> str | None:
        asked = Asked.from_payload(info)
        if self._session is None:
            return f"round {asked.round} is not known here: no update has been started in this worker"
        return self._session.verdict(asked)

    def describe(self, nonce: str) -> dict[str, Any]:
        """What this worker is and holds, as plain JSON types, with ``nonce`` echoed. Never raises.

        If a plan is being judged here, this call does a piece of it; see `init`.

        Returns:
            ``nonce``, ``rank``, ``world_size``, ``attesting`` (workers that an outcome here speaks for), ``package_version``, ``plans``
            (digests, oldest first), ``judging`` (digest, if there is more to judge), ``unjudged`` (by plan digest, what the structural
            check could not judge), ``update_open``, ``round`` and ``failure`` of the latest session, ``epoch`` (newest seen),
            ``resident``, ``incarnation`` (new in every process), ``node_ip``, ``pid``, ``device`` (its ``type``, and ``uuid`` of a
            GPU), ``nccl`` (whether nccl4py can be used).
        """
        session = self._session
        failures = list(session.failures) if session else []
        resident: list[str] = []
        judging = None
        try:
            resident = [str(each) for each in self._resident()]
        except Exception as error:
            logger.warning("rank %d cannot tell what is resident", self._agreement.rank, exc_info=True)
            failures.append(f"what is resident is not known: {payload.words_of(error)}")
        try:
            judging = self._plans.advance()
        except Exception as error:
            logger.warning("rank %d cannot go on judging a plan", self._agreement.rank, exc_info=True)
            failures.append(f"a plan could not be judged: {payload.words_of(error)}")
        return {
            "nonce": nonce,
            "rank": self._agreement.rank,
            "world_size": self._agreement.world_size,
            "attesting": self._everyone.world_size,
            "package_version": package_version(),
            "plans": self._plans.digests(),
            "judging": judging,
            "unjudged": self._plans.unjudged(),
            "update_open": self._open,
            "round": session.round if session else None,
            "failure": "; ".join(failures) or None,
            "epoch": self._epoch,
            "resident": resident,
            "incarnation": self._incarnation,
            "node_ip": self._node_ip,
            "pid": os.getpid(),
            "device": dict(self._device),
            "nccl": self._nccl,
        }

    def close(self) -> None:
        """Flush an open session, forget the plans, close the receivers that can be closed. Idempotent; never raises.

        The next session works after a new preflight. The newest epoch stays: a late update of the old session must still
        be refused.
        """
        self._prepared = self._chosen = None
        if self._open:
            self.finish()
        try:
            self._plans.clear()
        except Exception:
            logger.warning("rank %d: what judged a plan could not be ended", self._agreement.rank, exc_info=True)
        for name, receiver in self._receivers.items():
            close = getattr(receiver, "close", None)  # no part of `Receiver`: most hold nothing between updates
            if close is None:
                continue
            try:
                close()
            except Exception:
                logger.warning("rank %d: the %s receiver could not be closed", self._agreement.rank, name, exc_info=True)
