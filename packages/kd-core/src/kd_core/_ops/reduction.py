"""Reductions to one value: one typed method per row of `tools/operations.py`.

Written by `tools/generate_ops.py`: change the table, then run `nox -s generate`.
`_ops.reducing` has the rules for `dim` and `reduce`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal, overload

import torch

from kd_core._ops.binary import reduced_to
from kd_core._ops.reducing import logsumexp, norm, prod, reduced
from kd_core._protocol import AbstractContainer

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor

    from kd_core._ops.access import KeyFn
    from kd_core._ops.reducing import Dim


class Reductions(AbstractContainer):
    """Reductions to one value.

    Without `dim` every leaf is reduced to one number, and the batch size is (). `dim` names batch
    dimensions, or is `"feature"` for all trailing dimensions; `keepdim` keeps reduced dimensions
    with size 1. `reduce=True` reduces all leaves to one tensor. `key_transform` is a function from
    each key to its name in the result. `out` is a container into whose leaves the result is
    written.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": torch.ones(3), "b": torch.ones(3, 2)}, [3])
        >>> td.sum().to_dict()
        {'a': tensor(3.), 'b': tensor(6.)}
        >>> td.sum(0)["b"], td.mean(0, keepdim=True).batch_size
        (tensor([3., 3.]), torch.Size([1]))
        >>> td.sum(dim="feature")["b"], td.sum(reduce=True)
        (tensor([2., 2., 2.]), tensor(9.))
        >>> list(td.mean(key_transform="mean_{}".format).keys())
        ['mean_a', 'mean_b']
    """

    __slots__ = ()

    @overload
    def sum(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        key_transform: KeyFn | None = None,
        reduce: Literal[False] = False,
    ) -> Self: ...

    @overload
    def sum(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        reduce: Literal[True],
    ) -> Tensor: ...

    def sum(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        key_transform: KeyFn | None = None,
        reduce: bool = False,
    ) -> Self | Tensor:
        """Return the sum: `torch.sum`."""
        if dtype is not None:
            return reduced(
                self, partial(torch.sum, dtype=dtype), dim, keepdim, reduce, key_transform
            )
        return reduced(self, torch.sum, dim, keepdim, reduce, key_transform)

    @overload
    def nansum(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        key_transform: KeyFn | None = None,
        reduce: Literal[False] = False,
    ) -> Self: ...

    @overload
    def nansum(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        reduce: Literal[True],
    ) -> Tensor: ...

    def nansum(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        key_transform: KeyFn | None = None,
        reduce: bool = False,
    ) -> Self | Tensor:
        """Return the sum, NaN taken as zero: `torch.nansum`."""
        if dtype is not None:
            return reduced(
                self, partial(torch.nansum, dtype=dtype), dim, keepdim, reduce, key_transform
            )
        return reduced(self, torch.nansum, dim, keepdim, reduce, key_transform)

    @overload
    def mean(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        key_transform: KeyFn | None = None,
        reduce: Literal[False] = False,
    ) -> Self: ...

    @overload
    def mean(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        reduce: Literal[True],
    ) -> Tensor: ...

    def mean(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        key_transform: KeyFn | None = None,
        reduce: bool = False,
    ) -> Self | Tensor:
        """Return the mean: `torch.mean`."""
        if dtype is not None:
            return reduced(
                self, partial(torch.mean, dtype=dtype), dim, keepdim, reduce, key_transform
            )
        return reduced(self, torch.mean, dim, keepdim, reduce, key_transform)

    @overload
    def nanmean(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        key_transform: KeyFn | None = None,
        reduce: Literal[False] = False,
    ) -> Self: ...

    @overload
    def nanmean(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        reduce: Literal[True],
    ) -> Tensor: ...

    def nanmean(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        key_transform: KeyFn | None = None,
        reduce: bool = False,
    ) -> Self | Tensor:
        """Return the mean of what is not NaN: `torch.nanmean`."""
        if dtype is not None:
            return reduced(
                self, partial(torch.nanmean, dtype=dtype), dim, keepdim, reduce, key_transform
            )
        return reduced(self, torch.nanmean, dim, keepdim, reduce, key_transform)

    @overload
    def prod(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        key_transform: KeyFn | None = None,
        reduce: Literal[False] = False,
    ) -> Self: ...

    @overload
    def prod(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        reduce: Literal[True],
    ) -> Tensor: ...

    def prod(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        key_transform: KeyFn | None = None,
        reduce: bool = False,
    ) -> Self | Tensor:
        """Return the product: `torch.prod`."""
        if dtype is not None:
            return reduced(self, partial(prod, dtype=dtype), dim, keepdim, reduce, key_transform)
        return reduced(self, prod, dim, keepdim, reduce, key_transform)

    @overload
    def var(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        correction: float = 1,
        key_transform: KeyFn | None = None,
        reduce: Literal[False] = False,
    ) -> Self: ...

    @overload
    def var(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        correction: float = 1,
        reduce: Literal[True],
    ) -> Tensor: ...

    def var(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        correction: float = 1,
        key_transform: KeyFn | None = None,
        reduce: bool = False,
    ) -> Self | Tensor:
        """Return the variance: `torch.var`."""
        if type(correction) is not int or correction != 1:
            return reduced(
                self, partial(torch.var, correction=correction), dim, keepdim, reduce, key_transform
            )
        return reduced(self, torch.var, dim, keepdim, reduce, key_transform)

    @overload
    def std(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        correction: float = 1,
        key_transform: KeyFn | None = None,
        reduce: Literal[False] = False,
    ) -> Self: ...

    @overload
    def std(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        correction: float = 1,
        reduce: Literal[True],
    ) -> Tensor: ...

    def std(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        correction: float = 1,
        key_transform: KeyFn | None = None,
        reduce: bool = False,
    ) -> Self | Tensor:
        """Return the standard deviation: `torch.std`."""
        if type(correction) is not int or correction != 1:
            return reduced(
                self, partial(torch.std, correction=correction), dim, keepdim, reduce, key_transform
            )
        return reduced(self, torch.std, dim, keepdim, reduce, key_transform)

    @overload
    def amin(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        key_transform: KeyFn | None = None,
        reduce: Literal[False] = False,
    ) -> Self: ...

    @overload
    def amin(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        reduce: Literal[True],
    ) -> Tensor: ...

    def amin(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        key_transform: KeyFn | None = None,
        reduce: bool = False,
    ) -> Self | Tensor:
        """Return the smallest value: `torch.amin`."""
        return reduced(self, torch.amin, dim, keepdim, reduce, key_transform)

    @overload
    def amax(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        key_transform: KeyFn | None = None,
        reduce: Literal[False] = False,
    ) -> Self: ...

    @overload
    def amax(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        reduce: Literal[True],
    ) -> Tensor: ...

    def amax(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        key_transform: KeyFn | None = None,
        reduce: bool = False,
    ) -> Self | Tensor:
        """Return the largest value: `torch.amax`."""
        return reduced(self, torch.amax, dim, keepdim, reduce, key_transform)

    @overload
    def logsumexp(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        key_transform: KeyFn | None = None,
        out: Self | None = None,
        reduce: Literal[False] = False,
    ) -> Self: ...

    @overload
    def logsumexp(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        reduce: Literal[True],
    ) -> Tensor: ...

    def logsumexp(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        key_transform: KeyFn | None = None,
        out: Self | None = None,
        reduce: bool = False,
    ) -> Self | Tensor:
        """Return the logarithm of the sum of exponentials: `torch.logsumexp`."""
        return reduced_to(out, reduced(self, logsumexp, dim, keepdim, reduce, key_transform))

    @overload
    def norm(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        ord: float = 2,
        dtype: torch.dtype | None = None,
        key_transform: KeyFn | None = None,
        out: Self | None = None,
        reduce: Literal[False] = False,
    ) -> Self: ...

    @overload
    def norm(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        ord: float = 2,
        dtype: torch.dtype | None = None,
        reduce: Literal[True],
    ) -> Tensor: ...

    def norm(
        self,
        dim: Dim = None,
        keepdim: bool = False,
        *,
        ord: float = 2,
        dtype: torch.dtype | None = None,
        key_transform: KeyFn | None = None,
        out: Self | None = None,
        reduce: bool = False,
    ) -> Self | Tensor:
        """Return the vector norm: `torch.norm`."""
        if type(ord) is not int or ord != 2 or dtype is not None:
            return reduced_to(
                out,
                reduced(
                    self, partial(norm, ord=ord, dtype=dtype), dim, keepdim, reduce, key_transform
                ),
            )
        return reduced_to(out, reduced(self, norm, dim, keepdim, reduce, key_transform))
