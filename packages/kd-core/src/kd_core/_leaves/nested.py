"""Nested tensors of the jagged layout: rows of different lengths in one tensor.

torch has no indexing, splitting, repeating or joining of these along the batch. An operation that
moves rows is applied to the numbers of the rows instead, and the rows are taken by their numbers.

Knows `torch.nested`; must not know containers.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from kd_core._errors import InvalidValue
from kd_core._leaves.foreach import is_ragged
from kd_core._torch_private import nested_view_from_buffer

if TYPE_CHECKING:
    from kd_core._types import LeafFn, PartsFn


def row_lengths(leaf: Tensor) -> Tensor:
    """Return the length of each row in the ragged dimension."""
    if leaf.layout is not torch.jagged:
        return torch.tensor([row.shape[0] for row in leaf.unbind()], device=leaf.device)
    lengths: Tensor | None = leaf.lengths()  # type: ignore[attr-defined]  # of a nested tensor
    if lengths is not None:
        return lengths
    offsets: Tensor = leaf.offsets()  # type: ignore[attr-defined]  # as above
    return offsets.diff()


def stored_in(leaf: Tensor) -> list[Tensor]:
    """Return the tensors that a leaf is made of: values, offsets and perhaps lengths of rows."""
    if leaf.layout is not torch.jagged:
        return [leaf]
    lengths: Tensor | None = leaf.lengths()  # type: ignore[attr-defined]  # of a nested tensor
    parts = [_values(leaf), _offsets(leaf)]
    return parts if lengths is None else [*parts, lengths]


def restored_from(leaf: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return a leaf like another one, made of what stands for its `stored_in`."""
    if leaf.layout is not torch.jagged:
        return parts[0]
    values, offsets, *lengths = parts
    made: Tensor = torch.nested.nested_tensor_from_jagged(
        values, offsets, lengths[0] if lengths else None, jagged_dim=_ragged_dim(leaf) + 1
    )
    return made


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
    offsets = _shared_offsets([leaf], rows, lengths, _TAKEN)
    first = torch.repeat_interleave(starts - offsets[:-1], lengths)
    where = first + torch.arange(first.shape[0], device=first.device)
    dim = _ragged_dim(leaf)
    return _jagged(_values(leaf).index_select(dim, where), offsets, dim)


class _Made:
    """Offsets that were made for a leaf, or for leaves that were joined.

    torch combines nested tensors only if they share the tensor of offsets. So the last one is kept,
    for the next leaf of the same operation.
    """

    __slots__ = ("offsets", "rows", "sources")

    def __init__(self, sources: list[weakref.ref[Tensor]], rows: Tensor, offsets: Tensor) -> None:
        self.sources = sources
        self.rows = rows
        self.offsets = offsets


_TAKEN: Final[list[_Made]] = []
_JOINED: Final[list[_Made]] = []


def _shared_offsets(
    leaves: Sequence[Tensor], rows: Tensor, lengths: Tensor, last: list[_Made]
) -> Tensor:
    """Return offsets for some lengths; the same tensor for leaves that shared theirs.

    Args:
        leaves: the leaves whose rows they are.
        rows: the numbers of the rows.
        lengths: the length of each.
        last: what was made last by the same operation.
    """
    sources = [part for leaf in leaves for part in _parts(leaf)]
    for made in last:
        known = [source() for source in made.sources]
        if (
            len(known) == len(sources)
            and all(map(operator.is_, known, sources))
            and made.rows.shape == rows.shape
            and torch.equal(made.rows, rows)
        ):
            return made.offsets
    offsets = _ends(lengths)
    last[:] = [_Made([weakref.ref(source) for source in sources], rows, offsets)]
    return offsets


def _parts(leaf: Tensor) -> list[Tensor]:
    """Return the tensors that say where rows start and end."""
    lengths: Tensor | None = leaf.lengths()  # type: ignore[attr-defined]  # of a nested tensor
    return [_offsets(leaf)] if lengths is None else [_offsets(leaf), lengths]


def flat_values(leaf: Tensor) -> Tensor:
    """Return all elements as a vector; of a nested tensor those of its rows."""
    return _values(_without_gaps(leaf)).reshape(-1) if is_ragged(leaf) else leaf.reshape(-1)


def reduced_rows(leaves: Sequence[Tensor], fn: LeafFn) -> Tensor:
    """Apply a reduction of a vector to the elements of each row of all leaves; rows come last."""
    every = [_without_gaps(leaf) if is_ragged(leaf) else leaf for leaf in leaves]
    if not every[0].shape[0]:
        dtype = torch.cat([flat_values(leaf)[:0] for leaf in every])
        return fn(dtype.new_ones(1)).unsqueeze(-1)[..., :0]
    rows = zip(*[leaf.unbind() for leaf in every], strict=True)
    return torch.stack([fn(torch.cat([part.reshape(-1) for part in row])) for row in rows], -1)


def mapped_rows(leaf: Tensor, fn: LeafFn, together: bool = False) -> Tensor:
    """Apply a function of a vector, which keeps its shape, to each row, or to all together."""
    leaf = _without_gaps(leaf)
    dim, values = _ragged_dim(leaf), _values(leaf)
    rows = [values] if together or not leaf.shape[0] else leaf.unbind()
    made = [fn(row.reshape(-1)).reshape(row.shape) for row in rows]
    return _jagged(torch.cat(made, dim), _offsets(leaf), dim)


def chosen_rows(leaf: Tensor, mask: Tensor, other: Tensor | float) -> Tensor:
    """Return the rows of a nested tensor where a mask is true, and those of another elsewhere.

    Args:
        leaf: the nested tensor.
        mask: one boolean for each row, or for all.
        other: a nested tensor of as many rows, a tensor of one value for each row, or one value.
    """
    leaf = _without_gaps(leaf)
    mask = mask.to(leaf.device).expand(leaf.shape[0])
    if isinstance(other, Tensor) and other.is_nested:
        other = _without_gaps(other)
        if _offsets(other) is not _offsets(leaf):
            numbers = _numbers(leaf)
            both = joined_rows([leaf, other])
            return _taken(both, torch.where(mask, numbers, numbers + leaf.shape[0]))
        other = _values(other)
    elif isinstance(other, Tensor) and other.ndim:
        other = _beside_values(leaf, other.to(leaf.device).expand(leaf.shape[0]))
    chosen = torch.where(_beside_values(leaf, mask), _values(leaf), other)
    return _jagged(chosen, _offsets(leaf), _ragged_dim(leaf))


def _beside_values(leaf: Tensor, rows: Tensor) -> Tensor:
    """Return one value for each row, repeated to be broadcast over the values of the rows."""
    dim, values = _ragged_dim(leaf), _values(leaf)
    repeated = torch.repeat_interleave(rows, row_lengths(leaf))
    return repeated.reshape([-1 if axis == dim else 1 for axis in range(values.ndim)])


def _without_gaps(leaf: Tensor) -> Tensor:
    """Return a nested tensor whose values are those of its rows, and no others."""
    offsets = _offsets(leaf)
    lengths: Tensor | None = leaf.lengths()  # type: ignore[attr-defined]  # of a nested tensor
    whole = lengths is None and int(offsets[0]) == 0
    whole = whole and int(offsets[-1]) == _values(leaf).shape[_ragged_dim(leaf)]
    return leaf if whole else _taken(leaf, _numbers(leaf))


def joined_rows(leaves: Sequence[Tensor]) -> Tensor:
    """Concatenate nested tensors of the jagged layout along their rows."""
    dim = _ragged_dim(leaves[0])
    values = torch.cat([_values(_without_gaps(leaf)) for leaf in leaves], dim)
    lengths = [row_lengths(leaf) for leaf in leaves]
    counts = torch.tensor([len(each) for each in lengths])
    return _jagged(values, _shared_offsets(leaves, counts, torch.cat(lengths), _JOINED), dim)


def strided_parts(leaf: Tensor) -> tuple[Tensor, Tensor]:
    """Return all values of a nested tensor of the strided layout in a row, and the sizes of rows.

    The sizes are those of each row, one row each.
    """
    rows = [row.reshape(-1) for row in leaf.unbind()]
    values = torch.cat(rows) if rows else torch.empty(0, dtype=leaf.dtype, device=leaf.device)
    sizes: Tensor = leaf._nested_tensor_size()
    return values.detach(), sizes.clone()


def strided_view(values: Tensor, sizes: Tensor) -> Tensor:
    """Return a nested tensor of the strided layout that shares the memory of its values.

    Args:
        values: the values of all rows, one behind the other, in one dimension.
        sizes: the sizes of each row, one row each; their products must sum to all values.
    """
    if not len(sizes):
        return torch.nested.nested_tensor([], dtype=values.dtype)
    counts = sizes.prod(1)
    behind = sizes.flip(1).cumprod(1).flip(1)[:, 1:]  # how far apart neighbours are
    strides = torch.cat([behind, sizes.new_ones(len(sizes), 1)], 1)[:, : sizes.shape[1]]
    starts = counts.cumsum(0) - counts
    return nested_view_from_buffer(values, sizes, strides, starts)


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
