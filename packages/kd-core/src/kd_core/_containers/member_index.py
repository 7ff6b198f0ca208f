"""An index of a stack, taken apart: which members it picks, and what it takes of each.

Knows the rules of torch for one advanced item; must not know containers. An index with several
advanced items, or with a mask over the stacked dimension and another one, picks no members: there
the stack has to be stacked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kd_core._ops.indexing import plain_index

if TYPE_CHECKING:
    from kd_core._types import Batch, IndexItem


class Picked(NamedTuple):
    """What an index does to a stack.

    Attributes:
        rows: the members that it picks, by number; an integer for one of them as it is.
        inner: the index of each member; empty where all of it is taken.
        dim: where the stacked dimension stands in the result.
        views: whether it is a view of a tensor, and not a copy.
        in_place: whether writes into what it takes of each member reach the member.
    """

    rows: list[int] | int
    inner: tuple[IndexItem, ...]
    dim: int
    views: bool
    in_place: bool

    @property
    def distinct(self) -> bool:
        """Whether it picks each member once."""
        return isinstance(self.rows, int) or len(set(self.rows)) == len(self.rows)


_ALL = slice(None)


def pick(index: object, batch: Batch, dim: int) -> Picked | None:
    """Take an index apart.

    Args:
        index: what `td[index]` takes, but for keys.
        batch: the batch size of the stack.
        dim: the stacked dimension.

    Returns:
        What it picks, or `None` where it mixes members, picks none, or is wrong: the general way
        finds out what is wrong.
    """
    items = plain_index(index, batch)
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
    """Return what stands before the stacked dimension, at it, and behind it."""
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
    """Return how many dimensions of the result an item makes."""
    if isinstance(item, Tensor):
        return 1 if item.dtype is torch.bool else item.ndim
    return 0 if isinstance(item, int) else 1


def _is_flag(item: IndexItem) -> bool:
    """Tell whether an item is a mask without dimensions, which adds one."""
    return isinstance(item, Tensor) and item.dtype is torch.bool and not item.ndim


def _rows(which: IndexItem, count: int) -> list[int] | int | None:
    """Return the members that an item picks, by number from the front."""
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
