"""One round whose calls are given by a trainer engine of vLLM's, in the sender's process.

The engine's client is a proxy: each of its verbs is a request to the coordinator, which has every member carry it out, and answers when
all have. Pause, mark, outcome, commit and resume stay the coordinator's own. ::

    sender        make the engine: init ...... send_weights: start, update ..., finish ......... seal
    coordinator   paused, marked | init (a failure here puts all back) | start .. finish | outcome, commit, resume
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ray_weightsync.config import Native, Timeouts, transport_name
from ray_weightsync.errors import CallFailure, ConfigError, RoundAborted
from ray_weightsync.fleet.live import Live
from ray_weightsync.fleet.replica import Left
from ray_weightsync.fleet.shares import own_init_info, own_update_info
from ray_weightsync.fleet.steps import Call, StepFailed
from ray_weightsync.fleet.topology import Group
from ray_weightsync.protocol.channel import FINISH, INIT, SHUTDOWN, START, UPDATE
from ray_weightsync.protocol.messages import Payload
from ray_weightsync.transports.collective.stock_meeting import place_told
from ray_weightsync.transports.native.backends import traits
from ray_weightsync.transports.native.plain import to_plain

if TYPE_CHECKING:
    from ray_weightsync.engines.facts import EngineFacts
    from ray_weightsync.fleet.replica import Replica
    from ray_weightsync.weights.plan import Plan

PHASES = {INIT: "init", START: "start", UPDATE: "update", FINISH: "finish"}

AFTER = {None: (INIT,), INIT: (INIT, START), START: (UPDATE,), UPDATE: (UPDATE, FINISH), FINISH: ()}
"""Which verbs may follow which in one round. Stock engines, which are told of no round, may also be started at once."""

CarryOut = Callable[[str, list[Call]], Awaitable[Any]]
"""Makes a member's calls, given the phase and the calls. `StepFailed` if one fails."""


@dataclass(frozen=True, kw_only=True)
class NativeMembers:
    """Whom a trainer engine is to reach in this round. Picklable.

    Attributes:
        key: A trainer engine that was made for these very processes, ranks and this plan has the same one, and may be used again.
        group: The ranks of the sender and every worker.
        stock: They are on vLLM's own backend, without the worker side of this package.
        vllm: The versions of vLLM in them; None for one that did not say.
    """

    key: str
    group: Group
    stock: bool
    vllm: tuple[str | None, ...] = ()


class Ended(StepFailed):
    """The sender gives no more calls."""


@dataclass(eq=False)
class _Order:
    """One verb that the sender gave, and the members that have not answered it."""

    verb: str
    payload: Payload | None
    waits_for: set[str]
    answers: int = 0


class Relay(Live[NativeMembers]):
    """The calls of one round, from the sender's trainer engine to every member.

    Attributes:
        limits_s: By verb, the seconds that one call may take.
        limit_s: Seconds from the first call that could be given to the last answer.

    Args:
        native: Which backend.
        plan: What is sent.
        timeouts: The session's deadlines.
        on_group: Told who has which ranks.
    """

    receiver = "native"

    def __init__(self, native: Native, plan: Plan, timeouts: Timeouts, *, on_group: Callable[[str], None] = lambda table: None) -> None:
        super().__init__(on_group=on_group)
        of = traits(native.backend)
        self.backend = self.stock_backend = native.backend
        self.name = self.seen_once = transport_name(native)
        self.attested, self.grouped = of.attested, of.grouped
        self._one_mesh = of.one_mesh
        self.limits_s = {
            INIT: timeouts.connect_s,
            START: timeouts.start_s,
            UPDATE: timeouts.for_bytes("update", plan.num_bytes),
            FINISH: timeouts.for_bytes("finish", plan.num_bytes),
        }
        self.limit_s = sum(self.limits_s.values())
        self._plan = plan
        self._common: Mapping[str, Any] = {}
        self._group: Group | None = None
        self._stock = False
        self._until = 0.0
        self._members: set[str] = set()
        self._order: _Order | None = None
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()

    def probe(self) -> dict[str, Any]:
        """The backend that a worker has to be able to build."""
        return {"backend": self.backend}

    def refusal(self, facts: EngineFacts) -> str | None:
        """A synchronous LLM cannot be kept from requests between two calls; handles of GPU memory need a way that carries them."""
        if facts.kind == "sync":
            return (
                f"it is a synchronous LLM, which has no pause: between the calls of {self.name} it would run requests with half-loaded "
                "weights; hold an AsyncLLM in the actor, or choose transport='host', which makes all of them in one turn"
            )
        if facts.kind in ("http", "client") and self.backend == "ipc":
            return (
                "handles of GPU memory reach a server only as a pickle, which whoever reaches its port could replace: attach the engine by "
                "its actor, or choose another transport"
            )
        return None

    def ranks(self, replicas: Sequence[Replica]) -> Group:
        """See `Live.ranks`. Some backends take the workers of one engine alone."""
        group = super().ranks(replicas)
        deployments = {member.rank_offset for member in group.members}
        if self._one_mesh and len(deployments) > 1:
            words = f"{self.name} reaches one engine, or one data-parallel deployment, and here are {len(deployments)} ({group.table()})"
            raise StepFailed.refused("preflight", f"{words}: choose another transport")
        return group

    # --- the coordinator's side ---------------------------------------------------------------------------------------------

    def _invite(
        self, group: Group, replicas: Sequence[Replica], common: Mapping[str, Any]
    ) -> tuple[NativeMembers, dict[str, dict[str, Any]]]:
        self._group, self._common = group, common
        self._members = {replica.id for replica in replicas}
        self._stock = any(replica.engine.facts.is_stock for replica in replicas)
        self._until = time.monotonic() + self.limit_s
        # The engine itself says what each update holds.
        versions = tuple(replica.engine.facts.vllm_version for replica in replicas)
        members = NativeMembers(key=self._key(group, replicas), group=group, stock=self._stock, vllm=versions)
        return members, {replica.id: {} for replica in replicas}

    def _key(self, group: Group, replicas: Sequence[Replica]) -> str:
        # One that does not tell its incarnation may be another process by the next round.
        processes = [(replica.id, replica.engine.facts.incarnation or uuid.uuid4().hex) for replica in replicas]
        known = [self.backend, self._stock, self._plan.digest, group.table(), processes]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()

    async def set_up(self, replica: Replica, carry_out: CarryOut) -> None:
        """Carry out what the sender's engine asks of a member before it starts; the weights stay as they are.

        Raises:
            Ended: if the sender gave up.
            StepFailed: if the member fails. Then nobody is to start.
        """
        try:
            while (order := await self._given(replica.id, "init")).verb != START:
                await self._carry_out(order, replica, carry_out)
        except StepFailed as failed:
            self.end(f"{replica.id}: {failed}")
            raise

    async def update(self, replica: Replica, carry_out: CarryOut) -> None:
        """Carry out on a member what the sender's engine asks from start to finish.

        Raises:
            StepFailed: if the member fails, or the sender gave up.
        """
        verb: str | None = None
        while verb != FINISH:
            order = await self._given(replica.id, "update")
            await self._carry_out(order, replica, carry_out)
            verb = order.verb

    async def _carry_out(self, order: _Order, replica: Replica, carry_out: CarryOut) -> None:
        if order.verb != INIT:
            replica.left = Left.UNKNOWN
        try:
            await carry_out(PHASES[order.verb], self._calls(order, replica))
        except StepFailed as failed:
            words = failed.failure.message
            if self.grouped and failed.failure.kind == "unanswered":
                words += f": nothing ends a wait in a group of vLLM's own {self.backend}; kill the engine if it stays stuck"
            if order.verb == INIT and (place := place_told(order.payload, self.name)):
                words += f" ({place})"
            raise StepFailed(failed.phase, replace(failed.failure, message=words), failed.limit_s, failed.goes_on) from failed
        if order.verb == INIT:
            replica.holds_end = True
        else:
            replica.left = Left.NOTHING if order.verb == FINISH else Left.OPEN
        order.waits_for.discard(replica.id)
        order.answers += 1
        self._notify()

    async def _given(self, name: str, phase: str) -> _Order:
        """The verb that a member is to carry out next."""
        while True:
            if self._ended.done():
                message = self._ended.result() or "the round is over"
                raise Ended.refused(phase, message, self.limit_s)
            if (order := self._order) is not None and name in order.waits_for:
                return order
            try:
                await asyncio.wait_for(self._changed.wait(), self._until - time.monotonic())
            except TimeoutError:
                failure = CallFailure(message="the sender's engine asked for nothing more", kind="raised", elapsed_s=self.limit_s)
                raise Ended(phase, failure, self.limit_s) from None

    def _calls(self, order: _Order, replica: Replica) -> list[Call]:
        limit_s = min(self.limits_s[order.verb], max(0.0, self._until - time.monotonic()))
        phase, payload = PHASES[order.verb], order.payload
        if order.verb in (START, FINISH):
            return [Call(phase, limit_s, order.verb)]
        assert self._group is not None, "nobody is given calls before the group is made"
        if order.verb == INIT and payload is not None:
            payload = own_init_info(payload, self._group, replica.id)
        elif payload is not None:
            payload = own_update_info(payload, self._group, replica.id)
        if self._stock:
            again = [Call(phase, limit_s, SHUTDOWN)] if order.verb == INIT and replica.engine.channel.supports(SHUTDOWN) else []
            return [*again, Call(phase, limit_s, order.verb, (payload,))]
        # The workers' own deadline ends before ours: it is they who know how far they had come.
        info = {"backend": self.backend, "round": self._common["round"], "epoch": self._common["epoch"], "limit_s": 0.8 * limit_s}
        if order.verb == INIT:
            return [Call(phase, limit_s, INIT, ({**info, "op": "native", "init_info": payload},))]
        return [Call(phase, limit_s, UPDATE, ({**self._common, **info, "update_info": to_plain(payload)},))]

    # --- the sender's side --------------------------------------------------------------------------------------------------

    async def call(self, verb: str, payload: Payload | None = None) -> None:
        """Have every member that is left carry out a verb of the protocol.

        Args:
            verb: ``init_weight_transfer_engine``, ``start_weight_update``, ``update_weights`` or ``finish_weight_update``.
            payload: What the trainer engine gave with it. None with init: what an earlier round set up is used again.

        Raises:
            RoundAborted: if nobody is left, the round is over, or, of a group, as soon as one member is lost.
            ConfigError: for a payload that cannot be shared out, or a verb out of its order.
        """
        async with self._turn:
            if not self._ended.done():
                self._require_in_order(verb, payload)
            order = _Order(verb, payload, set(self._members))
            self._order = order
            self._notify()
            while order.waits_for and not self._ended.done():
                await self._changed.wait()
            if order.waits_for or not order.answers:
                raise RoundAborted("The engines do not go on with this round.", phase=PHASES[verb], engine_message=self._ended.result())

    def _require_in_order(self, verb: str, payload: Payload | None) -> None:
        before = None if self._order is None else self._order.verb
        if verb not in AFTER[before] and not (self._stock and (before, verb) == (None, START)):
            raise ConfigError(
                f"the trainer engine calls {verb} after {before or 'nothing'}: a round has one session, in the order of {', '.join(PHASES)}"
            )
        assert self._group is not None, "the sender was told whom to reach"
        if payload is not None:  # what cannot be shared out is refused before anybody has a part of it
            own = own_init_info if verb == INIT else own_update_info
            for member in self._group.members:
                own(payload, self._group, member.id)

    def lose(self, replica: str, why: str) -> None:
        """A member will not receive. The others go on without it, unless they are in one group that it was lost from."""
        self._members.discard(replica)
        order = self._order
        if not self._members or (self.grouped and (order is None or order.verb != FINISH)):
            self.end(f"{replica}: {why}")
        elif order is not None:
            order.waits_for.discard(replica)
            self._notify()

    def end(self, why: str | None = None) -> None:
        """Nothing more is to be sent: whoever waits for a call or an answer is told. Idempotent."""
        super().end(why)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
