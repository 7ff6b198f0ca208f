"""Values out of JSON that may hold anything: each is what it must be, or an error.

A function raises `TypeError` or `ValueError`, whose message stays short whatever the value is.
"""

from __future__ import annotations

import math

from kd_export._errors import brief

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Number = bool | int | float

_DTYPES = """
bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32
complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
"""
_LARGEST_SIZE = 1 << 62
_LARGEST_NUMBER = 1 << 64


def as_number(item: Json) -> Number:
    if isinstance(item, str):
        return float(item)
    if isinstance(item, float) or (isinstance(item, int) and abs(item) < _LARGEST_NUMBER):
        return item
    raise TypeError(f"expected a number, got {brief(item)}")


def as_finite(item: Json) -> Number:
    number = as_number(item)
    if math.isfinite(number):
        return number
    raise ValueError(f"expected a finite number, got {number}")


def as_size(item: Json) -> int:
    size = as_int(item)
    if 0 <= size <= _LARGEST_SIZE:
        return size
    raise ValueError(f"expected a size, got {size}")


def as_int(item: Json) -> int:
    if type(item) is int:
        return item
    raise TypeError(f"expected an integer, got {brief(item)}")


def as_str(item: Json) -> str:
    if isinstance(item, str):
        return item
    raise TypeError(f"expected a string, got {brief(item)}")


def as_dtype(item: Json) -> str:
    name = as_str(item)
    if name in _DTYPES.split():
        return name
    raise ValueError(f"expected a dtype, got {brief(name)}")


def as_list(item: Json) -> list[Json]:
    if isinstance(item, list):
        return item
    raise TypeError(f"expected a list, got {brief(item)}")


def as_dict(item: Json) -> dict[str, Json]:
    if isinstance(item, dict):
        return item
    raise TypeError(f"expected an object, got {brief(item)}")
