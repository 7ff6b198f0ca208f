"""Extreme values with their indices, of every leaf."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kd_core._batch.plans import SAME_SHAPE
from kd_core._errors import InvalidArgument, InvalidValue, wrong_type
from kd_core._ops.math.reducing import along_batch, batch_dims_of, reduced, without
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from kd_core._ops.math.reducing import Dim
    from kd_core._types import BatchFn

    E = TypeVar("E", bound=AbstractContainer)

V = TypeVar("V")
How: TypeAlias = tuple[bool, bool]
"""Whether all leaves are reduced together, and whether indices are wanted."""


class Extremes(NamedTuple, Generic[V]):
    """The extreme values along a dimension and their indices, as type checkers see them.

    They are of the type that torch returns for a tensor, such as `torch.return_types.max`, which
    takes two containers as well. Traced code, which cannot build one, has this class.
    """

    values: V
    indices: V


Along: TypeAlias = Callable[..., "tuple[Tensor, Tensor]"]


def extreme(
    td: E, over_all: Callable[..., Tensor], along: Along, dim: Dim, keepdim: bool, how: How
) -> E | Tensor | Extremes[E] | Extremes[Tensor]:
    """Return the extreme values of each leaf, with their indices where one dimension is given.

    Args:
        td: the container.
        over_all: the function over several dimensions.
        along: the function along one dimension, which returns indices, too.
        dim: the dimension, or several.
        keepdim: keep the dimension with size 1.
        how: whether all leaves are reduced together, and whether the indices are wanted.
    """
    reduce, return_indices = how
    alone = not (isinstance(dim, (tuple, list)) or (isinstance(dim, str) and dim == "feature"))
    if dim is None or not (alone or return_indices):
        return reduced(td, over_all, dim, keepdim, reduce)
    if not alone:
        raise InvalidArgument(
            "`dim` must be one integer or name, because the result has indices. Use `amin` or "
            "`amax` for several dimensions or for features."
        )
    (axis,) = batch_dims_of(td, dim)
    along_axis = partial(_call, along, axis, keepdim)
    if reduce:
        of_all = _joined(td, axis)
        found_all = _as_torch(along, *along_axis(of_all))
        return found_all if return_indices else found_all.values
    found = pairs(td, along, along_batch(td, along_axis), without((axis,), keepdim))
    return found if return_indices else found.values


def running(
    td: E, along: Along, dim: int | str, how: How
) -> E | Tensor | Extremes[E] | Extremes[Tensor]:
    """Return the extreme values so far along a batch dimension; see `extreme`."""
    reduce, return_indices = how
    if not isinstance(dim, (int, str)):
        raise wrong_type("`dim`", "an integer or a name", dim)
    (axis,) = batch_dims_of(td, dim)
    if reduce:
        of_all = _as_torch(along, *along(_joined(td, axis), axis))
        return of_all if return_indices else of_all.values
    found = pairs(td, along, along_batch(td, lambda leaf: along(leaf, axis)), SAME_SHAPE)
    return found if return_indices else found.values


def pairs(
    td: E, along: Along, fn: Callable[[Tensor], tuple[Tensor, Tensor]], batch: BatchFn
) -> Extremes[E]:
    """Apply a function that returns values and indices; `along` is that of torch."""
    found: list[tuple[Tensor, Tensor]] = []

    def values(leaf: Tensor) -> Tensor:
        found.append(fn(leaf))
        return found[-1][0]

    first = td._kd_map_each(values, batch)
    places = iter(found)
    return _as_torch(along, first, td._kd_map_each(lambda leaf: next(places)[1], batch))


def _call(along: Along, axis: int, keepdim: bool, leaf: Tensor) -> tuple[Tensor, Tensor]:
    return along(leaf, axis, keepdim)


def _as_torch(along: Along, values: V, indices: V) -> Extremes[V]:
    if is_compiling():
        return Extremes(values, indices)
    kind = getattr(torch.return_types, along.__name__)
    return cast("Extremes[V]", kind((values, indices)))


def _joined(td: AbstractContainer, axis: int) -> Tensor:
    """Return all leaves behind one another along a batch dimension."""
    leaves: list[Tensor] = []

    def noted(leaf: Tensor) -> Tensor:
        leaves.append(leaf)
        return leaf

    td._kd_map_each(noted, SAME_SHAPE)
    if not leaves:
        raise InvalidValue(
            "`reduce=True` requires at least one tensor, got a container without tensors."
        )
    return torch.cat(leaves, axis)
