"""What shapes and indices do to a lazy stack: which members they take, and in which order.

Knows members and batch dimensions; must not know entries.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import product
from threading import RLock
from types import CellType, FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kd_core import _registry as registry
from kd_core._descriptor import device_beside
from kd_core._nodes import is_data
from kd_core._ops.binary import cloned
from kd_core._ops.indexing import plain_index, resolve
from kd_core._ops.shaping import resize_plan
from kd_core._protocol import Composite, locked_alone, map_by
from kd_core._shapes import (
    Fresh,
    Grown,
    OpenSize,
    Reduced,
    Viewed,
    closed,
    names_of,
    numel,
    resized,
    with_names,
    without_names,
)
from kd_core._torch_private import (
    assume_constant_result,
    is_batchedtensor,
    without_wrappers,
)

if TYPE_CHECKING:
    from kd_core._protocol import AbstractContainer
    from kd_core._types import Batch, BatchFn, IndexItem, LeafFn

    K = TypeVar("K", bound=AbstractContainer)
    S = TypeVar("S", bound=Composite)


# Operations that move or reduce the rows of a stack without stacking its entries.
#
# What torch makes a view of a tensor is made of views of the members, so that writes reach them.
# What copies rows is stacked first, where that is possible.
#
# An operation that moves rows is applied to the numbers of the rows. Where it keeps the rows of
# each member together (`unsqueeze`, `permute`, `flip`), it then runs on every member; a view in
# which the rows of a member are as they were (`transpose`) holds the member itself, so that each
# sees keys and locks of the other. Elsewhere
# (`reshape` over the stacked dimension, an index of several) the rows are taken one by one and
# stacked lazily.
#
# Knows rows and their numbers; must not know which operation it is.


def moved_members(stack: S, fn: LeafFn, batch: BatchFn) -> S:
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
        return cast("S", _without_rows(stack, tuple(taken.shape)))
    kept = _way_by_member(stack, fn, rows, taken)
    if kept is not None:
        made = _mapped(stack, fn, batch, kept)
    else:
        found = _numbers(stack._kd_desc.batch, stack._dim, taken, _owners(rows, stack._dim), True)
        assert found is not None  # the rows of a member may be taken one by one
        made = _as_kind(stack, _rows_seen(stack, found, _share(taken, rows)))
    made._kd_describe(made._kd_desc.with_batch(batch(stack._kd_desc.batch)))
    return made


def viewed_members(stack: S, fn: LeafFn, batch: BatchFn) -> S | None:
    """Apply a function that makes views to a stack, so that writes to the result reach the members.

    Returns:
        A lazy stack of views of the members; `None` where the function copies rows, or takes apart
        the rows of a member although it is not a view.
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
            made = _as_kind(stack, _seen_as(stack, way, batch(stack._kd_desc.batch)))
        except RuntimeError:  # the strides of a leaf allow no view
            if isinstance(batch, Viewed):
                raise
            return None
    made._kd_describe(made._kd_desc.with_batch(batch(stack._kd_desc.batch)))
    return made


def regrouped(stack: S, batch: BatchFn) -> S | None:
    """Merge neighbouring dimensions of a stack, or part one; writes reach the members.

    Rows, or parts, are stacked lazily where the dimension was.

    Returns:
        A lazy stack; `None` where a shape is another one, or has no rows.
    """
    old, after = stack._kd_desc.batch, batch(stack._kd_desc.batch)
    old_sizes, new = without_names(old), without_names(after)
    same = 0
    while same < min(len(old), len(new)) - 1 and old_sizes[same] == new[same]:
        same += 1
    behind = min(len(old), len(new)) - same - 1
    merged, parted = old_sizes[same : len(old) - behind], new[same : len(new) - behind]
    if old_sizes[len(old) - behind :] != new[len(new) - behind :] or not all(merged):
        return None
    made: Sequence[AbstractContainer] = [stack]
    if len(parted) == 1 < len(merged):
        for _ in merged:
            made = [row for part in made for row in part._kd_engine.unbind(part, same)]
        result: S = registry.lazy_stack(made, same)
    elif len(merged) == 1 < len(parted) and numel(parted) == merged[0]:
        result = stack
        rest = merged[0]
        for at, count in enumerate(parted[:-1], same):
            rest //= count
            one = count == 1 and not result._kd_desc.frozen  # a locked one stays locked by itself
            parts = [result] if one else result._kd_engine.split(result, rest, at)
            result = registry.lazy_stack(parts, at)
    else:
        return None
    result = _as_kind(stack, result)
    result._kd_describe(result._kd_desc.with_batch(after))
    return result


def _as_kind(stack: S, made: S) -> S:
    """Return a result as a stack of the class, and with the attributes, of what it was made from.

    One row, and what has no rows, is no stack.
    """
    if type(made) is type(stack) or not isinstance(made, Composite):
        return made
    return stack._of(made._members, made._dim)


def _see(stack: Composite, fn: LeafFn, batch: BatchFn) -> _Together | _Resized | _Rows | None:
    """Return how the members of a stack are seen through a function; `None` if they are not."""
    rows, taken = _numbered(stack, fn)
    if type(rows) is not Tensor or is_batchedtensor(taken):
        return None
    if not taken.numel() or not _share(taken, rows):
        return None
    dim = _place_of_members(fn, rows, stack._dim, taken)
    if dim is not None:
        return _Resized(dim, Grown if isinstance(batch, Grown) else Viewed)
    kept = _way_by_member(stack, fn, rows, taken)
    if kept is not None:
        return kept
    owners = _owners(rows, stack._dim)
    apart = isinstance(batch, Viewed) or taken.ndim == 1  # all rows are flattened
    return _numbers(stack._kd_desc.batch, stack._dim, taken, owners, apart)


def _place_of_members(fn: LeafFn, rows: Tensor, at: int, taken: Tensor) -> int | None:
    """Return the dimension along which a result has the rows of each member; `None` if none has."""
    if rows.shape[at] == 1:  # of one member it may be any dimension of size 1: two show which
        two = torch.arange(2 * rows.numel(), device="cpu")
        two = two.reshape((*rows.shape[:at], 2, *rows.shape[at + 1 :]))
        try:
            other = fn(two)
        except (RuntimeError, IndexError):  # its sizes are those of the stack
            other = two[:0]
        if other.ndim == taken.ndim:
            for dim in range(other.ndim):
                if taken.shape[dim] == 1 and _has_members_along(other, dim, two, at):
                    return dim
    for dim in range(taken.ndim):
        if _has_members_along(taken, dim, rows, at):
            return dim
    return None


def _has_members_along(taken: Tensor, dim: int, rows: Tensor, at: int) -> bool:
    count = rows.shape[at]
    if taken.shape[dim] != count:
        return False
    whole = rows.movedim(at, 0).reshape(count, -1)
    return torch.equal(taken.movedim(dim, 0).reshape(count, -1), whole)


def _seen_as(stack: S, way: _Resized | _Rows, new: Batch) -> S:
    if isinstance(way, _Rows):
        return _rows_seen(stack, way)
    shape = (*new[: way.dim], *new[way.dim + 1 :])  # with its names
    members: list[AbstractContainer] = [
        each if _has_shape(each, shape) else _reshaped(each, shape, way.batch)
        for each in stack._members
    ]
    return stack._of(members, way.dim)


def _has_shape(member: AbstractContainer, shape: Batch) -> bool:
    batch = member._kd_desc.batch
    return batch == shape and names_of(batch) == names_of(shape)


def _reshaped(
    member: AbstractContainer, shape: Batch, kind: type[Grown | Viewed] = Viewed
) -> AbstractContainer:
    batch = member._kd_desc.batch
    if _has_shape(member, shape):
        return locked_alone(member, member._kd_shallow())
    resize = resize_plan(batch, (shape,), "view")[0]
    return locked_alone(member, map_by((resize, shape, kind(shape, len(batch))), member))


def _numbered(stack: Composite, fn: LeafFn) -> tuple[Tensor, Tensor]:
    """Return the numbers of the rows of a stack, and what a function makes of them."""
    old = stack._kd_desc.batch
    rows = torch.arange(numel(old), device="cpu").reshape(old)
    try:
        taken = fn(rows)
    except RuntimeError:  # its index is on another device
        rows = rows.to(device_beside(stack._kd_desc))
        taken = fn(rows)
    return without_wrappers(rows), without_wrappers(taken)


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
    """A result in which each member stays whole.

    Attributes:
        members: their numbers.
        dim: the stacked dimension.
        same: whether it shows the rows of each member as they are.
    """

    __slots__ = ("dim", "members", "same")

    def __init__(self, members: list[int], dim: int, same: bool = False) -> None:
        self.members, self.dim, self.same = members, dim, same


class _Resized:
    """A result in which each member stays whole, under another shape.

    Attributes:
        dim: the stacked dimension.
        batch: what the members are told of their new shape.
    """

    __slots__ = ("batch", "dim")

    def __init__(self, dim: int, batch: type[Grown | Viewed]) -> None:
        self.dim, self.batch = dim, batch


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
    way = _kept_together(rows.movedim(at, 0).reshape(rows.shape[at], -1), taken, one)
    if way is not None and _share(taken, rows):
        order, shape = one.select(way.dim, 0), alone[:at] + alone[at + 1 :]
        way.same = order.shape == shape and torch.equal(order.reshape(-1), _counted(order))
    return way


def _counted(rows: Tensor) -> Tensor:
    return torch.arange(rows.numel(), device=rows.device)


def _mapped(stack: S, fn: LeafFn, batch: BatchFn, kept: _Together) -> S:
    """Apply a function of stacked leaves to members, and stack the results."""
    at, dim = stack._dim, kept.dim

    def of_member(leaf: Tensor) -> Tensor:
        return fn(leaf.unsqueeze(at)).select(dim, 0)

    def size_of_member(size: Batch) -> Batch:
        new = batch((*size[:at], 1, *size[at:]))
        return (*new[:dim], *new[dim + 1 :])

    size = batch.along(at) if isinstance(batch, Reduced) else size_of_member
    made = []
    for number in kept.members:
        member = stack._members[number]
        if kept.same and _has_shape(member, size(member._kd_desc.batch)):
            made.append(member)
        else:
            made.append(locked_alone(member, member._kd_map_each(of_member, size)))
    return registry.lazy_stack(made, dim)


def members_kept(stack: S, fn: LeafFn, batch: BatchFn) -> S | None:
    """Apply a function that moves rows to a stack whose members have different sizes.

    Returns:
        A lazy stack of the results for the members; `None` if it mixes their rows, or depends on
        their sizes.
    """
    ways = [_way_of_size(stack, fn, size) for size in (2, 3)]
    first, other = ways
    if first is None or other is None or first.dim != other.dim or first.members != other.members:
        return None
    at, dim = stack._dim, first.dim

    def size_of_member(size: Batch) -> Batch:
        shape = _shape_through(fn, (*size[:at], 1, *size[at:]))
        return (*shape[:dim], *shape[dim + 1 :])

    def of_member(leaf: Tensor) -> Tensor:
        return fn(leaf.unsqueeze(at)).select(dim, 0)

    rows = [stack._members[number] for number in first.members]
    if not first.same:
        rows = [each._kd_map_each(of_member, size_of_member) for each in rows]
    made = stack._of(rows, dim)
    names = names_of(batch(stack._kd_desc.batch))
    made._kd_describe(made._kd_desc.with_batch(with_names(made._kd_desc.batch, names)))
    return made


def _shape_through(fn: LeafFn, size: Batch) -> Batch:
    """Return what a function that moves dimensions makes of a size; open ones stay open."""
    marks = {1009 + at: each for at, each in enumerate(size) if isinstance(each, OpenSize)}
    if not marks:
        return tuple(fn(torch.empty(size, device="cpu")).shape)
    marked = [1009 + at if 1009 + at in marks else int(each) for at, each in enumerate(size)]
    return tuple([marks.get(each, each) for each in fn(torch.empty(marked, device="meta")).shape])


def _way_of_size(stack: Composite, fn: LeafFn, size: int) -> _Together | None:
    """Return how an operation would run on each member, if all had a size."""
    old = without_names(closed(stack._kd_desc.batch, size))
    rows = torch.arange(numel(old), device="cpu").reshape(old)
    try:
        return _way_by_member(stack, fn, rows, fn(rows))
    except (RuntimeError, IndexError):  # its sizes are those of the members
        return None


def reduced_members(stack: S, fn: LeafFn, batch: Reduced) -> S | None:
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
    if not stack._kd_desc.open:
        made._kd_describe(made._kd_desc.with_batch(batch(stack._kd_desc.batch)))
        return made
    sizes = list(made._kd_desc.batch)  # with the names of the dimensions that are left
    sizes[dim] = resized(stack._kd_desc.batch[at], sizes[dim])
    made._kd_describe(made._kd_desc.with_batch(tuple(sizes)))
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


def _rows_seen(stack: S, rows: _Rows, shares: bool = True) -> S:
    """Return rows of members, stacked lazily: views, or copies."""
    if rows.parts:
        return registry.lazy_stack(_parts_seen(stack, rows.parts, shares), 0)
    if rows.member is None:
        seen = stack._kd_shallow()
    else:
        member = stack._members[rows.member]
        index = rows.index
        of = member._kd_engine
        row = of.__getitem__(member, index) if index else _reshaped(member, rows.shape)
        seen = cast("S", row)
    return seen if shares else cloned(seen)


def _parts_seen(stack: Composite, parts: Sequence[_Rows], shares: bool) -> list[AbstractContainer]:
    """Return several of them; a member of one dimension is unbound once for all of its rows."""
    unbound: dict[int, Sequence[AbstractContainer]] = {}
    found: list[AbstractContainer] = []
    for part in parts:
        if part.member is None or len(part.index) != 1:
            found.append(_rows_seen(stack, part, shares))
            continue
        if part.member not in unbound:
            member = stack._members[part.member]
            unbound[part.member] = member._kd_engine.unbind(member, 0)
        row = unbound[part.member][part.index[0]]
        found.append(row if shares else cloned(row))
    return found


def _without_rows(stack: Composite, shape: Batch) -> AbstractContainer:
    """Return a container without rows, with the common keys and the shapes of the first member."""
    first = stack._members[0]
    ndim = first._kd_desc.ndim
    common = set(stack._kd_engine.keys(stack, True, False))
    mine = first._kd_engine.keys(first, True, False)
    kept = first._kd_engine.exclude(first, *(key for key in mine if key not in common))
    size = Fresh(shape, ndim)
    return kept._kd_map_each(lambda leaf: leaf.new_empty((*shape, *leaf.shape[ndim:])), size)


# An index of a stack, resolved to the members that it selects and the index of each member.
#
# Knows the rules of torch for one advanced item; must not know containers. An index with several
# advanced items, or with a mask over the stacked dimension and another one, does not select whole
# members: the entries must be stacked for it.


class Picked:
    """An index of a stack, resolved.

    Attributes:
        rows: the numbers of the members that it selects; an integer selects one member itself.
        inner: the index of each member; empty if the whole member is taken.
        dim: the position of the stacked dimension in the result.
        views: whether the index makes a view of a tensor, not a copy.
        in_place: whether the inner index makes a view, so that writes reach the member.
    """

    __slots__ = ("dim", "in_place", "inner", "rows", "views")

    def __init__(
        self,
        rows: list[int] | int,
        inner: tuple[IndexItem, ...],
        dim: int,
        views: bool,
        in_place: bool,
    ) -> None:
        self.rows = rows
        self.inner = inner
        self.dim = dim
        self.views = views
        self.in_place = in_place

    @property
    def distinct(self) -> bool:
        """Whether the index selects each member at most once."""
        return isinstance(self.rows, int) or len(set(self.rows)) == len(self.rows)


_ALL = slice(None)


def pick(index: object, batch: Batch, dim: int) -> Picked | None:
    """Resolve an index of a stack.

    Args:
        index: an index of batch dimensions, not a key.
        batch: the batch size of the stack.
        dim: the stacked dimension.

    Returns:
        The resolved index, or `None` where it mixes members, selects none, maps the numbers of
        members, or is wrong: the general method then raises the error.
    """
    if type(index) is int and not dim:  # mostly: "lazy stacks" in the benchmarks
        row = _rows(index, batch[0])
        return None if row is None else Picked(row, (), 0, True, True)
    items = tuple(map(_row_number, plain_index(index, batch)))
    advanced = [item for item in items if isinstance(item, Tensor)]
    if len(advanced) > 1 or any(isinstance(item, bool) or _is_flag(item) for item in items):
        return None
    parts = _parted(items, dim)
    if parts is None:
        return None
    before, which, after = parts
    rows = _rows(which, batch[dim])
    if rows is None:
        return None
    inner = (*before, *after)
    if all(isinstance(item, slice) and item == _ALL for item in inner):
        inner = ()
    simple = which is advanced[0] if advanced else True
    return Picked(rows, inner, sum(map(_width, before)), not advanced, simple)


def pick_several(index: object, batch: Batch, dim: int) -> tuple[object, Batch, int] | None:
    """Resolve an index whose one advanced item takes the numbers of members in several dimensions.

    Returns:
        The index with the numbers in one dimension, their shape, and the place of that dimension in
        the result; `None` for another index.
    """
    items = plain_index(index, batch)
    advanced = [item for item in items if isinstance(item, Tensor)]
    parts = _parted(items, dim) if len(advanced) == 1 else None
    if parts is None or parts[1] is not advanced[0]:
        return None
    before, _, after = parts
    which = advanced[0]
    if which.dtype is torch.bool or which.ndim < 2 or not which.numel() or is_batchedtensor(which):
        return None
    return (*before, which.reshape(-1), *after), tuple(which.shape), sum(map(_width, before))


def _parted(
    items: tuple[IndexItem, ...], dim: int
) -> tuple[list[IndexItem], IndexItem, list[IndexItem]] | None:
    """Return the items of an index before, at and behind the stacked dimension."""
    before: list[IndexItem] = []
    after: list[IndexItem] = []
    which: IndexItem = _ALL
    at = 0
    for item in items:
        taken = 0 if item is None else 1
        if isinstance(item, Tensor) and item.dtype is torch.bool:
            taken = item.ndim
        if at + taken <= dim:
            before.append(item)
        elif at > dim:
            after.append(item)
        elif taken == 1:
            which = item
        else:
            return None
        at += taken
    return before + [_ALL] * (dim - at), which, after


def _width(item: IndexItem) -> int:
    """Return the number of dimensions of the result that belong to an item."""
    if isinstance(item, Tensor):
        return 1 if item.dtype is torch.bool else item.ndim
    return 0 if isinstance(item, int) else 1


def _row_number(item: IndexItem) -> IndexItem:
    """Return a 0-d integer tensor as an integer: torch selects a view for it, too."""
    if isinstance(item, Tensor) and not item.ndim and item.dtype is not torch.bool:
        return item if is_batchedtensor(item) else int(item)
    return item


def _is_flag(item: IndexItem) -> bool:
    """Return whether an item is a 0-d mask, which adds a dimension."""
    return isinstance(item, Tensor) and item.dtype is torch.bool and not item.ndim


def _rows(which: Any, count: int) -> list[int] | int | None:
    """Return the numbers of the members that an item selects, counted from the front."""
    if isinstance(which, slice):
        return None if which.step == 0 else list(range(count)[which]) or None
    if isinstance(which, Tensor) and is_batchedtensor(which):
        return None
    if isinstance(which, Tensor) and which.dtype is torch.bool:
        return which.nonzero().view(-1).tolist() or None if which.shape[0] == count else None
    if isinstance(which, Tensor) and which.ndim > 1:
        return None
    rows: list[int] = which.reshape(-1).tolist() if isinstance(which, Tensor) else [which]
    if not rows or any(not -count <= row < count for row in rows):
        return None
    rows = [row % count for row in rows]
    return rows if isinstance(which, Tensor) and which.ndim else rows[0]


# The class of a lazy stack of tensor classes, which is made of the tensor class.
#
# It is a lazy stack with the fields, methods and class variables of the tensor class. Each base
# class of a tensor class has its own, so that `super()` in a method finds the next one. Private
# names of lazy stacks are kept.
#
# Inheritance from both would be plainer, and Python refuses it: instances of either have slots of
# their own ("instance lay-out conflict"). So functions of the tensor class are copied with another
# `__class__` cell, which is the one way to say what `super()` without arguments means.
#
# Knows what the body of a class holds; must not know how fields are read or stacks stored.

_CLASS_METHODS: Final = ("fields", "from_dict", "from_tensordict")
_OWN: Final = frozenset(
    {
        *("__init__", "__new__", "__init_subclass__", "_stack_classes"),
        *("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
        *("__copy__", "__deepcopy__"),
    }
)
"""Names of a tensor class that its lazy stacks do not take: how they are built and pickled."""


def plain_class(kind: type[K]) -> type[K]:
    """Return the class of lazy stacks without the fields of a tensor class."""
    if kind._kd_tensor_class is None:
        return kind
    plain: type[K] = getattr(kind, "_plain_class")  # noqa: B009  # of stacks alone
    return plain


def stack_class(kind: type[K], members: Sequence[AbstractContainer]) -> type[K]:
    """Return the class of a lazy stack with the fields that all of its members declare.

    Members of several tensor classes have those of their first common base class that has any.

    Args:
        kind: a class of lazy stacks, with fields or without.
        members: what is stacked.
    """
    cls = type(members[0])
    classes = [type(member) for member in members]
    if all([each is cls for each in classes]):  # noqa: C419  # a generator is slow to trace
        classes = classes[:1]
    depth = _depth(kind, *classes)
    if depth < 0:
        return plain_class(kind)
    # Nothing is `cast`: dynamo copies what is, and cannot return a stack of a class it has copied.
    tensor_class: type | None = members[0]._kd_tensor_class
    assert tensor_class is not None  # as `depth` says
    base = tensor_class.__mro__[depth]
    known: dict[type[K], type[K]] = getattr(base, "_stack_classes")  # noqa: B009  # of tensor classes
    return known[plain_class(kind)]


@assume_constant_result  # dynamo traces no making of classes, and uses none that it is given
def _depth(kind: type[K], *classes: type[AbstractContainer]) -> int:
    """Return the place of the shared tensor class among the bases of the first, -1 for none."""
    first = classes[0]._kd_tensor_class
    for depth, base in enumerate(() if first is None else first.__mro__):
        if _has_fields(base) and all(
            issubclass(each._kd_tensor_class or each, base) for each in classes
        ):
            _made(base, plain_class(kind))
            return depth
    return -1


def _has_fields(cls: type) -> bool:
    return getattr(cls, "_kd_tensor_class", None) is cls and bool(cls._kd_declared.fields)


_MAKING: Final = RLock()


def _made(cls: type, plain: type[K]) -> type[K]:
    """Return the class of lazy stacks of a tensor class; it is made at the first call."""
    made: type[K] | None = _known(cls).get(plain)
    if made is not None:
        return made
    with _MAKING:  # else two threads make one each
        made = _known(cls).get(plain)
        return _make(cls, plain) if made is None else made


def _known(cls: type) -> dict[object, Any]:
    found: dict[object, object] = vars(cls).get("_stack_classes", {})
    return found


def _make(cls: type, plain: type[K]) -> type[K]:
    bases = tuple([_base(base, plain) for base in cls.__bases__])
    cell = CellType()
    made = type(f"LazyStacked{cls.__name__}", bases, _body(cls, plain, cell))
    setattr(made, "_kd_engine", plain)  # noqa: B010  # of containers
    cell.cell_contents = made
    # `isinstance` takes a lazy stack of instances for one. A field may be called `register`.
    ABCMeta.register(cast("ABCMeta", cls), made)
    type.__setattr__(cls, "_stack_classes", {**_known(cls), plain: made})
    return made


def _base(base: type, plain: type[K]) -> type:
    if not hasattr(base, "_kd_tensor_class"):
        return base
    return plain if base._kd_tensor_class is None else _made(base, plain)


def _body(cls: Any, plain: Any, cell: CellType) -> dict[str, object]:
    """Return what the class of lazy stacks defines itself; `cell` will hold that class."""
    body: dict[str, object] = {}
    for name, value in vars(cls).items():
        if is_taken(name, value, plain):
            body[name] = rebound(value, cell)

    def build(made: type, *values: object, **named: object) -> object:
        return cls(*values, **named)

    body.update({name: getattr(cls, name) for name in _CLASS_METHODS})
    body["__slots__"] = ()
    body["__new__"] = build  # `type(self)(...)` in a method builds a dense instance
    body["__getattr__"] = rebound(getattr(cls, "__getattr__"), cell)  # noqa: B009  # hidden from checkers
    body["__qualname__"] = f"LazyStacked{cls.__name__}"
    fields = getattr(cls, "__dataclass_fields__", None)  # of tensor classes that take no other keys
    if fields is not None:
        body["__dataclass_fields__"] = fields
    body["__replace__"] = getattr(plain, "_replaced")  # noqa: B009  # of stacks alone
    body["_plain_class"] = plain
    declaration = cls._kd_declared
    getter = next(base for base in cls.__mro__ if "get" in vars(base))
    is_own = getattr(getter, "_kd_tensor_class", cls) is not None  # a field, or of the author
    if not declaration.more_keys and not is_own:
        body["get"] = _unwrapping(plain.get)
    return body


def _unwrapping(get: Callable[..., object]) -> Callable[..., object]:
    """Return `get` as instances have it: data that is not a tensor is read as its values."""

    @wraps(get)
    def unwrapped(self: object, *args: object, **named: object) -> object:
        found = get(self, *args, **named)
        return found._kd_item() if is_data(found) else found

    return unwrapped


def is_taken(name: str, value: object, plain: type) -> bool:
    """Return whether lazy stacks have an attribute of a tensor class."""
    if name in _OWN or isinstance(value, (GetSetDescriptorType, MemberDescriptorType)):
        return False
    private = name.startswith("_") and not name.startswith("__")
    return not private or name in _DECLARED or not hasattr(plain, name)


_DECLARED: Final = frozenset({"_kd_tensor_class", "_kd_declared"})


def rebound(value: object, cell: CellType) -> object:
    """Return a member of a class whose `super()` looks in another class, that of a cell."""
    if isinstance(value, (classmethod, staticmethod)):
        wrap: Callable[..., object] = type(value)
        return wrap(rebound(value.__func__, cell))
    if isinstance(value, property):
        parts = [rebound(part, cell) for part in (value.fget, value.fset, value.fdel)]
        make: Callable[..., object] = type(value)
        return make(*parts, value.__doc__)
    if not isinstance(value, FunctionType):
        return value
    names, old = value.__code__.co_freevars, value.__closure__ or ()
    inner = getattr(value, "__wrapped__", None)
    cells = tuple(
        cell
        if name == "__class__"
        else CellType(rebound(inner, cell))
        if inner is not None and was.cell_contents is inner
        else was
        for name, was in zip(names, old, strict=True)
    )
    if cells == old:
        return value
    new = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    new.__kwdefaults__, new.__doc__ = value.__kwdefaults__, value.__doc__
    new.__qualname__ = value.__qualname__
    new.__dict__.update(value.__dict__)
    return new
