"""A `torch.nn.Module` as a source: its parameters (and chosen buffers) under the names the engine's checkpoint loader knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from ray_weightsync.errors import ConfigError
from ray_weightsync.weights.plan import ParamMeta
from ray_weightsync.weights.source_base import SourceBase, gather, matching
from ray_weightsync.weights.ties import declared_ties, refuse_disagreement, shared_names
from ray_weightsync.weights.transforms import Transform, as_patterns

# Parts of a name that only these wrappers put there: torch.compile, FSDP1, activation checkpointing.
_WRAPPER_PARTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# Classes that keep what they wrap in an attribute called "module", a name that models use too: only theirs is stripped.
_MODULE_WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel", "AveragedModel", "DeepSpeedEngine"})
_LORA_PARTS = frozenset({"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"})


class ModuleSource(SourceBase):
    """The parameters of ``module``, read anew each round, under the names of the module that wrappers wrap.

    - Prefixes of DistributedDataParallel, DataParallel, torch.compile, FSDP1 and activation checkpointing are stripped.
    - `DTensor` parameters (FSDP2, tensor parallelism) are gathered one after the other with ``full_tensor()``: a collective, so every
      rank has to iterate. ``metadata()`` reads global shapes and gathers nothing.
    - A tied parameter is sent under each of its names. Names that the model declares tied (``_tied_weights_keys``) but that hold
      different values are an error, found before the first tensor is yielded.

    Args:
        module: The model. No parameter may be on the meta device, sparse or quantised.
        transform: ``(name, tensor) -> iterable of (name, tensor)``, see `ray_weightsync.weights.transforms`.
        skip: Names or `fnmatch` patterns, as they are after stripping and before ``transform``, that are not sent.
        buffers: Names or patterns of buffers that are sent too, after the parameters.
        reject_nonfinite: Raise for NaN and infinite values, naming the tensor. By default they are sent as they are.

    Raises:
        ConfigError: when made and again each round, naming the tensor: for one that cannot be sent, a pattern that fits nothing, a
            PEFT module, a module sharded by FSDP1.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        transform: Transform | None = None,
        skip: str | Iterable[str] = (),
        buffers: str | Iterable[str] = (),
        reject_nonfinite: bool = False,
    ) -> None:
        super().__init__(transform=transform, skip=skip, reject_nonfinite=reject_nonfinite)
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(f"ModuleSource takes a torch.nn.Module, not {type(module).__name__}")
        self._module = module
        self._buffers = as_patterns("buffers", buffers)
        self._entries()

    @property
    def device(self) -> torch.device | None:
        """Where the module's first parameter is, or its first buffer; None if it has neither."""
        return next((tensor.device for tensors in (self._module.parameters(), self._module.buffers()) for tensor in tensors), None)

    def tied_names(self) -> list[tuple[str, ...]]:
        """Groups of names, as sent before any transform, that share one tensor; found by storage."""
        entries = self._entries()
        return [tuple(entries.sent[name] for name in group) for group in shared_names(entries.tensors)]

    def _declared(self) -> list[ParamMeta]:
        entries = self._entries()
        return [ParamMeta(entries.sent[name], tensor.dtype, tuple(tensor.shape)) for name, tensor in entries.tensors.items()]

    def _values(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        entries = self._entries()
        for tied, source in declared_ties(entries.tying_modules, entries.tensors):
            refuse_disagreement(tied, source, entries.tensors, _full, entries.sent.__getitem__)
        for name, tensor in entries.tensors.items():
            yield entries.sent[name], lambda tensor=tensor: _full(tensor)  # type: ignore[misc]

    def _entries(self) -> _Entries:
        wrapped: list[str] = []
        tying: list[tuple[str, torch.nn.Module]] = []
        for path, module in self._module.named_modules(remove_duplicate=False):
            kind: Any = type(module)  # mypy takes a class's __hash__ for that of its instances
            traits = _traits(kind)
            if traits.peft or "peft_config" in module.__dict__:
                raise _peft_refusal(f"{path or 'the module'} is a {type(module).__name__}")
            if traits.fsdp1:
                _refuse_sharded_fsdp1(path, module)
            if traits.wraps_module:
                wrapped.append(f"{path}." if path else "")
            if traits.may_tie or "_tied_weights_keys" in module.__dict__:
                tying.append((path, module))
        wrapped.reverse()  # innermost first, so that the outer prefixes still fit

        tensors: dict[str, torch.Tensor] = dict(self._module.named_parameters(remove_duplicate=False))
        sent = {name: _stripped(name, wrapped) for name in tensors}
        if self._buffers:
            buffers = {_stripped(name, wrapped): (name, buffer) for name, buffer in self._module.named_buffers(remove_duplicate=False)}
            chosen = matching("buffers", self._buffers, buffers.keys())
            for name, (raw_name, buffer) in buffers.items():
                if name in chosen:
                    tensors[raw_name] = buffer
                    sent[raw_name] = name
        if self._skip:
            skipped = matching("skip", self._skip, set(sent.values()))
            tensors = {name: tensor for name, tensor in tensors.items() if sent[name] not in skipped}
        for name, tensor in tensors.items():
            if not _LORA_PARTS.isdisjoint(name.split(".")):
                raise _peft_refusal(f"{sent[name]!r} is a LoRA weight")
            if is_lazy(tensor):
                raise ConfigError(
                    f"{sent[name]!r} is not initialised yet and has no shape", hint="run one batch through the lazy module first"
                )
            self._refuse(sent[name], tensor)
        return _Entries(tensors, sent, tying)


class _Entries(NamedTuple):
    tensors: dict[str, torch.Tensor]  # by the names of the module as it is
    sent: dict[str, str]  # those names to the ones without wrappers
    tying_modules: list[tuple[str, torch.nn.Module]]


class _Traits(NamedTuple):
    peft: bool
    fsdp1: bool
    wraps_module: bool
    may_tie: bool


@lru_cache(maxsize=1024)
def _traits(cls: Any) -> _Traits:
    # By name: neither peft nor deepspeed is a dependency, and a class that was not imported has no instances.
    bases = [(base.__module__, base.__name__) for base in cls.__mro__]
    return _Traits(
        peft=any(module.split(".")[0] == "peft" for module, _ in bases) or hasattr(cls, "peft_config"),
        fsdp1=any(module.startswith("torch.distributed.fsdp") and name == "FullyShardedDataParallel" for module, name in bases),
        wraps_module=any(name in _MODULE_WRAPPERS for _, name in bases),
        may_tie=hasattr(cls, "_tied_weights_keys"),
    )


def _stripped(name: str, wrapped: list[str]) -> str:
    for path in wrapped:
        if name.startswith(path + "module."):
            name = path + name[len(path) + len("module.") :]
    parts = name.split(".")
    return name if _WRAPPER_PARTS.isdisjoint(parts) else ".".join(part for part in parts if part not in _WRAPPER_PARTS)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return gather(tensor.detach())


def _peft_refusal(what: str) -> ConfigError:
    return ConfigError(
        f"{what}: a PEFT module cannot be sent, its base weights lack the adapter and the engine knows no adapter weights",
        hint="send merged weights: ModuleSource(copy.deepcopy(model).merge_and_unload())",
    )


def _refuse_sharded_fsdp1(path: str, module: Any) -> None:
    # FSDP1 shows each rank one-dimensional slices of its parameters; only unsharded, original ones have their own shapes.
    flat = any(name.rsplit(".", 1)[-1] == "_flat_param" for name, _ in module.named_parameters())
    if flat or (module.process_group.size() > 1 and module.sharding_strategy.name != "NO_SHARD"):
        raise ConfigError(
            f"{path or 'the module'} is sharded by FSDP1, whose parameters are one-dimensional slices",
            hint="shard with FSDP2 (torch.distributed.fsdp.fully_shard), or take a full state dict and send StateDictSource(state_dict)",
        )
