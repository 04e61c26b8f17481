"""Before anything changes: is every member who we think it is, able to take this plan, and in sight of the bytes?

One cheap call per replica and round; a plan is sent, and judged on the workers' meta twins, once per incarnation, while requests go on.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray_weightsync.config import Timeouts, is_tombstone
from ray_weightsync.engines.headers import Headers, headers_of, problems_of
from ray_weightsync.engines.resolve import OUR_ARGS, inspect
from ray_weightsync.errors import CallFailure, EngineCallError
from ray_weightsync.fleet.claims import Claims
from ray_weightsync.fleet.replica import Left, Replica
from ray_weightsync.fleet.states import ReplicaEvent, ReplicaState
from ray_weightsync.fleet.steps import StepFailed, Timeline, step
from ray_weightsync.fleet.stock import flush, ruined, unserved
from ray_weightsync.protocol.channel import FINISH, INIT
from ray_weightsync.protocol.reading import died, words
from ray_weightsync.weights.plan import Plan

if TYPE_CHECKING:
    from ray_weightsync.engines.facts import EngineFacts

PHASE = "preflight"

JUDGING_S_PER_TENSOR = 0.005
"""What judging a tensor may take on an engine that is busy with long steps: 0.1 ms of work, 4 ms of it between two steps."""


@dataclass(frozen=True)
class Source:
    """Where a replica is to have the bytes from, which it has to prove to see.

    Attributes:
        transport: The receiver that is asked.
        probe: What it is shown, or a function that fetches it.
        store: Identity of a snapshot store, or of what else is seen once per incarnation; None for what is new in every round.
    """

    transport: str
    probe: dict[str, Any] | Callable[[], Awaitable[dict[str, Any]]]
    store: str | None = None


def refusal(facts: EngineFacts, served: str | None = None) -> str | None:
    """Why an engine cannot take part in a round that starts now, or None. Pure.

    Args:
        facts: The engine's.
        served: The backend whose stock engines the round can bring, if any.
    """
    if facts.kind == "client":
        return None  # it tells nothing of itself; its own answers to the calls below are all there is
    if not facts.in_step:
        return f"its workers' replies are out of step with the calls ({facts.step_problem}); start a new engine in its place"
    if facts.backend is None:
        return f"it has no weight-transfer backend; {OUR_ARGS}"
    if (why := unserved(facts, served)) is not None:
        return why
    for worker in facts.workers:
        if "weights" not in worker.resident:
            return f"worker {worker.rank} sleeps without its weights; wake it up with tags=['weights'] first"
        if worker.update_open:
            return f"worker {worker.rank} has an update open that another client started; attach(..., take_over=True) flushes it"
    return None


async def look(replica: Replica, *, timeouts: Timeouts, timeline: Timeline) -> None:
    """Learn the replica's facts anew.

    Raises:
        StepFailed: if it cannot be asked.
    """
    began = time.monotonic()
    try:
        facts = await told(replica, limit_s=timeouts.preflight_s)
    finally:
        timeline.add(replica.id, PHASE, began, time.monotonic())
    learn(replica, facts)


async def told(replica: Replica, *, limit_s: float) -> EngineFacts:
    """What the replica's engine is and holds now, with a fresh nonce that every rank must echo.

    Raises:
        StepFailed: if it cannot be asked.
    """
    try:
        return await inspect(replica.engine, nonce=secrets.token_hex(8), limit_s=limit_s)
    except EngineCallError as error:
        (failure,) = error.failures.values()
        raise StepFailed(PHASE, failure, limit_s) from error


def learn(replica: Replica, facts: EngineFacts) -> None:
    """Keep what the engine told. Another incarnation means that it was restarted behind its handle: it holds no weights of ours."""
    if facts.incarnation != replica.engine.facts.incarnation:
        replica.forget_incarnation()
        if replica.state is not ReplicaState.JOINING:
            replica.happen(ReplicaEvent.FAIL, error="the engine restarted; it holds no weights of this session")
    replica.engine = replica.engine.with_facts(facts)
    if facts.paused is False:
        replica.asleep_tags, replica.owner_paused = set(), False  # whoever woke it up or resumed it, it runs
    if is_tombstone(facts.version):
        replica.found_torn()
    elif not replica.holds_weights and "weights" not in replica.asleep_tags:
        # At which level somebody put it to sleep is not known, so whether they come back is not either.
        replica.brought = replica.attested = False


async def check(
    replica: Replica,
    plan: Plan,
    *,
    source_for: Callable[[Replica], Awaitable[Source]],
    served: str | None,
    claims: Claims,
    timeouts: Timeouts,
    timeline: Timeline,
) -> None:
    """Everything that can be asked of one replica before a round touches it.

    Args:
        replica: The replica.
        plan: What will be sent.
        source_for: Finds where the replica is to have the bytes from.
        served: The backend whose stock engines the round can bring, if any.
        claims: This session's: an engine that restarted may be another session's by now.
        timeouts: Deadlines; each call here has ``preflight_s``.
        timeline: Where the seconds are written.

    Raises:
        StepFailed: if the replica refuses, cannot see the bytes, or does not answer.
    """
    await look(replica, timeouts=timeouts, timeline=timeline)
    await claims.follow([replica])
    if replica.state is ReplicaState.RETIRED:
        raise StepFailed.refused(PHASE, str(replica.error), timeouts.preflight_s)
    if replica.state is ReplicaState.QUARANTINED and any(worker.update_open for worker in replica.engine.facts.workers):
        # Left by a round of ours that broke inside: our backend's finish completes or flushes, and never raises.
        await step(replica, PHASE, FINISH, limit_s=timeouts.finish_s, timeline=timeline)
        await look(replica, timeouts=timeouts, timeline=timeline)
    if replica.engine.facts.is_stock and replica.left is not Left.NOTHING:
        if (why := ruined(replica)) is not None:
            raise StepFailed(PHASE, CallFailure(message=why, kind="out_of_step", elapsed_s=0.0), timeouts.preflight_s)
        await flush(replica, timeouts=timeouts, timeline=timeline)
    if (why := refusal(replica.engine.facts, served)) is not None:
        kind = "raised" if replica.engine.facts.in_step else "out_of_step"
        raise StepFailed(PHASE, CallFailure(message=why, kind=kind, elapsed_s=0.0), timeouts.preflight_s)
    source = await source_for(replica)
    if replica.engine.facts.is_stock:
        await _compared(replica, plan, limit_s=timeouts.preflight_s, timeline=timeline)
        return
    if source.store is None or source.store not in replica.stores:
        probe = source.probe if isinstance(source.probe, dict) else await source.probe()
        info = {"op": "see", "transport": source.transport, "probe": probe}
        await step(replica, PHASE, INIT, info, limit_s=timeouts.preflight_s, timeline=timeline)
        if source.store is not None:
            replica.stores.add(source.store)
    forgotten = any(plan.digest not in worker.plans for worker in replica.engine.facts.workers)
    if forgotten or plan.digest not in replica.plans:
        wire = plan.to_wire()
        if replica.engine.facts.workers:
            await step(replica, PHASE, INIT, {"op": "judge", "plan": wire}, limit_s=timeouts.preflight_s, timeline=timeline)
            await _judged(replica, plan, timeouts=timeouts, timeline=timeline)
        await step(replica, PHASE, INIT, {"op": "plan", "plan": wire}, limit_s=timeouts.preflight_s, timeline=timeline)
        replica.plans.add(plan.digest)


async def _compared(replica: Replica, plan: Plan, *, limit_s: float, timeline: Timeline) -> None:
    """Compare the plan with the checkpoint that a stock engine was started from, which is read once per incarnation.

    Raises:
        StepFailed: if it is not that one's, tensor for tensor.
    """
    if replica.headers is None:
        began = time.monotonic()
        try:
            replica.headers = await headers_of(replica.engine.channel, limit_s=limit_s)
        except TimeoutError:
            replica.headers = Headers(problem=f"its checkpoint's headers were not read within {limit_s:.1f} s")
        except Exception as error:
            failure = CallFailure(message=words(error), kind="died" if died(error) else "raised", elapsed_s=time.monotonic() - began)
            raise StepFailed(PHASE, failure, limit_s) from error
        finally:
            timeline.add(replica.id, PHASE, began, time.monotonic())
    if problems := problems_of(plan, replica.headers):
        message = f"the plan is not that of the checkpoint that the engine was started from: {'; '.join(problems)}"
        raise StepFailed.refused(PHASE, message, limit_s)


def judging_s(plan: Plan) -> float:
    """The seconds that a plan of so many tensors adds to the deadline of a preflight."""
    return JUDGING_S_PER_TENSOR * len(plan.tensors)


async def _judged(replica: Replica, plan: Plan, *, timeouts: Timeouts, timeline: Timeline) -> None:
    """Wait until every worker has judged the plan. Each look lets it judge for some ms, so that its requests go on in between.

    Raises:
        StepFailed: if one is not done in time.
    """
    limit_s = timeouts.preflight_s + judging_s(plan)
    began = time.monotonic()
    while True:
        asked = time.monotonic()
        await look(replica, timeouts=timeouts, timeline=timeline)
        busy = [worker.rank for worker in replica.engine.facts.workers if worker.judging == plan.digest]
        if not busy:
            return
        if (elapsed_s := time.monotonic() - began) > limit_s:
            message = f"its workers {busy} are still judging the plan (tensors: {len(plan.tensors)})"
            raise StepFailed(PHASE, CallFailure(message=message, kind="unanswered", elapsed_s=elapsed_s), limit_s)
        await asyncio.sleep(time.monotonic() - asked)  # half of the engine's time stays for its requests
