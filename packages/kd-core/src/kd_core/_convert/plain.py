"""Python objects as nested dicts: dataclasses, named tuples, tuples, lists, structured arrays."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from kd_core._batch.descriptor import describe
from kd_core._errors import InvalidValue, wrong_type
from kd_core._keys import format_key
from kd_core._nodes import registry
from kd_core._nodes.entry import Entry, Node, is_node, is_unbatched
from kd_core._protocol.primitives import AbstractContainer, refuse_unbatched
from kd_core._protocol.validation import shape_of_lists, values_of_rows


class AnyNamedTuple(Protocol):
    """An instance of a class that `collections.namedtuple` or `typing.NamedTuple` makes."""

    _fields: tuple[str, ...]


def tree_of(value: object) -> dict[str, object] | None:
    """Return an object of named or numbered parts as nested dicts; `None` for any other value."""
    parts = _parts_of(value)
    return None if parts is None else {key: branch_of(part) for key, part in parts}


def branch_of(value: object) -> object:
    """Return an object of named or numbered parts as nested dicts, any other value as it is.

    A list that holds tensors or objects has a value for each item.
    """
    if isinstance(value, list) and any(map(_has_parts, value)):
        return entry_of_list(value)
    tree = tree_of(value)
    return value if tree is None else tree


def entry_of_list(values: list[object]) -> Entry:
    """Return a list of numbers as a tensor, any other list as one value for each item."""
    try:
        return torch.tensor(values)
    except (TypeError, ValueError, RuntimeError):
        shape = shape_of_lists(values)
        rows = values_of_rows(values, shape, "the list")
        return registry.wrap_list(rows, describe(shape))


def _parts_of(value: object) -> Iterator[tuple[str, object]] | None:
    """Return names and parts of an object; `None` for a value without parts."""
    if isinstance(value, (Tensor, AbstractContainer, str, bytes)) or is_node(value):
        return None
    if isinstance(value, Mapping):
        return iter(value.items())
    if is_dataclass(value) and not isinstance(value, type):
        return ((field.name, getattr(value, field.name)) for field in fields(value))
    if isinstance(value, tuple):
        return zip(_field_names(value) or map(str, range(len(value))), value, strict=True)
    if is_struct_array(value):
        return iter(columns_of_struct_array(value).items())
    return None


def _field_names(value: object) -> tuple[str, ...]:
    """Return the names of the fields of a tuple: of a named one, or of a result of torch."""
    if hasattr(type(value), "n_sequence_fields"):  # `torch.max`, for example
        return tuple(type(value).__match_args__)  # type: ignore[attr-defined]  # such classes have it
    return tuple(getattr(value, "_fields", ()))


def _has_parts(value: object) -> bool:
    """Return whether an item of a list is a tensor or an object of parts, or holds one."""
    if isinstance(value, list):
        return any(_has_parts(part) for part in value)
    is_node = isinstance(value, (Tensor, Mapping, AbstractContainer))
    return is_node or _parts_of(value) is not None


def tree_of_dataclass(value: object) -> dict[str, object]:
    """Return a dataclass as nested dicts.

    Raises:
        InvalidArgument: if it is not an instance of a dataclass.
    """
    if not is_dataclass(value) or isinstance(value, type):
        remedy = "Decorate its class with `@dataclass`, and pass an instance."
        raise wrong_type("`dataclass`", "an instance of a dataclass", value, remedy)
    return cast("dict[str, object]", tree_of(value))


def tree_of_tuple(value: object) -> dict[str, object]:
    """Return a tuple as nested dicts: fields by name, others by position.

    Raises:
        InvalidArgument: if it is not a tuple.
    """
    if not isinstance(value, tuple):
        raise wrong_type("`obj`", "a tuple", value, "Use `from_any` for other objects.")
    return cast("dict[str, object]", tree_of(value))


def tree_of_named_tuple(value: object) -> dict[str, object]:
    """Return a named tuple as nested dicts.

    Raises:
        InvalidArgument: if it is not a named tuple.
    """
    kind = type(value)
    if not (hasattr(kind, "_fields") or hasattr(kind, "n_sequence_fields")):
        remedy = "Use `from_tuple` for a tuple without names."
        raise wrong_type("`named_tuple`", "a named tuple", value, remedy)
    return tree_of_tuple(value)


def named_tuple_of(td: AbstractContainer, path: tuple[str, ...] = ()) -> AnyNamedTuple:
    """Return a container as a named tuple, nested ones as nested named tuples.

    Raises:
        InvalidValue: if a key is not a valid name of a field.
    """
    values: list[object] = []
    for key, value in td._kd_entries.items():
        if not key.isidentifier() or key.startswith("_"):
            raise InvalidValue(
                f"key {format_key((*path, key))} is not a valid name of a field of a named tuple. "
                "Rename it with `rename_key_`."
            )
        if isinstance(value, AbstractContainer):
            values.append(named_tuple_of(value, (*path, key)))
        else:
            stays = isinstance(value, Tensor) or is_unbatched(value)
            values.append(value if stays else cast("Node", value)._kd_item())
    try:
        return cast("AnyNamedTuple", _named_tuple_class(tuple(td._kd_entries))(*values))
    except ValueError as error:  # a keyword of Python
        raise InvalidValue(f"{error}. Rename the key with `rename_key_`.") from None


@cache
def _named_tuple_class(names: tuple[str, ...]) -> type:
    return namedtuple("GenericDict", names)  # as users of tensordict see it


def is_struct_array(value: object) -> bool:
    """Return whether a value is a numpy array of records, or one record."""
    dtype = getattr(value, "dtype", None)
    return type(value).__module__ == "numpy" and getattr(dtype, "names", None) is not None


def columns_of_struct_array(value: object) -> dict[str, object]:
    """Return the fields of a structured array as nested dicts; numbers share its memory.

    Raises:
        InvalidArgument: if it is not a structured array.
    """
    if not is_struct_array(value):
        remedy = "Pass an array whose dtype has named fields, or use `from_any`."
        raise wrong_type("`struct_array`", "a structured numpy array", value, remedy)
    array = cast("Mapping[str, object]", value)
    columns: dict[str, object] = {}
    for name in value.dtype.names:  # type: ignore[attr-defined]  # checked above
        column = array[name]
        if getattr(column, "shape", None) == () and getattr(column, "dtype", "") == "O":
            column = column.item()  # type: ignore[attr-defined]  # the object itself
        columns[name] = columns_of_struct_array(column) if is_struct_array(column) else column
    return columns


def struct_array_of(td: AbstractContainer) -> object:
    """Return a container as a structured array of its batch size; nested ones are nested fields.

    Raises:
        InvalidValue: if numpy has no dtype for a leaf.
    """
    import numpy

    refuse_unbatched(td, "divided among records")
    array = numpy.empty(td._kd_desc.batch, _record_dtype(td, ()))
    _fill_records(array, td)
    return array


def _record_dtype(td: AbstractContainer, path: tuple[str, ...]) -> list[tuple[object, ...]]:
    ndim = td._kd_desc.ndim
    spec: list[tuple[object, ...]] = []
    for key, value in td._kd_entries.items():
        where = (*path, key)
        if not key:
            raise InvalidValue(
                f"key {format_key(where)} is empty, which is not a valid name of a field of a "
                "structured array. Rename it with `rename_key_`."
            )
        if isinstance(value, AbstractContainer):
            spec.append((key, _record_dtype(value, where), tuple(value._kd_desc.batch[ndim:])))
        elif isinstance(value, Tensor):
            array = _array_of(value, where)
            spec.append((key, array.dtype, tuple(value.shape[ndim:])))  # type: ignore[attr-defined]  # numpy
        else:
            spec.append((key, _text_dtype(rows_of_data(value, td._kd_desc.batch)), ()))
    return spec


def _text_dtype(values: list[object]) -> object:
    """Return the dtype of a column of values: text of ten letters and more, or objects."""
    texts = [value for value in values if type(value) is str]
    if not texts or len(texts) < len(values):
        return object
    return f"<U{max(10, *map(len, texts))}"


def _fill_records(array: object, td: AbstractContainer) -> None:
    records = cast("dict[str, Mapping[object, object]]", array)
    for key, value in td._kd_entries.items():
        if isinstance(value, AbstractContainer):
            _fill_records(records[key], value)
        elif isinstance(value, Tensor):
            records[key][...] = _array_of(value, (key,))  # type: ignore[index]  # an array
        else:
            _fill_objects(records[key], td._kd_desc.batch, rows_of_data(value, td._kd_desc.batch))


def _fill_objects(column: object, batch: Sequence[int], values: list[object]) -> None:
    import numpy

    for index, value in zip(numpy.ndindex(*batch), values, strict=True):
        cast("dict[object, object]", column)[index] = value


def rows_of_data(node: object, batch: Sequence[int]) -> list[object]:
    """Return the value of non-tensor data for each row, in one list."""
    level = [node.tolist()]  # type: ignore[attr-defined]  # nodes of data have it
    for _ in batch:
        level = [inner for each in level for inner in each]
    return level


def _array_of(leaf: Tensor, path: tuple[str, ...]) -> object:
    try:
        return leaf.detach().cpu().numpy()
    except TypeError as error:
        raise InvalidValue(
            f"entry {format_key(path)} is of dtype `{leaf.dtype}`, which numpy does not have: "
            f"{error}. Convert it first, for example with `td.float()`."
        ) from None
