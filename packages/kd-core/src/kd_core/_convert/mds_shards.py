"""Containers as samples of MosaicML Streaming, whose writer makes the shards.

Knows how a row becomes a sample, and which encoding each column has; must not know files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Protocol

from torch import Tensor

from kd_core._convert.columns import add_data, joined
from kd_core._convert.layout import leaves_of
from kd_core._convert.optional import load
from kd_core._errors import InvalidArgument, InvalidValue, a_type

if TYPE_CHECKING:
    from kd_core._convert.columns import Column
    from kd_core._protocol.primitives import AbstractContainer

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
    rows = td if td._kd_desc.batch else td._kd_engine.unsqueeze(td, 0)  # type: ignore[attr-defined]  # of a concern
    found: dict[str, Column] = {joined(path, "."): leaf for path, leaf in leaves_of(rows)}
    add_data(rows, ".", (), found)
    encodings = dict(columns or {})
    missing = {name: column for name, column in found.items() if name not in encodings}
    encodings |= {name: _encoding(name, column) for name, column in missing.items()}
    if writer is None:
        streaming = load("streaming", "to_mds")
        writer = streaming.MDSWriter(out=out, columns=encodings, **options)
    for row in range(rows._kd_desc.batch[0]):
        writer.write({name: _value(column, row) for name, column in found.items()})
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
