"""Containers as data frames of pandas."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kd_core._convert.columns import Column, column_of, columns_of, rows_in, tree_of_columns
from kd_core._convert.optional import load
from kd_core._errors import InvalidArgument, InvalidKey, InvalidValue, a_type

if TYPE_CHECKING:
    from kd_core._convert.columns import DtypeOf
    from kd_core._convert.layout import Tree
    from kd_core._protocol.primitives import AbstractContainer


def frame_of(td: AbstractContainer, separator: str) -> object:
    """Return a data frame with one row for each item of the first batch dimension."""
    pandas = load("pandas", "to_pandas")
    rows = rows_in(td, "to_pandas")
    columns: dict[str, object] = {}
    for name, column in columns_of(td, separator).items():
        if not isinstance(column, Tensor):
            columns[name] = pandas.Series(column, dtype=object)
            continue
        try:
            columns[name] = column.cpu().resolve_conj().resolve_neg().numpy()
        except TypeError as error:
            raise InvalidValue(
                f"column `{name}` is of dtype `{column.dtype}`, which numpy does not have: "
                f"{error}. Convert it first, as with `td.float()`."
            ) from None
    return cast("object", pandas.DataFrame(columns, index=pandas.RangeIndex(rows)))


def tree_of_frame(frame: object, separator: str | None, dtype: DtypeOf) -> tuple[Tree, int]:
    """Return the entries of a data frame, and the number of rows.

    Raises:
        InvalidArgument: if it is not a data frame.
        InvalidKey: if a name of a column is not a string or a tuple of strings.
    """
    pandas = load("pandas", "from_pandas")
    if not isinstance(frame, pandas.DataFrame):
        raise InvalidArgument(f"`dataframe` must be a pandas data frame, got {a_type(frame)}.")
    columns: dict[str, Column] = {}
    paths: dict[tuple[str, ...], Column] = {}
    for at, label in enumerate(frame.columns):
        column = _column(frame.iloc[:, at])
        if isinstance(label, tuple) and all(isinstance(part, str) for part in label):
            paths[tuple(part for part in label if part) or ("",)] = column
        elif isinstance(label, str):
            columns[label] = column
        else:
            raise InvalidKey(
                f"the name of a column must be a string or a tuple of strings, got {label!r}. "
                "Rename it with `dataframe.rename(columns=str)`."
            )
    tree = tree_of_columns(columns, separator, dtype)
    tree.update(paths)
    return tree, len(frame)


def _column(series: object) -> Column:
    kind = getattr(getattr(series, "dtype", None), "kind", "O")
    values = series.to_numpy(copy=True)  # type: ignore[attr-defined]  # a series
    if kind in "biufc" and values.dtype.kind in "biufc":
        return torch.from_numpy(values)
    if values.dtype.kind in "mM":
        raise InvalidValue(
            f"column `{getattr(series, 'name', None)}` holds times, which are not numbers. Convert "
            "it first, for example with `.astype('int64')`."
        )
    return column_of(values.tolist())
