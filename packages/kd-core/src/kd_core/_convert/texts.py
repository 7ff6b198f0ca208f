"""Containers as JSON, JSON Lines and comma-separated values."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor

from kd_core._convert.arrays import (
    Plain,
    Tree,
    batch_of_layout,
    checked,
    layout_of,
    leaves_of,
    rebuilt,
    restored,
)
from kd_core._convert.tables import column_of, columns_of, parsed, rows_in, tree_of_columns
from kd_core._errors import InvalidValue, KeyCollision, a_type
from kd_core._keys import format_key
from kd_core._protocol import AbstractContainer, refuse_unbatched

if TYPE_CHECKING:
    from kd_core._convert.tables import DtypeOf


# Containers as comma-separated values.


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


# Containers as JSON, and as JSON Lines with one row a line.

LAYOUT: Final = "__kd__"
"""The key of a file that holds what the values do not say."""


def text_of(td: AbstractContainer, separator: str | None) -> str:
    """Return a container as a JSON object of nested lists.

    Raises:
        KeyCollision: if a key is the one that holds the layout, or two keys become one.
        InvalidValue: if non-tensor data cannot be written as JSON.
    """
    if LAYOUT in td._kd_entries:
        raise KeyCollision(f"key `{LAYOUT}` is reserved in JSON. Rename it with `rename_key_`.")
    layout = layout_of(td)
    tree: Plain = {LAYOUT: layout}
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
        level = cast("Plain", level.setdefault(part, {}))
    level[path[-1]] = value


def _numbers(leaf: Tensor) -> object:
    if leaf.is_complex():
        leaf = torch.view_as_real(leaf.resolve_conj())
    return (leaf.double() if leaf.is_floating_point() else leaf).tolist()


def tree_of_text(
    text: str, separator: str | None, dtype: DtypeOf
) -> tuple[Tree, tuple[int, ...] | None]:
    """Return the entries of a JSON object, and its batch size if the text has one.

    Raises:
        InvalidValue: if the text is not a JSON object.
    """
    content = _parsed(text)
    if not isinstance(content, dict):
        raise InvalidValue(
            f"expected a JSON object of columns, got {a_type(content)}. Pass "
            "`lines=True` for one object a line."
        )
    layout = cast("Plain | None", content.pop(LAYOUT, None))
    if layout is None:
        return _plain_tree(content, separator, dtype), None

    rows = cast("list[tuple[list[str], str, list[int]]]", layout["leaves"])
    kinds = {tuple(path): (kind, shape) for path, kind, shape in rows}

    def read(path: tuple[str, ...]) -> Tensor:
        value: object = content[separator.join(path)] if separator is not None else content
        for part in path if separator is None else ():
            value = cast("Plain", value)[part]
        name, shape = kinds[path]
        return _tensor(value, getattr(torch, name), shape)

    return rebuilt(layout, read), batch_of_layout(layout)


def _tensor(value: object, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    if dtype.is_complex:
        values = torch.tensor(value, dtype=torch.float64)
        return restored(values, dtype, list(shape))
    if dtype.is_floating_point:
        return torch.tensor(value, dtype=torch.float64).to(dtype).reshape(tuple(shape))
    return torch.tensor(value, dtype=dtype).reshape(tuple(shape))


def _plain_tree(content: Plain, separator: str | None, dtype: DtypeOf) -> Tree:
    """Return the entries of an object of another origin."""
    columns: dict[str, object] = {}
    nested: Tree = {}
    for key, value in content.items():
        if isinstance(value, dict):
            inner = _plain_tree(value, separator, dtype)
            nested.update({(key, path): entry for path, entry in inner.items()})
        else:
            columns[key] = _leaf(value)
    nested.update(tree_of_columns(cast("dict[str, Tensor]", columns), separator, dtype))
    return nested


def _leaf(value: object) -> object:
    if not isinstance(value, list):
        return value
    try:
        return torch.tensor(value) if value and _flat_type(value) else value
    except (ValueError, TypeError, RuntimeError):
        return value


def _flat_type(value: object) -> bool:
    if isinstance(value, list):
        return all(_flat_type(part) for part in value)
    return isinstance(value, (bool, int, float))


def lines_of(td: AbstractContainer, separator: str | None) -> str:
    """Return one JSON object for each row, on a line of its own.

    Raises:
        InvalidValue: if the container does not have a batch.
    """
    rows = rows_in(td, "to_json")
    refuse_unbatched(td, "divided among lines")
    if separator is None:
        listed = torch.unbind(cast("Tensor", td))
        objects = [_row(cast("AbstractContainer", row), ()) for row in listed]
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
            row[key] = checked((*path, key), value._kd_item())
    return row


def tree_of_lines(text: str, separator: str | None, dtype: DtypeOf) -> tuple[Tree, int]:
    """Return the entries of one JSON object a line, and the number of rows.

    Raises:
        InvalidValue: if a line is not an object, or lines have different keys.
    """
    rows = [_parsed(line) for line in text.split("\n") if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise InvalidValue("expected one JSON object on each line.")
    return _columns(rows, (), separator, dtype), len(rows)


def _columns(
    rows: list[Plain], path: tuple[str, ...], separator: str | None, dtype: DtypeOf
) -> Tree:
    keys = rows[0].keys() if rows else ()
    columns: dict[str, object] = {}
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
            inner = _columns(cast("list[Plain]", values), (*path, key), separator, dtype)
            found.update({(key, below): entry for below, entry in inner.items()})
        else:
            leaf = _leaf(values)
            columns[key] = leaf if isinstance(leaf, Tensor) else column_of(values)
    found.update(tree_of_columns(cast("dict[str, Tensor]", columns), separator, dtype))
    return found


def _parsed(text: str) -> Plain:
    try:
        return cast("Plain", json.loads(text))
    except ValueError as error:
        raise InvalidValue(f"expected JSON: {error}.") from None


def write_text(path: str | Path, text: str) -> None:
    """Write a file in one go."""
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        file.write(text)


def read_text(path: str | Path) -> str:
    """Return the content of a file, line ends as they are."""
    with Path(path).open(encoding="utf-8", newline="") as file:
        return file.read()
