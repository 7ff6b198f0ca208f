"""Arrays of other libraries, and lists of tensors, as tensors, without importing these libraries.

Knows the protocols that arrays offer (`__dlpack__`, `__array__`, `__array_interface__`): numpy,
pandas, polars, pyarrow and JAX have one of them at least.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing import Any, TypeAlias

    import numpy

    Array: TypeAlias = numpy.ndarray[Any, numpy.dtype[Any]]

_NUMERIC = "biufc"


def tensor_of_array(value: object) -> Tensor | None:
    """Return an array as a tensor that shares its memory where torch can; `None` for other values.

    numpy arrays of strings or objects are other values.

    Raises:
        TypeError: if it is a column of a table, or its like, whose elements are not numbers.
    """
    kind = type(value)
    if hasattr(kind, "__dlpack__") and kind.__module__ != "numpy":
        try:
            return torch.utils.dlpack.from_dlpack(value)
        except Exception:  # noqa: BLE001, RUF100  # a library may raise anything; it may offer more
            pass
    array = _numpy_array(value)
    if array is None:
        return None
    dtype = array.dtype
    if dtype.kind not in _NUMERIC:
        if not array.ndim or kind.__module__ == "numpy":
            return None
        raise TypeError(f"its elements are of dtype {dtype}, which are not numbers")
    if array.ndim and _must_be_copied(array):
        array = array.astype(dtype.newbyteorder("="), order="C", copy=True)
    return torch.as_tensor(array)


def tensor_of_list(value: object) -> Tensor | None:
    """Return a list of tensors of one shape as one tensor; `None` for other values.

    Lists may be nested; a named tuple is another value.

    Raises:
        RuntimeError: if torch cannot stack them, because they are on different devices.
    """
    if not isinstance(value, (list, tuple)) or not value or hasattr(value, "_fields"):
        return None
    rows: list[Tensor] = []
    for item in value:
        row = item if isinstance(item, Tensor) else tensor_of_list(item)
        if row is None or row.is_nested or (rows and row.shape != rows[0].shape):
            return None
        rows.append(row)
    return torch.stack(rows)


def _numpy_array(value: object) -> Array | None:
    if hasattr(type(value), "__array__"):
        return cast("Array", value.__array__())  # type: ignore[attr-defined]  # asked above
    if hasattr(type(value), "__array_interface__"):
        import numpy

        return numpy.asarray(value)
    return None


def _must_be_copied(array: Array) -> bool:
    """Return whether torch cannot share the memory.

    It cannot if the array is read-only, reversed, of foreign byte order, or a field of records
    whose size is not a multiple of that of the field.
    """
    if not array.flags.writeable or not array.dtype.isnative:
        return True
    size = array.dtype.itemsize
    return any(stride < 0 or stride % size for stride in array.strides)
