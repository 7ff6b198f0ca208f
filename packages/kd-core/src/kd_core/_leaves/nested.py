"""Nested tensors of the jagged layout: rows of different lengths in one tensor.

torch has no indexing, splitting, repeating or joining of these along the batch. An operation that
moves rows is applied to the numbers of the rows instead, and the rows are taken by their numbers.

Knows `torch.nested`; must not know containers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from kd_core._errors import InvalidValue

if TYPE_CHECKING:
    from kd_core._types import LeafFn, PartsFn


def row_lengths(leaf: Tensor) -> Tensor:
    """Return the length of each row in the ragged dimension."""
    lengths: Tensor | None = leaf.lengths()  # type: ignore[attr-defined]  # of a nested tensor
    if lengths is not None:
        return lengths
    offsets: Tensor = leaf.offsets()  # type: ignore[attr-defined]  # as above
    return offsets.diff()


def padded_leaf(leaf: Tensor, padding: float) -> Tensor:
    """Return a nested tensor padded to its longest row."""
    if leaf.layout is not torch.jagged or _ragged_dim(leaf):
        padded: Tensor = torch.nested.to_padded_tensor(leaf, padding)
        return padded
    real = row_mask(leaf)  # torch pads a nested tensor without a known longest row too far
    leaf = _taken(leaf, _numbers(leaf))
    values = _values(leaf)
    filled = values.new_full((*real.shape, *values.shape[1:]), padding)
    return filled.index_put((real,), values)


def row_mask(leaf: Tensor) -> Tensor:
    """Return a mask of shape (rows, longest row): true for elements that are not padding."""
    lengths = row_lengths(leaf)
    longest = int(lengths.max()) if lengths.numel() else 0
    return torch.arange(longest, device=lengths.device) < lengths[:, None]


def moved_rows(leaf: Tensor, fn: LeafFn) -> Tensor:
    """Apply a function that moves rows to a nested tensor.

    Raises:
        InvalidValue: if the result would have other than one batch dimension.
    """
    if leaf.layout is not torch.jagged or is_dynamo_compiling():
        return fn(leaf)
    return _taken(leaf, fn(_numbers(leaf)))


def moved_parts(leaf: Tensor, fn: PartsFn) -> Sequence[Tensor]:
    """Apply a function that divides rows to a nested tensor; see `moved_rows`."""
    if leaf.layout is not torch.jagged or is_dynamo_compiling():
        return fn(leaf)
    return [_taken(leaf, part) for part in fn(_numbers(leaf))]


def _numbers(leaf: Tensor) -> Tensor:
    return torch.arange(leaf.shape[0], device=leaf.device)


def _taken(leaf: Tensor, rows: Tensor) -> Tensor:
    """Return the rows of a nested tensor with these numbers; one row is a plain tensor."""
    if not rows.ndim:
        return leaf[int(rows)]
    if rows.ndim > 1:
        raise InvalidValue(
            f"a nested tensor of the jagged layout has one batch dimension, and cannot have the "
            f"batch_size {tuple(rows.shape)}. Use `to_lazystack()`, or `to_padded_tensor()` first."
        )
    lengths, starts = row_lengths(leaf)[rows], _offsets(leaf)[:-1][rows]
    offsets = _shared_offsets(leaf, rows, lengths)
    first = torch.repeat_interleave(starts - offsets[:-1], lengths)
    where = first + torch.arange(first.shape[0], device=first.device)
    dim = _ragged_dim(leaf)
    return _jagged(_values(leaf).index_select(dim, where), offsets, dim)


_LAST: Final[list[tuple[weakref.ref[Tensor], Tensor, Tensor]]] = []


def _shared_offsets(leaf: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    """Return the offsets of rows; the same tensor for leaves that shared theirs.

    torch combines nested tensors only if they share the tensor of offsets. So the last one is kept,
    for the next leaf of the same operation.
    """
    old = _offsets(leaf)
    for source, numbers, offsets in _LAST:
        if source() is old and numbers.shape == rows.shape and torch.equal(numbers, rows):
            return offsets
    made = _ends(lengths)
    _LAST[:] = [(weakref.ref(old), rows, made)]
    return made


def joined_rows(leaves: Sequence[Tensor]) -> Tensor:
    """Concatenate nested tensors of the jagged layout along their rows."""
    dim = _ragged_dim(leaves[0])
    every = [_taken(leaf, _numbers(leaf)) for leaf in leaves]  # without gaps between rows
    lengths = torch.cat([row_lengths(leaf) for leaf in every])
    return _jagged(torch.cat([_values(leaf) for leaf in every], dim), _ends(lengths), dim)


def _offsets(leaf: Tensor) -> Tensor:
    offsets: Tensor = leaf.offsets()  # type: ignore[attr-defined]  # of a nested tensor
    return offsets


def _values(leaf: Tensor) -> Tensor:
    values: Tensor = leaf.values()
    return values


def _ends(lengths: Tensor) -> Tensor:
    """Return the offsets of rows that stand one behind the other."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _ragged_dim(leaf: Tensor) -> int:
    """Return the ragged dimension of the values, which have no batch dimension."""
    ragged: int = getattr(leaf, "_ragged_idx")  # noqa: B009  # of a nested tensor
    return ragged - 1


def _jagged(values: Tensor, offsets: Tensor, dim: int) -> Tensor:
    made: Tensor = torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=dim + 1)
    return made
