"""Transforms: what turns a trainer's tensors into those the engine expects, between a source and the plan.

A transform is any callable ``(name, tensor) -> iterable of (name, tensor)``: it may rename, cast, split, or drop (yield nothing).
The same callable runs over *meta* tensors when the plan is made and over data when it is sent, so metadata never moves data, and
what it does may depend on names, dtypes and shapes, never on values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

import torch

from ray_weightsync.errors import ConfigError
from ray_weightsync.weights.dtypes import dtype_name
from ray_weightsync.weights.plan import ParamMeta, ParamMetaLike

Transform = Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]

# torch's "two 4-bit floats in a byte" calls itself floating point, but a cast would have to change the shape.
_PACKED_FLOATS = frozenset({"float4_e2m1fn_x2"})


def apply_transform(transform: Transform, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Run ``transform`` on one tensor and yield its checked results, one at a time.

    Raises:
        ConfigError: if it returns anything but an iterable of ``(str, tensor)`` pairs.
    """
    results = transform(name, tensor)
    if isinstance(results, torch.Tensor) or not isinstance(results, Iterable):
        raise ConfigError(
            f"the transform returned {type(results).__name__} for {name!r}; it must return an iterable of (name, tensor) pairs",
            hint="to change one tensor return [(name, tensor)]; to drop one return []",
        )
    for result in results:
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], str) or not isinstance(result[1], torch.Tensor):
            raise ConfigError(f"the transform yielded {_describe(result)} for {name!r}; it must yield (name, tensor) pairs")
        yield result


def transform_metadata(metadata: Iterable[ParamMetaLike], transform: Transform) -> list[ParamMeta]:
    """What ``transform`` makes of ``metadata``, found by running it over meta tensors; no data is moved.

    Raises:
        ConfigError: naming the tensor, if the transform fails there or cannot run on meta tensors.
    """
    transformed = []
    for meta in metadata:
        stand_in = torch.empty(tuple(meta.shape), dtype=meta.dtype, device="meta")
        try:
            transformed += [
                ParamMeta(name, result.dtype, tuple(result.shape)) for name, result in apply_transform(transform, meta.name, stand_in)
            ]
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the transform failed for {meta.name!r} on a meta tensor of {meta.dtype} {tuple(meta.shape)}: "
                f"{type(error).__name__}: {error}",
                hint="transforms also run over meta tensors, to learn dtypes and shapes without moving data: use torch operations that "
                "have a meta implementation, and decide by name, dtype and shape, never by values",
            ) from error
    return transformed


def compose(*transforms: Transform) -> Transform:
    """One transform that runs ``transforms`` from left to right, each over everything the one before it yielded."""
    for each in transforms:
        if not callable(each):
            raise ConfigError(f"compose takes transforms, not {type(each).__name__}")

    def composed(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        return run(0, name, tensor)

    def run(position: int, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if position == len(transforms):
            yield name, tensor
            return
        for new_name, new_tensor in apply_transform(transforms[position], name, tensor):
            yield from run(position + 1, new_name, new_tensor)

    return composed


def rename(
    exact: Mapping[str, str] | Callable[[str], str] | None = None,
    *,
    prefixes: Mapping[str, str] | None = None,
    patterns: Mapping[str, str] | None = None,
) -> Transform:
    """A transform that changes names.

    Args:
        exact: A function of the name, or whole names to their new ones.
        prefixes: Beginnings of names to what replaces them; the longest that fits is used, once.
        patterns: Regular expressions to their replacements, as in `re.sub`; each is applied in turn.
        All three apply in this order; names that nothing fits stay as they are.

    Raises:
        ConfigError: if a pattern is no regular expression, or there is nothing to do.
    """
    if exact is None and not prefixes and not patterns:
        raise ConfigError("rename needs names, prefixes or patterns")
    if exact is not None and not callable(exact) and not isinstance(exact, Mapping):
        raise ConfigError(f"rename takes a mapping or a function of the name, not {type(exact).__name__}")
    whole = (lambda name: exact.get(name, name)) if isinstance(exact, Mapping) else exact
    by_length = sorted((prefixes or {}).items(), key=lambda item: len(item[0]), reverse=True)
    compiled = []
    for pattern, replacement in (patterns or {}).items():
        try:
            compiled.append((re.compile(pattern), replacement))
        except re.error as error:
            raise ConfigError(f"rename: {pattern!r} is not a regular expression: {error}") from error

    def renamed(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        new_name = whole(name) if whole is not None else name
        if not isinstance(new_name, str):
            raise ConfigError(f"rename: the new name of {name!r} must be a str, not {type(new_name).__name__}")
        for prefix, replacement in by_length:
            if new_name.startswith(prefix):
                new_name = replacement + new_name.removeprefix(prefix)
                break
        for expression, replacement in compiled:
            new_name = expression.sub(replacement, new_name)
        return [(new_name, tensor)]

    return renamed


def cast(dtype: torch.dtype, *, keep: str | Iterable[str] = ()) -> Transform:
    """A transform that casts floating-point tensors to ``dtype``. Out-of-range values become what `torch.Tensor.to` makes of them.

    Args:
        dtype: A floating-point dtype.
        keep: Names or `fnmatch` patterns of tensors that stay as they are, whatever their dtype: router biases, ``A_log``, scales.

    Raises:
        ConfigError: here, if ``dtype`` is not a floating-point dtype; when run, for a tensor that is not floating point and not kept
            (a cast would silently give integers another meaning).
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype_name(dtype) in _PACKED_FLOATS:
        raise ConfigError(f"cast takes a floating-point torch.dtype, not {dtype!r}")
    kept = as_patterns("cast: keep", keep)

    def converted(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        if tensor.dtype == dtype or any(fnmatchcase(name, pattern) for pattern in kept):
            return [(name, tensor)]
        if not tensor.dtype.is_floating_point or dtype_name(tensor.dtype) in _PACKED_FLOATS:
            raise ConfigError(
                f"cast: {name!r} is {dtype_name(tensor.dtype)}, which is not cast to {dtype_name(dtype)}",
                hint=f"send it as it is with cast(..., keep=[{name!r}]), or convert it in a transform of your own that runs before",
            )
        return [(name, tensor.to(dtype))]

    return converted


STACKED_EXPERTS: Mapping[str, tuple[str, ...]] = {
    "experts.gate_up_proj": ("experts.{expert}.gate_proj.weight", "experts.{expert}.up_proj.weight"),
    "experts.down_proj": ("experts.{expert}.down_proj.weight",),
}
"""How transformers stacks the experts of most mixture models, and the names that vLLM loads them under."""


def split_experts(
    layout: Mapping[str, tuple[str, ...]] = STACKED_EXPERTS, *, transpose: bool = False, interleaved: bool = False
) -> Transform:
    """A transform that splits stacked experts into two-dimensional tensors, one a projection and expert. It copies nothing.

    A tensor ``[num_experts, k * rows, columns]`` whose name ends in a key of ``layout`` (at a dot) becomes ``num_experts * k`` tensors
    ``[rows, columns]``, where k is the number of names under that key: with the default, ``[E, 2I, H]`` of
    ``...experts.gate_up_proj`` becomes ``...experts.0.gate_proj.weight`` ``[I, H]``, ``...experts.0.up_proj.weight``, and so on.

    Args:
        layout: Endings of names to the endings of what they are split into, in the order of the rows; each holds ``{expert}``.
        transpose: The stacked tensors are ``[num_experts, columns, k * rows]``.
        interleaved: The k projections alternate row by row, instead of following each other.

    Raises:
        ConfigError: here, if a name lacks ``{expert}``; when run, naming the tensor, if it is not three-dimensional or its rows cannot
            be divided by k.
    """
    targets: dict[str, tuple[str, ...]] = {}
    for stacked, names in layout.items():
        targets[stacked] = (names,) if isinstance(names, str) else tuple(names)
        if not stacked or not targets[stacked] or not all("{expert}" in name for name in targets[stacked]):
            raise ConfigError(f"split_experts: {stacked!r} needs the names it is split into, each with '{{expert}}' in it, not {names!r}")

    def split(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        stacked = next((ending for ending in targets if name == ending or name.endswith("." + ending)), None)
        if stacked is None:
            yield name, tensor
            return
        names = targets[stacked]
        rows = 2 if transpose else 1
        if tensor.dim() != 3 or tensor.shape[rows] % len(names):
            expected = f"[experts, columns, {len(names)} * rows]" if transpose else f"[experts, {len(names)} * rows, columns]"
            raise ConfigError(f"split_experts: {name!r} has shape {tuple(tensor.shape)}, expected {expected}")
        head = name.removesuffix(stacked)
        for expert, matrix in enumerate(tensor.unbind(0)):
            oriented = matrix.t() if transpose else matrix
            size = oriented.shape[0] // len(names)
            for position, target in enumerate(names):
                part = oriented[position :: len(names)] if interleaved else oriented.narrow(0, position * size, size)
                yield head + target.replace("{expert}", str(expert)), part

    return split


def as_patterns(what: str, patterns: str | Iterable[str]) -> tuple[str, ...]:
    """``patterns`` as a tuple; one str is one pattern. Raises `ConfigError` for anything that is not a non-empty str."""
    if isinstance(patterns, str):
        patterns = (patterns,)
    if not isinstance(patterns, Iterable):
        raise ConfigError(f"{what} must be a name, a pattern or several, not {type(patterns).__name__}")
    result = tuple(patterns)
    for pattern in result:
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(f"{what} must hold non-empty names or patterns, not {pattern!r}")
    return result


def _describe(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of ({', '.join(type(each).__name__ for each in value)})"
    return type(value).__name__
