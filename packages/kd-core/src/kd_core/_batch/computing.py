"""The batch functions of operations that compute new values, not ones that move rows.

A node that holds one value per row follows every operation that moves rows. An operation that
computes values, such as a sum, has no meaning for it; its batch function says so by being of one of
these classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kd_core._batch.names import resized

if TYPE_CHECKING:
    from kd_core._types import Batch, LeafFn


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
        return tuple(sorted(self.dims)) if self.first is None else tuple(range(self.first, ndim))

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

SAME_SHAPE = Reduced()
"""The batch shape of an operation along rows that keeps their number, such as `cumsum`."""


class Padded:
    """The batch shape after rows were added.

    Args:
        batch: the new batch size.
        ndim: the number of its dimensions; a nested container may have more.
    """

    __slots__ = ("batch", "ndim")

    def __init__(self, batch: Batch, ndim: int) -> None:
        self.batch = batch
        self.ndim = ndim

    def __call__(self, batch: Batch) -> Batch:
        return self.batch + batch[self.ndim :]


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
