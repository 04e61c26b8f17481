"""What runs inside a foreign actor, through Ray's ``__ray_call__``.

These functions travel by value (see `ray_channel`): the engine's process need not have this package. So they use the standard library only,
and keep what must outlive a call in the process, not in this module, of which each call brings its own copy.

In an async actor they run on one thread beside the event loop, one after the other: none may wait for more than a slice.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import sys
import time
import traceback
import types
from typing import Any

from ray_weightsync.protocol.channel import REQUIRED_VERBS  # the constant, not its module: it travels with whatever refers to it

Steps = list[tuple[str, tuple[Any, ...], dict[str, Any]]]
"""Calls to make in order: verb, positional arguments, keyword arguments."""

STORE = "_ray_weightsync_calls"
"""Name under which a process keeps its unanswered calls. Not an attribute of the actor: users pickle and compare their objects."""

MAX_KEPT = 256


def resolve(actor: Any, path: str) -> Any:
    """The engine that ``actor`` holds in ``path``, such as ``"llm"`` or ``"server.llm"``; the actor itself if that is empty."""
    engine = actor
    for name in path.split(".") if path else ():
        engine = getattr(engine, name)
    return engine


def loop_of(engine: Any) -> Any:
    """The running event loop of a vLLM ``AsyncLLM``, or None.

    ``output_handler`` is vLLM's own, undocumented: the task that hands out outputs, started on the loop that the engine lives on.
    """
    get_loop = getattr(getattr(engine, "output_handler", None), "get_loop", None)
    loop = get_loop() if callable(get_loop) else None
    return loop if loop is not None and loop.is_running() else None


def describe(actor: Any, path: str, required: tuple[str, ...], known: tuple[str, ...]) -> dict[str, Any]:
    """What the actor holds in ``path``: learned by looking at attributes, without calling any."""
    facts: dict[str, Any] = {"actor_type": type(actor).__qualname__, "found": True, "verbs": [], "is_async": False, "has_loop": False}
    facts.update(concurrency(), holders=[])
    try:
        engine = resolve(actor, path)
    except AttributeError as error:
        facts.update(found=False, problem=str(error), holders=holders(actor, required))
        return facts
    # On the class, not on the engine: reading a property would run code of vLLM's.
    public = [name for name in dir(type(engine)) if not name.startswith("_") and callable(getattr(type(engine), name, None))]
    facts["verbs"] = sorted({*public, *(name for name in known if callable(getattr(engine, name, None)))})
    facts["engine_type"] = type(engine).__qualname__
    facts["is_async"] = any(inspect.iscoroutinefunction(getattr(engine, name, None)) for name in required)
    facts["has_loop"] = loop_of(engine) is not None
    if not set(required) <= set(facts["verbs"]):
        facts["holders"] = holders(actor, required)
    return facts


def holders(actor: Any, required: tuple[str, ...]) -> list[str]:
    """Names of the actor's attributes that would do as an engine."""
    held = getattr(actor, "__dict__", {})
    return sorted(name for name, value in held.items() if all(callable(getattr(value, verb, None)) for verb in required))


def concurrency() -> dict[str, Any]:
    """Whether this actor runs calls at the same time. None where this Ray does not tell."""
    worker = getattr(getattr(sys.modules.get("ray"), "_private", None), "worker", None)
    core = getattr(getattr(worker, "global_worker", None), "core_worker", None)
    is_async, limit = getattr(core, "current_actor_is_asyncio", None), getattr(core, "current_actor_max_concurrency", None)
    return {"actor_is_async": is_async() if callable(is_async) else None, "max_concurrency": limit() if callable(limit) else None}


def described(error: BaseException) -> dict[str, Any]:
    """An exception as plain data: its class may not exist where it is read."""
    cls = type(error)
    trace = "".join(traceback.format_exception(error))[-4000:]
    names = [each.__name__ for each in cls.__mro__]
    return {"type_name": f"{cls.__module__}.{cls.__qualname__}", "names": names, "text": str(error), "trace": trace}


def run_here(actor: Any, path: str, token: str, steps: Steps, incarnation: str | None) -> dict[str, Any]:
    """Call the verbs one after the other in the actor's own turn; the first that raises ends it."""
    engine = resolve(actor, path)
    if (other := successor_of(actor, path, incarnation)) is not None:
        return {"restarted": other}
    answers: list[Any] = []
    course = _begun(token)
    try:
        for index, (verb, args, kwargs) in enumerate(steps):
            try:
                _next(course, index)
                answers.append(getattr(engine, verb)(*args, **kwargs))
            except Exception as error:
                return _outcome(course, answers, error)
        return _outcome(course, answers, None)
    finally:
        del courses()[token]


async def run_on_loop(engine: Any, token: str, steps: Steps) -> dict[str, Any]:
    """`run_here` for an engine with coroutine methods, on the loop that it lives on."""
    answers: list[Any] = []
    course = _begun(token)
    try:
        for index, (verb, args, kwargs) in enumerate(steps):
            try:
                _next(course, index)
                answer = getattr(engine, verb)(*args, **kwargs)
                answers.append(await answer if inspect.isawaitable(answer) else answer)
            except (Exception, asyncio.CancelledError) as error:
                return _outcome(course, answers, error)
        return _outcome(course, answers, None)
    finally:
        del courses()[token]


def begin(actor: Any, path: str, token: str, steps: Steps, incarnation: str | None, wait_s: float) -> dict[str, Any] | None:
    """Have the engine's own event loop carry out the steps; their outcome, or None when it is not there within ``wait_s``."""
    engine = resolve(actor, path)
    if (other := successor_of(actor, path, incarnation)) is not None:
        return {"restarted": other}
    loop = loop_of(engine)
    if loop is None:
        raise RuntimeError("the engine's event loop is gone")
    calls = unanswered()
    for old in [key for key, future in calls.items() if future.done()][: max(0, len(calls) - MAX_KEPT)]:
        del calls[old]  # answered long ago; whoever asked is gone
    calls[token] = asyncio.run_coroutine_threadsafe(run_on_loop(engine, token, steps), loop)
    return poll(actor, token, wait_s)


def poll(actor: Any, token: str, wait_s: float) -> dict[str, Any] | None:
    """The outcome of an earlier `begin`, or None when it is not there within ``wait_s``. Raises ``LookupError`` in a new process."""
    calls = unanswered()
    if token not in calls:
        raise LookupError("this process knows nothing of that call")
    done, _ = concurrent.futures.wait([calls[token]], timeout=wait_s)
    if not done:
        return None
    outcome: dict[str, Any] = calls.pop(token).result()
    return outcome


def halt(actor: Any, token: str, limits_s: list[float]) -> tuple[int, float] | None:
    """The index of the step that a chain is at, and for how many seconds; None if it has not begun or is over.

    If that is longer than its limit, no later step will begin.
    """
    course = courses().get(token)
    if course is None:
        return None
    at, seconds = course["step"], time.monotonic() - course["began"]
    if seconds >= limits_s[at]:
        course["halted"] = True
    return at, seconds


def halt_all(actor: Any) -> int:
    """How many chains are under way; none of them begins another step."""
    under_way = courses()
    for course in list(under_way.values()):
        course["halted"] = True
    return len(under_way)


def _begun(token: str) -> dict[str, Any]:
    course: dict[str, Any] = {"step": 0, "began": time.monotonic(), "seconds": [], "halted": False}
    courses()[token] = course
    return course


def _next(course: dict[str, Any], step: int) -> None:
    now = time.monotonic()
    if step:
        course["seconds"].append(now - course["began"])
    course.update(step=step, began=now)
    if course["halted"]:
        raise TimeoutError("not begun: the step before it took too long, or whoever asked for it is gone")


def _outcome(course: dict[str, Any], answers: list[Any], error: BaseException | None) -> dict[str, Any]:
    seconds = [*course["seconds"], time.monotonic() - course["began"]]
    failed = None if error is None else course["step"]
    return {"answers": answers, "failed_step": failed, "error": None if error is None else described(error), "seconds": seconds}


def unanswered() -> dict[str, concurrent.futures.Future[Any]]:
    """The calls of this process that nobody has fetched the outcome of."""
    calls: dict[str, concurrent.futures.Future[Any]] = _kept("calls")
    return calls


def courses() -> dict[str, dict[str, Any]]:
    """Where the chains of this process are, by token."""
    return _kept("courses")


def _kept(name: str) -> dict[str, Any]:
    module = sys.modules.setdefault(STORE, types.ModuleType(STORE))
    kept: dict[str, Any] = module.__dict__.setdefault(name, {})
    return kept


def source(actor: Any, path: str) -> Any:
    """The engine itself: what ``path`` names, or, where the actor's own methods only hand on, the one engine that it holds."""
    engine = resolve(actor, path)
    if path or config_of(engine) is not None:
        return engine
    held = holders(actor, REQUIRED_VERBS)
    return getattr(actor, held[0]) if len(held) == 1 else engine


def config_of(engine: Any) -> Any:
    """vLLM's configuration of an ``AsyncLLM`` or ``LLM``; None if it has none."""
    config = getattr(engine, "vllm_config", None) or getattr(getattr(engine, "llm_engine", None), "vllm_config", None)
    return config if hasattr(config, "parallel_config") else None


def ray_context() -> Any:
    """Ray's context of this process, or None where Ray is not loaded or not connected (a test without it)."""
    ray = sys.modules.get("ray")
    return ray.get_runtime_context() if ray is not None and ray.is_initialized() else None


def identity(worker_id: str | None, instance_id: str | None) -> str | None:
    """What changes when the process or the engine in it is a new one.

    Either alone is not enough: an actor may build a new engine in its old process, and vLLM's own id is five characters.
    """
    return "/".join(str(each) for each in (worker_id, instance_id) if each) or None


def successor_of(actor: Any, path: str, incarnation: str | None) -> str | None:
    """The identity of the engine that is here now, if that is not ``incarnation``."""
    if incarnation is None:
        return None
    context = ray_context()
    here = identity(context and context.get_worker_id(), getattr(config_of(source(actor, path)), "instance_id", None))
    return None if here == incarnation else str(here)


def world_size(actor: Any, path: str) -> int | None:
    """Workers of a vLLM engine, data parallel ones included (TP x PP x DP); None if there is no vLLM configuration."""
    size = getattr(getattr(config_of(resolve(actor, path)), "parallel_config", None), "world_size_across_dp", None)
    return None if size is None else int(size)


def data_parallel_place(actor: Any, path: str) -> tuple[int, int] | None:
    """Which data-parallel engine of its deployment a vLLM engine is, and its own workers (TP x PP); None if it cannot be seen."""
    parallel = getattr(config_of(resolve(actor, path)), "parallel_config", None)
    index, workers = getattr(parallel, "data_parallel_index", None), getattr(parallel, "world_size", None)
    return None if index is None or workers is None else (int(index), int(workers))
