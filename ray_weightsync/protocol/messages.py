"""What a payload may hold, and the plain copy of it that is sent.

Everything is checked and copied before anything touches the network: a dtype object, a tuple or a NaN in the middle of a payload
would otherwise fail in one engine's worker, when others have already begun. Torch is recognised, never imported: the control plane
does not need it.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_weightsync.errors import ConfigError

Payload = dict[str, Any] | list[dict[str, Any]]
"""One ``init_info`` or ``update_info``. A list has one entry per global worker rank of an engine, as vLLM (0.30+) defines it."""

IPC_HANDLES = "ipc_handles"
"""The one field of vLLM's payloads that is not plain data: arguments of ``rebuild_cuda_tensor``, by GPU."""

MAX_DEPTH = 64

_INTS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64))
_FLOATS = ("float16", "float32", "float64", "bfloat16", "half", "float", "double")
_SMALL_FLOATS = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2")
_COMPLEX = ("complex32", "complex64", "complex128", "chalf", "cfloat", "cdouble")
_OTHERS = ("bit", "bool", "short", "int", "long", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2")
_QUANTISED = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
DTYPE_NAMES = frozenset((*_INTS, *_FLOATS, *_SMALL_FLOATS, *_COMPLEX, *_OTHERS, *_QUANTISED))
"""Attribute names of torch that are dtypes. vLLM's workers look the name up with ``getattr(torch, name)``."""

_DTYPE_FIELDS = ("dtype", "dtypes", "dtype_name", "dtype_names")


@dataclass(frozen=True)
class PerReplica:
    """One payload per replica, in handle order, where they must differ (such as each replica's ``rank_offset``).

    Attributes:
        payloads: As many payloads as the client has handles or URLs.

    Raises:
        ConfigError: if a payload is neither a dict nor a list of dicts.
    """

    payloads: tuple[Payload, ...]

    def __init__(self, payloads: Sequence[Payload]) -> None:
        if isinstance(payloads, Mapping | str) or not isinstance(payloads, Sequence):
            raise ConfigError(f"PerReplica takes a sequence with one payload per replica, not {type(payloads).__name__}")
        for index, payload in enumerate(payloads):
            if not _is_payload(payload):
                raise ConfigError(f"PerReplica: payload {index} must be a dict or a list of dicts, not {type(payload).__name__}")
        object.__setattr__(self, "payloads", tuple(payloads))


def plain(payload: Payload, *, what: str, opaque: tuple[str, ...] = ()) -> Payload:
    """A copy of ``payload`` made of ``dict``, ``list``, ``str``, ``int``, finite ``float``, ``bool`` and ``None`` only.

    Tuples (``torch.Size`` is one) become lists, dtype objects their names; in fields called ``dtype``, ``dtype_names`` and the like
    ``"torch.float16"`` becomes ``"float16"``. ``payload`` itself is never modified.

    Args:
        payload: One dict, or a list of dicts with one entry per global worker rank.
        what: The payload's name in errors, such as ``"update_info"``.
        opaque: Names of top-level fields that are handed on as they are.

    Raises:
        TypeError: for bytes, NaN and infinity, unknown dtype names, keys that are not strings, and any other object; it says where.
    """
    if not _is_payload(payload):
        raise TypeError(f"{what} must be a dict, or a list of dicts with one entry per global worker rank, not {_kind(payload)}")
    try:
        if isinstance(payload, Mapping):
            return _plain_fields(payload, opaque, 0)
        return [_located(index, entry, opaque) for index, entry in enumerate(payload)]
    except _Unsendable as error:
        raise TypeError(f"{what}{error.where()} {error.problem}") from None


def plain_args(args: Sequence[Any], kwargs: Mapping[str, Any], *, what: str) -> tuple[list[Any], dict[str, Any]]:
    """Copies of positional and keyword arguments, plain in the same sense as `plain`.

    Raises:
        TypeError: saying which argument cannot be sent.
    """
    try:
        return [_step(index, each, False, 0) for index, each in enumerate(args)], _plain_fields(kwargs, (), 0)
    except _Unsendable as error:
        raise TypeError(f"{what}{error.where()} {error.problem}") from None


class _Unsendable(Exception):
    """Collects the way to the value on the way out, so that the way costs nothing while all is well."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        self.path: list[object] = []
        super().__init__(problem)

    def where(self) -> str:
        return "".join(f"[{step!r}]" for step in reversed(self.path))


def _is_payload(payload: object) -> bool:
    return isinstance(payload, Mapping) or (isinstance(payload, list) and all(isinstance(entry, Mapping) for entry in payload))


def _located(index: int, entry: Mapping[str, Any], opaque: tuple[str, ...]) -> dict[str, Any]:
    try:
        return _plain_fields(entry, opaque, 1)
    except _Unsendable as error:
        error.path.append(index)
        raise


def _plain_fields(fields: Mapping[str, Any], opaque: tuple[str, ...], depth: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in fields.items():
        if not isinstance(key, str):
            raise _Unsendable(f"has the key {key!r}; keys must be strings (JSON would turn it into one)")
        out[_text(key)] = value if key in opaque else _step(key, value, key.endswith(_DTYPE_FIELDS), depth)
    return out


def _step(step: object, value: object, is_dtype: bool, depth: int) -> Any:
    try:
        return _plain(value, is_dtype, depth + 1)
    except _Unsendable as error:
        error.path.append(step)
        raise


def _plain(value: object, is_dtype: bool, depth: int) -> Any:
    if isinstance(value, str):
        return _dtype_name(_text(value)) if is_dtype else _text(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):  # numpy's integers register themselves as such
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        if not math.isfinite(number):
            raise _Unsendable(f"is {number}, which JSON cannot carry")
        return number
    if depth > MAX_DEPTH:
        raise _Unsendable(f"is nested more than {MAX_DEPTH} levels deep, or refers to itself")
    if isinstance(value, list | tuple):
        return [_step(index, each, is_dtype, depth) for index, each in enumerate(value)]
    if isinstance(value, Mapping):
        return _plain_fields(value, (), depth)
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    raise _Unsendable(f"is {_kind(value)}, which is not plain data")


def _text(value: str) -> str:
    text = str.__str__(value)  # the bare string of a str enum
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _Unsendable(f"is not valid unicode: {error}") from None
    return text


def _dtype_name(text: str) -> str:
    name = text.removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise _Unsendable(f"is {text!r}, which names no torch dtype")
    return name


def _kind(value: object) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
