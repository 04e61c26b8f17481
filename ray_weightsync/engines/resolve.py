"""From what a user gave to an engine that can take part: reached, known, and told apart from every other.

Whatever keeps an engine from taking part is found here, before anything was changed, and said with what to do.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import ray

from ray_weightsync.engines.client_channel import ClientChannel
from ray_weightsync.engines.facts import EngineFacts
from ray_weightsync.engines.inspect import ask, has_own_inspect
from ray_weightsync.engines.ref import EngineLike, EngineRef, as_ref, as_refs, kind_of, normalised_url, shown
from ray_weightsync.errors import AttachError, ConfigError, EngineCallError, WeightSyncError
from ray_weightsync.protocol.channel import Channel
from ray_weightsync.protocol.fanout import fan_out
from ray_weightsync.protocol.http_channel import HTTPChannel
from ray_weightsync.protocol.ray_channel import ActorChannel
from ray_weightsync.protocol.reading import died, words
from ray_weightsync.worker.identity import package_version

__all__ = ["Engine", "inspect", "require_distinct", "resolve", "resolve_all", "unfit"]

PHASE = "attach"
IDENTITY_READS = 4
"""A round-robin router is found out by the second read, a random one over two servers by four reads seven times in eight."""

OUR_ARGS = "start it with **ray_weightsync.vllm_engine_args()"


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine that was reached.

    Attributes:
        id: The replica's id.
        label: What errors and logs call it.
        channel: Its control plane. Belongs to the event loop that resolved it.
        facts: What was last learned of it.
        ref: What the user gave.
    """

    id: str
    label: str
    channel: Channel
    facts: EngineFacts
    ref: EngineRef

    @property
    def world_size(self) -> int | None:
        """Workers behind it: what it told, else what the user said of it."""
        return self.ref.world_size if self.facts.world_size is None else self.facts.world_size

    def with_facts(self, facts: EngineFacts) -> Engine:
        """The same engine with newer facts."""
        return replace(self, facts=facts)


async def inspect(engine: Engine, nonce: str, *, limit_s: float) -> EngineFacts:
    """What ``engine`` is and holds now; see `ray_weightsync.engines.inspect.ask` for what it raises."""
    return await ask(engine.channel, nonce, limit_s=limit_s)


async def resolve(engine: EngineLike, *, limit_s: float, first: Callable[[Channel], Awaitable[None]] | None = None) -> Engine:
    """Reach one engine, learn what it is, and make sure that it can take part.

    Args:
        engine: What the user gave; without an id it is called ``"r0"``.
        limit_s: Seconds for all of it.
        first: Awaited with the channel before the engine is asked what it is.

    Raises:
        AttachError: if it cannot be reached, is no engine, or cannot take part. It says which engine, what was found and what to do.
    """
    ref = as_ref(engine)
    if ref.id is None:
        (ref,) = as_refs([ref])
    label = str(ref.id)
    began = time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            channel = await _channel(ref, label)
            if first is not None:
                await first(channel)
            if isinstance(channel, ActorChannel) and not has_own_inspect(channel):
                await channel.probe()
            facts = await ask(channel, secrets.token_hex(8), limit_s=limit_s)
            if isinstance(channel, HTTPChannel):
                await _require_one_server(channel, facts, ref, label)
    except TimeoutError as error:
        raise _unreachable(ref, label, "did not answer", began, limit_s) from error
    except EngineCallError as error:
        (failure,) = error.failures.values()
        verdict = {"died": "is dead", "unanswered": "did not answer", "raised": "could not be inspected"}[failure.kind]
        raise _unreachable(ref, label, verdict, began, None, failure.message) from error
    except WeightSyncError:
        raise
    except Exception as error:
        raise _unreachable(ref, label, "is dead" if died(error) else "cannot be reached", began, None, words(error)) from error
    problem = unfit(facts, ref, own_actor=has_own_inspect(channel))
    if problem is not None:
        raise AttachError(f"{label} ({shown(ref)}) cannot be attached: {problem[0]}", phase=PHASE, replicas=(label,), hint=problem[1])
    return Engine(id=label, label=label, channel=channel, facts=facts, ref=ref)


async def resolve_all(engines: Sequence[EngineRef], *, limit_s: float, warn_every_s: float = 10) -> tuple[Engine, ...]:
    """`resolve` for all of them at once, in order; then `require_distinct`.

    Raises:
        AttachError: if one or more cannot take part, with each one's reason; or if two are the same engine.
    """
    calls = {str(ref.id): (lambda ref=ref: resolve(ref, limit_s=limit_s)) for ref in engines}
    # Each call keeps its own deadline and names it better; the margin only lets them answer.
    outcomes = await fan_out(calls, what="attach", limit_s=limit_s + 5.0, warn_every_s=warn_every_s)
    for error in outcomes.errors.values():
        if not isinstance(error, WeightSyncError):
            raise error
    if len(outcomes.errors) == 1 and len(outcomes.failures) == 1:
        raise next(iter(outcomes.errors.values()))
    if outcomes.failures:
        told = [str(outcomes.errors.get(name, failure.message)) for name, failure in outcomes.failures.items()]
        text = "\n".join((f"{len(told)} of {len(calls)} engines cannot be attached:", *told))
        raise AttachError(text, phase=PHASE, replicas=tuple(outcomes.failures))
    resolved = tuple(outcomes.answers[str(ref.id)] for ref in engines)
    require_distinct(resolved)
    return resolved


def require_distinct(engines: Sequence[Engine]) -> None:
    """Raise `AttachError` if two of ``engines`` are one: a name and a handle, two URLs, an actor and the engine in it."""
    for place, one in enumerate(engines):
        for other in engines[place + 1 :]:
            if _same(one, other):
                raise AttachError(
                    f"{one.label} ({shown(one.ref)}) and {other.label} ({shown(other.ref)}) are the same engine",
                    phase=PHASE,
                    replicas=(one.label, other.label),
                    hint="list each engine once",
                )


def _same(one: Engine, other: Engine) -> bool:
    if one.facts.workers and other.facts.workers:
        return one.facts.workers[0].incarnation == other.facts.workers[0].incarnation
    if one.facts.incarnation is None or one.facts.incarnation != other.facts.incarnation:
        return False
    # One process may hold two engines that say no more than which process it is.
    return one.ref.attr == other.ref.attr or None in (one.ref.attr, other.ref.attr)


def unfit(facts: EngineFacts, ref: EngineRef, *, own_actor: bool = False) -> tuple[str, str] | None:
    """Why an engine cannot take part, and what to do; None if it can. Pure.

    Args:
        facts: What it told. Of a user's own client nothing is known, and nothing is held against it.
        ref: What the user said of it.
        own_actor: Whether it is an actor of ours, such as one with `EngineMixin`.
    """
    if facts.kind == "client":
        return None
    if not facts.in_step:
        return (
            f"its workers' replies are out of step with the calls ({facts.step_problem}); an RPC that raised on one worker left them so",
            "start a new engine in its place: from now on its answers cannot be trusted",
        )
    if own_actor and facts.kind == "sync":
        return (
            "it is a synchronous LLM in an actor with EngineMixin, whose methods make the actor asynchronous: "
            "a request could run in the middle of an update",
            "hold an AsyncLLM, or drop EngineMixin, keep the actor synchronous and attach EngineRef(handle, attr=...)",
        )
    if ref.world_size is not None and facts.world_size is not None and ref.world_size != facts.world_size:
        sizes = f"tensor {facts.tensor_parallel_size} x pipeline {facts.pipeline_parallel_size} x data {facts.data_parallel_size}"
        found = f"it has {facts.world_size} workers ({sizes}), EngineRef(world_size={ref.world_size}) was given"
        return (found, "the engine is believed; correct world_size or leave it out")
    if facts.backend is None:
        return ("it has no weight-transfer backend, 'rws' is needed", f"{OUR_ARGS}, which set backend and worker extension")
    if facts.is_stock and facts.kind == "sync":
        return (
            f"it is a synchronous LLM on vLLM's own {facts.backend!r} backend: a request could run in the middle of an update",
            f"hold an AsyncLLM, or {OUR_ARGS}",
        )
    if facts.data_parallel_outside:
        # Seen on vLLM 0.32: pause waits until all have been asked to pause, resume holds the engine until all have resumed.
        return (
            f"it drives only some of its deployment's {facts.data_parallel_size} data-parallel engines (external or hybrid load balancing, "
            "or an offline rank), which pause and resume only all together: one that fails or is healed would hold up all others",
            "start the deployment as one engine that drives all its data-parallel ranks (data_parallel_size=N without data_parallel_rank, "
            "VLLM_DP_RANK, --data-parallel-external-lb or --data-parallel-hybrid-lb; its other nodes --headless), and attach that one",
        )
    if facts.is_stock and (facts.data_parallel_size or 1) > 1:
        return (
            f"it has {facts.data_parallel_size} data-parallel engines on vLLM's own {facts.backend!r} backend, and only the first one's "
            "answers come back: that an update failed in another would not be known",
            f"start {facts.data_parallel_size} independent engines without data_parallel_size; or {OUR_ARGS}",
        )
    if facts.is_stock:
        return None  # nothing of ours is in it; which backends a session can serve is for the session to say
    if not facts.workers:
        found = "its workers lack our worker extension, so they cannot be asked what they hold"
        return (found, f"{OUR_ARGS}; an extension of your own must derive from ray_weightsync.engines.plugin.WorkerExtension")
    if (facts.data_parallel_size or 1) > 1 and any(worker.attesting != facts.world_size for worker in facts.workers):
        # vLLM runs the ranks of a dense model as engines that share nothing, and returns the answers of the first.
        return (
            f"it is {facts.data_parallel_size} data-parallel engines that know nothing of each other, "
            "and only the first one's workers answer, so what the others hold could not be attested",
            f"start {facts.data_parallel_size} independent engines without data_parallel_size, and attach them all",
        )
    ours = package_version()
    theirs = sorted({worker.package_version for worker in facts.workers})
    if theirs != [ours]:
        return (f"ray_weightsync is {', '.join(theirs)} in its workers and {ours} here", "install the same version in both environments")
    return None


async def _channel(ref: EngineRef, label: str) -> Channel:
    kind = kind_of(ref.target)
    if kind == "client":
        return ClientChannel(ref.target, label=label)  # type: ignore[arg-type]
    if kind == "url":
        try:
            return HTTPChannel(normalised_url(ref), label=label, api_key=ref.api_key, verify=ref.verify)
        except ConfigError as error:
            raise AttachError(
                f"{label} ({shown(ref)}) cannot be attached: {error.message}", phase=PHASE, replicas=(label,), hint=error.hint
            ) from error
    handle = ref.target
    if kind == "name":
        namespace = ref.namespace or ray.get_runtime_context().namespace
        try:
            # A namespace is always said: vLLM's engine core may have called ray.init with its own in this process.
            handle = await asyncio.to_thread(ray.get_actor, str(ref.target), namespace=namespace)
        except ValueError as error:
            raise AttachError(
                f"{label}: there is no actor named {ref.target!r} in namespace {namespace!r}",
                phase=PHASE,
                replicas=(label,),
                hint="check the name; an actor of another job is found with EngineRef(name, namespace=...); a server's URL begins with http://",
            ) from error
    return ActorChannel(handle, label=label, attr=ref.attr)


async def _require_one_server(channel: HTTPChannel, facts: EngineFacts, ref: EngineRef, label: str) -> None:
    """Read the server's identity again, on new connections: behind a router, an update would reach one engine and its start another."""
    found = {facts.incarnation, *[await channel.identity() for _ in range(IDENTITY_READS - 1)]}
    if len(found) > 1:
        raise AttachError(
            f"{label} ({shown(ref)}) is not one server: {IDENTITY_READS} reads of its identity gave {', '.join(sorted(map(str, found)))}",
            phase=PHASE,
            replicas=(label,),
            hint="a router or load balancer answers there; attach the servers behind it, each with its own URL",
        )


def _unreachable(ref: EngineRef, label: str, verdict: str, began: float, limit_s: float | None, said: str | None = None) -> AttachError:
    hints = {
        "is dead": "start a new engine and attach that one",
        "did not answer": "no actor answers before it has started, and a synchronous one only between its requests; Timeouts(attach_s=...) "
        "gives it more time. An actor whose request slots are all taken answers if its class has EngineMixin",
    }
    if kind_of(ref.target) == "url":
        hints["could not be inspected"] = "give the root of a vLLM server, without /v1, that was started with VLLM_SERVER_DEV_MODE=1"
    return AttachError(
        f"{label} ({shown(ref)}) {verdict}",
        phase=PHASE,
        replicas=(label,),
        elapsed_s=time.monotonic() - began,
        limit_s=limit_s,
        engine_message=said,
        hint=hints.get(verdict),
    )
