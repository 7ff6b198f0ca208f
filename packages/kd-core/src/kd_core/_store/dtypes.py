"""Under which name and shape of safetensors a tensor of some dtype is stored.

Most dtypes have a name there. Complex numbers of other sizes are stored as their real and imaginary
parts in a last dimension of two, and other dtypes of one byte as bytes. The manifest holds the
dtype and the shape of the tensor itself.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch


class Wire(NamedTuple):
    """How a dtype is stored."""

    name: str
    itemsize: int
    """Bytes of one element of the tensor, both parts of a complex number."""
    more: tuple[int, ...] = ()
    """The dimensions that the stored shape has in addition."""


_NAMES: Final = {
    "float64": Wire("F64", 8),
    "float32": Wire("F32", 4),
    "float16": Wire("F16", 2),
    "bfloat16": Wire("BF16", 2),
    "int64": Wire("I64", 8),
    "int32": Wire("I32", 4),
    "int16": Wire("I16", 2),
    "int8": Wire("I8", 1),
    "uint64": Wire("U64", 8),
    "uint32": Wire("U32", 4),
    "uint16": Wire("U16", 2),
    "uint8": Wire("U8", 1),
    "bool": Wire("BOOL", 1),
    "complex128": Wire("F64", 16, (2,)),
    "complex64": Wire("C64", 8),
    "complex32": Wire("F16", 4, (2,)),
    "float8_e4m3fn": Wire("F8_E4M3", 1),
    "float8_e5m2": Wire("F8_E5M2", 1),
    "float8_e4m3fnuz": Wire("U8", 1),
    "float8_e5m2fnuz": Wire("U8", 1),
    "float8_e8m0fnu": Wire("U8", 1),
    "float4_e2m1fn_x2": Wire("U8", 1),
}

WIRE: Final = {getattr(torch, name): wire for name, wire in _NAMES.items() if hasattr(torch, name)}
"""How each dtype that this version of torch has is stored."""

NAMES: Final = {dtype: str(dtype).removeprefix("torch.") for dtype in WIRE}
"""The names that a manifest holds, by their dtypes."""

DTYPES: Final = {name: dtype for dtype, name in NAMES.items()}
"""The dtypes by the names that a manifest holds."""

FOREIGN: Final = {wire.name: dtype for dtype, wire in reversed(WIRE.items()) if not wire.more} | {
    "U8": torch.uint8
}
"""The dtypes by their names in files of other origins."""
