"""What an engine said it is: plain, picklable values, and how an engine's answer becomes one. No Ray, no torch, no engine needed.

The answer itself (``told``: plain types) is made in the engine's own process, by `inspect.read_actor` or by a method ``rws_inspect``;
an HTTP server's routes are put into the same form. What an engine did not tell is None: unknown is never a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ray_weightsync.protocol.remote import identity

EngineKind = Literal["async", "sync", "torch", "http", "client"]

RWS_BACKEND = "rws"
"""The name under which our backend is registered with vLLM."""

CONTROL_GROUP = "rws_control"
"""The concurrency group of control calls: an actor whose request slots are all taken still answers these."""

INSPECT = "rws_inspect"
"""The method by which actors of ours tell what they are: ``rws_inspect(nonce) -> told``, in `CONTROL_GROUP`."""

DESCRIBE = "rws_describe"
"""The method of our worker extension: one dict per worker, never raises."""


@dataclass(frozen=True)
class DeviceFacts:
    """What a process computes on.

    Attributes:
        type: As torch names it, such as ``"cpu"`` or ``"cuda"``.
        uuid: Of a GPU: the same in every process that sees it. None if it was not told.
    """

    type: str
    uuid: str | None = None

    @classmethod
    def from_wire(cls, told: object) -> DeviceFacts | None:
        """Read what a process told of its device; None if it told nothing."""
        if not isinstance(told, Mapping) or not isinstance(told.get("type"), str):
            return None
        uuid = told.get("uuid")
        # NVIDIA's management library, which vLLM asks, writes "GPU-" before what torch says.
        return cls(told["type"], uuid.removeprefix("GPU-") if isinstance(uuid, str) and uuid else None)


@dataclass(frozen=True, kw_only=True)
class WorkerFacts:
    """One worker's own description; see `WorkerUpdates.describe` for the meaning of each field.

    Attributes:
        nonce: The nonce of the question, echoed; an older one means that this worker's replies are out of step.
        plans: Digests of the plans it accepted, oldest first.
        judging: Digest of the plan that it is still judging, a piece with each question.
        unjudged: By plan digest, what its structural check could not judge.
        resident: Which of ``"weights"`` and ``"kv_cache"`` are in memory.
        attesting: Workers that its engine's outcome speaks for, those of other data-parallel engines included; 0 if it did not say.
        failure: What went wrong in its latest session, if anything did.
        device: Where its part of the model is.
        nccl: Whether nccl4py can be used there; see `has_nccl`.
    """

    nonce: str
    rank: int
    world_size: int
    package_version: str
    plans: tuple[str, ...] = ()
    judging: str | None = None
    unjudged: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    update_open: bool = False
    round: str | None = None
    failure: str | None = None
    epoch: int = 0
    resident: tuple[str, ...] = ()
    attesting: int = 0
    incarnation: str = ""
    node_ip: str = ""
    pid: int = 0
    device: DeviceFacts | None = None
    nccl: bool = False

    @classmethod
    def from_wire(cls, told: object) -> WorkerFacts:
        """Read one worker's answer. Fields of a later package version are ignored.

        Raises:
            ValueError: if it is no such answer.
        """
        if not isinstance(told, Mapping):
            raise ValueError(f"a worker answered {_short(told)} instead of a description")
        values = {each.name: told[each.name] for each in fields(cls) if each.name in told}
        if missing := {"nonce", "rank", "world_size", "package_version"} - values.keys():
            said = f" (it says: {told['failure']})" if told.get("failure") else ""
            raise ValueError(f"a worker's description lacks {', '.join(sorted(missing))}{said}")
        values["plans"] = tuple(map(str, values.get("plans", ())))
        values["resident"] = tuple(map(str, values.get("resident", ())))
        values["device"] = DeviceFacts.from_wire(values.get("device"))
        values["nccl"] = values.get("nccl") is True
        values["unjudged"] = {str(digest): tuple(map(str, reasons)) for digest, reasons in dict(values.get("unjudged", {})).items()}
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What is known of an engine. None means that it did not say.

    Attributes:
        kind: ``"async"`` and ``"sync"`` are an actor's `AsyncLLM` and `LLM`, ``"torch"`` a `TorchEngine`, ``"http"`` a vLLM server,
            ``"client"`` whatever is behind a user's own `VLLMWeightSyncClient`.
        world_size: Workers behind it, tensor x pipeline (x context) x data parallel.
        data_parallel_index: Which data-parallel engine of its deployment it is.
        data_parallel_outside: Whether other data-parallel engines of its deployment are driven elsewhere, as under vLLM's external and
            hybrid load balancing.
        incarnation: Changes when the process or the engine in it is a new one, also behind the same actor handle or URL.
        node_id: Ray's id of the node that its actor runs on.
        actor_id: Ray's id of its actor.
        backend: Name of its weight-transfer backend; None also when it has none.
        version: Its version label.
        paused: Whether generation is paused (or the engine sleeps; vLLM does not tell these apart).
        package_version: Version of this package in its workers.
        kv_connector: Name of its KV-transfer connector, if it has one.
        is_multimodal: Whether its model also takes images or sound, which it caches as embeddings.
        unfinished_requests: Requests in flight, frozen ones included.
        verbs: Names of its public methods, the protocol's among them; empty if unknown.
        workers: What its workers said; empty where our worker extension is not there to be asked.
        devices: Where its workers are, by rank, as its configuration says; empty if that cannot be seen there.
        in_step: False if its workers' replies are proved to lag behind the calls. Such an engine must be replaced: its "OK" means nothing.
        step_problem: In words, when ``in_step`` is False.
    """

    kind: EngineKind
    world_size: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    data_parallel_index: int | None = None
    data_parallel_outside: bool | None = None
    node_id: str | None = None
    actor_id: str | None = None
    pid: int | None = None
    incarnation: str | None = None
    backend: str | None = None
    version: str | None = None
    paused: bool | None = None
    vllm_version: str | None = None
    package_version: str | None = None
    kv_connector: str | None = None
    is_multimodal: bool | None = None
    unfinished_requests: int | None = None
    verbs: tuple[str, ...] = ()
    workers: tuple[WorkerFacts, ...] = ()
    devices: tuple[DeviceFacts, ...] = ()
    in_step: bool = True
    step_problem: str | None = None

    @property
    def is_stock(self) -> bool:
        """Whether it was started on one of vLLM's own weight-transfer backends: nothing of ours is in its workers."""
        return self.backend is not None and self.backend != RWS_BACKEND


def facts_of(told: Mapping[str, Any], nonce: str) -> EngineFacts:
    """The facts in an engine's answer to the question that carried ``nonce``. Pure.

    Raises:
        ValueError: if the answer is malformed. Workers that are out of step are a fact and no error.
    """
    tensor, pipeline, data = (_size(told, f"{each}_parallel_size") for each in ("tensor", "pipeline", "data"))
    # A collective_rpc answers for one data-parallel engine only. Its workers are tensor x pipeline (x context) parallel.
    num_workers = _size(told, "num_workers")
    workers, problem = _workers(told, nonce, num_workers)
    version, paused = told.get("version"), told.get("paused")
    return EngineFacts(
        kind=told["kind"],
        world_size=None if num_workers is None or data is None else num_workers * data,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        data_parallel_size=data,
        data_parallel_index=told.get("data_parallel_index"),
        data_parallel_outside=told.get("data_parallel_outside"),
        node_id=told.get("node_id"),
        actor_id=told.get("actor_id"),
        pid=told.get("pid"),
        incarnation=identity(told.get("worker_id"), told.get("instance_id")),
        backend=told.get("backend"),
        version=version if isinstance(version, str) and version else None,
        paused=paused if isinstance(paused, bool) else None,
        vllm_version=told.get("vllm_version"),
        package_version=workers[0].package_version if workers else told.get("package_version"),
        kv_connector=told.get("kv_connector"),
        is_multimodal=told.get("is_multimodal"),
        unfinished_requests=told.get("unfinished_requests"),
        verbs=tuple(told.get("verbs") or ()),
        workers=workers,
        devices=_devices(told.get("devices"), num_workers),
        in_step=problem is None,
        step_problem=problem,
    )


def _devices(told: object, num_workers: int | None) -> tuple[DeviceFacts, ...]:
    if not isinstance(told, list | tuple):
        return ()
    devices = tuple(device for each in told if (device := DeviceFacts.from_wire(each)) is not None)
    return devices if len(devices) == num_workers else ()


def _size(told: Mapping[str, Any], key: str) -> int | None:
    value = told.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} must be a positive int, not {_short(value)}")
    return value


def _workers(told: Mapping[str, Any], nonce: str, expected: int | None) -> tuple[tuple[WorkerFacts, ...], str | None]:
    """The workers' descriptions, and what shows that their replies are out of step with the calls."""
    error = told.get("failed", {}).get("collective_rpc")
    if error is not None:
        # Our method never raises, so the error is an earlier call's that was still queued.
        return (), f"the workers were asked to describe themselves, and an earlier call's error came back: {error['text']}"
    answers = told.get("workers")
    if answers is None:
        return (), None
    workers = []
    for place, answer in enumerate(answers):
        try:
            worker = WorkerFacts.from_wire(answer)
        except ValueError as error:
            ours = isinstance(answer, Mapping) and answer.get("nonce") == nonce
            what = "no description" if ours else "an earlier call's"
            return (), f"reply {place} is {what}: {error}"
        if worker.nonce != nonce:
            return (), f"reply {place} answers an earlier question (nonce {worker.nonce!r}, asked with {nonce!r})"
        workers.append(worker)
    if expected is not None and len(workers) != expected:
        return (), f"{len(workers)} workers answered, there are {expected}"
    if sorted(worker.rank for worker in workers) != sorted({worker.rank for worker in workers}):
        return (), f"two workers answered for one rank: {[worker.rank for worker in workers]}"
    return tuple(workers), None


def _short(value: object) -> str:
    return f"{type(value).__name__} {value!r}"[:120]
