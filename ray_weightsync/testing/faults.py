"""`Faults`: what a test holds. It arms faults in the coordinator or in an engine's workers, and takes them out again."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

from ray_weightsync.errors import ConfigError, WeightSyncError
from ray_weightsync.testing.sides import SLICE_S, CoordinatorSide, EngineSide, ProcessGone, Side
from ray_weightsync.testing.spec import FaultNotReached, FaultSpec, Victim

if TYPE_CHECKING:
    from types import TracebackType

    from ray_weightsync.session import WeightSync


class Fault:
    """One injected fault.

    Attributes:
        spec: What it is.
    """

    def __init__(self, fault_id: str, spec: FaultSpec, side: Side) -> None:
        self.spec = spec
        self._id = fault_id
        self._side = side

    def struck(self) -> int:
        """How often it has struck so far, without waiting.

        Raises:
            WeightSyncError: if the process it was armed in is gone.
        """
        return self._side.reached(self._id, 0)[0]

    def wait_reached(self, *, timeout_s: float) -> None:
        """Wait until it has struck: a held call is held, what is ``"late"`` or ``"lost"`` is carried out or about to be.

        A fault that kills the process it was armed in counts as reached when that process is gone.

        Raises:
            FaultNotReached: if it has not after ``timeout_s`` seconds; it stays armed.
            WeightSyncError: if the process it was armed in is gone for another reason.
        """
        began = time.monotonic()
        while True:
            left_s = began + timeout_s - time.monotonic()
            try:
                if self._side.reached(self._id, max(0.0, min(SLICE_S, left_s)))[1]:
                    return
            except ProcessGone:
                if self.spec.kind == "kill" and (self.spec.in_worker or self.spec.victim == "coordinator"):
                    return
                raise
            if left_s <= 0:
                raise FaultNotReached(
                    f"The fault ({self.spec}) was not reached, and is still armed.",
                    phase=self.spec.phase,
                    replicas=(self.spec.replica,),
                    elapsed_s=time.monotonic() - began,
                    limit_s=timeout_s,
                    hint="is the replica a member of the round, and does its engine have that phase?",
                )

    def release(self) -> None:
        """Let go what is held; from now on it holds nothing. Idempotent.

        Raises:
            ConfigError: if this kind of fault holds nothing.
            WeightSyncError: if the process it was armed in is gone, and whatever was held with it.
        """
        if not self.spec.holds:
            raise ConfigError(f"a fault of kind {self.spec.kind!r} holds nothing that could be released; 'hang' and 'late' do")
        self._side.release(self._id)

    def __repr__(self) -> str:
        return f"Fault({self.spec})"


class Faults:
    """The faults of one session, as a context manager: leaving it takes all of them out and releases what hangs.

    The product is as it is, and has no hooks for this. At the level of a replica the coordinator's channel to it gets other methods; inside
    a worker its instances do. A coordinator that was restarted, and a replica that was attached anew, have no faults any more.

    Args:
        sync: The session.
        limit_s: Seconds that the coordinator or an engine may take to answer this kit.

    Raises:
        ConfigError: if ``limit_s`` is not a positive number.
    """

    def __init__(self, sync: WeightSync, *, limit_s: float = 60) -> None:
        if isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not 0 < limit_s < float("inf"):
            raise ConfigError(f"limit_s must be a positive number of seconds, not {limit_s!r}")
        self._limit_s = float(limit_s)
        self._coordinator = CoordinatorSide(lambda: sync.coordinator, limit_s=self._limit_s)
        self._engines: dict[str, EngineSide] = {}

    def inject(
        self,
        replica: str,
        phase: str,
        kind: str,
        *,
        rank: int | None = None,
        times: int = 1,
        seconds: float | None = None,
        carried_out: bool = False,
        silent: bool = False,
        victim: Victim = "replica",
    ) -> Fault:
        """Arm a fault: it strikes the next ``times`` times that the replica comes to ``phase``, in this round or a later one.

        Without ``rank`` it strikes at the coordinator's call to the replica. Phases are ``"preflight"`` (what asks an engine what it is, or
        has it judge a plan), ``"pause"``, ``"mark"``, ``"start"``, ``"update"``, ``"finish"``, ``"outcome"``, ``"commit"`` (the label),
        ``"cache"``, ``"resume"``, and ``"unmark"`` (the old label, put back). A fence pauses and marks as well. Kinds:

        * ``"raise"``: the call fails; the engine never sees it.
        * ``"hang"``: no answer until `Fault.release`. Then the call fails, unseen by the engine, or, with ``carried_out``, reaches it late.
        * ``"late"``: carried out at once, answered on `Fault.release`.
        * ``"lost"``: carried out; the connection breaks before the answer comes. Ray says so in the words it has for an actor that is
          gone, and so does this.
        * ``"slow"``: carried out after ``seconds``.
        * ``"kill"``: the replica's process is ended with SIGKILL at that point; with ``rank``, that worker's; with ``victim``, the
          coordinator's, or any process of the coordinator's node. Then the call goes its way.

        Where a coordinator makes several calls one, they are single calls while something is armed for one of them. A synchronous `LLM` has
        no pause, so between two of them it takes requests: give it none, or arm a rank.

        With ``rank`` it strikes inside that worker; a vLLM engine has to be started with `vllm_engine_args` of this package. Phases are
        ``"start"``, ``"load"`` (half way), ``"finish"`` and ``"outcome"``; kinds are ``"raise"``, ``"hang"`` (for 10 minutes at most),
        ``"slow"``, ``"kill"`` (in the other phases too), and in ``"load"`` also ``"corrupt"``: one byte of one tensor is flipped behind the
        receiver's checks, in this worker alone. The receiver then reports the digest of what it really handed over, and the outcome
        refuses the replica. With ``silent`` it reports what it was told, as the host transport's receiver does: that one trusts a sealed
        snapshot in its node's memory, and no worker hashes it again, so nothing finds this but a look at the outputs.

        Args:
            replica: The replica's id, as in reports.
            phase: See above.
            kind: See above.
            rank: Strike inside this worker.
            times: How often.
            seconds: Of ``"slow"``.
            carried_out: Of ``"hang"``.
            silent: Of ``"corrupt"``.
            victim: Of ``"kill"``: ``"replica"``, ``"coordinator"``, or a process id.

        Raises:
            ConfigError: naming the argument and what is allowed, or what the engine has to be started with.
            WeightSyncError: if the coordinator or the engine does not answer, or is gone.
        """
        spec = FaultSpec(
            replica=replica,
            phase=phase,
            kind=kind,
            rank=rank,
            times=times,
            seconds=seconds,
            carried_out=carried_out,
            silent=silent,
            victim=victim,
        )
        side: Side = self._engine(replica) if spec.in_worker else self._coordinator
        fault_id = uuid.uuid4().hex
        side.arm(fault_id, spec)
        return Fault(fault_id, spec, side)

    def clear(self) -> None:
        """Take every fault out again, and release what hangs. Processes that are gone are passed over. Idempotent.

        Raises:
            WeightSyncError: if a process did not answer; all were asked. Its faults may still be armed.
        """
        sides: list[Side] = [self._coordinator, *self._engines.values()]
        self._engines = {}
        problems: list[WeightSyncError] = []
        for side in sides:
            try:
                side.disarm()
            except WeightSyncError as error:
                problems.append(error)
        if len(problems) == 1:
            raise problems[0]
        if problems:
            replicas = tuple(name for problem in problems for name in problem.replicas)
            raise WeightSyncError("Faults may still be armed:\n" + "\n".join(map(str, problems)), replicas=replicas)

    def __enter__(self) -> Faults:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.clear()
        except WeightSyncError as problem:
            if error is None:
                raise
            error.add_note(f"Afterwards the fault kit could not be taken out: {problem}")

    def _engine(self, replica: str) -> EngineSide:
        if replica not in self._engines:
            ref, facts = self._coordinator.engine_of(replica)
            self._engines[replica] = EngineSide(ref, facts, label=replica, limit_s=self._limit_s)
        return self._engines[replica]
