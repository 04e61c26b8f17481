"""One tensor of a plan: what its name, dtype and shape may be, how many bytes it takes, and where the next one starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ray_weightsync.errors import ConfigError
from ray_weightsync.weights.dtype_names import itemsize

if TYPE_CHECKING:
    import torch

ALIGN = 64
"""Every tensor starts at a multiple of this many bytes: a cache line, and enough for any dtype's own alignment."""

MAX_PAYLOAD_BYTES = 1 << 62
MAX_DIMS = 64  # torch's own limit for tensor views


def round_up(num_bytes: int) -> int:
    """The smallest multiple of `ALIGN` that holds ``num_bytes``."""
    return -(-num_bytes // ALIGN) * ALIGN


class ParamMetaLike(Protocol):
    """What a plan reads of a source's metadata; vLLM's own ``ParamMeta`` is one."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class ParamMeta:
    """Name, dtype on the wire and full shape of one tensor; the same three fields as vLLM's."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor and its place in the payload.

    Attributes:
        name: What the engine's ``load_weights`` calls it.
        dtype: The attribute name of a torch dtype, such as ``"bfloat16"``.
        shape: Full shape; ``()`` for a scalar.
        offset: First byte in the payload, a multiple of `ALIGN`.
        nbytes: Bytes of the contiguous tensor, without padding.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        from ray_weightsync.weights.dtypes import DTYPES

        return DTYPES[self.dtype]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """First byte after this tensor and its padding."""
        return self.offset + round_up(self.nbytes)


def is_int(value: object) -> bool:
    """Whether ``value`` is an int and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def as_shape(shape: object) -> tuple[int, ...]:
    """``shape`` as a tuple of ints of at least 0, or `ConfigError`."""
    if not isinstance(shape, list | tuple):  # torch.Size is a tuple
        raise ConfigError(f"a shape must be a tuple or list of ints, not {type(shape).__name__}")
    if len(shape) > MAX_DIMS:
        raise ConfigError(f"a shape of {len(shape)} dimensions is more than torch's {MAX_DIMS}")
    for size in shape:
        if not is_int(size) or size < 0:
            raise ConfigError(f"a shape must hold ints of at least 0: {tuple(shape)!r}")
    return tuple(shape)


def checked_nbytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a contiguous tensor, or `ConfigError` if this torch does not have its dtype or cannot view so many."""
    size = itemsize(dtype)
    if size is None:
        import torch

        raise ConfigError(f"tensor {name!r}: this torch ({torch.__version__}) has no dtype {dtype!r} that can be sent")
    nbytes = math.prod(shape) * size
    # The product is also bounded without its zeros: torch refuses a view whose strides do not fit in 64 bits.
    if nbytes > MAX_PAYLOAD_BYTES or (nbytes == 0 and math.prod(size or 1 for size in shape) > MAX_PAYLOAD_BYTES):
        raise ConfigError(f"tensor {name!r}: a shape of {shape} is larger than any machine's memory")
    return nbytes


def check_names(names: list[str]) -> None:
    """Raise `ConfigError` unless every name is a non-empty str that any wire can carry, and there once."""
    for position, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise ConfigError(f"tensor {position} must have a non-empty str as its name, not {name!r}")
    if len(set(names)) != len(names):
        seen: set[str] = set()
        twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ConfigError(f"tensor name {twice!r} is there twice")
    try:
        "".join(names).encode()  # one pass for all; only a failure is looked at name by name
    except UnicodeEncodeError as error:
        broken = next(name for name in names if any("\ud800" <= char <= "\udfff" for char in name))
        raise ConfigError(f"tensor name {broken!r} holds an unpaired surrogate, which no wire can carry") from error
