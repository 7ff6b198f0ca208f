"""Stacking containers along a new batch dimension, and concatenating them along an old one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kd_core._base import TensorDictBase
from kd_core._batch.names import plain_size, resized, without_names
from kd_core._batch.shapes import new_dim, wrap_dim
from kd_core._combine.joining import Join, first_of
from kd_core._naming import also_named
from kd_core._nodes import registry
from kd_core._protocol.composite import Composite

if TYPE_CHECKING:
    from typing import TypeVar

    from kd_core._types import Batch

    C = TypeVar("C", bound=TensorDictBase)


@also_named(tensors="input")
def stack(input: Sequence[C], dim: int | str = 0, *, out: C | None = None) -> C:
    """Stack containers along a new batch dimension; `torch.stack` calls this function too.

    Args:
        input: containers of the same keys and batch size. Lazy stacks of the same stacked
            dimension are stacked member by member: the result is a lazy stack.
        dim: the position of the new dimension; a negative one counts from the end of the result,
            and the name of a dimension is its position.
        out: a container into whose leaves the result is written; entries that it does not have
            are left out.

    Raises:
        KeySetMismatch: if a container has other keys than the first.
        ShapeMismatch: if a batch size or the shape of an entry differs.
        InvalidValue: if an entry of `out` holds one value for all rows, and it differs.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, stack
        >>> stack([TensorDict({"a": torch.zeros(3)}, [3]) for _ in range(2)]).batch_size
        torch.Size([2, 3])
    """
    if isinstance(dim, str):
        dim = new_dim(dim, first_of(input, "stack")._kd_desc.batch)
    how = object.__new__(_Stacking)  # calling a class is slow to trace
    how.dim = how.wrapped(dim, input, 1)
    joined = how.members(input) if out is None else None
    return how.combined(input, out) if joined is None else cast("C", joined)


class _Stacking(Join):
    __slots__ = ()

    name = "stack"
    call = staticmethod(torch.stack)

    def shape(self, shapes: Sequence[Batch]) -> Batch | None:
        first = shapes[0]
        plain = without_names(first)  # see `check_batches`
        for shape in shapes:
            if without_names(shape) != plain:
                return None
        return self.even(first, len(shapes))

    def even(self, shape: Batch, count: int) -> Batch:
        return (*shape[: self.dim], count, *shape[self.dim :])

    def members(self, containers: Sequence[object]) -> Composite | None:
        stacks = _alike(containers)
        if stacks is None or any(
            each._kd_desc.batch != stacks[0]._kd_desc.batch for each in stacks
        ):
            return None
        at = stacks[0]._dim
        inner = self.dim - (self.dim > at)
        rows = zip(*[cast("list[TensorDictBase]", each._members) for each in stacks], strict=True)
        return stacks[0]._of([stack(list(row), inner) for row in rows], at + (self.dim <= at))


def _alike(containers: Sequence[object]) -> list[Composite] | None:
    """Return containers that all are lazy stacks along the same dimension; else `None`."""
    first = containers[0]
    if not isinstance(first, Composite):
        return None
    stacks = [
        each for each in containers if isinstance(each, Composite) and each._dim == first._dim
    ]
    return stacks if len(stacks) == len(containers) else None


registry.register("stack", stack)


@also_named(tensors="input")
def cat(input: Sequence[C], dim: int | str = 0, *, out: C | None = None) -> C:
    """Concatenate containers along a batch dimension; `torch.cat` calls this function too.

    Args:
        input: containers of the same keys, whose batch sizes may differ only in `dim`. Lazy
            stacks of the same stacked dimension are joined member by member.
        dim: the batch dimension along which they are concatenated, or its name.
        out: a container into whose leaves the result is written; entries that it does not have
            are left out.

    Raises:
        KeySetMismatch: if a container has other keys than the first.
        ShapeMismatch: if a batch size or the shape of an entry differs elsewhere.
        InvalidValue: if an entry of `out` holds one value for all rows, and it differs.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, cat
        >>> cat([TensorDict({"a": torch.zeros(n)}, [n]) for n in (2, 3)]).batch_size
        torch.Size([5])
    """
    if isinstance(dim, str):
        dim = wrap_dim(dim, first_of(input, "cat")._kd_desc.batch)
    how = object.__new__(_Concatenating)  # calling a class is slow to trace
    how.dim = how.wrapped(dim, input, 0)
    joined = how.members(input) if out is None else None
    return how.combined(input, out) if joined is None else cast("C", joined)


class _Concatenating(Join):
    __slots__ = ()

    name = "cat"
    call = staticmethod(torch.cat)

    def shape(self, shapes: Sequence[Batch]) -> Batch | None:
        first, dim = shapes[0], self.dim
        before, behind = first[:dim], first[dim + 1 :]
        plain = without_names((*before, *behind))  # see `check_batches`
        rows = 0
        for shape in shapes:
            others = (*shape[:dim], *shape[dim + 1 :])
            if len(shape) != len(first) or without_names(others) != plain:
                return None
            rows += plain_size(shape[dim])
        return (*before, resized(first[dim], rows), *behind)

    def even(self, shape: Batch, count: int) -> Batch:
        dim = self.dim
        return (*shape[:dim], resized(shape[dim], shape[dim] * count), *shape[dim + 1 :])

    def members(self, containers: Sequence[object]) -> Composite | None:
        stacks = _alike(containers)
        if stacks is None:
            return None
        first, dim = stacks[0], self.dim
        at, batch = first._dim, first._members[0]._kd_desc.batch
        rows = [cast("list[TensorDictBase]", each._members) for each in stacks]
        if dim == at:
            members = [member for column in rows for member in column]
            if any(member._kd_desc.batch != batch for member in members):
                return None
            return first._of([member._kd_engine.clone(member) for member in members])
        if any(len(column) != len(rows[0]) for column in rows):
            return None
        inner = dim - (dim > at)
        return first._of([cat(list(column), inner) for column in zip(*rows, strict=True)])

    def rows(self, leaves: Sequence[Tensor]) -> Tensor | None:
        return _join_rows(leaves)


def _join_rows(leaves: Sequence[Tensor]) -> Tensor:
    """Concatenate nested tensors along their rows."""
    from kd_core._leaves.nested import joined_rows

    return joined_rows(leaves)


class _ConcatenatingOnce(_Concatenating):
    """Joins the same tensors once: a tensor under several keys of all parts stays one."""

    __slots__ = ("_rows", "call")

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.call = _once(torch.cat)
        self._rows = _once(_join_rows)

    def rows(self, leaves: Sequence[Tensor]) -> Tensor | None:
        return self._rows(leaves)


def _cat_rows(parts: Sequence[TensorDictBase]) -> TensorDictBase:
    """Concatenate along the first dimension; a tensor under several keys of all parts stays one."""
    how = _ConcatenatingOnce(wrap_dim(0, parts[0]._kd_desc.ndim))
    joined = how.members(parts)
    return how.combined(parts, None) if joined is None else cast(TensorDictBase, joined)


def _once(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that joins the same tensors along the same dimension only once."""
    known: dict[tuple[int, ...], tuple[list[Tensor], Tensor]] = {}

    def joined(leaves: Sequence[Tensor], *dim: int) -> Tensor:
        same = (*map(id, leaves), *dim)
        if same not in known:
            known[same] = list(leaves), fn(leaves, *dim)  # which keeps their `id`
        return known[same][1]

    return joined


registry.register("cat", cat)
registry.register("cat_rows", _cat_rows)
