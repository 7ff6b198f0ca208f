"""Functions of all values along dimensions: extreme values, scans, truth, quantiles, softmax."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar, cast, overload

import torch
from torch import Tensor

from kd_core._batch.shapes import EVERYTHING_KEPT, SAME_SHAPE, Reduced
from kd_core._errors import ShapeMismatch
from kd_core._leaves.foreach import is_ragged
from kd_core._ops.access import renamed
from kd_core._ops.reducing import (
    along_batch,
    batch_dims_of,
    extreme,
    over_everything,
    reduced,
    reduced_features,
    running,
)
from kd_core._protocol import AbstractContainer, Composite, refuse_unbatched

if TYPE_CHECKING:
    from typing import Self, TypeVar

    from kd_core._ops.access import KeyFn
    from kd_core._ops.reducing import Dim, Extremes, SomeDim
    from kd_core._types import Batch, LeafFn

    S = TypeVar("S", bound=AbstractContainer)


class Statistics(AbstractContainer):
    """The methods for extreme values, cumulative results, truth, quantiles and softmax.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": torch.tensor([0.0, 1.0, 2.0, 3.0])}, [4])
        >>> td.quantile(0.5)["a"], td.quantile([0.0, 1.0], 0)["a"]
        (tensor(1.5000), tensor([0., 3.]))
        >>> td.softmax(0)["a"].sum()
        tensor(1.)
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
    def quantile(
        self,
        q: float | Sequence[float] | Tensor,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
        reduce: Literal[False] = False,
        key_transform: KeyFn | None = None,
    ) -> Self: ...

    @overload
    def quantile(
        self,
        q: float | Sequence[float] | Tensor,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
        reduce: Literal[True],
    ) -> Tensor: ...

    def quantile(
        self,
        q: float | Sequence[float] | Tensor,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
        reduce: bool = False,
        key_transform: KeyFn | None = None,
    ) -> Self | Tensor:
        """Compute quantiles: `torch.quantile`, over several dimensions too.

        Args:
            q: a number between 0 and 1, or several: these become the first batch dimension.
            dim: batch dimensions, `"feature"`, or `None` for everything.
            keepdim: keep the reduced dimensions with size 1.
            interpolation: between two values: "linear", "lower", "higher", "midpoint" or
                "nearest".
            reduce: reduce all leaves to one tensor.
            key_transform: a function from each key to its name in the result.
        """
        several = not isinstance(q, (int, float)) and not (isinstance(q, Tensor) and not q.ndim)
        at = torch.as_tensor(q)
        if at.ndim > 1:
            raise ShapeMismatch(f"`q` must be one number or a vector, got shape {tuple(at.shape)}.")
        fn = partial(_quantile, q=at, interpolation=interpolation)
        if reduce or not several:
            return reduced(self, fn, dim, keepdim, reduce, key_transform)
        lead = tuple(at.shape)
        result = _with_lead(self, fn, dim, keepdim, lead)
        return result if key_transform is None else renamed(result, key_transform)

    def softmax(self, dim: int | str, dtype: torch.dtype | None = None) -> Self:
        """Return the softmax along a batch dimension or over the features: `torch.softmax`.

        Args:
            dim: a batch dimension or its name, or `"feature"` for all trailing dimensions together.
            dtype: the dtype to which leaves are cast first.
        """
        return _along(self, partial(torch.softmax, dtype=dtype), dim)

    def log_softmax(self, dim: int | str, dtype: torch.dtype | None = None) -> Self:
        """Return the logarithm of `softmax`: `torch.log_softmax`."""
        return _along(self, partial(torch.log_softmax, dtype=dtype), dim)

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
    @overload
    def min(
        self, dim: int | str, keepdim: bool = False, *, reduce: bool, return_indices: bool = True
    ) -> Self | Tensor | Extremes[Self] | Extremes[Tensor]: ...
    def min(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        reduce: bool = False,
        return_indices: bool = True,
    ) -> Self | Tensor | Extremes[Self] | Extremes[Tensor]:
        """Return the smallest value of every leaf; along a batch dimension, its index too.

        Args:
            dim: a batch dimension or its name; `None`: over everything.
            keepdim: keep the dimension with size 1.
            reduce: reduce all leaves to one tensor; along `dim` they stand behind one another.
            return_indices: whether the indices are wanted; without them, `dim` may be several
                batch dimensions, or `"feature"`.

        Returns:
            With `dim` two containers, `values` and `indices`, in the type that torch returns; else
            a container, or a tensor.
        """
        return extreme(self, torch.amin, torch.min, dim, keepdim, (reduce, return_indices))

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
    @overload
    def max(
        self, dim: int | str, keepdim: bool = False, *, reduce: bool, return_indices: bool = True
    ) -> Self | Tensor | Extremes[Self] | Extremes[Tensor]: ...
    def max(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        reduce: bool = False,
        return_indices: bool = True,
    ) -> Self | Tensor | Extremes[Self] | Extremes[Tensor]:
        """Return the largest value of every leaf; along a batch dimension, its index too.

        Args:
            dim: a batch dimension or its name; `None`: over everything.
            keepdim: keep the dimension with size 1.
            reduce: reduce all leaves to one tensor; along `dim` they stand behind one another.
            return_indices: whether the indices are wanted; without them, `dim` may be several
                batch dimensions, or `"feature"`.

        Returns:
            With `dim` two containers, `values` and `indices`, in the type that torch returns; else
            a container, or a tensor.
        """
        return extreme(self, torch.amax, torch.max, dim, keepdim, (reduce, return_indices))

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
        self._kd_collect(leaves)
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
        self._kd_collect(leaves)
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
        return self._kd_map_each(along_batch(self, lambda leaf: leaf.cumsum(axis)), SAME_SHAPE)

    def cumprod(self, dim: int | str) -> Self:
        """Return the cumulative products along a batch dimension."""
        (axis,) = batch_dims_of(self, dim)
        return self._kd_map_each(along_batch(self, lambda leaf: leaf.cumprod(axis)), SAME_SHAPE)

    @overload
    def cummax(self, dim: int | str, *, return_indices: Literal[True] = True) -> Extremes[Self]: ...
    @overload
    def cummax(self, dim: int | str, *, return_indices: Literal[False]) -> Self: ...
    @overload
    def cummax(
        self, dim: int | str, *, reduce: bool, return_indices: bool = True
    ) -> Self | Tensor | Extremes[Self] | Extremes[Tensor]: ...
    def cummax(
        self, dim: int | str, *, reduce: bool = False, return_indices: bool = True
    ) -> Self | Tensor | Extremes[Self] | Extremes[Tensor]:
        """Return the largest value so far along a batch dimension, and its index.

        Args:
            dim: the batch dimension, or its name.
            reduce: take all leaves behind one another, as one tensor.
            return_indices: whether the indices are wanted; else one container is returned.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.tensor([1, 3, 2])}, [3])
            >>> td.cummax(0).values["a"], td.cummax(0).indices["a"]
            (tensor([1, 3, 3]), tensor([0, 1, 1]))
        """
        return running(self, torch.cummax, dim, (reduce, return_indices))

    @overload
    def cummin(self, dim: int | str, *, return_indices: Literal[True] = True) -> Extremes[Self]: ...
    @overload
    def cummin(self, dim: int | str, *, return_indices: Literal[False]) -> Self: ...
    @overload
    def cummin(
        self, dim: int | str, *, reduce: bool, return_indices: bool = True
    ) -> Self | Tensor | Extremes[Self] | Extremes[Tensor]: ...
    def cummin(
        self, dim: int | str, *, reduce: bool = False, return_indices: bool = True
    ) -> Self | Tensor | Extremes[Self] | Extremes[Tensor]:
        """Return the smallest value so far along a batch dimension, and its index; see `cummax`."""
        return running(self, torch.cummin, dim, (reduce, return_indices))


def _along(td: S, fn: partial[Tensor], dim: int | str) -> S:
    """Apply a function that keeps shapes along one dimension."""
    if dim != "feature":
        (axis,) = batch_dims_of(td, dim)
        if isinstance(td, Composite) and axis != td._dim:
            inner = axis - (axis > td._dim)
            return td._by_member(lambda member: _along(member, fn, inner))
        made = td._kd_map_each(along_batch(td, lambda leaf: fn(leaf, axis)), SAME_SHAPE)
        return made._kd_engine.to_lazystack(made, axis) if isinstance(td, Composite) else made
    refuse_unbatched(td, "combined along the features of others")
    ndim = td._kd_desc.ndim

    def over_features(leaf: Tensor) -> Tensor:
        if is_ragged(leaf):
            from kd_core._leaves.loops import mapped_rows

            return mapped_rows(leaf, lambda row: fn(row, 0), together=not ndim)
        if leaf.ndim == ndim:
            return fn(leaf.unsqueeze(-1), ndim).squeeze(-1)
        return fn(leaf.flatten(ndim), ndim).reshape(leaf.shape)

    return td._kd_map_each(over_features, SAME_SHAPE)


def _quantile(
    leaf: Tensor,
    dims: tuple[int, ...] | int | None = None,
    keepdim: bool = False,
    *,
    q: Tensor,
    interpolation: str,
) -> Tensor:
    """Compute `torch.quantile`, over several dimensions too."""
    q = q.to(leaf.device, leaf.dtype)
    if dims is None:
        return torch.quantile(leaf, q, interpolation=interpolation)
    along = (dims,) if isinstance(dims, int) else dims
    rest = [size for axis, size in enumerate(leaf.shape) if axis not in along]
    flat = leaf.movedim(along, tuple(range(-len(along), 0))).reshape(*rest, -1)
    result = torch.quantile(flat, q, -1, interpolation=interpolation)
    if not keepdim:
        return result
    kept = [1 if axis in along else size for axis, size in enumerate(leaf.shape)]
    return result.reshape((*q.shape, *kept))


def _with_lead(td: S, fn: partial[Tensor], dim: Dim, keepdim: bool, lead: Batch) -> S:
    """Reduce every leaf with a function that puts a dimension in front of the result."""
    refuse_unbatched(td, "given another one, of several quantiles")
    if dim is None:
        whole = over_everything(td, fn)
        if keepdim:
            over = Reduced(EVERYTHING_KEPT.dims, keepdim=True, lead=lead)
            return td._kd_map_each(lambda leaf: whole(leaf).view((*lead, *(1,) * leaf.ndim)), over)
        return td._kd_map_each(whole, Reduced(first=0, lead=lead))
    if dim == "feature":
        ndim = td._kd_desc.ndim
        return td._kd_map_each(
            _over_features(td, fn, ndim, keepdim), Reduced(first=ndim, lead=lead)
        )
    dims = batch_dims_of(td, dim)
    over = Reduced(dims, keepdim, lead=lead)
    return td._kd_map_each(along_batch(td, lambda leaf: fn(leaf, dims, keepdim)), over)


def _over_features(td: AbstractContainer, fn: partial[Tensor], ndim: int, keepdim: bool) -> LeafFn:
    def over(leaf: Tensor) -> Tensor:
        if is_ragged(leaf):
            return reduced_features(td, [leaf], lambda row: fn(row, 0), keepdim)
        if leaf.ndim == ndim:
            return fn(leaf.unsqueeze(-1), (ndim,))
        return fn(leaf, tuple(range(ndim, leaf.ndim)), keepdim)

    return over
