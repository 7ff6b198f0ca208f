"""Containers as tables and texts: columns, Arrow, pandas, MosaicML Streaming; JSON and CSV."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from kd_core import _registry as registry
from kd_core._convert.plain import (
    Plain,
    Tree,
    batch_of_layout,
    checked,
    data_of,
    jagged_of,
    layout_of,
    leaves_of,
    load,
    ragged_as_jagged,
    rebuilt,
    restored,
    rows_of_jagged,
    stored,
    with_lists,
)
from kd_core._errors import (
    InvalidArgument,
    InvalidValue,
    KeyCollision,
    KeyNotFound,
    a_type,
)
from kd_core._keys import format_key, nearest_key, path_of
from kd_core._leaves.arrays import holds_numbers, lists_as_tensors, tensor_of_numbers
from kd_core._leaves.loops import has_entry
from kd_core._nodes import is_data, rows_of_data
from kd_core._progress import advance, begin
from kd_core._protocol import AbstractContainer, refuse_unbatched
from kd_core._validation import note_ragged

if TYPE_CHECKING:
    from typing import IO

    from kd_core._nodes import Entry
    from kd_core._types import BatchSize, NestedKey

    DtypeOf: TypeAlias = "torch.dtype | str | Mapping[NestedKey, torch.dtype | str] | None"
    Table = Any


# Containers as columns of a table, one row for each item of the first batch dimension, and back.
#
# Nested keys are joined by a separator. A leaf with more dimensions takes a column for each
# element of a row, `name[i,j]`.

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


def columns_of(td: AbstractContainer, separator: str, *, ragged: bool = False) -> dict[str, Column]:
    """Return the columns of a container: tensors of one dimension, or lists of values.

    Args:
        td: the container.
        separator: what joins nested keys.
        ragged: whether a column may be a jagged tensor.

    Raises:
        KeyCollision: if a key holds the separator and is nested, or would be the name of one that
            is, or looks like the name of an element.
        InvalidValue: if a leaf has no element in a row.
    """
    columns: dict[str, Column] = {}
    _check_names(td, separator)
    for path, leaf in leaves_of(td):
        name = joined(path, separator)
        if leaf.is_nested:
            if not ragged:
                raise InvalidValue(
                    f"entry {format_key(path)} is ragged, which one column of numbers cannot hold. "
                    "Pad it with `to_padded_tensor`, or use `to_parquet` or `to_json`."
                )
            columns[name] = leaf
            continue
        flat = leaf.flatten(1) if leaf.ndim > 1 else leaf
        for place, suffix in enumerate(_elements(leaf, path)):
            columns[f"{name}{suffix}"] = flat[:, place] if suffix else leaf
    add_data(td, separator, (), columns)
    return columns


def _check_names(td: AbstractContainer, separator: str) -> None:
    """Raise `KeyCollision` if a key is the name of the column of a nested one, too."""
    for key in td._kd_entries:
        if separator in key and has_entry(td._kd_entries, tuple(key.split(separator))):
            raise KeyCollision(
                f"`{key}` and {format_key(tuple(key.split(separator)))} would be one column. Pass "
                "another `separator`, or rename one of them with `rename_key_`."
            )


def add_data(
    td: AbstractContainer, separator: str, path: tuple[str, ...], columns: dict[str, Column]
) -> None:
    """Add a column for what is not a tensor, of a level and of those below, to the columns."""
    for key, value in td._kd_entries.items():
        if isinstance(value, AbstractContainer):
            add_data(value, separator, (*path, key), columns)
        elif is_data(value):
            dims = min(value._kd_desc.ndim, 1)
            columns[joined((*path, key), separator)] = list(
                map(with_lists, rows_of_data(value, dims))
            )


def joined(path: tuple[str, ...], separator: str) -> str:
    """Return the name of the column of a nested key.

    Raises:
        KeyCollision: if a part of a nested key holds the separator, or any is like the name of an
            element.
    """
    for part in path:
        if (separator in part and len(path) > 1) or _ELEMENT.fullmatch(part):
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


def tree_of_columns(
    columns: Mapping[str, Column],
    separator: str | None,
    dtypes: Dtypes,
    above: tuple[str, ...] = (),
) -> Tree:
    """Return the entries that columns are.

    Args:
        columns: what `columns_of` returned, or columns of another origin.
        separator: what joins nested keys; `None`: names are keys.
        dtypes: which columns of other values are read as numbers.
        above: the key of the object that they are in.
    """

    def key_of(name: str) -> tuple[str, ...]:
        return (*above, *(name.split(separator) if separator else (name,)))

    grouped: dict[str, dict[tuple[int, ...], Column]] = {}
    for name, values in columns.items():
        found = _ELEMENT.fullmatch(name)
        column = dtypes.values(values, key_of(name), key_of(found[1] if found else name))
        found = found if isinstance(column, Tensor) else None
        index = () if found is None else tuple(map(int, found[2].split(",")))
        grouped.setdefault(name if found is None else found[1], {})[index] = column
    tree: Tree = {}
    for name, parts in grouped.items():
        for key, column in _assembled(name, parts).items():
            tree[key_of(key)[len(above) :]] = column
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


class Dtypes:
    """The dtypes that a caller asks for: of all tensors, or of some by their keys.

    A column that is not of numbers is read as numbers if a dtype is asked for its key; so is one of
    numbers and empty values if a dtype is asked for all, or if it is of texts. An empty value is
    `NaN`.
    """

    __slots__ = ("_all", "_by_key", "_met", "_texts")

    def __init__(self, dtype: DtypeOf, texts: bool = False) -> None:
        """Store what is asked for.

        Args:
            dtype: one dtype, or dtypes by key, or their names.
            texts: whether texts stand for numbers, as in a table of texts.

        Raises:
            InvalidArgument: if one is not a dtype.
        """
        by_key = dtype if isinstance(dtype, Mapping) else {}
        one = None if isinstance(dtype, Mapping) or dtype is None else _dtype_of(dtype)
        self._all: torch.dtype | None = one
        self._by_key = {path_of(key): _dtype_of(kind) for key, kind in by_key.items()}
        self._met: list[tuple[str, ...]] = []
        self._texts = texts

    @property
    def none(self) -> bool:
        """Whether nothing is asked for."""
        return self._all is None and not self._by_key

    def values(self, column: Column, path: tuple[str, ...], leaf: tuple[str, ...]) -> Column:
        """Return the values of a column as a tensor if that is asked for.

        Args:
            column: the values.
            path: the key of the column.
            leaf: the key of the leaf that it is an element of.

        Raises:
            InvalidValue: if a value cannot be read so.
        """
        if not isinstance(column, list):
            return column
        asked = self._by_key.get(path, self._by_key.get(leaf))
        if path in self._by_key:
            self._met.append(path)
        wanted = self._all if asked is None else asked
        if wanted is None and not self._texts:
            return column
        if not column:
            return column if wanted is None else torch.tensor([], dtype=wanted)
        texts = self._texts or asked is not None
        numbers = [_number(value, texts) for value in column]
        if asked is None and not _some_numbers(column, numbers):
            return column
        return _as_numbers(column, numbers, path, torch.float64 if wanted is None else wanted)

    def cast(self, value: object, path: tuple[str, ...]) -> object:
        """Return an entry of the dtype that is asked for.

        Raises:
            InvalidValue: if it has values that the dtype does not.
        """
        if isinstance(value, AbstractContainer):
            return self._below(value, path)
        if isinstance(value, Tensor):
            return self._converted(value, path)
        if isinstance(value, (bool, int, float)) and self._wanted(path) is not None:
            return self._converted(torch.tensor(value), path)
        self._met += [] if path in self._by_key else [path]
        return value

    def _below(self, container: AbstractContainer, path: tuple[str, ...]) -> AbstractContainer:
        """Return a container that was written as such, with the dtypes that are asked for."""
        entries: dict[str, Entry] = {}
        for key, value in container._kd_entries.items():
            below = (*path, key)
            if isinstance(value, AbstractContainer):
                entries[key] = self._below(value, below)
            else:
                entries[key] = self._converted(value, below) if isinstance(value, Tensor) else value
        return registry.make_dense(entries, container._kd_desc)

    def _wanted(self, path: tuple[str, ...]) -> torch.dtype | None:
        return self._by_key.get(path, self._all)

    def _converted(self, leaf: Tensor, path: tuple[str, ...]) -> Tensor:
        self._met.append(path)
        wanted = self._wanted(path)
        if wanted is None:
            return leaf
        made = leaf.to(wanted)
        if not _has_nan(wanted) and not leaf.is_nested:
            whole = leaf.double().trunc() if leaf.is_floating_point() else leaf
            lost = whole.isnan() if wanted is torch.bool else made.to(whole.dtype) != whole
            if lost.any():
                row = int(lost.nonzero()[0, 0]) if leaf.ndim else 0
                value = leaf[lost][0].item()
                raise _cannot(path, wanted, row, "NaN" if value != value else repr(value))
        return made

    def check(self) -> None:
        """Refuse keys at which no numbers were read.

        Raises:
            KeyNotFound: if there is one.
        """
        for path in self._by_key:
            if path not in self._met:
                near = nearest_key(path, self._met)
                hint = f" Did you mean {format_key(near)}?" if near is not None else ""
                raise KeyNotFound(
                    f"`dtype` names {format_key(path)}, but no entry of numbers has that key.{hint}"
                )


_OF_PYTHON: Final[Mapping[object, torch.dtype]] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}


def _dtype_of(kind: object) -> torch.dtype:
    if isinstance(kind, str):
        found = getattr(torch, kind.removeprefix("torch."), None)
    else:
        found = _OF_PYTHON.get(kind, kind)  # which `Tensor.to` takes, too
    if not isinstance(found, torch.dtype):
        raise InvalidArgument(
            f'`dtype` must be a `torch.dtype` or the name of one, as "float32", got {kind!r}.'
        )
    return found


def _has_nan(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _number(value: object, texts: bool) -> bool | float | complex | None:
    """Return a value as a number, `None` if it is empty or not a number."""
    if isinstance(value, (bool, int, float, complex)):
        return value
    if not isinstance(value, str) or not texts:
        return None
    if value in ("True", "False"):
        return value == "True"
    for kind in (int, float, complex):
        try:
            return kind(value)
        except ValueError:
            continue
    return None


def _some_numbers(values: Sequence[object], numbers: Sequence[object]) -> bool:
    """Return whether values are numbers and empty ones, and not all of them empty."""
    fit = all(
        number is not None or _is_empty(value)
        for value, number in zip(values, numbers, strict=True)
    )
    return fit and any(number is not None for number in numbers)


def _as_numbers(
    values: Sequence[object],
    numbers: Sequence[bool | float | complex | None],
    path: tuple[str, ...],
    dtype: torch.dtype,
) -> Tensor:
    """Return numbers as a tensor, `NaN` for an empty value.

    Raises:
        InvalidValue: if a value is not a number, or is empty and the dtype has no `NaN`.
    """
    for row, (value, number) in enumerate(zip(values, numbers, strict=True)):
        if number is None and not (_is_empty(value) and _has_nan(dtype)):
            raise _cannot(path, dtype, row, "empty" if _is_empty(value) else repr(value))
    filled = [math.nan if number is None else number for number in numbers]
    kinds = {type(number) for number in filled}
    wide = torch.complex128 if complex in kinds else torch.float64 if float in kinds else None
    try:
        return torch.tensor(filled, dtype=wide)
    except (RuntimeError, OverflowError) as error:
        raise InvalidValue(
            f"column {format_key(path)} cannot be read as `{dtype}`: {error}."
        ) from None


def _cannot(path: tuple[str, ...], dtype: torch.dtype, row: int, value: str) -> InvalidValue:
    remedy = "Fill what is empty, or ask for a dtype of floating-point numbers, which has NaN."
    if value not in ("empty", "NaN"):
        remedy = "Correct the value, or ask for another dtype of this column, or none."
    return InvalidValue(
        f"column {format_key(path)} cannot be read as `{dtype}`: the value of row {row}, counted "
        f"from 0, is {value}. {remedy}"
    )


def cast_tree(tree: Tree, dtypes: Dtypes) -> Tree:
    """Return the entries of a tree, converted to the dtypes that are asked for.

    Raises:
        KeyNotFound: if a dtype is asked for a key that there is not.
        InvalidValue: if a value has no such dtype.
    """
    if dtypes.none:
        return tree
    made: Tree = {}
    for key, value in tree.items():
        path = path_of(key)
        column = dtypes.values(value, path, path) if isinstance(value, list) else value
        made[key] = dtypes.cast(column, path)
    dtypes.check()
    return made


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
        make = kind
        try:
            return column_of([make(text) for text in texts]) if texts else []
        except (ValueError, OverflowError):
            continue
    return list(texts)


# Containers as tables of Arrow, and as files of Parquet.
#
# A leaf is a column; one of more dimensions is a column of lists of fixed size. The metadata of
# the table holds what the columns do not say, so that an equal container comes back.

LAYOUT: Final = b"kd_core"


def table_of(td: AbstractContainer, separator: str, purpose: str) -> object:
    """Return a table with one row for each item of the first batch dimension."""
    pyarrow = load("pyarrow", purpose)
    rows = rows_in(td, purpose)
    td = ragged_as_jagged(td)
    arrays: dict[str, object] = {}
    for path, leaf in leaves_of(td):
        _add(arrays, path, separator, _column_array(pyarrow, leaf, path, rows))
    for path, value, per_row in data_of(td):
        values = value if per_row and isinstance(value, list) else [value] * rows
        texts = [json.dumps(each) for each in values]
        plain = [json.loads(text) for text in texts]
        simple = all(isinstance(each, str) for each in plain)
        _add(arrays, path, separator, pyarrow.array(plain if simple else texts, pyarrow.string()))
    table = pyarrow.table(arrays)
    metadata = json.dumps({**layout_of(td), "separator": separator})
    return table.replace_schema_metadata({LAYOUT: metadata})


def _add(arrays: dict[str, object], path: tuple[str, ...], separator: str, array: object) -> None:
    name = separator.join(path)
    if name in arrays:
        raise KeyCollision(
            f"key {format_key(path)} becomes column `{name}`, which is another key. Pass another "
            "`separator`."
        )
    arrays[name] = array


def _column_array(pyarrow: Table, leaf: Tensor, path: tuple[str, ...], rows: int) -> object:
    if not leaf.is_nested:
        return _array_of(pyarrow, stored(leaf), rows)
    found = rows_of_jagged(leaf, path)
    offsets = [0, *found.lengths.cumsum(0).tolist()]
    inner = _array_of(pyarrow, stored(found.values), len(found.values))
    return pyarrow.LargeListArray.from_arrays(pyarrow.array(offsets, pyarrow.int64()), inner)


def _array_of(pyarrow: Table, leaf: Tensor, rows: int) -> object:
    array = pyarrow.array(leaf.reshape(-1).numpy())
    size = math.prod(leaf.shape[1:])
    if leaf.ndim == 1:
        return array
    if size == 0:
        kind = pyarrow.list_(array.type, 0)
        return pyarrow.array([[]] * rows, kind)
    return pyarrow.FixedSizeListArray.from_arrays(array, size)


def tree_of_table(
    table: object, separator: str | None, nulls: str, mask_key: NestedKey = "mask"
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
    if nulls not in ("raise", "mask", "nan"):
        raise InvalidValue(f"`nulls` must be 'raise', 'mask' or 'nan', got {nulls!r}.")
    layout = _layout_in(table)
    if layout is not None:
        joined: str = layout["separator"]
        tree = rebuilt(
            layout,
            lambda path: _read(table.column(joined.join(path)), pyarrow),
            lambda path: _lengths(table.column(joined.join(path)), pyarrow),
        )
        return tree, batch_of_layout(layout)
    found: Tree = {}
    masks: list[Tensor] = []
    for name in table.column_names:
        path = tuple(name.split(separator)) if separator else (name,)
        found.update(_entries(table.column(name), path, pyarrow, nulls, masks))
    if masks:
        found[mask_key] = torch.stack(masks).all(0)
    return found, (table.num_rows,)


def _layout_in(table: Table) -> Plain | None:
    """Return the layout of a table that `table_of` made, unless columns were changed since."""
    text = (table.schema.metadata or {}).get(LAYOUT)
    if text is None:
        return None
    layout: Plain = json.loads(text)
    separator = layout["separator"]
    wanted = {separator.join(row[0]) for row in (*layout["leaves"], *layout["data"])}
    same_rows = layout["levels"][0][1][:1] == [table.num_rows]
    return layout if wanted == set(table.column_names) and same_rows else None


def _read(column: Table, pyarrow: Table) -> Tensor:
    array = _one_array(column, pyarrow)
    while not pyarrow.types.is_primitive(array.type):  # lists, and lists of a fixed size
        array = array.flatten()
    return _tensor(array)


def _one_array(column: Table, pyarrow: Table) -> Table:
    array = column.combine_chunks()
    if isinstance(array, pyarrow.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pyarrow.array([], array.type)
    return array


def _lengths(column: Table, pyarrow: Table) -> Tensor:
    return _tensor(_one_array(column, pyarrow).value_lengths()).long()


def _tensor(array: Table) -> Tensor:
    values = array.to_numpy(zero_copy_only=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it is read-only, and copied at once
        return torch.from_numpy(values).clone()


def _entries(
    column: Table, path: tuple[str, ...], pyarrow: Table, nulls: str, masks: list[Tensor]
) -> Tree:
    """Return the entries of a column of another origin: one, or those of a struct."""
    types = pyarrow.types
    kind = column.type
    if types.is_struct(kind):
        found: Tree = {}
        for at, part in enumerate(column.flatten()):
            found.update(_entries(part, (*path, kind.field(at).name), pyarrow, nulls, masks))
        return found
    numeric = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    if column.null_count and numeric and nulls == "nan":
        if not types.is_boolean(kind):
            column = column.cast(pyarrow.float64()).fill_null(math.nan)
            return {path: _read(column, pyarrow)}
    elif column.null_count and numeric:
        if nulls == "raise":
            raise InvalidValue(
                f"column {format_key(path)} has {column.null_count} nulls. Pass `nulls='nan'` to "
                "read them as NaN, `nulls='mask'` to set them to zero and add a mask, or fill them "
                "first with `fill_null`."
            )
        masks.append(_tensor(column.is_valid().combine_chunks()))
        column = column.fill_null(False if types.is_boolean(kind) else 0)
    if types.is_timestamp(kind) and not column.null_count:
        kind = pyarrow.int64()
        column = column.cast(pyarrow.timestamp("ns", column.type.tz)).cast(kind)
        numeric = True
    if numeric and not column.null_count:
        return {path: _read(column, pyarrow)}
    if types.is_fixed_size_list(kind) and not column.null_count:
        sizes: list[int] = []
        while types.is_fixed_size_list(kind):
            sizes.append(kind.list_size)
            kind = kind.value_type
        if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
            return {path: _read(column, pyarrow).reshape(len(column), *sizes)}
    return {path: _listed(column.to_pylist(), path)}


def _listed(values: list[object], path: tuple[str, ...]) -> object:
    """Return the values of a column that is not of numbers: lists of one size are a tensor.

    Lists of numbers of different lengths are a tensor for each row.
    """
    if values and all(isinstance(value, list) for value in values):
        try:
            return tensor_of_numbers(values)
        except (ValueError, TypeError, RuntimeError):
            if not holds_numbers(values, empty=True):
                return values
            note_ragged(path)
            return lists_as_tensors(values, 1)
    return column_of(values)


def write_parquet(td: AbstractContainer, path: str | Path, separator: str) -> None:
    """Write a file of Parquet."""
    parquet = load("pyarrow.parquet", "to_parquet")
    parquet.write_table(table_of(td, separator, "to_parquet"), str(path))


def read_parquet(path: str | Path, columns: Sequence[str] | None) -> object:
    """Return the table of a file of Parquet."""
    parquet = load("pyarrow.parquet", "from_parquet")
    found = list(columns) if columns is not None else None
    return parquet.read_table(str(path), columns=found)


# Containers as data frames of pandas.


def frame_of(td: AbstractContainer, separator: str) -> object:
    """Return a data frame with one row for each item of the first batch dimension."""
    pandas = load("pandas", "to_pandas")
    rows = rows_in(td, "to_pandas")
    td = ragged_as_jagged(td)
    columns: dict[str, object] = {}
    ragged: dict[str, str] = {}
    for name, column in columns_of(td, separator, ragged=True).items():
        if not isinstance(column, Tensor):
            columns[name] = pandas.Series(column, dtype=object)
            continue
        if column.is_nested:
            lists = [row.tolist() for row in column.unbind()]
            columns[name] = pandas.Series(lists, dtype=object)
            ragged[name] = str(column.dtype).removeprefix("torch.")
            continue
        try:
            columns[name] = column.cpu().resolve_conj().resolve_neg().numpy()
        except TypeError as error:
            raise InvalidValue(
                f"column `{name}` is of dtype `{column.dtype}`, which numpy does not have: "
                f"{error}. Convert it first, as with `td.float()`."
            ) from None
    frame = pandas.DataFrame(columns, index=pandas.RangeIndex(rows))
    if ragged:
        frame.attrs[RAGGED] = ragged
    return frame


def tree_of_frame(frame: object, separator: str | None, dtype: DtypeOf) -> tuple[Tree, int]:
    """Return the entries of a data frame, and the number of rows.

    Raises:
        InvalidArgument: if it is not a data frame.
        KeyCollision: if two columns have the same name.
    """
    pandas = load("pandas", "from_pandas")
    if not isinstance(frame, pandas.DataFrame):
        raise InvalidArgument(f"`dataframe` must be a pandas data frame, got {a_type(frame)}.")
    columns: dict[str, Column] = {}
    ragged = frame.attrs.get(RAGGED, {})
    for at, label in enumerate(frame.columns):
        name = str(label)
        if name in columns:
            raise KeyCollision(f"column `{name}` is given twice. Rename one of them.")
        if name in ragged:
            columns[name] = _jagged_column(frame.iloc[:, at].tolist(), ragged[name])
        else:
            columns[name] = _column(frame.iloc[:, at])
    dtypes = Dtypes(dtype)
    return cast_tree(tree_of_columns(columns, separator, dtypes), dtypes), len(frame)


def frame_in(path: object, read: str, options: Mapping[str, object]) -> object:
    """Return the data frame that pandas reads."""
    return getattr(load("pandas", "reading with options of pandas"), read)(path, **options)


registry.register("tree_of_frame", tree_of_frame)


RAGGED: Final = "kd_core.ragged"
"""The attribute of a data frame that names the dtypes of columns of lists."""


def _jagged_column(lists: Sequence[Sequence[object]], dtype: str) -> Tensor:
    values = torch.tensor([item for row in lists for item in row], dtype=getattr(torch, dtype))
    return jagged_of(values, torch.tensor([len(row) for row in lists], dtype=torch.int64))


def _column(series: Any) -> Column:
    if hasattr(series, "cat"):  # categories: their numbers
        series = series.cat.codes
    kind = getattr(getattr(series, "dtype", None), "kind", "O")
    values = series.to_numpy(copy=True)
    if values.dtype.kind == "M":
        return torch.from_numpy(values.astype("datetime64[ns]").astype("int64"))
    if kind in "biufc" and values.dtype.kind in "biufc":
        return torch.from_numpy(values)
    if values.dtype.kind == "m":
        values = values.astype("timedelta64[us]")  # of Python
    return column_of(values.tolist())


# Containers as samples of MosaicML Streaming, whose writer makes the shards.
#
# Knows how a row becomes a sample, and which encoding each column has; must not know files.

_AS_JSON: Final = frozenset({dict, list, str, int, float, bool, type(None)})


class Writer(Protocol):
    """What a `streaming.MDSWriter` is used by."""

    def write(self, sample: dict[str, object]) -> None:
        """Add a sample."""

    def finish(self) -> None:
        """Write the last shard and the index."""


def write_shards(
    td: AbstractContainer,
    out: str | tuple[str, str] | None,
    columns: Mapping[str, str] | None,
    writer: Writer | None,
    finish: bool,
    options: Mapping[str, object],
) -> None:
    """Write each row of a container as a sample.

    Args:
        td: the container; without a batch it is one sample.
        out: where the shards are written, as `streaming.MDSWriter` takes it.
        columns: the encoding of each column; `None`: that of the entries.
        writer: a writer that is open already, in place of `out`.
        finish: close the writer.
        options: what else a new writer is given.

    Raises:
        InvalidArgument: if not exactly one of `out` and `writer` is given.
        InvalidValue: if a value has no encoding; nothing is written.
        KeyCollision: if a key holds a dot.
    """
    if (out is None) == (writer is None):
        given = "neither" if out is None else "both"
        raise InvalidArgument(f"`to_mds` takes either `out` or `writer`, got {given}.")
    rows = td if td._kd_desc.batch else td._kd_engine.unsqueeze(td, 0)
    found: dict[str, Column] = {joined(path, "."): leaf for path, leaf in leaves_of(rows)}
    add_data(rows, ".", (), found)
    encodings = dict(columns or {})
    missing = {name: column for name, column in found.items() if name not in encodings}
    encodings |= {name: _encoding(name, column) for name, column in missing.items()}
    if writer is None:
        streaming = load("streaming", "to_mds")
        writer = streaming.MDSWriter(out=out, columns=encodings, **options)
    count = rows._kd_desc.batch[0]
    begin("write", count, "rows")
    for row in range(count):
        writer.write({name: _value(column, row) for name, column in found.items()})
        advance()
    if finish:
        writer.finish()


def _encoding(name: str, column: Column) -> str:
    if isinstance(column, Tensor):
        if column.ndim > 1:
            return "ndarray"
        return "float64" if column.is_floating_point() else "int"
    kinds = {type(value) for value in column}
    for kind, encoding in ((str, "str"), (bytes, "bytes"), (int, "int"), (float, "float64")):
        if kinds == {kind}:
            return encoding
    odd = next((value for value in column if type(value) not in _AS_JSON), None)
    if odd is None:
        return "json"
    raise InvalidValue(
        f"entry `{name}` holds {a_type(odd)}, which has no encoding in a shard. Leave it out with "
        "`exclude`, or pass `columns` with an encoding of yours."
    )


def _value(column: Column, row: int) -> object:
    if not isinstance(column, Tensor):
        return column[row]
    value = column[row].detach().cpu()
    return value.numpy() if value.ndim else value.item()


# JSON, JSON Lines and comma-separated values.


# Containers as comma-separated values.


def csv_of(td: AbstractContainer, separator: str, options: Mapping[str, object]) -> str:
    """Return a table with a line of names, and one line for each row; pandas has the options."""
    if options:
        frame: Any = frame_of(td, separator)
        written: str = frame.to_csv(**{"index": False, **options})
        return written
    rows = rows_in(td, "to_csv")
    columns = columns_of(ragged_as_jagged(td), separator)
    lists = [
        _digits(column) if isinstance(column, Tensor) else column for column in columns.values()
    ]
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(columns)
    writer.writerows([column[row] for column in lists] for row in range(rows))
    return out.getvalue()


def _digits(column: Tensor) -> list[object]:
    """Return numbers, those of float32 and float16 with the fewest digits that read as the same."""
    exact: list[object] = column.tolist()
    if column.dtype not in (torch.float32, torch.float16):
        return exact
    column = column.detach().cpu()
    short = [float(str(number)) for number in column.numpy()]
    # A few are rounded differently by way of float64. A device may be the default one.
    same = torch.tensor(short, dtype=torch.float64, device="cpu").to(column.dtype) == column
    return [
        number if fits else full
        for number, fits, full in zip(short, same.tolist(), exact, strict=True)
    ]


def tree_of_csv(text: str, separator: str | None, dtype: DtypeOf) -> tuple[Tree, int]:
    """Return the entries of a table, and the number of rows.

    Raises:
        InvalidValue: if a line has more or fewer values than the line of names.
        KeyCollision: if a name stands twice.
    """
    reader = csv.reader(io.StringIO(text, newline=""))
    names = next(reader, [])
    twice = [name for position, name in enumerate(names) if name in names[:position]]
    if twice:
        raise KeyCollision(f"column `{twice[0]}` is given twice. Rename one of them.")
    rows = [row for row in reader if row or not names]
    for row in rows:
        if len(row) != len(names):
            raise InvalidValue(
                f"every line must have {len(names)} values, one for each name, got {len(row)} in "
                f"{row}."
            )
    columns = {name: parsed([row[at] for row in rows]) for at, name in enumerate(names)}
    dtypes = Dtypes(dtype, texts=True)
    tree = tree_of_columns(columns, separator, dtypes)
    return cast_tree(tree, dtypes), len(rows)


# Containers as JSON, and as JSON Lines with one row a line.

LEVELS: Final = "__kd__"
"""The key of a file that holds what the values do not say."""


def text_of(td: AbstractContainer, separator: str | None) -> str:
    """Return a container as a JSON object of nested lists.

    Raises:
        KeyCollision: if a key is the one that holds the layout, or two keys become one.
        InvalidValue: if non-tensor data cannot be written as JSON.
    """
    if LEVELS in td._kd_entries:
        raise KeyCollision(f"key `{LEVELS}` is reserved in JSON. Rename it with `rename_key_`.")
    td = ragged_as_jagged(td)
    layout = layout_of(td)
    tree: Plain = {LEVELS: layout}
    for path, leaf in leaves_of(td):
        _place(tree, path, _numbers(leaf), separator)
    return json.dumps(tree)


def _place(tree: Plain, path: tuple[str, ...], value: object, separator: str | None) -> None:
    if separator is not None:
        name = separator.join(path)
        if name in tree:
            raise KeyCollision(f"key {format_key(path)} becomes `{name}`, which is another key.")
        tree[name] = value
        return
    level = tree
    for part in path[:-1]:
        level = level.setdefault(part, {})
    level[path[-1]] = value


def _numbers(leaf: Tensor) -> object:
    if leaf.is_nested:
        return [_numbers(row) for row in leaf.unbind()]
    if leaf.is_complex():
        leaf = torch.view_as_real(leaf.resolve_conj())
    return (leaf.double() if leaf.is_floating_point() else leaf).tolist()


def tree_of_text(text: str, separator: str | None, dtype: DtypeOf) -> tuple[Tree, BatchSize | None]:
    """Return the entries of a JSON object, and its batch size if the text has one.

    Raises:
        InvalidValue: if the text is not a JSON object.
    """
    content = _parsed(text)
    if isinstance(content, list):
        return _tree_of_rows(content, separator, dtype)
    if not isinstance(content, dict):
        raise InvalidValue(
            f"expected a JSON object of columns, got {a_type(content)}. Pass "
            "`lines=True` for one object a line."
        )
    layout: Plain | None = content.pop(LEVELS, None)
    dtypes = Dtypes(dtype)
    if layout is None:
        content = _with_lists(content)
        sizes = {len(each) if isinstance(each, list) else None for each in content.values()}
        size = sizes.pop() if len(sizes) == 1 else None
        return cast_tree(_plain_tree(content, separator, dtypes), dtypes), size

    rows: list[tuple[list[str], str, list[int]]] = layout["leaves"]
    kinds = {tuple(path): (kind, shape) for path, kind, shape in rows}

    counts: dict[tuple[str, ...], Tensor] = {}

    def read(path: tuple[str, ...]) -> Tensor:
        value: Any = content[separator.join(path)] if separator is not None else content
        for part in path if separator is None else ():
            value = value[part]
        name, shape = kinds[path]
        if None in shape:
            rows: list[list[object]] = value
            counts[path] = torch.tensor([len(row) for row in rows], dtype=torch.int64)
            value = [item for row in rows for item in row]
            shape = [len(value), *shape[2:]]
        return _read_tensor(value, getattr(torch, name), shape)

    def lengths(path: tuple[str, ...]) -> Tensor:
        read(path)
        return counts[path]

    return cast_tree(rebuilt(layout, read, lengths), dtypes), batch_of_layout(layout)


def _read_tensor(value: object, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    if dtype.is_complex:
        values = torch.tensor(value, dtype=torch.float64)
        return restored(values, dtype, list(shape))
    if dtype.is_floating_point:
        return torch.tensor(value, dtype=torch.float64).to(dtype).reshape(tuple(shape))
    return torch.tensor(value, dtype=dtype).reshape(tuple(shape))


def _plain_tree(
    content: Plain, separator: str | None, dtypes: Dtypes, above: tuple[str, ...] = ()
) -> Tree:
    """Return the entries of an object of another origin."""
    columns: dict[str, Any] = {}
    nested: Tree = {}
    for key, value in content.items():
        if isinstance(value, dict):
            inner = _plain_tree(value, separator, dtypes, (*above, key))
            nested.update({(key, path): entry for path, entry in inner.items()})
        else:
            columns[key] = _leaf(value)
    nested.update(tree_of_columns(columns, separator, dtypes, above))
    return nested


def _with_lists(content: Plain) -> Plain:
    """Return columns as pandas writes them, each an object of a value a row, as lists."""
    if not all(map(_is_column_of_pandas, content.values())):
        return content
    return {key: [*column.values()] for key, column in content.items()}


def _is_column_of_pandas(column: object) -> bool:
    if not isinstance(column, dict) or list(column) != [*map(str, range(len(column)))]:
        return False
    return bool(column) and not any(isinstance(each, dict) for each in column.values())


def _leaf(value: object) -> object:
    """Return a list of numbers as a tensor: of `float64` as in pandas, which reads nulls as NaN."""
    if not isinstance(value, list):
        return value
    kinds = {*map(type, value)}
    if type(None) in kinds and len(kinds) > 1 and kinds <= {int, float, type(None)}:
        value = [math.nan if each is None else each for each in value]
    if not value or not _flat_type(value):
        return value
    try:
        leaf = tensor_of_numbers(value)
    except (ValueError, TypeError, RuntimeError):
        return value
    return tensor_of_numbers(value, torch.float64) if leaf.is_floating_point() else leaf


def _flat_type(value: object) -> bool:
    if isinstance(value, list):
        return all(_flat_type(part) for part in value)
    return isinstance(value, (bool, int, float))


def json_by_pandas(
    td: AbstractContainer, separator: str | None, options: Mapping[str, object]
) -> str:
    """Return a list of an object for each row, or what else pandas writes with its options."""
    frame: Any = frame_of(td, separator or ".")
    written: str = frame.to_json(**{"orient": "records", **options})
    return written


def lines_of(td: AbstractContainer, separator: str | None) -> str:
    """Return one JSON object for each row, on a line of its own.

    Raises:
        InvalidValue: if the container does not have a batch.
    """
    rows = rows_in(td, "to_json")
    refuse_unbatched(td, "divided among lines")
    if separator is None:
        objects = [_row(row, ()) for row in td._kd_engine.unbind(td, 0)]
    else:
        columns = columns_of(td, separator)
        lists = {
            name: column.tolist() if isinstance(column, Tensor) else column
            for name, column in columns.items()
        }
        objects = [{name: column[row] for name, column in lists.items()} for row in range(rows)]
    return "".join(json.dumps(each) + "\n" for each in objects)


def _row(td: AbstractContainer, path: tuple[str, ...]) -> Plain:
    row: Plain = {}
    for key, value in td._kd_entries.items():
        if isinstance(value, AbstractContainer):
            row[key] = _row(value, (*path, key))
        elif isinstance(value, Tensor):
            row[key] = _numbers(value.detach())
        else:
            row[key] = checked((*path, key), with_lists(value._kd_item()))
    return row


def tree_of_lines(text: str, separator: str | None, dtype: DtypeOf) -> tuple[Tree, int]:
    """Return the entries of one JSON object a line, and the number of rows.

    Raises:
        InvalidValue: if a line is not an object, or lines have different keys.
    """
    rows = [_parsed(line) for line in text.split("\n") if line.strip()]
    return _tree_of_rows(rows, separator, dtype)


def _tree_of_rows(rows: list[Any], separator: str | None, dtype: DtypeOf) -> tuple[Tree, int]:
    if not all(isinstance(row, dict) for row in rows):
        raise InvalidValue(
            "expected one JSON object for each row, one on each line with `lines=True`."
        )
    dtypes = Dtypes(dtype)
    return cast_tree(_columns(rows, (), separator, dtypes), dtypes), len(rows)


def _columns(
    rows: list[Plain], path: tuple[str, ...], separator: str | None, dtypes: Dtypes
) -> Tree:
    keys = rows[0].keys() if rows else ()
    columns: dict[str, Any] = {}
    found: Tree = {}
    for number, row in enumerate(rows):
        if row.keys() != keys:
            raise InvalidValue(
                f"every line must have the same keys{f' below {format_key(path)}' if path else ''}"
                f", got {sorted(keys)} in line 1 and {sorted(row)} in line {number + 1}."
            )
    for key in keys:
        values = [row[key] for row in rows]
        if all(isinstance(value, dict) for value in values):
            inner = _columns(values, (*path, key), separator, dtypes)
            found.update({(key, below): entry for below, entry in inner.items()})
        else:
            leaf = _leaf(values)
            columns[key] = leaf if isinstance(leaf, Tensor) else column_of(values)
    found.update(tree_of_columns(columns, separator, dtypes, path))
    return found


def _parsed(text: str) -> Any:
    try:
        parsed: object = json.loads(text)
    except ValueError as error:
        raise InvalidValue(f"expected JSON: {error}.") from None
    return parsed


def write_text(path: str | Path, text: str) -> None:
    """Write a file in one go."""
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        file.write(text)


def json_text(path: str | Path | IO[str]) -> str:
    """Return the content of a file of JSON, which may be open, or a text that is JSON itself."""
    if not isinstance(path, (str, Path)):
        return path.read()
    if isinstance(path, str):
        ends = path.strip()[:1] + path.strip()[-1:]
        if ends in ("{}", "[]"):
            return path
    return read_text(path)


def read_text(path: str | Path) -> str:
    """Return the content of a file, line ends as they are."""
    with Path(path).open(encoding="utf-8", newline="") as file:
        return file.read()
