"""Values of Python and of other libraries that become tensors, which are not imported for it.

Knows numbers, nested lists, arrays of records, and the protocols that arrays offer (`__dlpack__`,
`__array__`, `__array_interface__`): numpy, pandas, polars, pyarrow and JAX have one of them at
least. Must not know containers.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeGuard

import torch
from torch import Tensor

from kd_core._errors import ShapeMismatch, wrong_type

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    import numpy

    from kd_core._types import Batch

    Array: TypeAlias = numpy.ndarray[Any, numpy.dtype[Any]]

    class Records(Protocol):
        """A numpy array of records, or one record."""

        @property
        def dtype(self) -> numpy.dtype[numpy.void]: ...
        @property
        def shape(self) -> tuple[int, ...]: ...
        def __getitem__(self, name: str) -> Any: ...


NUMBERS: Final = (bool, int, float)
"""The numbers of Python that become tensors; complex ones do in a tuple, and in `from_dict`."""
_ALL_NUMBERS: Final = (bool, int, float, complex)
_NUMERIC = "biufc"
_OF_NUMPY: Final = ("numpy", "numpy.ma", "numpy.rec")
"""The modules of kinds of arrays: a tuple, which dynamo traces."""


def is_of_numpy(value: object) -> bool:
    """Return whether a value is an array or a number of numpy."""
    return type(value).__module__ in _OF_NUMPY


def is_number(value: object) -> bool:
    """Return whether a value is a number of Python or of numpy, and not an array."""
    if isinstance(value, _ALL_NUMBERS):
        return True
    scalar = is_of_numpy(value) and isinstance(value, sys.modules["numpy"].generic)
    return scalar and value.dtype.kind in _NUMERIC  # type: ignore[attr-defined]  # of numpy


def is_frame(value: object) -> bool:
    """Return whether a value is a data frame of pandas, which is not imported for it."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, getattr(pandas, "DataFrame", ()))


def is_struct_array(value: object) -> TypeGuard[Records]:
    """Return whether a value is a numpy array of records, or one record."""
    dtype = getattr(value, "dtype", None)
    return is_of_numpy(value) and getattr(dtype, "names", None) is not None


def is_record(value: object) -> bool:
    """Return whether a value is one record of numpy, and not an array."""
    return is_of_numpy(value) and isinstance(value, sys.modules["numpy"].void)


def columns_of_struct_array(value: object) -> dict[str, object]:
    """Return the fields of a structured array as nested dicts; numbers share its memory.

    Raises:
        InvalidArgument: if it is not a structured array.
    """
    if not is_struct_array(value):
        remedy = "Pass an array whose dtype has named fields, or use `from_any`."
        raise wrong_type("`struct_array`", "a structured numpy array", value, remedy)
    columns: dict[str, object] = {}
    for name in value.dtype.names or ():
        column = value[name]
        if getattr(column, "shape", None) == () and getattr(column, "dtype", "") == "O":
            column = column.item()  # the object itself
        columns[name] = columns_of_struct_array(column) if is_struct_array(column) else column
    return columns


def tensor_of_array(value: object) -> Tensor | None:
    """Return an array as a tensor that shares its memory where torch can; `None` for other values.

    Arrays of strings or objects are other values; so are tables and what has no length, as images
    of PIL.
    """
    kind = type(value)
    if hasattr(kind, "__dlpack__") and not is_of_numpy(value):
        try:
            return torch.utils.dlpack.from_dlpack(value)
        except Exception:  # noqa: BLE001, RUF100  # a library may raise anything; it may offer more
            pass
    array = _numpy_array(value)
    if array is None:
        return None
    dtype = array.dtype
    if dtype.kind not in _NUMERIC:
        return None
    if array.ndim and _must_be_copied(array):
        array = array.astype(dtype.newbyteorder("="), order="C", copy=True)
    return torch.as_tensor(array)


def tensor_of_numbers(values: object, dtype: torch.dtype | None = None) -> Tensor:
    """Return a number, or nested lists of numbers, as a tensor.

    Raises:
        TypeError: if a value is not a number.
        ValueError: if lists of a level have different lengths, also where the first one is empty,
            behind which torch reads none.
    """
    made = torch.as_tensor(values, dtype=dtype)
    if not made.numel() and isinstance(values, (list, tuple)) and _holds_any(values):
        raise ValueError("expected lists of one length, got an empty one first")
    return made


def _holds_any(values: Sequence[object]) -> bool:
    """Return whether nested lists hold a value."""
    return any(not isinstance(each, (list, tuple)) or _holds_any(each) for each in values)


def tensor_of_list(value: object) -> Tensor | None:
    """Return a list of tensors of one shape as one tensor; `None` for other values.

    Lists may be nested; a named tuple, or a tuple in a list, is another value.

    Raises:
        RuntimeError: if torch cannot stack them, because they are on different devices.
    """
    if not isinstance(value, (list, tuple)) or not value or hasattr(value, "_fields"):
        return None
    rows: list[Tensor] = []
    for item in value:
        within = None if isinstance(value, list) and isinstance(item, tuple) else item
        row = item if isinstance(item, Tensor) else tensor_of_list(within)
        if row is None or row.is_nested or (rows and row.shape != rows[0].shape):
            return None
        rows.append(row)
    return torch.stack(rows)


def _numpy_array(value: Any) -> Array | None:
    kind = type(value)
    if not is_of_numpy(value) and (not hasattr(kind, "__len__") or hasattr(kind, "columns")):
        return None
    if hasattr(kind, "__array__"):
        found: Array = value.__array__()
        return found
    if hasattr(kind, "__array_interface__"):
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


# Lists: of numbers, of tensors, of a value for each row.


def as_array(value: object) -> object:
    """Return a list or tuple as an array of text or of objects; numbers in text stay numbers."""
    if not isinstance(value, (list, tuple)) or hasattr(value, "_fields"):
        return value
    import numpy as np

    array = np.array(value, dtype=object)
    kinds = {*map(type, array.flat)}
    alike = kinds == {str} or kinds <= {*_ALL_NUMBERS}
    return np.array(value) if alike else array


def rows_of(value: Any) -> Sequence[object] | None:
    """Return a value that has an item for each row: a list, a tuple, or an array of objects."""
    if isinstance(value, (list, tuple)):
        return None if hasattr(value, "_fields") else value  # a named tuple is one value
    array = None if isinstance(value, str) else _numpy_array(value)
    plain: object = None if array is None else array.tolist()
    return plain if isinstance(plain, list) else None


def values_of_rows(values: object, batch: Batch, where: str) -> list[object]:
    """Return the values of nested lists of shape `batch` in one list.

    Args:
        values: the nested lists.
        batch: the shape; only its dimensions are lists of rows, further lists are values.
        where: what is checked, for the message.

    Raises:
        ShapeMismatch: if a list does not have one item for each row.
    """
    level = [values]
    for dim, size in enumerate(batch):
        below: list[object] = []
        for each in level:
            if not isinstance(each, (list, tuple)) or len(each) != size:
                raise _rows_differ(where, batch, each, dim)
            below.extend(each)
        level = below
    return level


def shape_of_lists(values: Sequence[object]) -> Batch:
    """Return the shape of nested lists, as far as those of a level have the same length."""
    batch: Batch = ()
    level: Sequence[Any] = [values]
    while level and all(isinstance(each, list) for each in level[1:]):
        lists = level
        if batch and (not isinstance(level[0], list) or len({len(each) for each in lists}) > 1):
            break
        batch = (*batch, len(lists[0]))
        level = [each for one in lists for each in one]
    return batch


def _rows_differ(where: str, batch: Batch, found: object, dim: int) -> ShapeMismatch:
    count = f"{len(found)}" if isinstance(found, (list, tuple)) else "a single one"
    at = f" in dimension {dim}" if len(batch) > 1 else ""
    return ShapeMismatch(
        f"{where} must have one value for each row of batch_size {batch}, got {count} where "
        f"{batch[dim]} are expected{at}. Wrap it in `NonTensorData` to store it as one value that "
        "every row has."
    )


def holds_numbers(values: list[object] | tuple[object, ...], empty: bool = False) -> bool:
    """Return whether nested lists hold numbers alone; a tuple in a list is one value.

    `empty`: some of them may hold nothing.
    """
    listed = isinstance(values, list)
    inner = list if listed else (list, tuple)
    numbers = NUMBERS if listed else _ALL_NUMBERS
    return all(
        isinstance(value, numbers)
        or (isinstance(value, inner) and (holds_numbers(value, empty) if value else empty))
        for value in values
    )


def lists_as_tensors(value: object, depth: int) -> object:
    """Return lists of numbers of different lengths as lists of tensors, at least `depth` deep."""
    if not isinstance(value, list):
        return value
    if depth <= 0:
        try:
            return tensor_of_numbers(value)
        except (ValueError, TypeError):
            pass
    alike = depth > 1 or all(isinstance(each, list) for each in value)
    return [lists_as_tensors(each, depth - 1) for each in value] if alike else value


def shape_of_nothing(value: object) -> Batch | None:
    """Return the shape of nested lists of one shape that hold nothing; `None` for other values."""
    if not isinstance(value, (list, tuple)) or hasattr(value, "_fields"):
        return None
    if not value:
        return (0,)
    if isinstance(value, list) and isinstance(value[0], tuple):  # which is one value
        return None
    inner = shape_of_nothing(value[0])
    if inner is None or any(shape_of_nothing(each) != inner for each in value[1:]):
        return None
    return (len(value), *inner)
