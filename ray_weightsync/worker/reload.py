"""Opening, completing and flushing vLLM's layerwise reload: the only file that touches that private API.

Between `start` and `finish` a live model has its parameters on the meta device, and each layer collects what its loaders are
given until it is complete. An update that stops half way leaves layers on meta, and the next request kills the engine core
(seen). Here a session always ends with every layer in place again, and whatever vLLM would pass over in silence - a layer
that was given nothing keeps its old weights behind a log line - is an error.

Written against vLLM 0.28 to 0.32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from ray_weightsync.worker.ledger import aliases_of, is_optional
from ray_weightsync.worker.payload import listed

logger = logging.getLogger(__name__)

MAX_NAMED = 5


def restored(layer: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The parameters and buffers, on meta and with their loaders, that a reload gives to ``layer``."""
    parameters, buffers = get_layerwise_info(layer).restore_metadata
    return parameters, buffers


class LayerwiseReload:
    """The reload sessions of one live model.

    Args:
        model: The worker's model.
        model_config: vLLM's config of it.

    Attributes:
        shared: Parameters that lie in the memory of others, with the names of those.
        aliases: Those of them that have what one of the others was given, so that one name is enough.
    """

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        self._model = model
        self._model_config = model_config
        # A model may keep tensors on meta for reasons of its own; only what a session adds is a leftover.
        self._on_meta = set(self._names_on_meta())
        named = list(model.named_parameters(remove_duplicate=False))
        self.shared = aliases_of(named)
        # On an accelerator a tied weight is one tensor, and loading it under one name loads it under both. On a CPU each of its
        # layers keeps a repacked copy of its own, which only its own name reaches.
        self.aliases = aliases_of((name, each) for name, each in named if each.device.type != "cpu")
        self._expert_kernels: list[tuple[Any, Any]] = []

    def start(self, begin: Callable[[], None] | None = None) -> None:
        """Put the model's parameters on meta and collect from now on. Leftovers of an earlier session are flushed first.

        Args:
            begin: Does so in place of vLLM's ``initialize_layerwise_reload``, or whatever else whoever will load begins with.
        """
        self.clear()
        self._expert_kernels = _take_expert_kernels(self._model)
        try:
            if begin is None:
                initialize_layerwise_reload(self._model)
            else:
                begin()
        except BaseException:
            self._give_back_expert_kernels()
            raise

    def clear(self) -> None:
        """Flush what an earlier session left open, if anything.

        Raises:
            RuntimeError: as `flush`.
        """
        if self._layers_open():
            logger.warning("an earlier weight update was left open in this worker; it is flushed")
            self.flush()
        self._give_back_expert_kernels()

    def finish(self, complete: Callable[[], None] | None = None, *, every_layer: bool = True) -> None:
        """Process the layers that were not complete on their own (padded ones, attention) and end the session.

        Args:
            complete: Does so in place of vLLM's ``finalize_layerwise_reload``, and what else whoever loaded has to do.
            every_layer: Whether each layer has to have been given something by its loaders.

        Raises:
            RuntimeError: if a layer was given nothing, or something is left on meta. The model is flushed then.
            Exception: whatever a layer's processing raises; the model is flushed then, too.
        """
        stale = self._layers_given_nothing() if every_layer else []
        if stale:
            self.flush()
            raise RuntimeError(f"{listed(stale, MAX_NAMED)} got no weights at all")
        try:
            if complete is None:
                finalize_layerwise_reload(self._model, self._model_config)
            else:
                complete()
            self._give_back_expert_kernels()
            self.require_clean()
        except BaseException as error:
            try:
                self.flush()
            except Exception as second:
                raise RuntimeError(f"{type(error).__name__}: {error}; afterwards the model could not be flushed: {second}") from error
            raise

    def flush(self) -> None:
        """End the session without completing it: layers already complete keep the new weights, all others get the old back.

        Nothing half collected is processed: a layer made of what arrived and uninitialised memory would serve no one.

        Raises:
            RuntimeError: if something is left on meta or open all the same; only a restart helps this worker.
        """
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                # To vLLM's finalize this layer now looks as if it had been given nothing: it puts the old tensors back.
                info.load_numel = 0
                info.loaded_weights.clear()
        try:
            finalize_layerwise_reload(self._model, self._model_config)
        finally:
            self._give_back_expert_kernels()
        self.require_clean()

    def _give_back_expert_kernels(self) -> None:
        for method, kernel in self._expert_kernels:
            if method.moe_kernel is None:  # its layer was not loaded
                method.moe_kernel = kernel
        self._expert_kernels = []

    def require_clean(self) -> None:
        """Raise unless the model is as whole as it was before the first session.

        Raises:
            RuntimeError: if something is left on meta or open.
        """
        left = [name for name in self._names_on_meta() if name not in self._on_meta]
        if left:
            raise RuntimeError(f"{listed(left, MAX_NAMED)} was left without memory (on the meta device)")
        if still_open := self._layers_open():
            raise RuntimeError(f"the reload of {listed(still_open, MAX_NAMED)} was left open")

    def _names_on_meta(self) -> list[str]:
        named = [*self._model.named_parameters(remove_duplicate=False), *self._model.named_buffers(remove_duplicate=False)]
        return [name for name, tensor in named if tensor.is_meta]

    def _layers_open(self) -> list[str]:
        return [name or "the model" for name, layer in self._model.named_modules() if get_layerwise_info(layer).can_load()]

    def _layers_given_nothing(self) -> list[str]:
        stale = []
        for name, layer in self._model.named_modules():
            info = get_layerwise_info(layer)
            if not info.can_load() or info.load_numel > 0 or isinstance(layer, AttentionLayerBase):
                continue  # complete already, being completed, or holding scales alone, which no checkpoint need have
            parameters = {f"{name}.{each}" if name else each: parameter for each, parameter in info.restore_metadata[0].items()}
            if any(parameter.numel() and not is_optional(each) and each not in self.aliases for each, parameter in parameters.items()):
                stale.append(name or "the model")
        return stale


def _take_expert_kernels(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """Make every layer of experts on a CPU set itself up anew when it is loaded; returns what each had.

    vLLM packs experts for its CPU kernels only while it makes the kernel (seen on 0.32): a layer that has one would compute with weights
    that were not packed, without a word. On an accelerator graphs have captured the kernel, and what it needs is done at each load.
    """
    found = []
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if kernel is not None and {each.device.type for each in layer.parameters(recurse=False)} == {"cpu"}:
            found.append((method, kernel))
            method.moe_kernel = None
    return found
