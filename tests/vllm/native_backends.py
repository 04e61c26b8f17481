"""Worker backends under the names of vLLM's own, for engines without a GPU, and vLLM's own ``nccl`` one behind its stand-ins.

A worker extension. The backends do with the model what vLLM's do; only that their bytes come out of a file that the update names.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from tests.vllm import extension, nccl_on_gloo

__all__ = ["Extension", "nccl_on_gloo"]

MADE: list[FromFile] = []


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not typed for us
    refuse_on: list[int] = field(default_factory=list)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Of the file at ``path``, these names. On ranks of ``raise_after`` receiving fails when so many of them have been loaded.

    ``handles`` are what handles of GPU memory are made of.
    """

    path: str
    names: list[str]
    raise_after: dict[str, int] = field(default_factory=dict)
    handles: list[list[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for tensor, storage, dtype, handle in self.handles:
            assert (tensor, storage, handle) == (torch.Tensor, torch.storage.TypedStorage, b"handle")
            assert isinstance(dtype, torch.dtype)


class FromFile(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """As ``ipc``: loads what each update brings at once, with vLLM's reload around the session."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: list[str] = []
        MADE.append(self)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.calls.append("init")
        if self.parallel_config.rank in init_info.refuse_on:
            raise RuntimeError("made to fail in init")

    def start_weight_update(self) -> None:
        self.calls.append("start")
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.calls.append("receive")
        stored = load_file(update_info.path)
        after = update_info.raise_after.get(str(self.parallel_config.rank), len(update_info.names))
        self.load([(name, stored[name]) for name in update_info.names[:after]])
        if after < len(update_info.names):
            raise RuntimeError("made to fail in receive")

    def load(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        self.model.load_weights(pairs)

    def finish_weight_update(self) -> None:
        self.calls.append("finish")
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class Deferring(FromFile):
    """As ``sharded_rdt``: tries the loaders out at init, loads on a thread of its own, and waits for that one in *finish*."""

    defers_processing = True
    _loading: threading.Thread | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        initialize_layerwise_reload(self.model)
        super().init_transfer_engine(init_info)  # may fail when the model is on meta
        finalize_layerwise_reload(self.model, self.model_config)

    def load(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        before = self._loading

        def later() -> None:
            if before is not None:
                before.join()
            self.model.load_weights(pairs)

        self._loading = threading.Thread(target=later)
        self._loading.start()

    def drain_pending(self) -> None:
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.join()

    def finish_weight_update(self) -> None:
        self.drain_pending()
        super().finish_weight_update()


class InPlace(FromFile):
    """As ``sparse_nccl``: no reload, the live model is written to."""

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def load(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        try:
            from vllm.model_executor.model_loader.checkpoint_weight_patch import CheckpointWeightPatch, load_checkpoint_weight_patches
        except ModuleNotFoundError:  # vLLM 0.28
            self.model.load_weights(pairs)
            return
        patches = []
        for name, tensor in pairs:
            every = torch.arange(tensor.numel(), dtype=torch.int32)
            patches.append(CheckpointWeightPatch(name, tuple(tensor.shape), tensor.dtype, tensor.flatten(), every))
        load_checkpoint_weight_patches(self.model, patches)

    def finish_weight_update(self) -> None:
        self.calls.append("finish")


@dataclass
class PlannedInitInfo(InitInfo):
    """The names that will come in every session."""

    names: list[str] = field(default_factory=list)


class Resharding(FromFile):
    """As ``nccl_m2n``: at init finds out which parameters it can write into, keeps hold of their memory, and asks ``load_weights`` for
    the others alone. Without others there is no reload around the session.

    What it writes into are norms and this rank's rows of the embedding: of vLLM's choice, rows and columns of linear layers, a CPU keeps
    repacked copies.
    """

    init_info_cls = PlannedInitInfo

    def init_transfer_engine(self, init_info: PlannedInitInfo) -> None:
        super().init_transfer_engine(init_info)
        parameters = dict(self.model.named_parameters())
        written = [name for name in init_info.names if name.endswith(("norm.weight", "embed_tokens.weight"))]
        self._live = {name: parameters[name].data for name in written}
        self._reloads = len(written) < len(init_info.names)

    def start_weight_update(self) -> None:
        self.calls.append("start")
        if self._reloads:
            initialize_layerwise_reload(self.model)

    def load(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        rest = self._without_those_written(pairs)
        if all(name in self._live for name, _ in pairs):
            assert not list(rest)
        else:
            self.model.load_weights(rest)

    def _without_those_written(self, pairs: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in pairs:
            live = self._live.get(name)
            if live is None:
                yield name, tensor
                continue
            own = tensor if tensor.shape == live.shape else tensor[self.parallel_config.rank * len(live) :][: len(live)]  # may be padded
            live[: len(own)].copy_(own)

    def finish_weight_update(self) -> None:
        self.calls.append("finish")
        if self._reloads:
            finalize_layerwise_reload(self.model, self.model_config)


WeightTransferEngineFactory._registry |= {
    "ipc": lambda: FromFile,
    "sharded_rdt": lambda: Deferring,
    "sparse_nccl": lambda: InPlace,
    "nccl_m2n": lambda: Resharding,
}


class Extension(extension.FaultyExtension):
    """Brings this module into an engine's workers."""

    def rws_test_backends(self) -> list[list[str]]:
        """What every backend that was made in this worker was asked to do."""
        return [each.calls for each in MADE]

    def rws_test_forget(self) -> None:
        MADE.clear()
