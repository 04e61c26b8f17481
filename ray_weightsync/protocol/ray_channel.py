"""The control plane of one engine in a Ray actor: its own methods, or the engine it holds in an attribute.

The only module that uses ``__ray_call__`` and the ``_ray_system`` concurrency group, both Ray's own and undocumented. What was
measured on Ray 2.60:

* ``__ray_call__`` works on any actor, unchanged. In an async actor it runs on a thread beside the event loop, one call after the other.
* The group ``_ray_system`` exists in every actor. In an async or threaded one it answers even while requests hold every slot of
  ``max_concurrency``. In a sync actor it runs on a thread of its own, which may meet a request's. A group that does not exist
  **kills the actor**.
* ``max_task_retries=0`` as a call's option wins over the actor's and over ``@ray.method``'s, and stops ``retry_exceptions`` too. A call
  that takes part in an update must not run twice, so every call here sets it.
* What travels by value costs 0.4 ms to pickle (6 kB), and a call on a held engine takes 1.9 ms in all, against 0.9 ms for a method of the
  actor.
"""

from __future__ import annotations

import asyncio
import sys
import time
import types
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import ray.cloudpickle
from ray.actor import ActorHandle

from ray_weightsync.errors import AttachError, ConfigError
from ray_weightsync.protocol import channel as verbs
from ray_weightsync.protocol import remote
from ray_weightsync.protocol.chain import ChainOutcome, Place, Step, StepByStep
from ray_weightsync.protocol.reading import EngineRaised, EngineRestarted

DEFAULT_ATTR = "llm"
SLICE_S = 0.05
"""How long one call waits inside the actor. Others wait behind it, on the one thread there is."""


_WRAPPED = {verbs.INIT: "init_info", verbs.UPDATE: "update_info"}
_ONCE = {"max_task_retries": 0, "retry_exceptions": False}
_SYSTEM_GROUP_SINCE = (2, 60)


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """What was learned of an engine by looking at its attributes.

    Attributes:
        verbs: Names of its public methods.
        is_async: Whether its protocol methods are coroutine functions (``AsyncLLM``) or plain ones (``LLM``).
        actor_is_async: Whether the actor around it has an event loop. None if Ray does not tell.
        max_concurrency: How many calls the actor runs at a time. None if Ray does not tell.
        engine_type: Name of the engine's class.
    """

    verbs: frozenset[str]
    is_async: bool
    actor_is_async: bool | None
    max_concurrency: int | None
    engine_type: str


class ActorChannel(StepByStep):
    """One engine in a Ray actor.

    With ``attr=None``, an actor whose class has the protocol's four verbs is called directly; any other actor is expected to hold its
    engine in ``self.llm``. With ``attr`` given, the engine is what the actor holds there, even if the actor has methods of the same names.
    A direct call waits for a free slot of the actor's; a held ``AsyncLLM`` is reached even while requests hold all of them.

    Args:
        handle: Handle of the actor.
        label: The engine's name in errors and logs.
        attr: Attribute of the actor that holds the engine; dots lead further down.

    Raises:
        ConfigError: if ``handle`` is not an actor handle, or ``attr`` is not the name of an attribute.
    """

    def __init__(self, handle: Any, *, label: str, attr: str | None = None) -> None:
        if not isinstance(handle, ActorHandle):
            raise ConfigError(f"{label}: expected a Ray actor handle, not {type(handle).__name__}")
        if attr is not None and not (isinstance(attr, str) and all(name.isidentifier() for name in attr.split("."))):
            raise ConfigError(f"{label}: attr must be the name of an attribute such as 'llm', not {attr!r}")
        self.label = label
        self.handle = handle
        self.attr = attr if attr is not None or not self.missing_verbs(handle) else DEFAULT_ATTR
        self._attr_was_named = attr is not None
        self._shape: EngineShape | None = None

    @staticmethod
    def missing_verbs(handle: Any) -> tuple[str, ...]:
        """The required verbs that the actor's class does not have. Nothing is called."""
        return tuple(verb for verb in verbs.REQUIRED_VERBS if not hasattr(handle, verb))

    @property
    def is_direct(self) -> bool:
        """Whether the actor's own methods are called."""
        return self.attr is None

    @property
    def shape(self) -> EngineShape | None:
        """What `probe` found; None before it ran."""
        return self._shape

    def __repr__(self) -> str:
        return f"ActorChannel({self.label}{'' if self.is_direct else f', attr={self.attr!r}'})"

    def supports(self, verb: str) -> bool:
        """Whether the engine has ``verb``.

        Raises:
            RuntimeError: for a held engine that was not probed yet: nothing is known of it.
        """
        if self.is_direct:
            return hasattr(self.handle, verb)
        if self._shape is None:
            raise RuntimeError(f"{self.label}: await probe() first; what the actor holds in {self.attr!r} is not known yet")
        return verb in self._shape.verbs

    async def probe(self) -> EngineShape:
        """Look at the engine's attributes, without calling any of its methods. What was found is kept.

        Raises:
            AttachError: if there is no such attribute, what it holds is no engine, an ``AsyncLLM`` whose event loop cannot be
                found, or a synchronous ``LLM`` in an actor that runs calls at the same time.
        """
        facts = await self.run(remote.describe, self.attr or "", verbs.REQUIRED_VERBS, verbs.KNOWN_VERBS)
        if not facts["found"]:
            raise self._no_engine(f"the actor ({facts['actor_type']}) has no attribute {self.attr!r}", facts)
        missing = [verb for verb in verbs.REQUIRED_VERBS if verb not in facts["verbs"]]
        if missing:
            held = f"what the actor ({facts['actor_type']}) holds in {self.attr!r} is a {facts['engine_type']}"
            raise self._no_engine(f"{held}, which lacks {', '.join(missing)}", facts)
        if not self.is_direct:
            self._check_reachable(facts)
        self._shape = EngineShape(
            verbs=frozenset(facts["verbs"]),
            is_async=facts["is_async"],
            actor_is_async=facts["actor_is_async"],
            max_concurrency=facts["max_concurrency"],
            engine_type=facts["engine_type"],
        )
        return self._shape

    async def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``verb`` and return the engine's answer; see `Channel`.

        Raises:
            UnsupportedError: if the engine does not have ``verb``; nothing was sent.
            EngineRaised: what a held engine raised. A direct call raises what Ray delivers.
        """
        if self.is_direct:
            self._require(verb)
            return await getattr(self.handle, verb).options(**_ONCE).remote(*_wrapped(verb, args), **kwargs)
        outcome = await self.call_chain(uuid.uuid4().hex, [(verb, args, kwargs)])
        if outcome.error is not None:
            raise outcome.error
        return outcome.answers[0]

    async def call_chain(self, token: str, steps: Sequence[Step], *, incarnation: str | None = None) -> ChainOutcome:
        """See `Channel.call_chain`.

        A synchronous engine runs them all in one turn of its actor, so that no request of the actor's can come in between: an ``LLM``
        has no pause, and one that generates between start and finish kills its core. An asynchronous one runs them on its own loop, an
        actor of ours itself; any other that is called directly takes one call each.
        """
        runs_chains = self.is_direct and hasattr(self.handle, verbs.CHAIN)
        shape = None if runs_chains else self._shape or await self.probe()
        for verb, _, _ in steps:
            self._require(verb)
        plan = [(verb, _wrapped(verb, args), dict(kwargs)) for verb, args, kwargs in steps]
        if shape is None:
            return self._outcome(await getattr(self.handle, verbs.CHAIN).options(**_ONCE).remote(token, plan, incarnation))
        if not shape.is_async:
            in_turn: Any = self.handle.__ray_call__.options(**_ONCE)
            return self._outcome(await in_turn.remote(_by_value(remote.run_here), self.attr or "", token, plan, incarnation))
        if self.is_direct:
            return await super().call_chain(token, steps, incarnation=incarnation)
        doing = f"during {', '.join(verb for verb, _, _ in steps)}"
        return self._outcome(await self.run_long(remote.begin, token, plan, incarnation, doing=doing))

    async def halt_chain(self, token: str, limits_s: Sequence[float]) -> Place | None:
        """See `Channel.halt_chain`."""
        if self.is_direct and hasattr(self.handle, verbs.HALT_CHAIN):
            found = await getattr(self.handle, verbs.HALT_CHAIN).options(**_ONCE).remote(token, list(limits_s))
        elif self.is_direct and (self._shape is None or self._shape.is_async):
            return await super().halt_chain(token, limits_s)
        else:
            # Beside a synchronous engine's turn too: it touches a note, and nothing of the engine.
            found = await self.handle.__ray_call__.options(**_beside()).remote(_by_value(remote.halt), token, list(limits_s))
        return None if found is None else Place(*found)

    async def halt_chains(self) -> int:
        """See `Channel.halt_chains`. The channel need not have been probed."""
        return int(await self.handle.__ray_call__.options(**_beside()).remote(_by_value(remote.halt_all)))

    async def require_incarnation(self, incarnation: str) -> None:
        """Raise `EngineRestarted` if another incarnation is behind the handle now."""
        self._outcome({"restarted": await self.run(remote.successor_of, self.attr or "", incarnation)})

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function(actor, *args)`` in the actor's process, and return what it returns.

        Beside the actor's calls, or, once the engine is known to be synchronous, in its turn among them: a synchronous ``LLM`` talks to
        its core through sockets that end the process when two threads use them.

        It travels by value with its module, which must not need anything that the engine's process lacks. It must not wait, nor be async.
        """
        in_turn = self._shape is not None and not self._shape.is_async
        options = dict(_ONCE) if in_turn else _beside()
        return await self.handle.__ray_call__.options(**options).remote(_by_value(function), *args)

    async def run_long(self, function: Callable[..., Any], token: str, *args: Any, doing: str) -> dict[str, Any]:
        """`run` for what may take longer than a slice: ``function(actor, path, token, *args, wait_s)`` answers a dict, or None as long as
        `remote.poll` is to be asked for it.

        Raises:
            EngineRestarted: if the actor's process was replaced meanwhile; ``doing`` says while what.
        """
        began = time.monotonic()
        answer = await self.run(function, self.attr or "", token, *args, SLICE_S)
        while answer is None:
            # Waiting costs a long call half a percent at most, and a hung one a poll a second.
            await asyncio.sleep(min(1.0, (time.monotonic() - began) * 0.005))
            try:
                answer = await self.run(remote.poll, token, SLICE_S)
            except LookupError:
                raise EngineRestarted(f"the actor's process was replaced {doing}") from None
        return dict(answer)

    def _outcome(self, facts: Mapping[str, Any]) -> ChainOutcome:
        if (other := facts.get("restarted")) is not None:
            raise EngineRestarted(f"{self.label} restarted: another process ({other}) answers behind its handle, and it was told nothing")
        error = EngineRaised(**facts["error"]) if facts.get("error") is not None else None
        answers, seconds = tuple(facts.get("answers", ())), tuple(facts.get("seconds", ()))
        return ChainOutcome(answers=answers, failed_step=facts.get("failed_step"), error=error, seconds=seconds)

    def _require(self, verb: str) -> None:
        if not self.supports(verb):
            raise verbs.unsupported(verb, (self.label,))

    def _no_engine(self, problem: str, facts: Mapping[str, Any]) -> AttachError:
        if not self._attr_was_named:
            problem = f"its class lacks {', '.join(self.missing_verbs(self.handle))}, and {problem}"
        hint = "name the attribute that holds the AsyncLLM or LLM: EngineRef(handle, attr=...)"
        if facts["holders"]:
            hint = "the engine seems to be in " + " or ".join(f"EngineRef(handle, attr={name!r})" for name in facts["holders"])
        return AttachError(f"{self.label} is not an engine: {problem}", replicas=(self.label,), hint=hint)

    def _check_reachable(self, facts: Mapping[str, Any]) -> None:
        engine = f"{facts['engine_type']} in {self.attr!r}"
        if facts["is_async"] and not facts["has_loop"]:
            raise AttachError(
                f"{self.label}: the event loop of the {engine} cannot be found; it is told from its output_handler, which vLLM starts "
                "with the engine if that is made on a running loop, else with its first request",
                replicas=(self.label,),
                hint="make the engine in the __init__ or an async method of an async actor, or derive the actor's class from EngineMixin",
            )
        crowd = facts["actor_is_async"] or (facts["max_concurrency"] or 1) > 1
        if not facts["is_async"] and crowd:
            raise AttachError(
                f"{self.label}: the {engine} is synchronous, and its actor runs several calls at a time. A request beside an update "
                "would kill the engine core, and nothing can keep it away",
                replicas=(self.label,),
                hint="hold an AsyncLLM, or make the actor synchronous with max_concurrency=1",
            )


def _wrapped(verb: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with a payload made a request: ``AsyncLLM`` reads one attribute of it, ``LLM`` too, and neither checks the class."""
    field_name = _WRAPPED.get(verb)
    return args if field_name is None else (types.SimpleNamespace(**{field_name: args[0]}), *args[1:])


def _by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, from now on pickled with all that it refers to in its module and in `remote`, which such modules build upon."""
    register: Callable[[types.ModuleType], None] = ray.cloudpickle.register_pickle_by_value
    for module in (sys.modules[function.__module__], remote):
        register(module)
    return function


def _beside() -> dict[str, Any]:
    """Options of a call that must not wait for the actor's requests; a group is named only where Ray is known to have it."""
    version = tuple(int(part) for part in ray.__version__.split(".")[:2])
    return {**_ONCE, "concurrency_group": "_ray_system"} if _SYSTEM_GROUP_SINCE <= version < (3,) else dict(_ONCE)
