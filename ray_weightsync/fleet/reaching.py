"""How a successor finds the engines of the coordinator before it again: each is asked what it is once nothing is under way in it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ray_weightsync.config import Timeouts
from ray_weightsync.engines.resolve import Engine
from ray_weightsync.engines.unreached import Unreached
from ray_weightsync.fleet.journal import ReplicaRecord
from ray_weightsync.fleet.replica import Replica
from ray_weightsync.fleet.states import ReplicaState
from ray_weightsync.protocol.fanout import fan_out
from ray_weightsync.protocol.reading import words

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable

    from ray_weightsync.engines.facts import EngineFacts
    from ray_weightsync.engines.ref import EngineRef
    from ray_weightsync.protocol.channel import Channel

logger = logging.getLogger(__name__)

QUIET_POLL_S = 0.05


class Reach(Protocol):
    """Reaches an engine again; `ray_weightsync.engines.resolve.resolve` is the real one."""

    def __call__(
        self, engine: EngineRef, *, limit_s: float, first: Callable[[Channel], Awaitable[None]] | None = None
    ) -> Coroutine[Any, Any, Engine]: ...


class Reaching:
    """Of one successor.

    Attributes:
        busy: Ids of replicas in which a call of the coordinator before is still under way.
        problems: By replica id, why it could not be asked.

    Args:
        reach: How one engine is reached.
        timeouts: The session's deadlines.
    """

    def __init__(self, reach: Reach, timeouts: Timeouts) -> None:
        self.busy: set[str] = set()
        self.problems: dict[str, str] = {}
        self._reach = reach
        self._timeouts = timeouts

    def limit_s(self, num_bytes: int) -> float:
        """The longest that it may take, in seconds, where the calls that may be under way move ``num_bytes``."""
        return self._timeouts.attach_s + self._quiet_s(num_bytes)

    def _quiet_s(self, num_bytes: int) -> float:
        timeouts = self._timeouts
        return max(timeouts.pause_s, timeouts.for_bytes("update", num_bytes), timeouts.for_bytes("finish", num_bytes))

    def replica(self, record: ReplicaRecord) -> Replica:
        """The replica as it stood. Its engine is reached with the first call, if not before."""
        name = str(record.ref.id)

        async def reached() -> Channel:
            return (await self._reach(record.ref, limit_s=self._timeouts.preflight_s)).channel

        engine = Engine(id=name, label=name, channel=Unreached(name, reached), facts=record.facts, ref=record.ref)
        return Replica(engine, state=ReplicaState(record.state), **record.values)

    async def found(self, replicas: Iterable[Replica], *, num_bytes: int) -> dict[str, EngineFacts]:
        """What each engine tells, by id. Who cannot be asked is missing."""
        asked = {each.id: partial(self._ask, each, num_bytes) for each in replicas if each.state is not ReplicaState.RETIRED}
        limit_s = self.limit_s(num_bytes) + 1  # whoever is late says so itself
        outcomes = await fan_out(asked, what="recovery", limit_s=limit_s, warn_every_s=self._timeouts.warn_every_s)
        for name, failure in outcomes.failures.items():
            error = outcomes.errors.get(name)
            self.problems[name] = words(error) if error is not None else failure.message
            logger.warning("%s could not be reached again: %s", name, self.problems[name])
        return outcomes.answers

    async def _ask(self, replica: Replica, num_bytes: int) -> EngineFacts:
        async def first(channel: Channel) -> None:
            await self._quieten(replica, channel, num_bytes)

        engine = await self._reach(replica.engine.ref, limit_s=self.limit_s(num_bytes), first=first)
        replica.engine = dataclasses.replace(engine, id=replica.id)
        return engine.facts

    async def _quieten(self, replica: Replica, channel: Channel, num_bytes: int) -> None:
        """Have the chains of the coordinator before begin no further step, and wait for the steps that they are at."""
        began, limit_s = time.monotonic(), self._quiet_s(num_bytes)
        while await channel.halt_chains():
            if time.monotonic() - began > limit_s:
                self.busy.add(replica.id)
                replica.left_unanswered(asyncio.ensure_future(_quiet(channel)))
                raise TimeoutError(f"a call of the coordinator before is still under way in it after {limit_s:.1f} s")
            await asyncio.sleep(QUIET_POLL_S)


async def _quiet(channel: Channel) -> None:
    while await channel.halt_chains():
        await asyncio.sleep(1.0)
