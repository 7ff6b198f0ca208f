"""Reading an entry of which every member has a row of another shape.

Knows the rows of an entry; must not know how a stack is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kd_core._errors import InvalidArgument, InvalidValue, ShapeMismatch, a_type, shape_text
from kd_core._keys import format_key
from kd_core._protocol.composite import Composite

if TYPE_CHECKING:
    from kd_core._keys import KeyPath
    from kd_core._nodes.entry import Entry
    from kd_core._protocol.composite import Side
    from kd_core._protocol.primitives import AbstractContainer


def rows_of(stack: Composite, path: KeyPath) -> list[object]:
    """Return the entry of each member, those of stacks as lists."""
    return [_row_of(member, path) for member in stack._members]


def _row_of(member: AbstractContainer, path: KeyPath) -> object:
    if isinstance(member, Composite):
        return rows_of(member, path)
    level: Entry = cast("Entry", member)
    for depth in range(len(path)):
        if isinstance(level, Composite):
            return rows_of(level, path[depth:])
        level = member._kd_read(path[: depth + 1])
    return level if isinstance(level, Tensor) else level._kd_item()


def padded_rows(stack: Composite, path: KeyPath, padding: float, side: Side) -> Tensor:
    """Return the rows of an entry, padded to one shape and stacked."""
    if side not in ("left", "right"):
        raise InvalidArgument(f'`padding_side` must be "left" or "right", got {side!r}.')
    rows = [
        padded_rows(member, path, padding, side)
        if isinstance(member, Composite)
        else _tensor_of(member, path)
        for member in stack._members
    ]
    _check_ranks(rows, path)
    shape = [max(sizes) for sizes in zip(*[row.shape for row in rows], strict=True)]
    return torch.stack([_padded(row, shape, padding, side) for row in rows], stack._dim)


def _padded(row: Tensor, shape: Sequence[int], padding: float, side: Side) -> Tensor:
    added = [full - size for full, size in zip(shape, row.shape, strict=True)]
    pairs = [
        pair for each in reversed(added) for pair in ((each, 0) if side == "left" else (0, each))
    ]
    return torch.constant_pad_nd(row, pairs, padding) if any(added) else row


def nested_rows(stack: Composite, path: KeyPath, layout: torch.layout) -> Tensor:
    """Return the rows of an entry as one nested tensor."""
    if stack._dim:
        raise InvalidValue(
            f"entry {format_key(path)} cannot be a nested tensor: the rows of a nested tensor are "
            f"those of dimension 0, got a stack along dimension {stack._dim}. "
            f"{_elsewhere(path, 'as_padded_tensor=True')}"
        )
    rows = [_tensor_of(member, path) for member in stack._members]
    _check_ranks(rows, path)
    try:
        return torch.nested.as_nested_tensor(rows, layout=layout)
    except (RuntimeError, ValueError) as error:
        shapes = ", ".join({shape_text(row.shape): None for row in rows})
        raise ShapeMismatch(
            f"entry {format_key(path)} cannot be a nested tensor of shapes {shapes}: "
            f"{str(error).partition(chr(10))[0].rstrip('.')}. "
            f"{_elsewhere(path, 'as_padded_tensor=True')}"
        ) from None


def _tensor_of(member: AbstractContainer, path: KeyPath) -> Tensor:
    entry = member._kd_read(path)
    if not isinstance(entry, Tensor):
        raise InvalidValue(
            f"entry {format_key(path)} must be a tensor in every member, got "
            f"{a_type(entry)}. {_elsewhere(path)}"
        )
    return entry


def _check_ranks(rows: Sequence[Tensor], path: KeyPath) -> None:
    if len({row.ndim for row in rows}) > 1:
        shapes = ", ".join({shape_text(row.shape): None for row in rows})
        raise ShapeMismatch(
            f"the rows of entry {format_key(path)} must have the same number of dimensions, got "
            f"shapes {shapes}. {_elsewhere(path)}"
        )


def _elsewhere(path: KeyPath, *options: str) -> str:
    """Return the remedy for an entry that is read in another way, or left out of the others."""
    key: object = path[0] if len(path) == 1 else path
    calls = " or ".join(f"`get({key!r}, {option})`" for option in (*options, "as_list=True"))
    return f"Read it with {calls}, and the others after `exclude({key!r})`."
