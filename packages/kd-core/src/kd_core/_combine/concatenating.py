"""Concatenating containers along a batch dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from kd_core._base import TensorDictBase
from kd_core._batch.caching import remembered
from kd_core._batch.shapes import wrap_dim
from kd_core._combine.joining import Join, combined, concatenated_shape, dims_of

C = TypeVar("C", bound=TensorDictBase)

# By a name of its own: dynamo guards that the `torch` of each module it looks into is the same.
_cat_tensors = torch.cat


def cat(tensors: Sequence[C], dim: int = 0, *, out: C | None = None) -> C:
    """Concatenate containers along a batch dimension; `torch.cat` comes here too.

    Args:
        tensors: containers of the same keys, whose batch sizes differ in `dim` at most.
        dim: along which batch dimension.
        out: a container whose leaves the result is written to.

    Raises:
        KeySetMismatch: if a container has other keys than the first.
        ShapeMismatch: if a batch size or the shape of an entry differs elsewhere.
        InvalidValue: if they hold different values of data that is no tensor.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, cat
        >>> cat([TensorDict({"a": torch.zeros(n)}, [n]) for n in (2, 3)]).batch_size
        torch.Size([5])
    """
    return combined(tensors, _concatenating(dims_of(tensors, "cat"), dim), out)


@remembered
def _concatenating(ndim: int, dim: int) -> Join:
    return Join("cat", wrap_dim(dim, ndim), _cat_tensors, concatenated_shape)
