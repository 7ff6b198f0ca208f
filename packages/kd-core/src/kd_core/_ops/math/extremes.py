"""Extreme values with their indices, `all` and `any`, and cumulative sums and products."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, TypeVar, cast, overload

import torch
from torch import Tensor

from kd_core._batch.computing import SAME_SHAPE
from kd_core._errors import InvalidArgument
from kd_core._naming.parameters import explains_parameters
from kd_core._ops.math.reducing import along_batch, batch_dims_of, reduced, without
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from typing import Self

    from kd_core._ops.math.reducing import Dim, SomeDim
    from kd_core._types import BatchFn

    E = TypeVar("E", bound="Extrema")

W = TypeVar("W")


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
    def min(
        self, dim: int | str, keepdim: bool = False, *, return_indices: Literal[True] = True
    ) -> Extremes[Self]: ...
    @overload
    def min(
        self, dim: SomeDim, keepdim: bool = False, *, return_indices: Literal[False]
    ) -> Self: ...
    def min(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        reduce: bool = False,
        return_indices: bool = True,
    ) -> Self | Tensor | Extremes[Self]:
        """Return the smallest value of every leaf; along a batch dimension, its index too.

        Args:
            dim: a batch dimension or its name; `None`: over everything.
            keepdim: keep the dimension with size 1.
            reduce: reduce all leaves to one tensor.
            return_indices: whether the indices are wanted; without them, `dim` may be several
                batch dimensions, or `"feature"`.

        Returns:
            With `dim` two containers, `values` and `indices`; else a container, or a tensor.
        """
        return _extreme(self, torch.amin, torch.min, dim, keepdim, reduce, return_indices)

    @overload
    def max(self, dim: None = None, *, reduce: Literal[False] = False) -> Self: ...
    @overload
    def max(self, dim: None = None, *, reduce: Literal[True]) -> Tensor: ...
    @overload
    def max(
        self, dim: int | str, keepdim: bool = False, *, return_indices: Literal[True] = True
    ) -> Extremes[Self]: ...
    @overload
    def max(
        self, dim: SomeDim, keepdim: bool = False, *, return_indices: Literal[False]
    ) -> Self: ...
    def max(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        reduce: bool = False,
        return_indices: bool = True,
    ) -> Self | Tensor | Extremes[Self]:
        """Return the largest value of every leaf; along a batch dimension, its index too.

        Args:
            dim: a batch dimension or its name; `None`: over everything.
            keepdim: keep the dimension with size 1.
            reduce: reduce all leaves to one tensor.
            return_indices: whether the indices are wanted; without them, `dim` may be several
                batch dimensions, or `"feature"`.

        Returns:
            With `dim` two containers, `values` and `indices`; else a container, or a tensor.
        """
        return _extreme(self, torch.amax, torch.max, dim, keepdim, reduce, return_indices)

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

    def cumsum(self, dim: int | str) -> Self:
        """Return the cumulative sums along a batch dimension.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": torch.ones(3)}, [3]).cumsum(0)["a"]
            tensor([1., 2., 3.])
        """
        (axis,) = batch_dims_of(self, dim)
        return self._map_each(along_batch(self, lambda leaf: leaf.cumsum(axis)), SAME_SHAPE)

    def cumprod(self, dim: int | str) -> Self:
        """Return the cumulative products along a batch dimension."""
        (axis,) = batch_dims_of(self, dim)
        return self._map_each(along_batch(self, lambda leaf: leaf.cumprod(axis)), SAME_SHAPE)

    @overload
    def cummax(self, dim: int | str, *, return_indices: Literal[True] = True) -> Extremes[Self]: ...
    @overload
    def cummax(self, dim: int | str, *, return_indices: Literal[False]) -> Self: ...
    @explains_parameters
    def cummax(self, dim: int | str, *, return_indices: bool = True) -> Self | Extremes[Self]:
        """Return the largest value so far along a batch dimension, and its index.

        Args:
            dim: the batch dimension, or its name.
            return_indices: whether the indices are wanted; else one container is returned.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.tensor([1, 3, 2])}, [3])
            >>> td.cummax(0).values["a"], td.cummax(0).indices["a"]
            (tensor([1, 3, 3]), tensor([0, 1, 1]))
        """
        (axis,) = batch_dims_of(self, dim)
        found = _pairs(self, along_batch(self, lambda leaf: torch.cummax(leaf, axis)), SAME_SHAPE)
        return found if return_indices else found.values

    @overload
    def cummin(self, dim: int | str, *, return_indices: Literal[True] = True) -> Extremes[Self]: ...
    @overload
    def cummin(self, dim: int | str, *, return_indices: Literal[False]) -> Self: ...
    @explains_parameters
    def cummin(self, dim: int | str, *, return_indices: bool = True) -> Self | Extremes[Self]:
        """Return the smallest value so far along a batch dimension, and its index; see `cummax`."""
        (axis,) = batch_dims_of(self, dim)
        found = _pairs(self, along_batch(self, lambda leaf: torch.cummin(leaf, axis)), SAME_SHAPE)
        return found if return_indices else found.values


def _extreme(
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
    found = _pairs(td, extreme, without((axis,), keepdim))
    return found if return_indices else found.values


def _pairs(td: E, fn: Callable[[Tensor], tuple[Tensor, Tensor]], batch: BatchFn) -> Extremes[E]:
    """Apply a function that returns values and indices."""
    found: list[tuple[Tensor, Tensor]] = []

    def values(leaf: Tensor) -> Tensor:
        found.append(fn(leaf))
        return found[-1][0]

    first = td._map_each(values, batch)
    places = iter(found)
    return Extremes(first, td._map_each(lambda leaf: next(places)[1], batch))
