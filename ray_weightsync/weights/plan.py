"""The plan: which tensors one model's weights are, in which order, and where each lies in the payload.

Sender and receivers derive everything else (offsets, sizes, digests, views) from it, so it is built in one place, validated
whenever it is made, and compared by digest. It moves no bytes: see `packing`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import xxhash

from ray_weightsync.errors import ConfigError
from ray_weightsync.weights.piecemeal import yield_point
from ray_weightsync.weights.tensor_spec import (
    ALIGN,
    MAX_PAYLOAD_BYTES,
    ParamMeta,
    ParamMetaLike,
    TensorSpec,
    as_shape,
    check_names,
    checked_nbytes,
    is_int,
    round_up,
)

__all__ = ["ALIGN", "ParamMeta", "ParamMetaLike", "Plan", "Segment", "TensorSpec"]

_WIRE_FORMAT = 1
_AT_ONCE = 512


@dataclass(frozen=True)
class Segment:
    """The bytes ``[start, stop)`` of the payload, written by one writer rank."""

    writer: int
    start: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """The ordered tensors of one model and their layout. Validated when made; equal digests mean equal plans.

    Attributes:
        tensors: In the order in which they are sent and laid out.
        num_bytes: Size of the payload in bytes, padding included; a multiple of `ALIGN`.
        segments: Byte ranges that tile the payload, one per writer. Today one.
        target: Which model of the engine is meant; ``"main"``.
        partial: The tensors are some of the model's; the others stay as they are. Only what patches a model in place can bring it.

    Raises:
        ConfigError: if there are no tensors, a name is empty, not a str, not valid unicode or there twice, a dtype is unknown,
            a shape is negative or too large, or offsets, sizes or segments are not those of the layout rule.
    """

    tensors: tuple[TensorSpec, ...]
    num_bytes: int
    segments: tuple[Segment, ...]
    target: str = "main"
    partial: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.target, str) or not self.target:
            raise ConfigError(f"a plan's target must be a non-empty str, not {self.target!r}")
        if not isinstance(self.partial, bool):
            raise ConfigError(f"a plan's partial must be a bool, not {self.partial!r}")
        if not self.tensors:
            raise ConfigError("there is nothing to send: the source has no tensors")
        check_names([spec.name for spec in self.tensors])
        offset = 0
        for spec in self.tensors:
            yield_point()
            nbytes = checked_nbytes(spec.name, spec.dtype, spec.shape)
            if spec.offset != offset or spec.nbytes != nbytes:
                raise ConfigError(
                    f"tensor {spec.name!r} must lie at byte {offset} with {nbytes} bytes, not at {spec.offset} with {spec.nbytes}"
                )
            offset += round_up(nbytes)
        if self.num_bytes != offset:
            raise ConfigError(f"the payload of these tensors has {offset} bytes, not {self.num_bytes}")
        if offset > MAX_PAYLOAD_BYTES:
            raise ConfigError(f"a payload of {offset} bytes is larger than any machine's memory; is a shape wrong?")
        position = 0
        for segment in self.segments:
            if segment.start != position or segment.stop < segment.start:
                raise ConfigError(f"segment {segment} does not continue at byte {position}")
            position = segment.stop
        if not self.segments or position != offset:
            raise ConfigError(f"the segments cover {position} of {offset} bytes")

    @classmethod
    def from_metadata(cls, metadata: Iterable[ParamMetaLike], *, target: str = "main", partial: bool = False) -> Plan:
        """Lay out what a source's ``metadata()`` declares, in its order.

        Shapes given as lists are accepted, dtypes also by name.

        Raises:
            ConfigError: naming the tensor; see `Plan`.
        """
        if isinstance(metadata, str | bytes) or not isinstance(metadata, Iterable):
            raise ConfigError(f"metadata must be an iterable of (name, dtype, shape) records, not {type(metadata).__name__}")
        from ray_weightsync.weights.dtypes import dtype_name

        names: list[str] = []
        layouts: list[tuple[str, tuple[int, ...]]] = []
        for meta in metadata:
            try:
                name, dtype, shape = meta.name, meta.dtype, meta.shape
            except AttributeError as error:
                raise ConfigError(
                    f"metadata entry {len(names)} is {meta!r}; it needs the attributes name, dtype and shape, as ParamMeta has"
                ) from error
            try:
                layouts.append((dtype_name(dtype), as_shape(shape)))
            except ConfigError as error:
                raise ConfigError(f"tensor {name!r}: {error.message}") from error
            names.append(name)
        return cls._laid_out(names, layouts, target, partial)

    @classmethod
    def _laid_out(cls, names: list[str], layouts: list[tuple[str, tuple[int, ...]]], target: str, partial: bool) -> Plan:
        specs = []
        offset = 0
        for name, (dtype, shape) in zip(names, layouts, strict=True):
            yield_point()
            nbytes = checked_nbytes(name, dtype, shape)
            specs.append(TensorSpec(name, dtype, shape, offset, nbytes))
            offset += round_up(nbytes)
        return cls(tuple(specs), offset, (Segment(0, 0, offset),), target, partial)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names in order."""
        return tuple(spec.name for spec in self.tensors)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the tensors alone, without padding."""
        return sum(spec.nbytes for spec in self.tensors)

    @cached_property
    def structure_digest(self) -> str:
        """32 hex digits over order, names, dtypes and shapes, whatever the target."""
        hasher = xxhash.xxh3_128(b"[")
        for start in range(0, len(self.tensors), _AT_ONCE):
            yield_point()
            some = [[spec.name, spec.dtype, spec.shape] for spec in self.tensors[start : start + _AT_ONCE]]
            hasher.update(("," if start else "").encode() + json.dumps(some, separators=(",", ":")).encode()[1:-1])
        hasher.update(b"]")
        return hasher.hexdigest()

    @cached_property
    def digest(self) -> str:
        """32 hex digits over target, order, names, dtypes, shapes and whether it is partial; offsets and sizes follow from them."""
        told = [self.target, self.structure_digest, *(["partial"] if self.partial else [])]
        return xxhash.xxh3_128_hexdigest(json.dumps(told).encode())

    def to_wire(self) -> dict[str, Any]:
        """The plan as plain JSON types: columns, and a table of the distinct (dtype, shape) pairs, of which a model has few."""
        index_of: dict[tuple[str, tuple[int, ...]], int] = {}
        layout_of = [index_of.setdefault((spec.dtype, spec.shape), len(index_of)) for spec in self.tensors]
        return {
            "format": _WIRE_FORMAT,
            "target": self.target,
            "names": list(self.names),
            "layouts": [[dtype, list(shape)] for dtype, shape in index_of],
            "layout_of": layout_of,
            "segments": [[segment.writer, segment.start, segment.stop] for segment in self.segments],
            "num_bytes": self.num_bytes,
            "digest": self.digest,
            **({"partial": True} if self.partial else {}),
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Plan:
        """The plan that `to_wire` wrote. Nothing in ``wire`` is trusted: all is validated, and the digest computed anew and compared.

        Raises:
            ConfigError: if ``wire`` is not such a dict, was changed on the way, or names a dtype that this torch does not have.
        """
        if not isinstance(wire, Mapping) or set(wire) - {"partial"} != _WIRE_KEYS:
            found = sorted(map(str, wire)) if isinstance(wire, Mapping) else type(wire).__name__
            raise ConfigError(f"not a wire plan: expected the keys {sorted(_WIRE_KEYS)}, found {found}")
        if not is_int(wire["format"]) or wire["format"] != _WIRE_FORMAT:
            raise ConfigError(f"this version reads wire plans of format {_WIRE_FORMAT}, not {wire['format']!r}")
        names = _wire_list(wire, "names")
        layouts = [_wire_layout(entry) for entry in _wire_list(wire, "layouts")]
        layout_of = _wire_list(wire, "layout_of")
        if len(layout_of) != len(names):
            raise ConfigError(f"wire plan: {len(names)} names but {len(layout_of)} layouts")
        for index in layout_of:
            if not is_int(index) or not 0 <= index < len(layouts):
                raise ConfigError(f"wire plan: layout_of must hold indices below {len(layouts)}, not {index!r}")
        laid_out = cls._laid_out(names, [layouts[index] for index in layout_of], wire["target"], wire.get("partial", False))
        segments = []
        for entry in _wire_list(wire, "segments"):
            if not isinstance(entry, list | tuple) or len(entry) != 3 or not all(map(is_int, entry)):
                raise ConfigError(f"wire plan: a segment must be [writer, start, stop], not {entry!r}")
            segments.append(Segment(*entry))
        if not is_int(wire["num_bytes"]) or wire["num_bytes"] != laid_out.num_bytes:
            raise ConfigError(f"wire plan: its tensors have {laid_out.num_bytes} bytes, it says {wire['num_bytes']!r}")
        if wire["digest"] != laid_out.digest:
            raise ConfigError(f"wire plan: its digest is {laid_out.digest}, it says {wire['digest']!r}; it was changed on the way")
        if tuple(segments) == laid_out.segments:
            return laid_out
        return cls(laid_out.tensors, laid_out.num_bytes, tuple(segments), laid_out.target, laid_out.partial)


_WIRE_KEYS = frozenset({"format", "target", "names", "layouts", "layout_of", "segments", "num_bytes", "digest"})


def _wire_list(wire: Mapping[str, Any], key: str) -> list[Any]:
    value = wire[key]
    if not isinstance(value, list | tuple):
        raise ConfigError(f"wire plan: {key} must be a list, not {type(value).__name__}")
    return cast("list[Any]", value)


def _wire_layout(entry: object) -> tuple[str, tuple[int, ...]]:
    if not isinstance(entry, list | tuple) or len(entry) != 2 or not isinstance(entry[0], str):
        raise ConfigError(f"wire plan: a layout must be [dtype, shape], not {entry!r}")
    return entry[0], as_shape(entry[1])
