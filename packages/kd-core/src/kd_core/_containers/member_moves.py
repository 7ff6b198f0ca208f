"""Operations that move or reduce the rows of a stack whose entries cannot be stacked.

An operation that moves rows is applied to the numbers of the rows. Where it keeps the rows of each
member together (`unsqueeze`, `permute`, `flip`), it then runs on every member. Elsewhere (`reshape`
over the stacked dimension, an index of several) the rows are taken one by one and stacked lazily.

Knows rows and their numbers; must not know which operation it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kd_core._base import TensorDictBase
from kd_core._batch.plans import Fresh, Reduced
from kd_core._batch.shapes import numel
from kd_core._nodes import registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kd_core._protocol.composite import Composite
    from kd_core._types import Batch, BatchFn, LeafFn


def moved_members(stack: Composite, fn: LeafFn, batch: BatchFn) -> TensorDictBase:
    """Apply a function that moves rows to a stack, without stacking its entries.

    Args:
        stack: the stack.
        fn: the function of a leaf.
        batch: the function of a batch size.

    Returns:
        A lazy stack of members that share what `fn` shares; for one row the row itself, and for
        none a `TensorDict`, because a stack has at least one member.
    """
    old = stack._desc.batch
    rows = torch.arange(numel(old)).reshape(old)
    taken = fn(rows)
    if not taken.numel():
        return _without_rows(stack, tuple(taken.shape))
    made = _by_member(stack, fn, batch, rows, taken)
    if made is None:
        shares = taken.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
        made = _by_row(stack, taken, shares)
    made._describe(made._desc.with_batch(batch(old)))
    return made


class _Together:
    """A result in which each member stays whole: their numbers, and the stacked dimension."""

    __slots__ = ("dim", "members")

    def __init__(self, members: list[int], dim: int) -> None:
        self.members, self.dim = members, dim


def _by_member(
    stack: Composite, fn: LeafFn, batch: BatchFn, rows: Tensor, taken: Tensor
) -> TensorDictBase | None:
    """Run an operation on each member; return `None` if it mixes their rows."""
    at = stack._dim
    alone = (*rows.shape[:at], 1, *rows.shape[at + 1 :])
    try:
        one = fn(torch.arange(numel(alone)).reshape(alone))
    except (RuntimeError, IndexError):  # its sizes are those of the whole stack
        return None
    kept = _kept_together(rows.movedim(at, 0).reshape(rows.shape[at], -1), taken, one)
    if kept is None:
        return None
    return _mapped(stack, fn, batch, kept)


def _mapped(stack: Composite, fn: LeafFn, batch: BatchFn, kept: _Together) -> TensorDictBase:
    """Apply a function of stacked leaves to members, and stack the results."""
    at, dim = stack._dim, kept.dim

    def of_member(leaf: Tensor) -> Tensor:
        return fn(leaf.unsqueeze(at)).select(dim, 0)

    def size_of_member(size: Batch) -> Batch:
        new = batch((*size[:at], 1, *size[at:]))
        return (*new[:dim], *new[dim + 1 :])

    size = batch.along(at) if isinstance(batch, Reduced) else size_of_member
    made = [stack._members[number]._map_each(of_member, size) for number in kept.members]
    return _stacked(made, dim)


def reduced_members(stack: Composite, fn: LeafFn, batch: Reduced) -> TensorDictBase | None:
    """Apply a reduction of features, or of dimensions of the members, to a stack.

    Returns:
        A lazy stack; `None` if the stacked dimension takes part, or may do so.
    """
    at, ndim = stack._dim, stack._desc.ndim
    gone = batch.gone(ndim)
    if at in gone or (batch.first is None and not batch.dims):
        return None
    dim = at + len(batch.lead)
    if not batch.keepdim:
        dim -= sum(1 for other in gone if other < at)
    made = _mapped(stack, fn, batch, _Together(list(range(len(stack._members))), dim))
    made._describe(made._desc.with_batch(batch(stack._desc.batch)))
    return made


def _kept_together(rows: Tensor, taken: Tensor, one: Tensor) -> _Together | None:
    """Return where the members are in a result, or `None` if an operation mixes their rows.

    Args:
        rows: the numbers of the rows of each member.
        taken: the numbers in the result.
        one: the result for the numbers of one member alone.
    """
    size = rows.shape[1]
    owners = torch.empty(rows.numel(), dtype=torch.int64)
    owners[rows.reshape(-1)] = torch.arange(rows.shape[0]).repeat_interleave(size)
    for dim in range(min(taken.ndim, one.ndim)):
        if one.shape[dim] != 1 or one.ndim != taken.ndim:
            continue
        order = one.select(dim, 0)
        if taken.select(dim, 0).shape != order.shape:
            continue
        members = owners[taken.movedim(dim, 0).reshape(taken.shape[dim], -1)[:, 0]]
        if torch.equal(taken.movedim(dim, 0), rows[members][:, order]):
            return _Together(members.tolist(), dim)
    return None


def _by_row(stack: Composite, taken: Tensor, shares: bool) -> TensorDictBase:
    """Return the rows of the given numbers, stacked lazily along each dimension."""
    if taken.ndim:
        return _stacked([_by_row(stack, part, shares) for part in taken.unbind(0)], 0)
    rest = int(taken)
    index: list[int] = []
    for size in reversed(stack._desc.batch):
        rest, at = divmod(rest, size)
        index.insert(0, at)
    member = cast("TensorDictBase", stack._members[index.pop(stack._dim)])
    row = member[tuple(index)] if index else member._shallow()
    return row if shares else row._engine.clone(row)


def _stacked(members: Sequence[object], dim: int) -> TensorDictBase:
    return cast("TensorDictBase", registry.lazy_stack(members, dim))


def _without_rows(stack: Composite, shape: Batch) -> TensorDictBase:
    """Return a container without rows, with the common keys and the shapes of the first member."""
    first = cast("TensorDictBase", stack._members[0])
    ndim = first._desc.ndim
    return first._engine.select(first, *stack._entries)._map_each(
        lambda leaf: leaf.new_empty((*shape, *leaf.shape[ndim:])), Fresh(shape, ndim)
    )
