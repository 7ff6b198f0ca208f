"""Extreme values with their indices, of every leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch import Tensor

from kd_core._errors import InvalidArgument
from kd_core._ops.math.reducing import along_batch, batch_dims_of, reduced, without
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from kd_core._ops.math.reducing import Dim
    from kd_core._types import BatchFn

    E = TypeVar("E", bound=AbstractContainer)

W = TypeVar("W")


class Extremes(NamedTuple, Generic[W]):
    """The extreme values along a dimension and their indices: two containers."""

    values: W
    indices: W


def extreme(
    td: E,
    over_all: Callable[..., Tensor],
    along: Callable[..., tuple[Tensor, Tensor]],
    dim: Dim,
    keepdim: bool,
    reduce: bool,
    return_indices: bool,
) -> E | Tensor | Extremes[E]:
    alone = not (isinstance(dim, (tuple, list)) or (isinstance(dim, str) and dim == "feature"))
    if dim is None or not (alone or return_indices):
        return reduced(td, over_all, dim, keepdim, reduce)
    if reduce or not alone:
        raise InvalidArgument(
            "`dim` must be one integer or name, without `reduce`, because the result has indices. "
            "Use `amin` or `amax` for several dimensions, for features, or for all leaves together."
        )
    (axis,) = batch_dims_of(td, dim)
    extreme = along_batch(td, lambda leaf: along(leaf, axis, keepdim))
    found = pairs(td, extreme, without((axis,), keepdim))
    return found if return_indices else found.values


def pairs(td: E, fn: Callable[[Tensor], tuple[Tensor, Tensor]], batch: BatchFn) -> Extremes[E]:
    """Apply a function that returns values and indices."""
    found: list[tuple[Tensor, Tensor]] = []

    def values(leaf: Tensor) -> Tensor:
        found.append(fn(leaf))
        return found[-1][0]

    first = td._map_each(values, batch)
    places = iter(found)
    return Extremes(first, td._map_each(lambda leaf: next(places)[1], batch))
