"""Extreme values with their indices, `all` and `any`, and cumulative sums and products."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, TypeVar, cast, overload

import torch
from torch import Tensor

from kd_core._errors import InvalidArgument
from kd_core._ops.reducing import batch_dims_of, reduced, without
from kd_core._protocol.primitives import AbstractContainer, same_batch

if TYPE_CHECKING:
    from typing import Self

    from kd_core._ops.reducing import Dim, SomeDim

W = TypeVar("W")
E = TypeVar("E", bound="Extrema")


class Extremes(NamedTuple, Generic[W]):
    """The extreme values along a dimension and their indices: two containers."""

    values: W
    indices: W


class Extrema(AbstractContainer):
    """The methods for extreme values, truth and cumulative results.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": torch.tensor([1.0, 3.0]), "b": torch.tensor([5.0, 4.0])}, [2])
        >>> td.max().to_dict(), td.max(reduce=True)
        ({'a': tensor(3.), 'b': tensor(5.)}, tensor(5.))
        >>> td.max(0).indices.to_dict()
        {'a': tensor(1), 'b': tensor(0)}
        >>> (td > 0).all(), (td > 4).any(0)["b"]
        (True, tensor(True))
    """

    __slots__ = ()

    @overload
    def min(self, dim: None = None, *, reduce: Literal[False] = False) -> Self: ...
    @overload
    def min(self, dim: None = None, *, reduce: Literal[True]) -> Tensor: ...
    @overload
    def min(self, dim: int, keepdim: bool = False) -> Extremes[Self]: ...
    def min(
        self, dim: int | None = None, keepdim: bool = False, *, reduce: bool = False
    ) -> Self | Tensor | Extremes[Self]:
        """Return the smallest value of every leaf; along a batch dimension, its index too.

        Args:
            dim: a batch dimension; `None`: over everything.
            keepdim: keep the dimension with size 1.
            reduce: reduce all leaves to one tensor.

        Returns:
            With `dim` two containers, `values` and `indices`; else a container, or a tensor.
        """
        return _extreme(self, torch.amin, torch.min, dim, keepdim, reduce)

    @overload
    def max(self, dim: None = None, *, reduce: Literal[False] = False) -> Self: ...
    @overload
    def max(self, dim: None = None, *, reduce: Literal[True]) -> Tensor: ...
    @overload
    def max(self, dim: int, keepdim: bool = False) -> Extremes[Self]: ...
    def max(
        self, dim: int | None = None, keepdim: bool = False, *, reduce: bool = False
    ) -> Self | Tensor | Extremes[Self]:
        """Return the largest value of every leaf; along a batch dimension, its index too.

        Args:
            dim: a batch dimension; `None`: over everything.
            keepdim: keep the dimension with size 1.
            reduce: reduce all leaves to one tensor.

        Returns:
            With `dim` two containers, `values` and `indices`; else a container, or a tensor.
        """
        return _extreme(self, torch.amax, torch.max, dim, keepdim, reduce)

    @overload
    def all(self, dim: None = None) -> bool: ...
    @overload
    def all(self, dim: SomeDim, keepdim: bool = False) -> Self: ...
    def all(self, dim: Dim = None, keepdim: bool = False) -> bool | Self:
        """Return whether all values are true: of all leaves, or along dimensions.

        Args:
            dim: batch dimensions, or `"feature"`; `None`: over everything.
            keepdim: keep the reduced dimensions with size 1.

        Returns:
            Without `dim` a bool, else a container.
        """
        if dim is not None:
            return cast("Self", reduced(self, torch.all, dim, keepdim, False))
        leaves: list[Tensor] = []
        self._collect(leaves)
        for leaf in leaves:
            if not leaf.all():
                return False
        return True

    @overload
    def any(self, dim: None = None) -> bool: ...
    @overload
    def any(self, dim: SomeDim, keepdim: bool = False) -> Self: ...
    def any(self, dim: Dim = None, keepdim: bool = False) -> bool | Self:
        """Return whether any value is true: of all leaves, or along dimensions; see `all`."""
        if dim is not None:
            return cast("Self", reduced(self, torch.any, dim, keepdim, False))
        leaves: list[Tensor] = []
        self._collect(leaves)
        for leaf in leaves:
            if leaf.any():
                return True
        return False

    def cumsum(self, dim: int) -> Self:
        """Return the cumulative sums along a batch dimension.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": torch.ones(3)}, [3]).cumsum(0)["a"]
            tensor([1., 2., 3.])
        """
        (axis,) = batch_dims_of(self, dim)
        return self._map_each(lambda leaf: torch.cumsum(leaf, axis), same_batch)

    def cumprod(self, dim: int) -> Self:
        """Return the cumulative products along a batch dimension."""
        (axis,) = batch_dims_of(self, dim)
        return self._map_each(lambda leaf: torch.cumprod(leaf, axis), same_batch)


def _extreme(
    td: E,
    over_all: Callable[..., Tensor],
    along: Callable[..., tuple[Tensor, Tensor]],
    dim: Dim,
    keepdim: bool,
    reduce: bool,
) -> E | Tensor | Extremes[E]:
    if dim is None:
        return reduced(td, over_all, None, keepdim, reduce)
    if reduce or isinstance(dim, (str, tuple, list)):
        raise InvalidArgument(
            "`dim` must be one integer, without `reduce`, because the result has indices. Use "
            "`amin` or `amax` for several dimensions, for features, or for all leaves together."
        )
    (axis,) = batch_dims_of(td, dim)
    batch = without((axis,), keepdim)
    found: list[tuple[Tensor, Tensor]] = []

    def values(leaf: Tensor) -> Tensor:
        found.append(along(leaf, axis, keepdim))
        return found[-1][0]

    first = td._map_each(values, batch)
    places = iter(found)
    return Extremes(first, td._map_each(lambda leaf: next(places)[1], batch))
