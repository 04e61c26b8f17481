"""The dtypes of this torch and their names. Plans name dtypes by text, so that peers with other torch versions can say what they lack."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ray_weightsync.errors import ConfigError

_QUANTISED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def _dtype_table() -> dict[str, torch.dtype]:
    # torch has no list of its dtypes; aliases ("half", "cfloat") map to the name that str() gives.
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - _QUANTISED
    return {str(dtype).removeprefix("torch."): dtype for dtype in found}


DTYPES: Mapping[str, torch.dtype] = _dtype_table()
"""Every dtype that this torch has and a plan can carry, by name. Quantised ones are left out: their scale is not in their bytes."""

_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: object) -> str:
    """The name a plan gives to ``dtype`` (a `torch.dtype`, ``"bfloat16"`` or ``"torch.bfloat16"``).

    Raises:
        ConfigError: if this torch has no such dtype, or it is a quantised one.
    """
    if isinstance(dtype, str):
        known = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(known, torch.dtype):
            raise ConfigError(f"this torch ({torch.__version__}) has no dtype {dtype!r}")
        dtype = known
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"a dtype must be a torch.dtype or its name, not {type(dtype).__name__}")
    name = _NAME_OF.get(dtype)
    if name is None:
        raise ConfigError(
            f"{dtype} is quantised and its scales are not part of its bytes",
            hint="send the dequantised tensor, or integers and scales apart",
        )
    return name
