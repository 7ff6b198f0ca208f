"""Plans and their cache: what the arguments of an operation mean for one batch size.

What `td.reshape(-1, 3)` does to the leaves depends on its arguments and the batch size alone, so it
is computed once and cached ("shape" in the benchmarks). A plan holds functions without state and
never a tensor, so threads may share it. Under `torch.compile` and `torch.export` sizes may be
symbolic, and nothing is cached.

A node that holds one value per row follows every operation that moves rows. An operation that
computes values, such as a sum, has no meaning for it; its batch function says so by being a
`Reduced`, `Padded` or `Fresh`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from types import FunctionType
from typing import TYPE_CHECKING, ParamSpec, TypeAlias

from torch.compiler import is_compiling

from kd_core._batch.names import resized
from kd_core._torch_private import traced_as

if TYPE_CHECKING:
    from typing import TypeVar

    from torch import Tensor

    from kd_core._types import Batch, BatchFn, LeafFn

    R = TypeVar("R")

P = ParamSpec("P")


Plan: TypeAlias = "tuple[LeafFn, Batch, BatchFn]"
"""What an operation does to a container of one batch size.

Its parts: a function from a leaf to the new leaf; the new batch size; a function from the batch
size of a nested container, which may have more dimensions, to the new one. A plain tuple is the
fastest to build while dynamo traces.
"""


def plan(old: Batch, leaf: LeafFn, new: Batch) -> Plan:
    """Return a plan that replaces the leading dimensions `old` by `new`."""
    ndim = len(old)
    return leaf, new, lambda batch: new + batch[ndim:]


def unchanged(leaf: Tensor) -> Tensor:
    """Return a leaf itself: the function of a plan that changes nothing."""
    return leaf


def kept(batch: Batch) -> Plan:
    """Return the plan that changes nothing: the container itself is the result."""
    return unchanged, batch, lambda inner: inner


def cached(resolve: Callable[P, R]) -> Callable[P, R]:
    """Cache the results of a function by its arguments.

    To a Python dict 2, 2.0 and True are the same key. So only plain integers, strings, `None`,
    functions and tuples of these are looked up; other arguments reach the function, which checks
    them.
    """
    known = lru_cache(maxsize=1024)(resolve)

    @traced_as(resolve)
    @wraps(resolve)
    def look_up(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_compiling():
            return resolve(*args, **kwargs)
        for arg in args:
            if arg.__class__ is not int and not _is_exact(arg):
                return resolve(*args, **kwargs)
        return known(*args)

    return look_up


def _is_exact(arg: object) -> bool:
    """Return whether an argument can be a key of the cache."""
    kind = arg.__class__
    if kind is not tuple:
        return arg is None or kind is int or kind is str or kind is FunctionType
    for each in arg:  # type: ignore[attr-defined]  # a tuple
        if each.__class__ is not int and not _is_exact(each):
            return False
    return True


class Reduced:
    """The batch shape after a reduction.

    Args:
        dims: the batch dimensions that are reduced, counted from the front.
        keepdim: whether they stay, with size 1.
        first: the number of leading dimensions that may stay; all beyond are reduced.
        lead: dimensions that the results have in front, as those of several quantiles.
    """

    __slots__ = ("dims", "first", "keepdim", "lead")

    def __init__(
        self,
        dims: tuple[int, ...] = (),
        keepdim: bool = False,
        first: int | None = None,
        lead: Batch = (),
    ) -> None:
        self.dims, self.keepdim, self.first, self.lead = dims, keepdim, first, lead

    def gone(self, ndim: int) -> tuple[int, ...]:
        """Return the dimensions of a batch that are reduced."""
        if self.first is None:
            return tuple(sorted(dim for dim in self.dims if dim < ndim))
        return tuple(range(self.first, ndim))

    def along(self, stacked: int) -> Reduced:
        """Return the same for one member of a stack along a dimension that is not reduced."""
        dims = tuple([dim - (dim > stacked) for dim in self.dims])
        first = None if self.first is None else self.first - 1
        return Reduced(dims, self.keepdim, first, self.lead)

    def __call__(self, batch: Batch) -> Batch:
        dims = self.dims
        if self.first is not None:
            left = batch[: self.first]
        elif self.keepdim:
            left = tuple([resized(size, 1) if i in dims else size for i, size in enumerate(batch)])
        elif len(dims) == 1:  # "sum(0)" in the benchmarks
            left = batch[: dims[0]] + batch[dims[0] + 1 :]
        else:
            left = tuple([size for i, size in enumerate(batch) if i not in dims])
        return (*self.lead, *left) if self.lead else left


EVERYTHING = Reduced(first=0)
"""The batch shape after a reduction of whole leaves: ()."""

EVERYTHING_KEPT = Reduced(tuple(range(64)), keepdim=True)  # torch has no more dimensions
"""The batch shape after a reduction of whole leaves that keeps dimensions: (1, 1, ...)."""

SAME_SHAPE = Reduced()
"""The batch shape of an operation along rows that keeps their number, such as `cumsum`."""


class Replaced:
    """The batch shape after its leading dimensions were replaced.

    Args:
        batch: the new batch size.
        ndim: the number of dimensions that it replaces; a nested container may have more.
    """

    __slots__ = ("batch", "ndim")

    def __init__(self, batch: Batch, ndim: int) -> None:
        self.batch, self.ndim = batch, ndim

    def __call__(self, batch: Batch) -> Batch:
        return self.batch + batch[self.ndim :]


class Padded(Replaced):
    """The batch shape after rows were added."""

    __slots__ = ()


class Viewed(Replaced):
    """The batch shape after a `view`, whose result always shares storage."""

    __slots__ = ()


class Grown(Replaced):
    """The batch shape after dimensions were inserted: one value for all rows is one per row."""

    __slots__ = ()


class Fresh(Padded):
    """The batch shape of new rows: none of those that were there stays.

    Args:
        batch: the new batch size.
        ndim: the number of its dimensions.
        make: makes new values for an entry that has no rows; `None`: it stays.
    """

    __slots__ = ("make",)

    def __init__(self, batch: Batch, ndim: int, make: LeafFn | None = None) -> None:
        super().__init__(batch, ndim)
        self.make = make
