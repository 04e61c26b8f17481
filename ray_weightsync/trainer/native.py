"""The trainer's part in a round over one of vLLM's own data planes: a trainer engine of vLLM's sends, through a client that is a proxy.

The engine is made when the engines are paused and marked, and is kept for as long as their processes and the plan stay the same. It runs
on a thread of its own: where nobody can end its waits, the thread is left behind and the engine with it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

import torch

from ray_weightsync.config import Native, Timeouts
from ray_weightsync.errors import RoundAborted
from ray_weightsync.fleet.link import CoordinatorLink, CoordinatorLost
from ray_weightsync.fleet.relay import NativeMembers
from ray_weightsync.protocol.channel import FINISH, INIT, START, UPDATE
from ray_weightsync.protocol.client import VLLMWeightSyncClient
from ray_weightsync.protocol.messages import Payload
from ray_weightsync.trainer.live import END_S, Kept, LiveSending
from ray_weightsync.transports.native.backends import traits
from ray_weightsync.transports.native.engine import TrainerEngine, VllmEngines
from ray_weightsync.transports.native.patches import Patches
from ray_weightsync.transports.native.source import RoundSource
from ray_weightsync.weights.packing import Packed
from ray_weightsync.weights.plan import Plan
from ray_weightsync.weights.sources import SourceLike, WeightSource

logger = logging.getLogger(__name__)

EngineMaker = Callable[[VLLMWeightSyncClient, RoundSource, NativeMembers], TrainerEngine]
"""Makes a trainer engine for these members, and has their ends set up through the client. It may block until all have joined."""


class RelayClient:
    """The four verbs of a trainer engine's client: each is carried out by every member of the round, through the coordinator."""

    def __init__(self, link: CoordinatorLink) -> None:
        self._link = link
        self._round = ""
        self._limit_s = 0.0
        self.finished = False

    def begin(self, round_id: str, limit_s: float) -> None:
        """The next calls are this round's. Each waits at most ``limit_s`` seconds."""
        self._round, self._limit_s, self.finished = round_id, limit_s, False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call(INIT, init_info)

    def set_up_again(self) -> None:
        """The members use what an earlier round set up."""
        self._call(INIT, None)

    def start_weight_update(self) -> None:
        self._call(START, None)

    def update_weights(self, update_info: Payload) -> None:
        self._call(UPDATE, update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The label is the coordinator's to give, when all are attested."""
        self._call(FINISH, None)
        self.finished = True

    def _call(self, verb: str, payload: Payload | None) -> None:
        self._link.wait(self._link.submit("native_call", self._round, verb, payload), "native_call", limit_s=self._limit_s)


class _Driven:
    """A trainer engine, the processes and the plan that it was made for, and what it holds on to."""

    def __init__(self, key: str, link: CoordinatorLink, make: EngineMaker) -> None:
        self.key = key
        self._make = make
        self.client = RelayClient(link)
        self.source = RoundSource()
        self.engine: TrainerEngine | None = None
        self._cuda: Any = torch.cuda  # partly untyped
        self._gpu: int | None = self._cuda.current_device() if self._cuda.is_available() else None

    def begin(self, round_id: str, source: WeightSource, plan: Plan, limit_s: float) -> None:
        """What is sent next, and the seconds that one call of it may take. To be called on the thread that sends."""
        if self._gpu is not None:  # what this thread's stream still does to the weights is not waited for by the engine's thread
            self._cuda.current_stream(self._gpu).synchronize()
        self.client.begin(round_id, limit_s)
        self.source.begin(source, plan)

    def run(self, members: NativeMembers, over: Future[Packed]) -> None:
        """Send the round, unless somebody fails ``over`` before: then the engine is shut down as soon as it comes back."""
        try:
            if self._gpu is not None:
                self._cuda.set_device(self._gpu)  # of this thread: a new one begins with GPU 0
            settle(over, self._send(members))
        except BaseException as error:  # told to whoever waits
            settle(over, error)
        if over.exception() is not None:
            self.shutdown()

    def _send(self, members: NativeMembers) -> Packed:
        if self.engine is None:
            self.engine = self._make(self.client, self.source, members)
        elif not members.stock:
            self.client.set_up_again()
        self.engine.send_weights()
        if not self.client.finished:
            raise RoundAborted("The trainer engine came to its end without having finished the update.", phase="update")
        return self.source.packed()

    def abort(self, reason: str) -> None:
        if self.engine is not None:
            self.engine.abort(reason)

    def shutdown(self) -> None:
        engine, self.engine = self.engine, None
        if engine is None:
            return
        try:
            engine.shutdown()
        except Exception as error:
            logger.warning("a trainer engine could not be shut down: %s", error)


class NativeEngines:
    """The trainer engine of one sender, kept from round to round.

    Args:
        link: The way to the coordinator.
        make: Makes one.
    """

    def __init__(self, link: CoordinatorLink, make: EngineMaker) -> None:
        self._link = link
        self._make = make
        self._kept: _Driven | None = None
        self._closed = False
        self._lock = threading.Lock()

    def take(self, key: str) -> _Driven:
        """The engine that was made for ``key``; one that is to be made if there is none."""
        with self._lock:
            driven, self._kept = self._kept, None
        if driven is not None and driven.key != key:
            _ending(driven)  # not waited for: engines are paused
            driven = None
        return driven or _Driven(key, self._link, self._make)

    def keep(self, driven: _Driven) -> None:
        """It has sent a whole round, and may send the next one; unless this was closed meanwhile."""
        with self._lock:
            if not self._closed:
                self._kept = driven
                return
        _ending(driven)

    def close(self) -> None:
        """Have the engine shut down, which is waited for at most `END_S` seconds; one that sends is when it has sent. Idempotent."""
        with self._lock:
            self._closed, driven, self._kept = True, self._kept, None
        if driven is None:
            return
        ending = _ending(driven)
        ending.join(END_S)
        if ending.is_alive():
            logger.warning("a trainer engine does not shut down; its thread is left behind")


class Relaying(LiveSending):
    """One round's sending by a trainer engine.

    Args:
        link: The way to the coordinator.
        native: The backend.
        timeouts: The session's deadlines.
        engines: Where the engine is kept.
    """

    def __init__(self, link: CoordinatorLink, native: Native, timeouts: Timeouts, engines: NativeEngines) -> None:
        super().__init__(link, timeouts)
        self._native = native
        self._engines = engines

    @property
    def offer(self) -> Native:
        """The backend alone: options are of no use to engines."""
        return Native(self._native.backend)

    def source(self, given: SourceLike) -> WeightSource:
        """A source of what the caller gave: patches, for a backend that sends nothing else."""
        return super().source(given) if traits(self._native.backend).needs_source else Patches(given)

    def _told(self, source: WeightSource, plan: Plan, kept: Kept | None) -> Packed:
        return source.packed() if isinstance(source, Patches) else super()._told(source, plan, kept)

    def _send(self, round_id: str, members: NativeMembers, source: WeightSource, plan: Plan, kept: Kept | None) -> Packed:
        limit_s = self._timeouts.round_s(plan.num_bytes)
        over: Future[Packed] = Future()
        self._watch_for(
            round_id,
            lambda why: settle(over, RoundAborted("The engines do not go on with this round.", phase="update", engine_message=why)),
            lambda error: settle(over, CoordinatorLost(str(error))),
        )
        driven = self._engines.take(members.key)  # not before: from here on it is this call's to end
        try:
            driven.begin(round_id, source, plan, limit_s)
            threading.Thread(target=driven.run, args=(members, over), name="rws-native-send", daemon=True).start()
        except BaseException:
            _ending(driven)
            raise
        try:
            packed = over.result(limit_s)
        except BaseException as error:  # also one that interrupts the wait: nobody goes on for it
            engine = f"The trainer engine of {self._native.backend!r}"
            late = RoundAborted(f"{engine} did not come to an end; its thread is left behind.", phase="update", limit_s=limit_s)
            settle(over, late if isinstance(error, TimeoutError) else error)
            if over.exception() is None:  # it came to its end in this very moment: nobody else shuts it down
                _ending(driven)
            driven.abort(str(over.exception() or error))
            raise (over.exception() or error) from None
        self._engines.keep(driven)
        return packed


def vllm_engine_maker(native: Native) -> EngineMaker:
    """Makes vLLM's own trainer engines.

    Raises:
        ConfigError: as of `VllmEngines`.
    """
    engines = VllmEngines(native)
    return lambda client, source, members: engines.make(
        client, source, workers=[len(each.ranks) for each in members.group.members], vllm=members.vllm
    )


def settle(over: Future[Packed], result: Packed | BaseException) -> None:
    """The first result stays."""
    with suppress(InvalidStateError):
        if isinstance(result, BaseException):
            over.set_exception(result)
        else:
            over.set_result(result)


def _ending(driven: _Driven) -> threading.Thread:
    ending = threading.Thread(target=driven.shutdown, name="rws-native-shutdown", daemon=True)
    ending.start()
    return ending
