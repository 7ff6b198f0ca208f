"""Operations that move or reduce the rows of a stack without stacking its entries.

What torch makes a view of a tensor is made of views of the members, so that writes reach them. What
copies rows is stacked first, where that is possible.

An operation that moves rows is applied to the numbers of the rows. Where it keeps the rows of each
member together (`unsqueeze`, `permute`, `flip`), it then runs on every member. Elsewhere (`reshape`
over the stacked dimension, an index of several) the rows are taken one by one and stacked lazily.

Knows rows and their numbers; must not know which operation it is.
"""

from __future__ import annotations

from itertools import product
from types import FunctionType
from typing import TYPE_CHECKING, Final, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kd_core._base import TensorDictBase
from kd_core._batch.descriptor import device_beside
from kd_core._batch.names import names_of
from kd_core._batch.plans import Fresh, Reduced, Viewed
from kd_core._batch.shapes import numel
from kd_core._nodes import registry
from kd_core._ops.selection.index_plan import resolve
from kd_core._ops.shape.shape_plans import resize_plan
from kd_core._protocol.primitives import map_by

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kd_core._protocol.composite import Composite
    from kd_core._protocol.primitives import AbstractContainer
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
    rows, taken = _numbered(stack, fn)
    if not taken.numel():
        return _without_rows(stack, tuple(taken.shape))
    kept = _way_by_member(stack, fn, rows, taken)
    if kept is not None:
        made = _mapped(stack, fn, batch, kept)
    else:
        found = _numbers(stack._kd_desc.batch, stack._dim, taken, _owners(rows, stack._dim), True)
        made = _rows_seen(stack, cast("_Rows", found), _share(taken, rows))
    made._kd_describe(made._kd_desc.with_batch(batch(stack._kd_desc.batch)))
    return made


def viewed_members(stack: Composite, fn: LeafFn, batch: BatchFn) -> TensorDictBase | None:
    """Apply a function that makes views to a stack, so that writes to the result reach the members.

    Returns:
        A lazy stack of views of the members; `None` where the function copies rows, or takes apart
        the rows of a member though it is no `view`.
    """
    if isinstance(fn, FunctionType):
        sizes = tuple(map(int, stack._kd_desc.batch)), stack._dim
        known = _SEEN.get(fn)
        if known is None:
            known = _SEEN.setdefault(fn, {})
        if sizes not in known:
            known[sizes] = _see(stack, fn, batch)
        way = known[sizes]
    else:
        way = _see(stack, fn, batch)
    if way is None:
        return None
    if isinstance(way, _Together):
        made = _mapped(stack, fn, batch, way)
    else:
        try:
            made = _seen_as(stack, way, batch(stack._kd_desc.batch))
        except RuntimeError:  # the strides of a leaf allow no view
            if isinstance(batch, Viewed):
                raise
            return None
    made._kd_describe(made._kd_desc.with_batch(batch(stack._kd_desc.batch)))
    return made


def _see(stack: Composite, fn: LeafFn, batch: BatchFn) -> _Together | _Resized | _Rows | None:
    """Return how the members of a stack are seen through a function; `None` if they are not."""
    rows, taken = _numbered(stack, fn)
    if type(rows) is not Tensor or not taken.numel() or not _share(taken, rows):
        return None
    count = len(stack._members)
    whole = rows.movedim(stack._dim, 0).reshape(count, -1)
    for dim in range(taken.ndim):
        by_member = taken.movedim(dim, 0)
        if len(by_member) == count and torch.equal(by_member.reshape(count, -1), whole):
            return _Resized(tuple(by_member.shape[1:]), dim)
    kept = _way_by_member(stack, fn, rows, taken)
    if kept is not None:
        return kept
    owners = _owners(rows, stack._dim)
    apart = isinstance(batch, Viewed) or taken.ndim == 1  # all rows are flattened
    return _numbers(stack._kd_desc.batch, stack._dim, taken, owners, apart)


def _seen_as(stack: Composite, way: _Resized | _Rows, new: Batch) -> TensorDictBase:
    if isinstance(way, _Rows):
        return _rows_seen(stack, way)
    shape = (*new[: way.dim], *new[way.dim + 1 :])  # with its names
    return _stacked([_reshaped(member, shape) for member in stack._members], way.dim)


def _reshaped(member: AbstractContainer, shape: Batch) -> TensorDictBase:
    batch = member._kd_desc.batch
    if batch == shape and names_of(batch) == names_of(shape):
        return cast("TensorDictBase", member._kd_shallow())
    resize = resize_plan(batch, (shape,), "view")[0]
    return cast("TensorDictBase", map_by((resize, shape, Viewed(shape, len(batch))), member))


def _numbered(stack: Composite, fn: LeafFn) -> tuple[Tensor, Tensor]:
    """Return the numbers of the rows of a stack, and what a function makes of them."""
    old = stack._kd_desc.batch
    rows = torch.arange(numel(old), device="cpu").reshape(old)
    try:
        return rows, fn(rows)
    except RuntimeError:  # its index is on another device
        rows = rows.to(device_beside(stack._kd_desc))
        return rows, fn(rows)


def numbered_rows(stack: Composite, index: object) -> tuple[list[Batch], Tensor]:
    """Return the index of each row of a stack, and the numbers of those that an index selects."""
    old = stack._kd_desc.batch
    rows = torch.arange(numel(old), device="cpu").reshape(old)
    return positions_of(rows), resolve(index, old)[0](rows)


def positions_of(rows: Tensor) -> list[Batch]:
    """Return the index of each element of a tensor, in order."""
    return list(product(*map(range, rows.shape)))


def _share(taken: Tensor, rows: Tensor) -> bool:
    return taken.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()


class _Together:
    """A result in which each member stays whole: their numbers, and the stacked dimension."""

    __slots__ = ("dim", "members")

    def __init__(self, members: list[int], dim: int) -> None:
        self.members, self.dim = members, dim


class _Resized:
    """A result in which each member stays whole, under another shape; the stacked dimension."""

    __slots__ = ("dim", "shape")

    def __init__(self, shape: Batch, dim: int) -> None:
        self.shape, self.dim = shape, dim


class _Rows:
    """A part of a result: rows of one member, or parts that are stacked along dimension 0.

    Attributes:
        member: the number of the member; `None` for all members, as they are stacked.
        index: the index of one row in it, `()` for all of them.
        shape: the shape of the rows.
        parts: the parts; the other attributes are not used then.
    """

    __slots__ = ("index", "member", "parts", "shape")

    def __init__(
        self, member: int | None, index: Batch, shape: Batch, parts: Sequence[_Rows] = ()
    ) -> None:
        self.member, self.index, self.shape, self.parts = member, index, shape, parts


_SEEN: Final[
    WeakKeyDictionary[LeafFn, dict[tuple[Batch, int], _Together | _Resized | _Rows | None]]
] = WeakKeyDictionary()
"""How stacks are seen through a function, by their sizes: most functions are those of plans."""


def _way_by_member(stack: Composite, fn: LeafFn, rows: Tensor, taken: Tensor) -> _Together | None:
    """Return how an operation runs on each member; `None` if it mixes their rows."""
    at = stack._dim
    alone = (*rows.shape[:at], 1, *rows.shape[at + 1 :])
    try:
        one = fn(torch.arange(numel(alone), device="cpu").reshape(alone))
    except (RuntimeError, IndexError):  # its sizes are those of the whole stack
        return None
    return _kept_together(rows.movedim(at, 0).reshape(rows.shape[at], -1), taken, one)


def _mapped(stack: Composite, fn: LeafFn, batch: BatchFn, kept: _Together) -> TensorDictBase:
    """Apply a function of stacked leaves to members, and stack the results."""
    at, dim = stack._dim, kept.dim

    def of_member(leaf: Tensor) -> Tensor:
        return fn(leaf.unsqueeze(at)).select(dim, 0)

    def size_of_member(size: Batch) -> Batch:
        new = batch((*size[:at], 1, *size[at:]))
        return (*new[:dim], *new[dim + 1 :])

    size = batch.along(at) if isinstance(batch, Reduced) else size_of_member
    made = [stack._members[number]._kd_map_each(of_member, size) for number in kept.members]
    return _stacked(made, dim)


def reduced_members(stack: Composite, fn: LeafFn, batch: Reduced) -> TensorDictBase | None:
    """Apply a reduction of features, or of dimensions of the members, to a stack.

    Returns:
        A lazy stack; `None` if the stacked dimension takes part, or may do so.
    """
    at, ndim = stack._dim, stack._kd_desc.ndim
    gone = batch.gone(ndim)
    if at in gone or (batch.first is None and not batch.dims):
        return None
    dim = at + len(batch.lead)
    if not batch.keepdim:
        dim -= sum(1 for other in gone if other < at)
    made = _mapped(stack, fn, batch, _Together(list(range(len(stack._members))), dim))
    made._kd_describe(made._kd_desc.with_batch(batch(stack._kd_desc.batch)))
    return made


def _owners(rows: Tensor, at: int) -> Tensor:
    """Return for each number of a row the member that it is in."""
    members = torch.arange(rows.shape[at], device="cpu").reshape(-1, *[1] * (rows.ndim - at - 1))
    return members.expand(rows.shape).reshape(-1)


def _kept_together(rows: Tensor, taken: Tensor, one: Tensor) -> _Together | None:
    """Return where the members are in a result, or `None` if an operation mixes their rows.

    Args:
        rows: the numbers of the rows of each member.
        taken: the numbers in the result.
        one: the result for the numbers of one member alone.
    """
    size = rows.shape[1]
    count = torch.arange(rows.shape[0], device="cpu")
    owners = torch.empty_like(rows.reshape(-1))
    owners[rows.reshape(-1)] = count.repeat_interleave(size)
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


def _numbers(batch: Batch, at: int, taken: Tensor, owners: Tensor, apart: bool) -> _Rows | None:
    """Return which rows the given numbers are.

    Args:
        batch: the batch size of the stack.
        at: the stacked dimension.
        taken: the numbers.
        owners: the member of each number.
        apart: whether the rows of a member may be taken one by one; `False`: it is `None` then.
    """
    shape = tuple(taken.shape)
    every = torch.arange(len(owners), device="cpu")
    if shape == batch and torch.equal(taken.reshape(-1), every):
        return _Rows(None, (), shape)
    member = int(owners[taken.reshape(-1)[0]])
    if taken.ndim:
        whole = every.reshape(batch).select(at, member).reshape(-1)
        if taken.numel() == whole.numel() and torch.equal(taken.reshape(-1), whole):
            return _Rows(member, (), shape)
        parts = [_numbers(batch, at, part, owners, apart) for part in taken.unbind(0)]
        known = [part for part in parts if part is not None]
        return _Rows(member, (), shape, known) if len(known) == len(parts) else None
    index: list[int] = []
    rest = int(taken)
    for size in reversed(batch):
        rest, row = divmod(rest, size)
        index.insert(0, row)
    del index[at]
    return None if index and not apart else _Rows(member, tuple(index), ())


def _rows_seen(stack: Composite, rows: _Rows, shares: bool = True) -> TensorDictBase:
    """Return rows of members, stacked lazily: views, or copies."""
    if rows.parts:
        return _stacked([_rows_seen(stack, part, shares) for part in rows.parts], 0)
    if rows.member is None:
        seen = cast("TensorDictBase", stack._kd_shallow())
    else:
        member = cast("TensorDictBase", stack._members[rows.member])
        seen = member[rows.index] if rows.index else _reshaped(member, rows.shape)
    return seen if shares else seen._kd_engine.clone(seen)


def _stacked(members: Sequence[object], dim: int) -> TensorDictBase:
    return cast("TensorDictBase", registry.lazy_stack(members, dim))


def _without_rows(stack: Composite, shape: Batch) -> TensorDictBase:
    """Return a container without rows, with the common keys and the shapes of the first member."""
    first = cast("TensorDictBase", stack._members[0])
    ndim = first._kd_desc.ndim
    return first._kd_engine.select(first, *stack._kd_entries)._kd_map_each(
        lambda leaf: leaf.new_empty((*shape, *leaf.shape[ndim:])), Fresh(shape, ndim)
    )
