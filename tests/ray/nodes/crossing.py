"""Bytes on their way from one node's store to another's: what can be done to them there, and what room they take."""

from __future__ import annotations

import asyncio
import importlib
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
import torch
from ray._private.internal_api import memory_summary

import ray_weightsync as rws
from ray_weightsync.transports.host.actor import start_store
from ray_weightsync.transports.host.writer import SlotWriter
from ray_weightsync.weights.plan import Plan
from tests.ray.killing import kill

VARIABLE = "RWS_TEST_SHM"
LIMIT_S = 60.0


def flip(actor: Any) -> None:
    """From now on the first byte of every payload that leaves this store arrives as another one."""
    module: Any = importlib.import_module("ray_weightsync.transports.host.actor")
    true = module.read_piece

    def flipped(address: Any, start: int, stop: int) -> Any:
        piece = true(address, start, stop)
        if start == 0:
            piece = piece.copy()
            piece[0] ^= 1
        return piece

    module.read_piece = flipped


def _hold(actor: Any) -> None:
    """From now on every payload that leaves this store stops on its way, after the first piece."""
    module: Any = importlib.import_module("ray_weightsync.transports.host.actor")
    true, module.held = module.read_piece, threading.Event()

    def held(address: Any, start: int, stop: int) -> Any:
        if start > 0:
            module.held.set()
            threading.Event().wait(LIMIT_S)  # the store is killed meanwhile
        return true(address, start, stop)

    module.read_piece = held


def _until_held(actor: Any) -> bool:
    module: Any = importlib.import_module("ray_weightsync.transports.host.actor")
    return bool(module.held.wait(LIMIT_S))


def dies_during(source: Any, call: Callable[[], Any]) -> Any:
    """What ``call`` returns or raises, when the store ``source`` dies while its bytes cross."""
    ray.get(source.__ray_call__.remote(_hold), timeout=LIMIT_S)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call)
        assert ray.get(source.__ray_call__.remote(_until_held), timeout=2 * LIMIT_S), "no byte was asked for"
        kill(source)
        return calling.result(LIMIT_S)


def relay_more_than_an_object_store_holds(node_ids: Sequence[str]) -> dict[str, Any]:
    """160 MB from one node's store to another's, whose object stores hold 100 MB."""
    module = torch.nn.ParameterList(torch.full((5 << 20,), float(index)) for index in range(8))
    plan = Plan.from_metadata(rws.ModuleSource(module).metadata())
    snapshot, stores = uuid.uuid4().hex, []
    try:
        for node_id in node_ids:
            began = start_store(node_id, session=uuid.uuid4().hex[:12], directory=f"${VARIABLE}", num_slots=2, limit_s=LIMIT_S)
            stores.append(asyncio.run(began))
        opened = [store.open_slot.remote(snapshot, plan.digest, plan.num_bytes, False) for store in stores]
        source, target = ray.get(opened, timeout=LIMIT_S)
        with SlotWriter() as writer:
            digest = writer.write(source, plan, iter(rws.ModuleSource(module)), progress_bytes=plan.num_bytes).digest
        ray.get(stores[0].seal.remote(snapshot, digest), timeout=LIMIT_S)
        sent = stores[1].relay.remote(snapshot, stores[0], digest, [ray.put(plan.to_wire())], 16 << 20, LIMIT_S)
        ray.get(sent, timeout=LIMIT_S)
        assert target["num_bytes"] == source["num_bytes"]
        summary: Any = memory_summary  # untyped
        return {"num_bytes": plan.num_bytes, "object_stores": summary(stats_only=True)}
    finally:
        for store in stores:
            ray.get(store.close.remote(), timeout=LIMIT_S)
            kill(store)
