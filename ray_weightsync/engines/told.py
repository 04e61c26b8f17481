"""What runs in an engine's own process to tell what the engine is. Standard library only, since it may travel there by value.

`look` reads attributes and calls nothing of the engine's. `read` then calls what cannot raise on one worker alone: two questions to the
engine core, and our worker extension's own method - only where the configuration proves that it is there, since a method that is missing
would raise on every rank and leave the engine's replies out of step.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import sys
from collections.abc import Coroutine, Mapping
from typing import Any

# Functions and constants, not their modules: whatever a travelling function refers to travels with it.
from ray_weightsync.engines.facts import DESCRIBE, RWS_BACKEND
from ray_weightsync.engines.vllm_args import WORKER_EXTENSION
from ray_weightsync.protocol.channel import KNOWN_VERBS, REQUIRED_VERBS
from ray_weightsync.protocol.remote import config_of, described, loop_of, poll, ray_context, source, unanswered
from ray_weightsync.protocol.remote import describe as describe_shape


def look(actor: Any, path: str) -> dict[str, Any]:
    """What the actor, and the engine that it holds in ``path`` (``""`` if it is one itself), show without being called."""
    told = describe_shape(actor, path, REQUIRED_VERBS, KNOWN_VERBS)
    told.update(kind="async", extension=False, pid=os.getpid(), worker_id=None, node_id=None, actor_id=None)
    told.update(backend=None, data_parallel_size=None)
    context = ray_context()
    if context is not None:
        told.update(worker_id=context.get_worker_id(), node_id=context.get_node_id(), actor_id=context.get_actor_id())
    if not told["found"] or not set(REQUIRED_VERBS) <= set(told["verbs"]):
        return told
    engine = source(actor, path)
    told["kind"] = "async" if any(inspect.iscoroutinefunction(getattr(engine, verb, None)) for verb in REQUIRED_VERBS) else "sync"
    config = config_of(engine)
    if config is None:
        return told
    told.update(configured(config))
    told["vllm_version"] = getattr(sys.modules.get("vllm"), "__version__", None)
    # Asked only of engines that have our backend: in others a foreign extension is none of our business.
    own = getattr(config.parallel_config, "worker_extension_cls", None)
    told["extension"] = told["backend"] == RWS_BACKEND and has_extension(own)
    if told["backend"] != RWS_BACKEND:  # its workers cannot be asked
        told["devices"] = devices(config)
    return told


def configured(config: Any) -> dict[str, Any]:
    """Sizes, backend and identity in vLLM's configuration."""
    parallel = config.parallel_config
    transfer, kv = getattr(config, "weight_transfer_config", None), getattr(config, "kv_transfer_config", None)
    return {
        "tensor_parallel_size": getattr(parallel, "tensor_parallel_size", None),
        "pipeline_parallel_size": getattr(parallel, "pipeline_parallel_size", None),
        "data_parallel_size": getattr(parallel, "data_parallel_size", None),
        # Of a dense model every data-parallel engine has rank 0; only the index tells them apart.
        "data_parallel_index": getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", None)),
        "data_parallel_outside": data_parallel_outside(vars(parallel)),
        "num_workers": getattr(parallel, "world_size", None),
        "instance_id": getattr(config, "instance_id", None),
        "backend": getattr(transfer, "backend", None),
        "kv_connector": getattr(kv, "kv_connector", None),
        "is_multimodal": getattr(getattr(config, "model_config", None), "is_multimodal_model", None),
    }


def devices(config: Any) -> list[dict[str, Any]] | None:
    """Where each worker is, by rank, as this process sees it. None where they may be on other nodes, or other engines have the first GPUs.

    vLLM asks the management library for a GPU's identity, so this process need not use the GPU.
    """
    parallel, device = config.parallel_config, getattr(config, "device_config", None)
    kind, executor = getattr(device, "device_type", None), getattr(parallel, "distributed_executor_backend", None)
    if kind is None or executor not in ("uni", "mp") or getattr(parallel, "data_parallel_size", None) != 1:
        return None
    platform = getattr(sys.modules.get("vllm.platforms"), "current_platform", None)
    found: list[dict[str, Any]] = []
    for rank in range(parallel.world_size):
        try:
            uuid = platform.get_device_uuid(rank) if platform is not None else None
        except Exception:  # a platform without such a thing; what it is not known to be is told as unknown
            uuid = None
        found.append({"type": kind, "uuid": uuid})
    return found


def data_parallel_outside(parallel: Mapping[str, Any]) -> bool:
    """Whether the deployment has data-parallel engines that this one does not drive, by the fields of vLLM's ``ParallelConfig``.

    So it is under external and hybrid load balancing, and for an offline `LLM` of one rank (``VLLM_DP_RANK``), which alone has a local
    rank in the configuration that its user sees.
    """
    balanced_elsewhere = any(parallel.get(f"data_parallel_{kind}_lb") for kind in ("external", "hybrid"))
    of_one_rank = parallel.get("data_parallel_rank_local") is not None and (parallel.get("data_parallel_size") or 1) > 1
    return balanced_elsewhere or of_one_rank


def has_extension(name: Any) -> bool:
    """Whether the workers have our method: their extension is ours, or a class with that method.

    Another class is looked up by importing its module, as the workers have done. Where that fails the answer is no: a method that is
    not known to be there is never called.
    """
    if not isinstance(name, str) or not name:
        return False
    if name == WORKER_EXTENSION:
        return True
    module, _, cls = name.rpartition(".")
    try:
        return callable(getattr(getattr(importlib.import_module(module), cls, None), DESCRIBE, None))
    except Exception:
        return False


async def read(engine: Any, told: dict[str, Any], nonce: str) -> dict[str, Any]:
    """Add to ``told`` what only a call tells. To be run where the engine lives; never raises for anything the engine does."""
    told["failed"] = {}
    for key, verb in (("paused", "is_paused"), ("version", "get_weight_version")):
        if not callable(getattr(engine, verb, None)):
            continue
        try:
            told[key] = await settled(getattr(engine, verb)())
        except Exception as error:  # told to whoever asks
            told["failed"][verb] = described(error)
    count = getattr(engine, "get_num_unfinished_requests", None)
    told["unfinished_requests"] = count() if callable(count) else None
    if told["extension"] and not told["failed"]:
        try:
            told["workers"] = list(await settled(engine.collective_rpc(DESCRIBE, args=(nonce,))))
        except Exception as error:  # told to whoever asks
            told["failed"]["collective_rpc"] = described(error)
    return told


def at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing. Not `asyncio.run`, which takes the thread's event loop away."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise RuntimeError("a synchronous engine answered with something to be awaited")


async def settled(answer: Any) -> Any:
    """``answer``, awaited if it is to be awaited: `AsyncLLM` is asynchronous, `LLM` is not."""
    return await answer if inspect.isawaitable(answer) else answer


def tell(actor: Any, path: str, token: str, nonce: str, wait_s: float) -> dict[str, Any] | None:
    """`look` and `read` from a thread of the actor's process: all of it, or None when the engine has not answered within ``wait_s``
    (then `remote.poll` fetches the rest by ``token``).

    Where the engine cannot be called from here the answer has no ``"failed"``: nothing was called.
    """
    told = look(actor, path)
    if not told["found"] or not set(REQUIRED_VERBS) <= set(told["verbs"]):
        return told
    engine = source(actor, path)
    if told["kind"] == "sync":
        # Beside a request on another thread nothing of an LLM may be called.
        return told if told["actor_is_async"] or (told["max_concurrency"] or 1) > 1 else at_once(read(engine, told, nonce))
    loop = loop_of(engine)
    if loop is None:
        return told
    unanswered()[token] = asyncio.run_coroutine_threadsafe(read(engine, told, nonce), loop)
    return poll(actor, token, wait_s)
