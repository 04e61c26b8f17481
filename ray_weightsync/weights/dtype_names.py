"""Dtypes by name, for processes that read plans and hold no tensors: without torch, whose import costs a second and 200 MB."""

from __future__ import annotations

ITEMSIZES = {
    "bool": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip
"""Bytes of one element, for the dtypes that every torch this package runs on has and can send."""

SAFETENSORS_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "BOOL": "bool",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
"""The format's names of dtypes (https://huggingface.co/docs/safetensors) to torch's. Those of less than a byte are not sent."""


def itemsize(dtype: str) -> int | None:
    """Bytes of one element of the dtype of that name, or None if this torch has none that a plan can carry."""
    if (known := ITEMSIZES.get(dtype)) is not None:
        return known
    from ray_weightsync.weights.dtypes import DTYPES

    found = DTYPES.get(dtype)
    return None if found is None else found.itemsize
