"""Who would write how much into which parameter of a twin, and what that says of a plan: completeness, shapes, dtypes.

Pure bookkeeping over meta tensors: it neither builds twins nor runs loaders, and knows nothing of vLLM but the names of the
scales that have defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from ray_weightsync.weights.piecemeal import yield_point
from ray_weightsync.weights.plan import Plan

MAX_PROBLEMS = 3
"""How many problems of one kind are told; a wrong model has thousands."""

_EXACT_WIDENINGS = {
    torch.float16: (torch.float32, torch.float64),
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}
"""Casts that keep every value, so that parameters an engine keeps in float32 (router biases, ``A_log``) take what a bfloat16
trainer has; vLLM's own loader accepts the same ones as exact."""


@dataclass
class _Parameter:
    """What one parameter of the twin has been given so far."""

    name: str
    tensor: torch.Tensor
    shards: int
    copied: int = 0
    filled: int = 0
    sources: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str | None] = field(default_factory=dict)
    twice: tuple[str | None, str | None] | None = None


class Ledger:
    """Who wrote how much into which parameter; kept by the parameter's storage, which its slices and views share."""

    def __init__(self, twin: torch.nn.Module, world_size: int, aliases: Mapping[str, frozenset[str]]) -> None:
        self._aliases = aliases
        self._of: dict[int, _Parameter] = {}
        self._used: dict[str, tuple[int, _Parameter]] = {}
        self._casts: dict[tuple[torch.dtype, torch.dtype], dict[str, str]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._broadcast: dict[str, str] = {}
        for prefix, module in twin.named_modules():
            yield_point()
            # How many ranks may share one tensor of the wire; a module that does not say shares it with all of them at most.
            shards = getattr(module, "tp_size", None)
            shards = shards if isinstance(shards, int) and shards > 0 else world_size
            for leaf, tensor in module.named_parameters(recurse=False):
                name = f"{prefix}.{leaf}" if prefix else leaf
                self.shapes[name] = tuple(tensor.shape)
                self._of.setdefault(_storage(tensor), _Parameter(name, tensor, shards))

    def copy(self, target: torch.Tensor, source: torch.Tensor, wire: str | None) -> None:
        parameter = self._of.get(_storage(target))
        if parameter is None:
            return
        if source.dtype != target.dtype and target.dtype not in _EXACT_WIDENINGS.get(source.dtype, ()):
            sent = f" (tensor {wire!r})" if wire not in (None, parameter.name) else ""
            self._casts.setdefault((target.dtype, source.dtype), {}).setdefault(parameter.name, sent)
        if source.numel() != target.numel():
            self._broadcast.setdefault(
                parameter.name, f"{parameter.name}: shape {list(source.shape)} does not fill the place of shape {list(target.shape)}"
            )
        if wire is not None:
            self._used[wire] = (self._used[wire][0] + target.numel() if wire in self._used else target.numel(), parameter)
        place = (int(target.storage_offset()), tuple(target.shape), tuple(target.stride()))
        if place not in parameter.sources:
            parameter.sources[place] = wire
            parameter.copied += target.numel()
        elif parameter.sources[place] != wire:  # the same tensor twice is a loader's business: some transform in place
            parameter.twice = parameter.twice or (parameter.sources[place], wire)

    def fill(self, target: torch.Tensor) -> None:
        parameter = self._of.get(_storage(target))
        if parameter is not None:
            parameter.filled += target.numel()

    def dtype_problems(self) -> list[str]:
        problems = []
        for (kept, given), names in self._casts.items():
            first, sent = next(iter(names.items()))
            others = f" ({len(names) - 1} other parameters likewise)" if len(names) > 1 else ""
            what = f"{first} is {_short(kept)} in this engine and would be given {_short(given)}{sent}{others}"
            problems.append(f"{what}: {_remedy(kept, given)}")
        return problems

    def coverage_problems(self, plan: Plan) -> list[str]:
        problems = list(self._broadcast.values())
        # Loaders of fused and sharded layers cut out what they need, so a tensor that is too large passes them unnoticed.
        for spec in plan.tensors:
            yield_point()
            used, parameter = self._used.get(spec.name, (0, None))
            # Ranks get equal shards, but for the last ones of a padded vocabulary, which fill up with zeros; unused tensors are
            # those of other pipeline stages or experts.
            if parameter is not None and not parameter.filled and used * parameter.shards < spec.numel:
                problems.append(
                    f"{spec.name!r} of shape {list(spec.shape)} is larger than its place in {parameter.name}: "
                    f"{used} of {spec.numel} elements would be used here"
                )
        names = set(plan.names)
        given = {parameter.name for parameter in self._of.values() if parameter.copied}
        for parameter in self._of.values():
            yield_point()
            if not parameter.copied and not given.isdisjoint(self._aliases.get(parameter.name, ())):
                continue
            whole = parameter.tensor.numel()
            # Some quantised weights are created with padding that no checkpoint has; vLLM notes the rest (0.31 and later).
            wanted = int(getattr(parameter.tensor, "weight_loader_numel", whole))
            if parameter.twice is not None:
                first, second = parameter.twice
                problems.append(f"{parameter.name} would be given the same place twice, by {first!r} and {second!r}")
            elif parameter.copied > whole:
                problems.append(f"{parameter.name} has {whole} elements and would be given {parameter.copied}")
            elif plan.partial and parameter.name not in names:
                continue  # it is left out, or a part of it is, on purpose
            elif parameter.copied + parameter.filled < wanted and not (parameter.copied == 0 and is_optional(parameter.name)):
                problems.append(_missing(parameter, wanted, names))
        return problems

    def ties(self, shared: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
        """By name on the wire, the names of what goes to the same place, because parameters lie in one memory."""
        by_name = {parameter.name: parameter for parameter in self._of.values()}
        found: dict[str, set[str]] = {}
        for name, others in shared.items():
            for other in others & by_name.keys() if name in by_name else ():
                there = by_name[other].sources
                for place, wire in by_name[name].sources.items():
                    rival = there.get(place)
                    if wire is not None and rival is not None and rival != wire:
                        found.setdefault(wire, set()).add(rival)
        return {wire: frozenset(rivals) for wire, rivals in found.items()}

    def unjudged(self, plan: Plan) -> list[str]:
        if plan.partial:  # what it leaves out, it means to leave out
            return []
        found = []
        for parameter in self._of.values():
            wanted = int(getattr(parameter.tensor, "weight_loader_numel", parameter.tensor.numel()))
            if parameter.copied < wanted < parameter.copied + parameter.filled:
                found.append(f"{parameter.name}: its loader overwrites zeros of its own, so a missing part cannot be told from padding")
            elif parameter.copied == 0 and wanted and is_optional(parameter.name):
                found.append(f"{parameter.name} is not in the plan; the engine keeps the value it has")
        return first_of(found)


def aliases_of(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, frozenset[str]]:
    """For each of these parameters that lies in the very memory of others (tied weights), the names of those others."""
    groups: dict[tuple[int, torch.Size], list[str]] = {}
    for name, parameter in parameters:
        if parameter.numel() and not parameter.is_meta:
            groups.setdefault((parameter.data_ptr(), parameter.shape), []).append(name)
    return {name: frozenset(group) - {name} for group in groups.values() if len(group) > 1 for name in group}


def is_optional(parameter: str) -> bool:
    """Whether a checkpoint may lack this parameter: scales of activations and of the KV cache have defaults."""
    leaf = parameter.rpartition(".")[2]
    return leaf.startswith(("input_", "q_", "k_", "v_", "prob_")) and leaf.endswith(("scale", "zero_point"))


def _missing(parameter: _Parameter, wanted: int, names: set[str]) -> str:
    if parameter.copied == 0 and parameter.name in names:
        return f"{parameter.name} would be given nothing and stay as it is: the model's own loader skips the plan's tensor of that name"
    if parameter.copied == 0:
        return f"{parameter.name} would be given nothing: it is missing from the plan (a tied weight is sent under each of its names)"
    got = [each for each in dict.fromkeys(parameter.sources.values()) if each is not None]
    sources = f", from {', '.join(map(repr, got[:3]))}{' and others' if len(got) > 3 else ''}" if got else ""
    return f"{parameter.name} would be given {parameter.copied} of {wanted} elements{sources}: the rest is missing from the plan"


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # a meta storage has no address; this is its identity


def _remedy(kept: torch.dtype, given: torch.dtype) -> str:
    if kept.itemsize == 1 and kept.is_floating_point:
        return "quantise on the sender as its checkpoint is, and send the scales too"
    floats = kept.is_floating_point and given.is_floating_point
    return "cast on the sender with cast(...)" if floats else f"send {_short(kept)}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def first_of(problems: list[str]) -> list[str]:
    """The first problems, and how many more there are."""
    more = len(problems) - MAX_PROBLEMS
    return [*problems[:MAX_PROBLEMS], f"and {more} more"] if more > 0 else problems
