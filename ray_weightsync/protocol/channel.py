"""The seam between a protocol call and the way it reaches one engine.

A channel knows how to reach, not what to say: it never retries, never waits for another engine and holds no state of a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from ray_weightsync.errors import CallFailure, UnsupportedError
from ray_weightsync.protocol.chain import ChainOutcome, Place, Step

INIT = "init_weight_transfer_engine"
SHUTDOWN = "shutdown_weight_transfer_engine"
START = "start_weight_update"
START_DRAFT = "start_draft_weight_update"
UPDATE = "update_weights"
FINISH = "finish_weight_update"
PAUSE = "pause_generation"
RESUME = "resume_generation"
IS_PAUSED = "is_paused"
GET_VERSION = "get_weight_version"
SET_VERSION = "update_weight_version"
RESET_PREFIX_CACHE = "reset_prefix_cache"
RESET_MM_CACHE = "reset_mm_cache"
RESET_ENCODER_CACHE = "reset_encoder_cache"
COLLECTIVE_RPC = "collective_rpc"
WORLD_SIZE = "get_world_size"
SLEEP = "sleep"
WAKE_UP = "wake_up"
UNFINISHED = "get_num_unfinished_requests"
"""No part of the protocol: an `AsyncLLM` in an actor has it, a server does not."""

CHAIN = "rws_chain"
HALT_CHAIN = "rws_halt_chain"
"""How an actor of ours carries out a chain of its own methods, and halts one that is late."""

REQUIRED_VERBS = (INIT, START, UPDATE, FINISH)
"""What every vLLM from 0.26 on speaks; an engine that lacks one of these is none."""

KNOWN_VERBS = (
    *REQUIRED_VERBS,
    *(SHUTDOWN, START_DRAFT, PAUSE, RESUME, IS_PAUSED, GET_VERSION, SET_VERSION, RESET_PREFIX_CACHE, COLLECTIVE_RPC, WORLD_SIZE),
    *(RESET_MM_CACHE, RESET_ENCODER_CACHE, SLEEP, WAKE_UP),
)
"""What this package may ask for; all but the required ones are missing in some engine or other."""

SINCE = {GET_VERSION: "0.28", SET_VERSION: "0.28", SHUTDOWN: "0.30"}
"""First vLLM version with an optional verb, where that is known."""


def unsupported(verb: str, labels: tuple[str, ...], *, hint: str | None = None) -> UnsupportedError:
    """The error for engines that do not have ``verb``; it says since which vLLM there is one."""
    since = f" (vLLM has it since {SINCE[verb]})" if verb in SINCE else ""
    failure = CallFailure(message=f"has no {verb}", kind="raised", elapsed_s=0.0)
    text = f"nothing was done: {', '.join(labels)} cannot do {verb}{since}"
    return UnsupportedError(text, failures=dict.fromkeys(labels, failure), phase=verb, replicas=labels, hint=hint)


@runtime_checkable
class Channel(Protocol):
    """The control plane of one engine.

    ``label`` names the engine in errors and logs.
    """

    label: str

    def supports(self, verb: str) -> bool:
        """Whether the engine has ``verb``, told without calling the engine."""
        ...

    async def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``verb`` and return the engine's answer.

        ``init_weight_transfer_engine`` and ``update_weights`` take one plain dict (or list of dicts, one per global worker rank);
        the channel wraps it the way its engine expects. The other verbs take vLLM's own arguments.

        Raises:
            UnsupportedError: if the engine does not have ``verb``; nothing was sent.
            Exception: whatever the engine answered; `died` and `words` of this channel's module read it.
        """
        ...

    async def call_chain(self, token: str, steps: Sequence[Step], *, incarnation: str | None = None) -> ChainOutcome:
        """Call several verbs, one after the other, until one raises.

        Args:
            token: A fresh name for it, by which `halt_chain` finds it.
            steps: The calls, as for `call`.
            incarnation: The engine that they are meant for (``EngineFacts.incarnation``). Another one is told nothing.

        Raises:
            UnsupportedError: if the engine does not have one of the verbs; nothing was sent.
            EngineRestarted: if another incarnation answers now.
            Exception: if the engine cannot be reached; what a step raised is in the outcome.
        """
        ...

    async def halt_chain(self, token: str, limits_s: Sequence[float]) -> Place | None:
        """The step that a chain is at; None if it has not begun, or is over.

        If that step has taken its limit or more (``limits_s``, one for each step), it still runs on, but no later one will begin.
        """
        ...

    async def halt_chains(self) -> int:
        """How many chains are under way in the engine, whoever asked for them. None of them begins another step.

        For a successor of whoever asked. Where each step is a call of its own, there is no chain without its caller.
        """
        ...
