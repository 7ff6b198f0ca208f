"""Containers as comma-separated values."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from torch import Tensor

from kd_core._convert.columns import columns_of, parsed, rows_in, tree_of_columns
from kd_core._errors import InvalidValue, KeyCollision

if TYPE_CHECKING:
    from kd_core._convert.columns import DtypeOf
    from kd_core._convert.layout import Tree
    from kd_core._protocol.primitives import AbstractContainer


def csv_of(td: AbstractContainer, separator: str) -> str:
    """Return a table with a line of names, and one line for each row."""
    rows = rows_in(td, "to_csv")
    columns = columns_of(td, separator)
    lists = [
        column.tolist() if isinstance(column, Tensor) else column for column in columns.values()
    ]
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(columns)
    writer.writerows([column[row] for column in lists] for row in range(rows))
    return out.getvalue()


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
    tree = tree_of_columns(columns, separator, dtype)
    return tree, len(rows)
