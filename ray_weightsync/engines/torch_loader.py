"""The way into a plain `torch.nn.Module`: what it has by name, what a plan must bring, and the copying.

A module's names are its parameters and persistent buffers. All of them have to be sent, exactly as they are: a plan that leaves one
out would leave it stale without anybody noticing. Of names that are one tensor (tied weights) at least one is needed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ray_weightsync.weights.copying import flat_bytes
from ray_weightsync.weights.piecemeal import yield_point
from ray_weightsync.weights.plan import Plan
from ray_weightsync.weights.ties import shared_names

MAX_PROBLEMS = 20


class ModuleLoader:
    """A `ray_weightsync.worker.updates.ModelLoader` over ``module``.

    Args:
        module: Any module. Its tensors are written in place; they are never replaced, so whoever holds them sees the new values.

    Raises:
        ValueError: if a tensor of the module is on the meta device (it has no memory to be loaded into), sparse or quantised.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._targets = tensors_by_name(module)
        self.awake = True
        for name, tensor in self._targets.items():
            if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
                raise ValueError(f"{name} is a {_kind(tensor)} tensor; weights can only be copied into ordinary ones")
        self._buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
        first = {name: group[0] for group in shared_names(self._targets) for name in group}
        self._group = {name: first.get(name, name) for name in self._targets}
        """By name, the first name of the tensor that it stands for."""
        self._loaded: dict[str, str] = {}

    def check(self, plan: Plan) -> list[str]:
        """Every way in which ``plan`` is not this module: unknown and missing names, shapes, dtypes (at most 20 are named)."""
        problems = [] if plan.target == "main" else [f"the engine has no {plan.target!r} model, only 'main'"]
        brought = set()
        for spec in plan.tensors:
            yield_point()
            target = self._targets.get(spec.name)
            if target is None:
                problems.append(f"{spec.name} is unknown to the engine's model")
                continue
            brought.add(self._group[spec.name])
            if tuple(target.shape) != spec.shape:
                problems.append(f"{spec.name} has shape {list(spec.shape)}, the engine's has {list(target.shape)}")
            if _dtype_name(target) != spec.dtype:
                problems.append(f"{spec.name} has dtype {spec.dtype}, the engine's has {_dtype_name(target)}")
        missing: dict[str, list[str]] = {}
        for name, group in self._group.items():
            if group not in brought:
                missing.setdefault(group, []).append(name)
        problems += [self._missing(names) for names in missing.values()]
        if len(problems) > MAX_PROBLEMS:
            problems[MAX_PROBLEMS:] = [f"and {len(problems) - MAX_PROBLEMS} more problems"]
        return problems

    def _missing(self, names: list[str]) -> str:
        hint = ", a buffer: ModuleSource(..., buffers=...) sends it" if names[0] in self._buffers else ""
        return f"{' or '.join(names)} is missing from the plan{hint}"

    def unjudged(self) -> list[str]:
        """Nothing: names, shapes and dtypes are all there is to a plain module."""
        return []

    def start(self) -> None:
        """Forget what an earlier session loaded.

        Raises:
            RuntimeError: if the weights are not in memory because the engine sleeps.
        """
        self._loaded = {}
        if not self.awake:
            raise RuntimeError("the weights are not in memory: wake the engine up before an update")

    @torch.no_grad()
    def load(self, pairs: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Copy each tensor into the module's own. What fails leaves the module half old, half new: nobody may use it then.

        Raises:
            ValueError: for a name, shape or dtype that is not the module's, and for tied names that bring different values.
        """
        for name, tensor in pairs:
            target = self._targets.get(name)
            if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
                raise ValueError(f"{name}, {_dtype_name(tensor)} {list(tensor.shape)}, does not fit the engine's model")
            group = self._group[name]
            first = self._loaded.get(group)
            if first is None:
                target.copy_(tensor)
                self._loaded[group] = name
            elif not _same_bytes(target, tensor):
                raise ValueError(f"{first} and {name} are one tensor in the engine's model, and different values were sent for them")

    def finish(self) -> None:
        """End the session.

        Raises:
            ValueError: if only a part of the weights was loaded.
        """
        loaded, self._loaded = self._loaded, {}
        total = len(set(self._group.values()))
        if loaded and len(loaded) < total:
            raise ValueError(f"only {len(loaded)} of {total} tensors were loaded; the model is half old, half new")

    @torch.no_grad()
    def drop(self) -> None:
        """Lose the values, as an engine does that sleeps at level 2: whoever uses them afterwards gets zeros, not the old weights."""
        for tensor in self._targets.values():
            tensor.zero_()


def tensors_by_name(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers under every name they have, so a tied tensor appears more than once."""
    kept = module.state_dict(keep_vars=True).keys()  # the only public way to tell persistent buffers from the others
    named = {name: tensor.detach() for name, tensor in module.named_parameters(remove_duplicate=False)}
    named.update({name: tensor for name, tensor in module.named_buffers(remove_duplicate=False) if name in kept})
    return named


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    # As bytes: NaN equals itself, and 0.0 is not -0.0.
    return torch.equal(flat_bytes(left.contiguous()), flat_bytes(right.contiguous()))


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _kind(tensor: torch.Tensor) -> str:
    return "meta" if tensor.is_meta else "quantised" if tensor.is_quantized else "sparse"
