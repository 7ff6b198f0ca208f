"""Containers as columns of a table, one row for each item of the first batch dimension, and back.

Nested keys are joined by a separator. A leaf with more dimensions takes a column for each element
of a row, `name[i,j]`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import torch
from torch import Tensor

from kd_core._convert.layout import Tree, leaves_of
from kd_core._convert.plain import rows_of_data
from kd_core._errors import InvalidValue, KeyCollision
from kd_core._keys import format_key
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from kd_core._types import NestedKey

    DtypeOf: TypeAlias = "torch.dtype | Mapping[NestedKey, torch.dtype] | None"

Column: TypeAlias = "Tensor | list[object]"

_ELEMENT: Final = re.compile(r"(.*)\[(\d+(?:,\d+)*)\]", re.DOTALL)


def rows_in(td: AbstractContainer, what: str) -> int:
    """Return the number of rows of a table.

    Raises:
        InvalidValue: if the container does not have a batch.
    """
    if not td._kd_desc.batch:
        raise InvalidValue(
            f"`{what}` writes one row for each item of the first batch dimension, got a container "
            "without a batch. Call `unsqueeze(0)` first."
        )
    return td._kd_desc.batch[0]


def columns_of(td: AbstractContainer, separator: str) -> dict[str, Column]:
    """Return the columns of a container: tensors of one dimension, or lists of values.

    Raises:
        KeyCollision: if a key holds the separator, or looks like the name of an element.
        InvalidValue: if a leaf has no element in a row.
    """
    columns: dict[str, Column] = {}
    for path, leaf in leaves_of(td):
        name = joined(path, separator)
        flat = leaf.flatten(1) if leaf.ndim > 1 else leaf
        for place, suffix in enumerate(_elements(leaf, path)):
            columns[f"{name}{suffix}"] = flat[:, place] if suffix else leaf
    add_data(td, separator, (), columns)
    return columns


def add_data(
    td: AbstractContainer, separator: str, path: tuple[str, ...], columns: dict[str, Column]
) -> None:
    """Add a column for what is not a tensor, of a level and of those below, to the columns."""
    for key, value in td._kd_entries.items():
        if isinstance(value, AbstractContainer):
            add_data(value, separator, (*path, key), columns)
        elif not isinstance(value, Tensor):
            columns[joined((*path, key), separator)] = rows_of_data(value, value._kd_desc.batch[:1])


def joined(path: tuple[str, ...], separator: str) -> str:
    """Return the name of the column of a nested key.

    Raises:
        KeyCollision: if a part of the key holds the separator, or is like the name of an element.
    """
    for part in path:
        if separator in part or _ELEMENT.fullmatch(part):
            raise KeyCollision(
                f"key {format_key(path)} cannot be the name of a column: `{part}` holds the "
                f"separator `{separator}` or ends like an element, `[0]`. Pass another "
                "`separator`, or rename the key with `rename_key_`."
            )
    return separator.join(path)


def _elements(leaf: Tensor, path: tuple[str, ...]) -> list[str]:
    """Return what is added to the name of a leaf for each element of a row."""
    sizes = leaf.shape[1:]
    if 0 in sizes:
        raise InvalidValue(
            f"entry {format_key(path)} of shape {tuple(leaf.shape)} has no element in a row, so "
            "it has no column. Leave it out with `exclude`."
        )
    if not sizes:
        return [""]
    return [f"[{','.join(map(str, index))}]" for index in itertools.product(*map(range, sizes))]


def tree_of_columns(columns: Mapping[str, Column], separator: str | None, dtype: DtypeOf) -> Tree:
    """Return the entries that columns are.

    Args:
        columns: what `columns_of` returned, or columns of another origin.
        separator: what joins nested keys; `None`: names are keys.
        dtype: the dtype of the tensors, of all or by key.
    """
    grouped: dict[str, dict[tuple[int, ...], Column]] = {}
    for name, column in columns.items():
        found = _ELEMENT.fullmatch(name) if isinstance(column, Tensor) else None
        index = () if found is None else tuple(map(int, found[2].split(",")))
        grouped.setdefault(name if found is None else found[1], {})[index] = column
    tree: Tree = {}
    for name, parts in grouped.items():
        for key, column in _assembled(name, parts).items():
            path = tuple(key.split(separator)) if separator else (key,)
            tree[path] = _cast(column, path, dtype)
    return tree


def _assembled(name: str, parts: dict[tuple[int, ...], Column]) -> dict[str, Column]:
    """Return the leaf of all elements, or the columns as they are if some are missing."""
    if set(parts) == {()}:
        return {name: parts[()]}
    ndim = len(next(iter(parts)))
    if all(len(index) == ndim for index in parts):
        sizes = [max(index[dim] for index in parts) + 1 for dim in range(ndim)]
        grid = list(itertools.product(*map(range, sizes)))
        if len(grid) == len(parts):
            stacked = torch.stack([cast("Tensor", parts[index]) for index in grid], dim=-1)
            return {name: stacked.reshape(-1, *sizes)}
    return {
        f"{name}[{','.join(map(str, index))}]" if index else name: column
        for index, column in parts.items()
    }


def _cast(column: Column, path: tuple[str, ...], dtype: DtypeOf) -> Column:
    if isinstance(dtype, Mapping):
        wanted = dtype.get(path, dtype.get(path[0]) if len(path) == 1 else None)
    else:
        wanted = dtype
    if wanted is None:
        return column
    if isinstance(column, Tensor):
        return column.to(wanted)
    return column if column else torch.tensor([], dtype=wanted)


def cast_tree(tree: Tree, dtype: DtypeOf) -> Tree:
    """Return the entries of a tree of columns, tensors converted to a dtype."""
    cast_entries: Tree = {}
    for key, value in tree.items():
        path = cast("tuple[str, ...]", key if isinstance(key, tuple) else (key,))
        cast_entries[key] = _cast(value, path, dtype) if isinstance(value, Tensor) else value
    return cast_entries


def column_of(values: Sequence[object]) -> Column:
    """Return values as a tensor if all are numbers of one kind, else as a list."""
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        return torch.tensor(values, dtype=torch.bool)
    if kinds == {int}:
        return torch.tensor(values, dtype=torch.int64)
    if kinds and kinds <= {int, float}:
        return torch.tensor(values, dtype=torch.float64)
    if kinds and kinds <= {int, float, complex}:
        return torch.tensor(values, dtype=torch.complex128)
    return list(values)


def parsed(texts: Sequence[str]) -> Column:
    """Return texts as numbers if all of them are, else as they are."""
    if texts and set(texts) <= {"True", "False"}:
        return torch.tensor([text == "True" for text in texts])
    for kind in (int, float, complex):
        make = cast("Callable[[str], object]", kind)
        try:
            return column_of([make(text) for text in texts]) if texts else []
        except (ValueError, OverflowError):
            continue
    return list(texts)
