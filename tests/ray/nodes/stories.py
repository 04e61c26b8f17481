"""What the tests here have done in the driver: sessions over engines on several nodes. Plain values come back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray_weightsync as rws
from ray_weightsync.testing import Faults
from tests.ray.killing import kill, until_dead
from tests.ray.nodes.crossing import LIMIT_S, VARIABLE, dies_during, flip

ROAMING = "roaming"
"""A resource of the nodes that an engine may be restarted on."""
PIECE_BYTES = 4096
HOST = rws.Host(directory=f"${VARIABLE}", bucket_bytes=PIECE_BYTES)

engines: dict[str, Any] = {}
"""One on each node, by its id."""


def make_module() -> torch.nn.Module:
    """About ten pieces of weights, different ones at each call."""
    return torch.nn.Sequential(torch.nn.Linear(16, 192), torch.nn.Tanh(), torch.nn.Linear(192, 33))


def start_engine(node_id: str) -> Any:
    return rws.TorchEngine.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(make_module)


def start_engines(node_ids: Sequence[str]) -> None:
    engines.update({node_id: start_engine(node_id) for node_id in node_ids})


@contextlib.contextmanager
def session(**options: Any) -> Iterator[rws.WeightSync]:
    """A session on all engines, r0 on the first node, which is the driver's."""
    options.setdefault("on_failure", rws.FailurePolicy(auto_heal=False))
    options.setdefault("transport", HOST)
    refs = [rws.EngineRef(engine, id=f"r{index}") for index, engine in enumerate(engines.values())]
    with rws.WeightSync.attach(refs, **options) as sync:
        yield sync


def serve(module: torch.nn.Module, among: Sequence[Any] | None = None) -> list[bool]:
    """Of each engine, whether its output is the module's, bit for bit."""
    inputs = torch.arange(32, dtype=torch.float32).reshape(2, 16) / 7
    with torch.no_grad():
        expected = module(inputs)
    outputs = ray.get([engine.forward.remote(inputs) for engine in (among or list(engines.values()))], timeout=LIMIT_S)
    return [torch.equal(output, expected) for output in outputs]


def store_on(sync: rws.WeightSync, node_id: str) -> Any:
    """The session's store on a node."""
    for each in ray.util.list_named_actors(all_namespaces=True):
        if each["name"].startswith(f"store:{sync.name}:"):
            handle: Any = ray.get_actor(each["name"], namespace=each["namespace"])
            with contextlib.suppress(ray.exceptions.RayActorError):
                if ray.get(handle.__ray_call__.remote(_node), timeout=LIMIT_S) == node_id:
                    return handle
    raise LookupError(f"session {sync.name} has no store on {node_id}")


def _node(actor: Any) -> str:
    return ray.get_runtime_context().get_node_id()


def slots_on(sync: rws.WeightSync, node_id: str) -> Any:
    return ray.get(store_on(sync, node_id).stats.remote(), timeout=LIMIT_S)


def fence(sync: rws.WeightSync, replica_id: str, module: torch.nn.Module, version: int) -> None:
    """A round in which that replica fails."""
    with Faults(sync) as faults:
        faults.inject(replica_id, "update", "raise")
        try:
            sync.send_weights(module, version=version)
        except rws.ReplicasLost as error:
            assert error.replicas == (replica_id,)  # noqa: PT017 - told to the test as an error of the story
        else:
            raise AssertionError("nobody was lost")


# --- the stories --------------------------------------------------------------------------------------------------------------


def three_rounds() -> dict[str, Any]:
    with session() as sync:
        modules = [make_module() for _ in range(3)]
        sync.send_weights(modules[0], version=1)
        served = [serve(modules[0])]
        sync.commit_weights(sync.stage_weights(modules[1], version=2))
        served.append(serve(modules[1]))
        report = sync.send_weights(modules[2], version=3)
        served.append(serve(modules[2]))
        return {
            "served": served,
            "versions": ray.get([engine.get_weight_version.remote() for engine in engines.values()], timeout=LIMIT_S),
            "relayed": ["relay" in replica.phases_s for replica in report.replicas],
            "stats": {node_id: slots_on(sync, node_id) for node_id in engines},
            "digest": report.weights_digest == rws.weights_digest(modules[2]),
        }


def a_byte_flips() -> dict[str, Any]:
    with session() as sync:
        before, after = make_module(), make_module()
        sync.send_weights(before, version=1)
        origin = store_on(sync, next(iter(engines)))
        ray.get(origin.__ray_call__.remote(flip), timeout=LIMIT_S)
        try:
            sync.send_weights(after, version=2)
        except rws.RoundAborted as error:
            told = error
        else:
            raise AssertionError("other bytes were accepted")
        return {"error": str(told), "replicas": told.replicas, "phase": told.phase, "served": serve(before)}


def stores_die(node_id: str) -> dict[str, Any]:
    with session() as sync:
        sync.send_weights(make_module(), version=1)
        kill(store_on(sync, node_id))
        module = make_module()
        report = sync.send_weights(module, version=2)
        between = {"committed": report.committed, "served": serve(module)}
        try:
            dies_during(store_on(sync, next(iter(engines))), lambda: sync.send_weights(make_module(), version=3))
        except rws.RoundAborted as error:
            told = {"error": str(error), "replicas": error.replicas, "served": serve(module)}
        else:
            raise AssertionError("bytes came from a dead store")
        module = make_module()
        report = sync.send_weights(module, version=4)
        return {"between": between, "while they cross": told, "after": {"committed": report.committed, "served": serve(module)}}


def healed_from_a_relay(node_ids: Sequence[str], coordinator_dies: bool) -> dict[str, Any]:
    """The replica on the second node is fenced; of three stores only the third's is left, or stays while the first's bytes cross."""
    with session() as sync:
        module = make_module()
        sync.send_weights(make_module(), version=1)
        fence(sync, "r1", module, 2)
        kill(store_on(sync, node_ids[1]))
        if coordinator_dies:
            kill(store_on(sync, node_ids[0]))
            ray.kill(sync.coordinator)
            sync.heal()
        else:
            dies_during(store_on(sync, node_ids[0]), sync.heal)
        healed = [replica.id for replica in sync.serving()], serve(module)
        module = make_module()
        report = sync.send_weights(module, version=3)
        return {"healed": healed, "committed": report.committed, "served": serve(module)}


class Slow:
    """A source that gives its tensors only when the engines have begun to read."""

    def __init__(self, module: torch.nn.Module, sync: rws.WeightSync) -> None:
        self._tensors = dict(module.state_dict())
        self._sync = sync

    def metadata(self) -> list[rws.ParamMeta]:
        return [rws.ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        deadline = time.monotonic() + LIMIT_S
        while self._sync.status().phase != "update":
            assert time.monotonic() < deadline, str(self._sync.status())
            time.sleep(0.01)
        yield from self._tensors.items()


def overlapped() -> dict[str, Any]:
    with session(transport=rws.Host(directory=HOST.directory, bucket_bytes=PIECE_BYTES, overlap=True)) as sync:
        module = make_module()
        report = sync.send_weights(Slow(module, sync), version=1)
        return {"notes": report.notes, "served": serve(module)}


kept: dict[str, Any] = {}


def begin_losing_a_node() -> None:
    """With one more engine on the third node, r3, which may be restarted."""
    engines["roamer"] = rws.TorchEngine.options(max_restarts=1, resources={ROAMING: 1}).remote(make_module)
    kept["stack"] = contextlib.ExitStack()
    kept["sync"] = kept["stack"].enter_context(session(timeouts=rws.Timeouts(health_interval_s=0.5)))
    kept["module"] = make_module()
    kept["sync"].send_weights(kept["module"], version=1)


def heal_where_it_was_restarted(node_id: str) -> dict[str, Any]:
    """The node of r3 was killed: the same handle is on this one as soon as Ray has found out."""
    sync, roamer, deadline, found = kept["sync"], engines["roamer"], time.monotonic() + LIMIT_S, None
    while found != node_id:
        assert time.monotonic() < deadline, (found, str(sync.status()))
        with contextlib.suppress(ray.exceptions.RayActorError):
            found = ray.get(roamer.__ray_call__.remote(_node), timeout=LIMIT_S)
        time.sleep(0.05)
    while (state := next(each.state for each in sync.status().replicas if each.id == "r3")) != "QUARANTINED":
        assert time.monotonic() < deadline, str(sync.status())
        time.sleep(0.05)
    sync.heal("r3")
    return {
        "noticed": state,
        "serving": "r3" in [replica.id for replica in sync.serving()],
        "served": serve(kept["module"], [roamer]),
    }


def go_on_without(node_id: str) -> dict[str, Any]:
    """The node was killed, and its processes end when they have found out; the next call may still be one that does."""
    sync, module, aborted = kept["sync"], make_module(), []
    until_dead(engines.pop(node_id))
    for version in (2, 3):
        try:
            report = sync.send_weights(module, version=version)
        except (rws.RoundAborted, rws.ReplicasLost) as error:
            aborted.append((type(error).__name__, error.replicas))
        else:
            break
    kept["module"] = module
    return {"aborted": aborted, "committed": report.committed, "served": serve(module)}


def replace_on(lost: str, node_id: str) -> dict[str, Any]:
    sync = kept["sync"]
    engines[node_id] = start_engine(node_id)
    sync.replace(lost, rws.EngineRef(engines[node_id], id="new"))
    deadline = time.monotonic() + LIMIT_S
    while "new" not in [replica.id for replica in sync.serving()]:
        assert time.monotonic() < deadline, str(sync.status())
        time.sleep(0.05)
    joined = serve(kept["module"])
    module = make_module()
    report = sync.send_weights(module, version="last")
    return {"joined": joined, "committed": report.committed, "served": serve(module)}


def end() -> None:
    """Close what a story has left open."""
    if kept:
        kept["stack"].close()
        kept.clear()
