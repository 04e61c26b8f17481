"""What the two public clients share: one blocking call to all engines, one error that tells of all of them.

The calls run on an event loop of this package's own, on a daemon thread, so that a client also works inside an async actor, whose loop
its caller blocks, and so that an engine that never answers does not keep the process alive.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ray_weightsync.config import PauseMode, require_choice, version_label
from ray_weightsync.errors import CallFailure, ConfigError, EngineCallError, UnsupportedError
from ray_weightsync.protocol import channel as verbs
from ray_weightsync.protocol import offsets
from ray_weightsync.protocol.channel import Channel
from ray_weightsync.protocol.fanout import Outcomes, fan_out
from ray_weightsync.protocol.messages import Payload, PerReplica
from ray_weightsync.protocol.reading import died, words

logger = logging.getLogger(__name__)

Call = Callable[[], Awaitable[Any]]


class BlockingClient(ABC):
    """The verbs of `VLLMWeightSyncClient` and their companions, each a fan-out that blocks until every engine has answered.

    Every call raises `EngineCallError` if an engine fails, dies or does not answer within ``timeout`` seconds, after **all** engines
    have answered or missed that deadline; `UnsupportedError`, which is one, if an engine does not have the verb: then none was asked.
    Verbs that ask something return a list with one answer per engine, in the order in which the client was given them.
    """

    def __init__(self, channels: Sequence[Channel], *, timeout: float) -> None:
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
            raise ConfigError(f"timeout must be a positive number of seconds, not {timeout!r}")
        if not channels:
            raise ConfigError("no engines were given; a client without any would report success for nothing")
        self.timeout = float(timeout)
        self._channels = tuple(channels)

    @property
    def labels(self) -> tuple[str, ...]:
        """The engines' names in errors, in order."""
        return tuple(channel.label for channel in self._channels)

    def __repr__(self) -> str:
        return f"{type(self).__name__}([{', '.join(self.labels)}], timeout={self.timeout:g})"

    def init_weight_transfer_engine(self, init_info: Payload | PerReplica) -> None:
        """Set up the engines' end of a data plane.

        Args:
            init_info: The backend's fields, plain data. `PerReplica` gives each engine its own. Where several engines get one for
                vLLM's ``nccl`` or ``sparse_nccl``, its ``rank_offset`` is the first one's, and each later one gets its own.

        Raises:
            ConfigError: if the group's ``world_size`` is not that of these engines; nothing was sent.
            TypeError: if a payload is not plain data; nothing was sent.
            EngineCallError: see the class.
        """
        if len(self._channels) > 1 and not isinstance(init_info, PerReplica | list) and offsets.joins_a_group(init_info):
            self._require(verbs.INIT)
            ranks: dict[str, Any] = {"world_sizes": self.get_world_size(), "places": self._data_parallel_places()}
            init_info = PerReplica(offsets.spread(init_info, labels=self.labels, **ranks))
        self._send(verbs.INIT, init_info)

    def start_weight_update(self) -> None:
        """Open an update session on every engine."""
        self._ask(verbs.START)

    def start_draft_weight_update(self) -> None:
        """Open an update session for the speculative draft model of every engine."""
        self._ask(verbs.START_DRAFT)

    def update_weights(self, update_info: Payload | PerReplica) -> None:
        """Have every engine receive one chunk; blocks until all have it.

        Args:
            update_info: The backend's fields, plain data; a list has one entry per global worker rank of an engine (vLLM 0.30+).
                `PerReplica` gives each engine its own payload.

        Raises:
            TypeError: if a payload is not plain data; nothing was sent.
            EngineCallError: see the class.
        """
        self._send(verbs.UPDATE, update_info)

    def finish_weight_update(self, weight_version: int | str | None = None) -> None:
        """Close the session on every engine and then, if all of them did, label the weights on every engine.

        Args:
            weight_version: The new label. Finish and label are two calls: after a failure that is reported in the phase
                ``"update_weight_version"``, the weights are in place everywhere and that call alone is to be repeated.

        Raises:
            ConfigError: if ``weight_version`` is no valid label; nothing was sent.
            UnsupportedError: if it is given and an engine keeps no labels (vLLM before 0.28); nothing was finished.
            EngineCallError: see the class.
        """
        label = None if weight_version is None else version_label(weight_version)
        if label is not None:
            self._require_labels()
        self._ask(verbs.FINISH, holds="no version label was changed")
        if label is not None:
            self._label(label, "the weights are finished on every engine; only their label is missing")

    def update_weight_version(self, version: int | str) -> None:
        """Label the weights of every engine, without touching them.

        Raises:
            ConfigError: if ``version`` is no valid label; nothing was sent.
            EngineCallError: see the class.
        """
        self._label(version_label(version), "some engines kept their old label")

    def get_weight_version(self) -> list[str | None]:
        """Each engine's label, None where it has none. vLLM's is ``"default"`` until one is set."""
        return [None if answer is None else str(answer) for answer in self._ask(verbs.GET_VERSION)]

    def shutdown_weight_transfer_engine(self) -> None:
        """Release the engines' end of the data plane; they go on generating (vLLM 0.30+)."""
        self._ask(verbs.SHUTDOWN)

    def pause_generation(self, mode: PauseMode = "keep", clear_cache: bool = False) -> None:
        """Pause every engine. Only the return of this call proves that it is paused; after an error it may be, or become so.

        Args:
            mode: ``"keep"`` freezes requests, ``"wait"`` lets them end, ``"abort"`` ends them.
            clear_cache: Drop caches and preempt what runs. vLLM's own default is True.
        """
        require_choice("mode", mode, ("keep", "wait", "abort"))
        self._ask(verbs.PAUSE, mode=mode, clear_cache=clear_cache)

    def resume_generation(self) -> None:
        """Resume every engine; harmless where nothing is paused."""
        self._ask(verbs.RESUME)

    def is_paused(self) -> list[bool]:
        """Whether each engine is paused. It also says True of one that sleeps, and before the batch in flight is done."""
        return [bool(answer) for answer in self._ask(verbs.IS_PAUSED)]

    def get_world_size(self) -> list[int]:
        """Workers of each engine, data parallel ones included (TP x PP x DP)."""
        return [int(answer) for answer in self._ask(verbs.WORLD_SIZE)]

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> list[bool]:
        """Whether each engine dropped its prefix cache. It does not while requests hold blocks, unless ``reset_running_requests``."""
        return [answer is True for answer in self._ask(verbs.RESET_PREFIX_CACHE, reset_running_requests, reset_connector)]

    def collective_rpc(self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> list[list[Any]]:
        """Call a method of every worker of every engine; one list per engine, one answer per worker.

        There is no deadline inside the engine: one that struck would leave an engine with several workers out of step for good.
        """
        return [list(answer) for answer in self._ask(verbs.COLLECTIVE_RPC, method, args=tuple(args), kwargs=dict(kwargs or {}))]

    def _require_labels(self) -> None:
        """Raise `UnsupportedError` unless every engine can be labelled; asked before anything that cannot be taken back."""
        self._require(verbs.SET_VERSION)

    def _label(self, label: str, holds: str) -> None:
        self._ask(verbs.SET_VERSION, label, holds=holds, hint="update_weight_version may be repeated alone")

    def _data_parallel_places(self) -> list[tuple[int, int] | None]:
        """Which data-parallel engine of its deployment each engine is, and its own workers, where it can be seen."""
        return [None] * len(self._channels)

    @abstractmethod
    def _payload_calls(self, verb: str, payloads: Sequence[Payload]) -> list[Call]:
        """One call per engine, every payload checked. Raises before anything is sent to anyone."""

    def _send(self, verb: str, payload: Payload | PerReplica) -> None:
        payloads = list(payload.payloads) if isinstance(payload, PerReplica) else [payload] * len(self._channels)
        if len(payloads) != len(self._channels):
            count = f"{len(payloads)} payloads for {len(self._channels)} engines"
            raise ConfigError(f"PerReplica must hold one payload per engine; it holds {count}: {', '.join(self.labels)}")
        self._require(verb)
        self._run(verb, self._payload_calls(verb, payloads))

    def _ask(self, verb: str, *args: Any, holds: str = "", hint: str | None = None, **kwargs: Any) -> list[Any]:
        self._require(verb)
        return self._run(verb, [partial(channel.call, verb, *args, **kwargs) for channel in self._channels], holds=holds, hint=hint)

    def _require(self, verb: str) -> None:
        lacking = tuple(channel.label for channel in self._channels if not channel.supports(verb))
        if lacking:
            raise verbs.unsupported(verb, lacking)

    def _run(self, verb: str, calls: Sequence[Call], *, holds: str = "", hint: str | None = None) -> list[Any]:
        named = dict(zip(self.labels, calls, strict=True))
        running = asyncio.run_coroutine_threadsafe(fan_out(named, what=verb, limit_s=self.timeout, died=died, words=words), _loop())
        try:
            outcomes = running.result()
        except BaseException:  # such as Ctrl-C while this thread waits
            running.cancel()
            raise
        for label, task in outcomes.late.items():
            task.add_done_callback(partial(_log_late, f"{verb} of {label}"))
        if outcomes.failures:
            raise self._failed(verb, outcomes, holds, hint)
        return [outcomes.answers[label] for label in self.labels]

    def _failed(self, verb: str, outcomes: Outcomes[Any], holds: str, hint: str | None) -> EngineCallError:
        lost = tuple(label for label in self.labels if label in outcomes.failures)
        if all(isinstance(outcomes.errors.get(label), UnsupportedError) for label in lost):
            error = verbs.unsupported(verb, lost)
            error.hint = next(each.hint for each in outcomes.errors.values() if isinstance(each, UnsupportedError))
            return error
        only = outcomes.failures[lost[0]] if len(lost) == 1 and outcomes.failures[lost[0]].kind == "raised" else None
        told = f"{lost[0]} raised" if only else "; ".join(f"{label} {_verdict(outcomes.failures[label])}" for label in lost)
        count = f"{len(lost)} of {len(self.labels)} engines failed {verb}, {len(outcomes.answers)} did it"
        return EngineCallError(
            f"{f'{holds}: ' if holds else ''}{count}: {told}",
            answers=outcomes.answers,
            failures=outcomes.failures,
            phase=verb,
            replicas=lost,
            elapsed_s=max(outcomes.elapsed_s[label] for label in lost),
            limit_s=self.timeout,
            engine_message=only.message if only else None,
            hint=hint,
        )


def _verdict(failure: CallFailure) -> str:
    return {"died": "died", "unanswered": "did not answer"}.get(failure.kind, "raised") + f" ({failure.message})"


def _log_late(call: str, task: asyncio.Future[Any]) -> None:
    if task.cancelled():
        return
    error = task.exception()
    logger.warning("%s was answered after its deadline: %s", call, "done" if error is None else words(error))


_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}


def _loop() -> asyncio.AbstractEventLoop:
    """This process's loop for blocking clients; a forked child, which has no copy of the thread, starts its own."""
    with _lock:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="rws-clients", daemon=True).start()
        return loop
