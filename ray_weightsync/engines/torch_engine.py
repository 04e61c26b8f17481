"""`TorchEngine`: a Ray actor around any `torch.nn.Module` that obeys vLLM's weight-transfer protocol, with vLLM's own rules.

It is a stand-in that must not be kinder than the real thing: starting twice, finishing without a start and updating without one
raise; a request that runs between start and finish while nothing is paused kills the engine for good; the protocol itself accepts
half an update. Where vLLM raises, the words are vLLM's. It needs neither vLLM nor a GPU.

torch is imported where an engine is made: whoever is handed a `TorchEngine`, as a session's coordinator is, imports this module.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorClass

from ray_weightsync.engines.facts import CONTROL_GROUP, RWS_BACKEND
from ray_weightsync.engines.torch_gate import EngineDeadError, StepGate
from ray_weightsync.protocol.channel import KNOWN_VERBS
from ray_weightsync.protocol.remote import described, halt, run_here
from ray_weightsync.worker.identity import RESIDENT, package_version

if TYPE_CHECKING:
    import torch

    from ray_weightsync.worker.receiver import Receiver

MAX_REQUESTS = 8
"""Threads for `forward`: requests that can be in flight, frozen ones included, before others wait in Ray's queue."""

CONTROL_THREADS = 4
"""Threads of the control group. A pause that waits for a long step takes one; resume and inspection still get through."""


class TorchEngineActor:
    """The class behind `TorchEngine`; usable without Ray in tests.

    Args:
        make_module: Called once, in the actor's process. The module is put into eval mode and serves without gradients.
        num_threads: Intra-op threads of torch in this process. On a busy machine two threads make a 64 KiB copy take
            1 ms that one does in 13 us, so the default is one.

    Raises:
        TypeError: if ``make_module`` does not return a `torch.nn.Module`.
        ValueError: if the module has tensors that weights cannot be copied into.
    """

    def __init__(self, make_module: Callable[[], torch.nn.Module], *, num_threads: int = 1) -> None:
        import torch

        from ray_weightsync.engines.torch_loader import ModuleLoader
        from ray_weightsync.transports.collective.receiver import CollectiveReceiver
        from ray_weightsync.transports.host.receiver import HostReceiver
        from ray_weightsync.worker.seams import SoleRank
        from ray_weightsync.worker.updates import WorkerUpdates

        torch.set_num_threads(num_threads)
        module = make_module()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"make_module must return a torch.nn.Module, not {type(module).__name__}")
        self._module = module.eval().requires_grad_(False)
        self._gate = StepGate()
        self._loader = ModuleLoader(self._module)
        self._resident: tuple[str, ...] = RESIDENT
        receivers: dict[str, Receiver] = {"host": HostReceiver(), "collective": CollectiveReceiver()}
        device = next((each.device for each in module.parameters()), torch.device("cpu"))
        self._updates = WorkerUpdates(self._loader, SoleRank(), receivers, resident=lambda: self._resident, device=device)
        self._version = "default"

    # -- requests ----------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output. While generation is paused the call is frozen: it runs after the next resume.

        Raises:
            RequestAbortedError: if a pause of mode ``"abort"`` came while it was frozen.
            EngineDeadError: if the engine is dead, or this call kills it because its weights are being replaced.
        """
        return self.forward_versioned(*args, **kwargs)[0]

    def forward_versioned(self, *args: Any, **kwargs: Any) -> tuple[Any, str]:
        """Like `forward`, with the version label under which the output was made."""
        import torch

        with self._gate.step(), torch.no_grad():
            return self._module(*args, **kwargs), self._version

    # -- what it holds -----------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group=CONTROL_GROUP)
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies, on the CPU, of every parameter and persistent buffer, under every name it has. No RPC runs meanwhile."""
        from ray_weightsync.engines.torch_loader import tensors_by_name

        with self._gate.rpc():
            return {name: tensor.detach().cpu().clone() for name, tensor in tensors_by_name(self._module).items()}

    @ray.method(concurrency_group=CONTROL_GROUP)
    def get_weight_version(self) -> str:
        """The version label; ``"default"`` until one was set."""
        self._gate.check_alive()
        return self._version

    @ray.method(concurrency_group=CONTROL_GROUP)
    def update_weight_version(self, new_version: str) -> None:
        """Set the version label, between steps."""
        with self._gate.rpc():
            self._version = str(new_version)

    # -- the four phases ---------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group=CONTROL_GROUP)
    def init_weight_transfer_engine(self, request: Any) -> None:
        """Carry out an op of the ``"rws"`` backend; see `WorkerUpdates.init`.

        Args:
            request: A dict with, or an object that has, ``init_info``.

        Raises:
            ValueError: with what speaks against it.
        """
        info = payload_of(request, "init_info")
        with self._gate.rpc():
            self._updates.init(info)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def shutdown_weight_transfer_engine(self) -> None:
        """Forget plans and close receivers."""
        with self._gate.rpc():
            if self._gate.update_open:
                raise RuntimeError("Cannot release a trainer connection during a weight update")
            self._updates.close()

    @ray.method(concurrency_group=CONTROL_GROUP)
    def start_weight_update(self) -> None:
        """Open an update.

        Raises:
            RuntimeError: if one is open; it stays open.
        """
        with self._gate.rpc():
            self._gate.open_update()
            self._updates.start()

    @ray.method(concurrency_group=CONTROL_GROUP)
    def update_weights(self, request: Any) -> None:
        """Receive and load what ``request`` names. What goes wrong is recorded and told by the outcome call.

        Args:
            request: A dict with, or an object that has, ``update_info``: a dict, or a list of one dict per worker rank.
        """
        info = payload_of(request, "update_info")
        with self._gate.rpc():
            self._gate.require_update("start_weight_update must be called before update_weights.")
            self._updates.update(info[0] if isinstance(info, list) and info else info)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update, and then set the label if there is one. Half an update is accepted here."""
        with self._gate.rpc():
            self._gate.require_update("finish_weight_update called without a matching start_weight_update.")
            self._updates.finish()
            self._gate.close_update()
        if weight_version is not None:
            with self._gate.rpc():  # a second RPC, as in vLLM: the two are not atomic
                self._version = str(weight_version)

    # -- generation --------------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group=CONTROL_GROUP)
    def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Hold requests back; returns when none runs. Mode ``"abort"`` ends the ones that are frozen. There is no cache to clear."""
        self._gate.pause(mode)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def resume_generation(self) -> None:
        """Let requests run."""
        self._gate.resume()

    @ray.method(concurrency_group=CONTROL_GROUP)
    def is_paused(self) -> bool:
        """Whether requests are held back; also True while asleep."""
        self._gate.check_alive()
        return self._gate.paused

    @ray.method(concurrency_group=CONTROL_GROUP)
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """True: nothing of old weights is kept here beyond a request's own forward."""
        self._gate.check_alive()
        return True

    @ray.method(concurrency_group=CONTROL_GROUP)
    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause; from level 1 on weights and KV count as not in memory, at level 2 the weights are lost."""
        self._gate.pause(mode)
        if level < 1:
            return
        with self._gate.rpc():
            self._resident, self._loader.awake = (), False
            if level > 1:
                self._loader.drop()

    @ray.method(concurrency_group=CONTROL_GROUP)
    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Bring ``tags`` (``"weights"``, ``"kv_cache"``; all if None) back; resumes once everything is. Whether it is."""
        with self._gate.rpc():
            self._resident = tuple(each for each in RESIDENT if each in self._resident or tags is None or each in tags)
            self._loader.awake = "weights" in self._resident
        if self._resident != RESIDENT:
            return False
        self._gate.resume()
        return True

    @ray.method(concurrency_group=CONTROL_GROUP)
    def is_sleeping(self) -> bool:
        """True while asleep, and, as in vLLM, also while only paused."""
        self._gate.check_alive()
        return self._gate.paused or self._resident != RESIDENT

    # -- what it is --------------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group=CONTROL_GROUP)
    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Run ``method`` on the only worker. It has ``"rws_describe"``.

        Raises:
            AttributeError: for another method.
        """
        if method != "rws_describe":
            raise AttributeError(f"the worker of a TorchEngine has no method {method!r}")
        with self._gate.rpc():
            return [self._updates.describe(*args, **(kwargs or {}))]

    @ray.method(concurrency_group=CONTROL_GROUP)
    def rws_inspect(self, nonce: str) -> dict[str, Any]:
        """What `ray_weightsync.engines.inspect` wants to know, in one answer that waits for an RPC in progress but for no request."""
        context = ray.get_runtime_context()
        told: dict[str, Any] = {
            "kind": "torch",
            "num_workers": 1,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "data_parallel_index": 0,
            "node_id": context.get_node_id(),
            "actor_id": context.get_actor_id(),
            "pid": os.getpid(),
            "worker_id": context.get_worker_id(),
            "instance_id": None,
            "backend": RWS_BACKEND,
            "extension": True,
            "package_version": package_version(),
            "paused": self._gate.paused,
            "version": self._version,
            "unfinished_requests": self._gate.unfinished,
            "verbs": [verb for verb in KNOWN_VERBS if hasattr(self, verb)],
            "failed": {},
        }
        try:
            with self._gate.rpc(between_steps=False):
                told["workers"] = [self._updates.describe(nonce)]
        except EngineDeadError as error:
            told["failed"]["collective_rpc"] = described(error)
        return told

    @ray.method(concurrency_group=CONTROL_GROUP)
    def rws_chain(self, token: str, steps: Any, incarnation: str | None) -> dict[str, Any]:
        """Carry out several of the protocol's calls; see `ray_weightsync.protocol.channel.Channel.call_chain`."""
        return run_here(self, "", token, steps, incarnation)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def rws_halt_chain(self, token: str, limits_s: list[float]) -> tuple[int, float] | None:
        """Let a chain that is late begin no further step; see `ray_weightsync.protocol.channel.Channel.halt_chain`."""
        return halt(self, token, limits_s)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def wait_frozen(self, num: int, timeout_s: float = 30.0) -> bool:
        """Wait until ``num`` requests are frozen. A gate for tests and demos that want requests in flight across a round."""
        return self._gate.wait_frozen(num, timeout_s)


def payload_of(request: Any, field: str) -> Any:
    """``field`` of a request, which vLLM takes as an object or, in `LLM`, as a dict."""
    return request[field] if isinstance(request, dict) else getattr(request, field)


_remote: Any = ray.remote  # its overloads do not know concurrency_groups

TorchEngine: ActorClass[TorchEngineActor] = _remote(
    concurrency_groups={CONTROL_GROUP: CONTROL_THREADS},
    max_concurrency=MAX_REQUESTS,
    num_cpus=0,
    max_restarts=0,
    # A repeated data-plane call would be a second update; nothing here may be retried behind our back.
    max_task_retries=0,
)(TorchEngineActor)
"""``TorchEngine.remote(make_module)`` starts one; `TorchEngineSpec` starts several."""
