"""The trainer's end of one of vLLM's own data planes: its trainer engine, made when it is known whom it is to reach.

vLLM is imported here, and only when an engine is asked for.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import ray
import torch

from ray_weightsync.config import Native, transport_name
from ray_weightsync.errors import ConfigError
from ray_weightsync.protocol.client import VLLMWeightSyncClient
from ray_weightsync.transports.collective.stock_format import OLDEST
from ray_weightsync.transports.collective.stock_meeting import oldest_release
from ray_weightsync.transports.native.backends import missing_module, traits
from ray_weightsync.transports.native.forms import fitting
from ray_weightsync.transports.native.patches import Patches
from ray_weightsync.transports.native.source import RoundSource
from ray_weightsync.worker.identity import node_ip

OURS = ("rank", "num_trainer_ranks", "world_size", "num_consumers", "master_port")
"""Fields of a ``TrainerInitInfo`` that follow from who takes part."""


class TrainerEngine(Protocol):
    """What sends one round after the other to the members that it was made for. Its client's verbs reach all of them."""

    def send_weights(self) -> None:
        """Send what the source holds, in one session: start, update as often as it likes, finish."""
        ...

    def abort(self, reason: str) -> None:
        """End the other two from another thread, as far as that can be done: somebody is lost, and nobody waits for them any more."""
        ...

    def shutdown(self) -> None:
        """Leave the group and free what belongs to it."""
        ...


class VllmEngines:
    """Makes vLLM's trainer engines of one backend, through vLLM's own factory.

    Args:
        native: The backend, and its options.

    Raises:
        ConfigError: if vLLM, or what the engine needs beside it, cannot be imported here, or it has no such trainer engine, or that has not
            one of the options.
    """

    def __init__(self, native: Native) -> None:
        try:
            import vllm
            from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        except ImportError as error:
            raise ConfigError(
                f"transport {transport_name(native)!r} is vLLM's own trainer engine, and vLLM cannot be imported in the trainer ({error})",
                hint="install the vLLM of the engines (0.28 or later) where weights are sent from, or choose 'host' or 'collective'",
            ) from error
        self._native = native
        self._traits = traits(native.backend)
        self._own: str = vllm.__version__
        known = WeightTransferTrainerFactory._registry  # vLLM has no other way to tell what an engine takes
        if native.backend not in known:
            raise ConfigError(f"this vLLM has no trainer engine {native.backend!r}; it has {', '.join(sorted(known))}")
        self._factory = WeightTransferTrainerFactory
        engine = known[native.backend]()
        if (module := missing_module(native.backend, engine)) is not None:
            raise ConfigError(
                f"transport {transport_name(native)!r} needs {module!r}, which is not installed in the trainer",
                hint="docs/transports.md says what each backend needs, in the trainer and in the engines",
            )
        self._init_info_cls: Any = engine.init_info_cls
        self._fields = {field.name for field in dataclasses.fields(self._init_info_cls) if field.init}
        if wrong := sorted(set(native.options) - self._fields | set(native.options) & set(OURS)):
            mine = ", ".join(sorted(self._fields - set(OURS))) or "none"
            raise ConfigError(f"Native({native.backend!r}).options cannot have {', '.join(wrong)}; options of this backend: {mine}")

    def make(
        self, client: VLLMWeightSyncClient, source: RoundSource, *, workers: Sequence[int], vllm: Sequence[str | None] = ()
    ) -> TrainerEngine:
        """An engine for replicas of so many workers each, of these versions of vLLM. Blocks until all of them have joined.

        Raises:
            ConfigError: if the engines could not read the plan in the form that they are to be sent; none was told.
            Exception: whatever vLLM raises; nothing is left open then.
        """
        options = self._native.options
        if "packed" in self._fields:
            options = fitting(self._native.backend, options, source.plan, vllm=oldest_release([*vllm, self._own]) or OLDEST)
        place = _Place(options.get("master_address")) if "master_port" in self._fields else None
        try:
            ours = of_fleet(workers)
            if "trainer_actor_namespace" in self._fields:  # where vLLM's workers look for the actors that it starts here
                ours["trainer_actor_namespace"] = ray.get_runtime_context().namespace
            if place is not None:
                ours |= {"master_address": place.address, "master_port": place.port}
            values = {name: value for name, value in ours.items() if name in self._fields} | options
            given = as_vllms(source, layouts=self._traits.layouts) if self._traits.needs_source else None
            engine = self._factory.trainer_init(self._init_info_cls(**values), client=client, source=given)
        except BaseException:
            if place is not None:
                place.close()
            raise
        return _Engine(engine, source, place)


class _Engine:
    """vLLM's engine, what it sends, and the port that it was given."""

    def __init__(self, engine: Any, source: RoundSource, place: _Place | None) -> None:
        self._engine = engine
        self._source = source
        self._place = place

    def send_weights(self) -> None:
        if isinstance(self._source.given, Patches):
            self._engine.send_weights(self._source.given.on_device(current_gpu()))
        else:
            self._engine.send_weights()

    def abort(self, reason: str) -> None:
        """vLLM's have nothing that ends a wait."""

    def shutdown(self) -> None:
        try:
            self._engine.shutdown()
        finally:
            if self._place is not None:
                self._place.close()


class _Place:
    """An address of this machine and a port of it that is nobody else's as long as this is open.

    vLLM binds it itself. Bound here with SO_REUSEADDR, and not listened on, it lets whoever sets the same; the kernel gives it to nobody
    who asks for any free port.

    Args:
        address: Which one. None: this node's in Ray.
    """

    def __init__(self, address: str | None = None) -> None:
        self.address = address or node_ip()
        family, kind, protocol, _, target = socket.getaddrinfo(self.address, 0, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, kind, protocol)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(target)
        except BaseException:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


def current_gpu() -> torch.device | None:
    """The GPU that vLLM's trainer engines take all tensors to be on: this thread's current one. None without a GPU."""
    cuda: Any = torch.cuda  # partly untyped
    return torch.device("cuda", cuda.current_device()) if cuda.is_available() else None


def on_device(pairs: Iterable[tuple[str, torch.Tensor]], device: torch.device | None) -> Iterator[tuple[str, torch.Tensor]]:
    """``pairs``, each tensor on ``device``: copied there if it is elsewhere, such as the rest of a module that is spread over several."""
    for name, tensor in pairs:
        yield name, tensor if device is None else tensor.to(device)


def of_fleet(workers: Sequence[int]) -> dict[str, Any]:
    """What vLLM's ``TrainerInitInfo`` classes say of the group: this one trainer, and replicas of so many workers each. Pure."""
    total, sizes = sum(workers), set(workers)
    equal = workers[0] if len(sizes) == 1 else None
    return {
        "rank": 0,
        "num_trainer_ranks": 1,
        "world_size": 1 + total,
        "num_consumers": total,
        # Workers at the same place in replicas of equal size have the same shards.
        "workers_per_replica": equal or 0,
        "dst_mesh_dims": (total, 1) if equal is None else (len(workers), equal),
    }


def as_vllms(source: RoundSource, *, layouts: bool = False) -> Any:
    """``source`` as one of vLLM's own ``WeightSource``, whose engines may ask for the defaults of that class.

    Args:
        source: What is sent.
        layouts: It has to say how the trainer holds each tensor: this one trainer holds all of it.
    """
    from vllm.distributed.weight_transfer import base

    class VllmRoundSource(base.WeightSource):  # type: ignore[misc]  # vLLM is not there where types are checked
        def metadata(self) -> list[Any]:
            return [base.ParamMeta(each.name, each.dtype, each.shape) for each in source.metadata()]

        def __iter__(self) -> Any:
            return on_device(source, current_gpu())

        def held_names(self) -> Any:
            told = getattr(source.given, "held_names", None)
            return told() if callable(told) else None

    if not layouts:
        return VllmRoundSource()

    from vllm.distributed.weight_transfer import m2n_common, m2n_source

    class VllmLaidOutSource(VllmRoundSource, m2n_source.M2NWeightSource):  # type: ignore[misc]
        def mesh(self) -> Any:
            return m2n_common.M2NMesh((1, 1), 0)

        def metadata(self) -> list[Any]:
            return [m2n_common.M2NParamMeta(each.name, each.dtype, each.shape, m2n_common.REPLICATED) for each in source.metadata()]

    return VllmLaidOutSource()
