"""What a source is, what every source of ours does, and the check of a stream of tensors against its plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable

import torch

from ray_weightsync.errors import ConfigError
from ray_weightsync.weights.plan import ParamMeta, ParamMetaLike, Plan, TensorSpec
from ray_weightsync.weights.transforms import Transform, apply_transform, as_patterns, transform_metadata


@runtime_checkable
class WeightSource(Protocol):
    """A trainer's weights, readable once a round. It is vLLM's own ``WeightSource`` contract; subclasses of that one fit as they are.

    1. ``metadata()`` declares name, dtype and full shape of all that iteration yields, in the same order, and moves no data.
    2. ``iter(source)`` starts a fresh pass each time and yields ``(name, tensor)``, each a full, plain tensor.
    3. Where yielding is a collective of several ranks, every rank iterates in the same order, in lockstep.

    Optional: ``held_names()``, ``groups()`` and ``iter_groups()``, as vLLM has them; and ``device``, where the tensors are that it yields,
    which helps ``transport="auto"``.
    """

    def metadata(self) -> Sequence[ParamMetaLike]: ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


def checked(pairs: Iterable[tuple[str, torch.Tensor]], plan: Plan) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """Yield what ``pairs`` (a source is one) yields, each beside its place in ``plan``, as long as the two agree.

    Raises:
        ConfigError: naming the tensor, if one has another name, dtype or shape than declared, cannot be sent (see `refuse_unsendable`),
            is missing, or is one too many.
    """
    specs = plan.tensors
    position = 0
    for item in pairs:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise ConfigError(f"iteration must yield (name, tensor) pairs; after {position} of them came {type(item).__name__}")
        name, tensor = item
        if position == len(specs):
            raise ConfigError(f"iteration yields {name!r} after all {position} tensors that metadata() declared", hint=_AGREE)
        spec = specs[position]
        if name != spec.name:
            raise ConfigError(f"iteration yields {name!r} where metadata() declared {spec.name!r} (tensor {position})", hint=_AGREE)
        if tensor is None:
            raise ConfigError(
                f"iteration yields None for {name!r}: a source that holds only part of the model cannot be sent by one sender"
            )
        refuse_unsendable(name, tensor)
        if tensor.dtype is not spec.torch_dtype or tensor.shape != spec.shape:
            raise ConfigError(
                f"iteration yields {name!r} as {tensor.dtype} {tuple(tensor.shape)}, metadata() declared torch.{spec.dtype} {spec.shape}",
                hint=_AGREE,
            )
        yield spec, tensor
        position += 1
    if position < len(specs):
        raise ConfigError(
            f"iteration ends after {position} of {len(specs)} tensors; the next one declared is {specs[position].name!r}", hint=_AGREE
        )


_AGREE = "metadata() and iteration must agree name for name, in the same order, and every iter(source) must be a fresh, complete pass"


def refuse_unsendable(name: str, tensor: object) -> None:
    """Raise `ConfigError` naming the tensor unless its values lie in plain memory, to be read as they are.

    Refused: what `refuse_valueless` refuses, and subclasses that hold their values in tensors of their own (a `DTensor` whose shards
    were not gathered, quantised weights of torchao).
    """
    refuse_valueless(name, tensor)
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # type: ignore[attr-defined]
        raise ConfigError(
            f"{name!r} is a {type(tensor).__name__}, whose values only its own class can read",
            hint="yield plain tensors: full_tensor() of a DTensor, the dequantised tensor of a quantised one",
        )


def refuse_valueless(name: str, tensor: object) -> None:
    """Raise `ConfigError` naming what is not a tensor, without a shape, on meta, of another layout than strided, or quantised by torch."""
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    if torch.nn.parameter.is_lazy(tensor):
        raise ConfigError(f"{name!r} has no shape and no values yet", hint="run one batch through the module first")
    if tensor.is_nested:
        raise ConfigError(f"{name!r} is a nested tensor, only dense tensors can be sent", hint=f"send {name}.to_padded_tensor(0)")
    if tensor.is_meta:
        raise ConfigError(f"{name!r} is on the meta device and has no values to send", hint="load or initialise it first")
    if tensor.layout is not torch.strided:
        raise ConfigError(f"{name!r} has the layout {tensor.layout}, only dense tensors can be sent", hint=f"send {name}.to_dense()")
    if tensor.is_quantized:
        raise ConfigError(
            f"{name!r} is quantised ({tensor.dtype}), its scales are not part of its bytes",
            hint=f"send {name}.dequantize(), or .int_repr()",
        )


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """The full, plain tensor: shards (anything with ``full_tensor()``, as `DTensor` has) are gathered, which is a collective.

    The gather is complete on return. Ranks thus run their gathers in lockstep with the sender, and none of them queues the next
    gather (and its memory) while the sender still copies this one.
    """
    full_tensor = getattr(tensor, "full_tensor", None)
    if not callable(full_tensor):
        return tensor
    full: torch.Tensor = full_tensor()
    wait = getattr(full, "wait", None)  # an AsyncCollectiveTensor
    if callable(wait):
        full = wait()
    if not full.is_cpu and not full.is_meta:
        torch.accelerator.current_stream(full.device).synchronize()
    return full


def refuse_nonfinite(name: str, tensor: torch.Tensor) -> None:
    """Raise `ConfigError` naming the tensor if a value of it is NaN or infinite. Integers, and 4-bit floats, have no such values."""
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.dtype.is_floating_point or tensor.dtype is getattr(torch, "float4_e2m1fn_x2", None):
        return
    if tensor.element_size() == 1:
        tensor = tensor.to(torch.float32)  # torch.isfinite has no 8-bit kernel
    if not bool(torch.isfinite(tensor).all()):
        raise ConfigError(
            f"{name!r} holds NaN or infinite values", hint="nothing was published; reject_nonfinite=False sends them as they are"
        )


def matching(what: str, patterns: tuple[str, ...], names: Collection[str]) -> set[str]:
    """The names that one of ``patterns`` is, or matches as an `fnmatch` pattern.

    Raises:
        ConfigError: for a pattern that fits no name: a spelling mistake would otherwise send what was to be skipped.
    """
    known = names if isinstance(names, set | frozenset | dict) else set(names)
    matched: set[str] = set()
    for pattern in patterns:
        found = {pattern} if pattern in known else {name for name in known if fnmatchcase(name, pattern)}
        if not found:
            raise ConfigError(f"{what}: {pattern!r} fits none of the {len(known)} names there are", hint=f"for example {sorted(known)[:3]}")
        matched |= found
    return matched


def layer_groups(names: Iterable[str]) -> list[list[str]]:
    """Partition names by decoder layer, as vLLM's trainer engines do: both sides number the groups, so the rule must be the same.

    A name belongs to the layer given by its first numeric part and what stands before that. Layers come by their prefix, in order of
    first appearance, and by number. Names without a number that come before the first numbered one form the first group, all
    others the last.
    """
    before: list[str] = []
    after: list[str] = []
    stacks: dict[str, dict[int, list[str]]] = {}
    for name in names:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if at is None:
            (after if stacks else before).append(name)
        else:
            stacks.setdefault(".".join(parts[:at]), {}).setdefault(int(parts[at]), []).append(name)
    layers = [stack[index] for stack in stacks.values() for index in sorted(stack)]
    return [group for group in (before, *layers, after) if group]


class SourceBase(ABC):
    """What our sources share: skipping, gathering, transforming, refusing, and vLLM's optional methods.

    A subclass names its tensors in `_entries`; all else follows. Values are read anew each round, never kept.
    """

    def __init__(self, *, transform: Transform | None, skip: str | Iterable[str], reject_nonfinite: bool) -> None:
        if transform is not None and not callable(transform):
            raise ConfigError(f"transform must be a callable (name, tensor) -> iterable of (name, tensor), not {type(transform).__name__}")
        if not isinstance(reject_nonfinite, bool):
            raise ConfigError(f"reject_nonfinite must be a bool, not {reject_nonfinite!r}")
        self._transform = transform
        self._skip = as_patterns("skip", skip)
        self._reject_nonfinite = reject_nonfinite

    @property
    @abstractmethod
    def device(self) -> torch.device | None:
        """Where the weights are, as far as the first one tells; see `ray_weightsync.weights.placed.device_of`."""

    @abstractmethod
    def _declared(self) -> list[ParamMeta]:
        """What `_values` yields, without moving data."""

    @abstractmethod
    def _values(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Names, each with a function that brings the full, detached tensor."""

    def metadata(self) -> list[ParamMeta]:
        """Name, dtype and full shape of every tensor that iteration yields, in its order. Moves and gathers nothing.

        Raises:
            ConfigError: naming the tensor that cannot be sent, the pattern that fits nothing, or where the transform failed.
        """
        declared = self._declared()
        return declared if self._transform is None else transform_metadata(declared, self._transform)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(name, tensor)``: full, detached, plain tensors, which may share memory with what they come from.

        Raises:
            ConfigError: naming the tensor, as `metadata` does; and for NaN or infinite values where those are to be rejected.
        """
        for name, value in self._values():
            if self._transform is None:
                yield self._accepted(name, value())
                continue
            try:
                for result in apply_transform(self._transform, name, value()):
                    yield self._accepted(*result)
            except Exception as error:
                error.add_note(f"while {name!r} was transformed and sent")
                raise

    def _refuse(self, name: str, tensor: object) -> None:
        """Refuse before anything is sent what can be seen to be unsendable. A transform may yet turn a subclass into plain tensors."""
        if self._transform is not None or callable(getattr(tensor, "full_tensor", None)):
            refuse_valueless(name, tensor)
        else:
            refuse_unsendable(name, tensor)

    def _accepted(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        if self._reject_nonfinite:
            refuse_nonfinite(name, tensor)
        return name, tensor

    def held_names(self) -> Collection[str] | None:
        """None: this rank yields every tensor."""
        return None

    def groups(self) -> list[list[str]]:
        """The names, one list a decoder layer; see `layer_groups`."""
        return layer_groups(meta.name for meta in self.metadata())

    def iter_groups(self) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
        """Yield ``(names, tensors)`` for each of `groups`, in its order.

        Tensors are read in the order of iteration, the same on every rank; those that belong to a later group wait for it.

        Raises:
            ConfigError: if iteration ends before all declared tensors have come.
        """
        waiting: dict[str, torch.Tensor] = {}
        pairs = iter(self)
        for group in self.groups():
            for name in group:
                while name not in waiting:
                    try:
                        found, tensor = next(pairs)
                    except StopIteration:
                        raise ConfigError(f"iteration ended without {name!r}, which metadata() declared", hint=_AGREE) from None
                    waiting[found] = tensor
            yield group, [waiting.pop(name) for name in group]
