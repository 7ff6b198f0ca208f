"""Containers as tables of Arrow, and as files of Parquet.

A leaf is a column; one of more dimensions is a column of lists of fixed size. The metadata of the
table holds what the columns do not say, so that an equal container comes back.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor

from kd_core._convert.columns import column_of, rows_in
from kd_core._convert.layout import (
    Tree,
    batch_of_layout,
    data_of,
    layout_of,
    leaves_of,
    rebuilt,
    stored,
)
from kd_core._convert.optional import load
from kd_core._errors import InvalidArgument, InvalidValue, KeyCollision, a_type
from kd_core._keys import format_key

if TYPE_CHECKING:
    from kd_core._protocol.primitives import AbstractContainer
    from kd_core._types import NestedKey

    Table = Any

LAYOUT: Final = b"kd_core"


def table_of(td: AbstractContainer, separator: str, purpose: str) -> object:
    """Return a table with one row for each item of the first batch dimension."""
    pyarrow = load("pyarrow", purpose)
    rows = rows_in(td, purpose)
    arrays: dict[str, object] = {}
    for path, leaf in leaves_of(td):
        _add(arrays, path, separator, _array_of(pyarrow, stored(leaf), rows))
    for path, value, per_row in data_of(td):
        texts = [json.dumps(each) for each in _rows(value, per_row, rows)]
        plain = [json.loads(text) for text in texts]
        simple = all(isinstance(each, str) for each in plain)
        _add(arrays, path, separator, pyarrow.array(plain if simple else texts, pyarrow.string()))
    table = pyarrow.table(arrays)
    metadata = json.dumps({**layout_of(td), "separator": separator})
    return cast("object", table.replace_schema_metadata({LAYOUT: metadata}))


def _rows(value: object, per_row: bool, rows: int) -> Sequence[object]:
    return cast("Sequence[object]", value) if per_row else [value] * rows


def _add(arrays: dict[str, object], path: tuple[str, ...], separator: str, array: object) -> None:
    name = separator.join(path)
    if name in arrays:
        raise KeyCollision(
            f"key {format_key(path)} becomes column `{name}`, which is another key. Pass another "
            "`separator`."
        )
    arrays[name] = array


def _array_of(pyarrow: Table, leaf: Tensor, rows: int) -> object:
    array = pyarrow.array(leaf.reshape(-1).numpy())
    size = math.prod(leaf.shape[1:])
    if leaf.ndim == 1:
        return cast("object", array)
    if size == 0:
        kind = pyarrow.list_(array.type, 0)
        return cast("object", pyarrow.array([[]] * rows, kind))
    return cast("object", pyarrow.FixedSizeListArray.from_arrays(array, size))


def tree_of_table(
    table: object, separator: str | None, nulls: str, mask_key: NestedKey
) -> tuple[Tree, tuple[int, ...]]:
    """Return the entries of a table, and the batch size.

    Raises:
        InvalidArgument: if it is not a table.
        InvalidValue: if a column has nulls and they are not masked.
    """
    pyarrow = load("pyarrow", "from_arrow")
    if isinstance(table, pyarrow.RecordBatch):
        table = pyarrow.Table.from_batches([table])
    if not isinstance(table, pyarrow.Table):
        raise InvalidArgument(f"`table` must be an Arrow table, got {a_type(table)}.")
    if nulls not in ("raise", "mask"):
        raise InvalidValue(f"`nulls` must be 'raise' or 'mask', got {nulls!r}.")
    layout = _layout_in(table)
    if layout is not None:
        joined = cast("str", layout["separator"])
        tree = rebuilt(layout, lambda path: _read(table.column(joined.join(path)), pyarrow))
        return tree, batch_of_layout(layout)
    found: Tree = {}
    masks: list[Tensor] = []
    for name in table.column_names:
        path = tuple(name.split(separator)) if separator else (name,)
        found.update(
            _entries(table.column(name), path, pyarrow, masks if nulls == "mask" else None)
        )
    if masks:
        found[mask_key] = torch.stack(masks).all(0)
    return found, (table.num_rows,)


def _layout_in(table: Table) -> dict[str, object] | None:
    """Return the layout of a table that `table_of` made, unless columns were changed since."""
    text = (table.schema.metadata or {}).get(LAYOUT)
    if text is None:
        return None
    layout = cast("dict[str, Any]", json.loads(text))
    separator = layout["separator"]
    wanted = {separator.join(row[0]) for row in (*layout["leaves"], *layout["data"])}
    same_rows = layout["levels"][0][1][:1] == [table.num_rows]
    return layout if wanted == set(table.column_names) and same_rows else None


def _read(column: Table, pyarrow: Table) -> Tensor:
    array = column.combine_chunks()
    if isinstance(array, pyarrow.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pyarrow.array([], array.type)
    while pyarrow.types.is_fixed_size_list(array.type):
        array = array.flatten()
    return _tensor(array)


def _tensor(array: Table) -> Tensor:
    values = array.to_numpy(zero_copy_only=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it is read-only, and copied at once
        return torch.from_numpy(values).clone()


def _entries(
    column: Table, path: tuple[str, ...], pyarrow: Table, masks: list[Tensor] | None
) -> Tree:
    """Return the entries of a column of another origin: one, or those of a struct."""
    types = pyarrow.types
    kind = column.type
    if types.is_struct(kind):
        found: Tree = {}
        for at, part in enumerate(column.flatten()):
            found.update(_entries(part, (*path, kind.field(at).name), pyarrow, masks))
        return found
    numeric = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    if column.null_count and numeric:
        if masks is None:
            raise InvalidValue(
                f"column {format_key(path)} has {column.null_count} nulls. Pass `nulls='mask'` to "
                "set them to zero and add a mask, or fill them first with `fill_null`."
            )
        masks.append(_tensor(column.is_valid().combine_chunks()))
        column = column.fill_null(False if types.is_boolean(kind) else 0)
    if numeric:
        return {path: _read(column, pyarrow)}
    if types.is_fixed_size_list(kind) and not column.null_count:
        sizes: list[int] = []
        while types.is_fixed_size_list(kind):
            sizes.append(kind.list_size)
            kind = kind.value_type
        if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
            return {path: _read(column, pyarrow).reshape(len(column), *sizes)}
    return {path: _listed(column.to_pylist())}


def _listed(values: list[object]) -> object:
    """Return the values of a column that is not of numbers: lists of one size are a tensor."""
    if values and all(isinstance(value, list) for value in values):
        try:
            return torch.tensor(values)
        except (ValueError, TypeError, RuntimeError):
            return values
    return column_of(values)


def write_parquet(td: AbstractContainer, path: str | Path, separator: str) -> None:
    """Write a file of Parquet."""
    parquet = load("pyarrow.parquet", "to_parquet")
    parquet.write_table(table_of(td, separator, "to_parquet"), str(path))


def read_parquet(path: str | Path, columns: Sequence[str] | None) -> object:
    """Return the table of a file of Parquet."""
    parquet = load("pyarrow.parquet", "from_parquet")
    found = list(columns) if columns is not None else None
    return cast("object", parquet.read_table(str(path), columns=found))
