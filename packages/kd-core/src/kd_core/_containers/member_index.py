"""An index of a stack, resolved to the members that it selects and the index of each member.

Knows the rules of torch for one advanced item; must not know containers. An index with several
advanced items, or with a mask over the stacked dimension and another one, does not select whole
members: the entries must be stacked for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kd_core._ops.selection.index_plan import plain_index

if TYPE_CHECKING:
    from kd_core._types import Batch, IndexItem


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
        The resolved index, or `None` where it mixes members, selects none, or is wrong: the general
        method then raises the error.
    """
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
        return int(item)
    return item


def _is_flag(item: IndexItem) -> bool:
    """Return whether an item is a 0-d mask, which adds a dimension."""
    return isinstance(item, Tensor) and item.dtype is torch.bool and not item.ndim


def _rows(which: IndexItem, count: int) -> list[int] | int | None:
    """Return the numbers of the members that an item selects, counted from the front."""
    if isinstance(which, slice):
        backwards = which.step is not None and which.step < 1
        return None if backwards else list(range(count)[which]) or None
    if isinstance(which, Tensor) and which.dtype is torch.bool:
        return which.nonzero().view(-1).tolist() or None if which.shape[0] == count else None
    if isinstance(which, Tensor) and which.ndim > 1:
        return None
    rows: list[int] = which.reshape(-1).tolist() if isinstance(which, Tensor) else [which]  # type: ignore[list-item]  # an integer
    if not rows or any(not -count <= row < count for row in rows):
        return None
    rows = [row % count for row in rows]
    return rows if isinstance(which, Tensor) and which.ndim else rows[0]
