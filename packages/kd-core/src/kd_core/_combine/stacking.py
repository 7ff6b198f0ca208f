"""Stacking containers along a new batch dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from kd_core._base import TensorDictBase
from kd_core._batch.caching import remembered
from kd_core._batch.shapes import wrap_dim
from kd_core._combine.joining import Join, combined, dims_of, stacked_shape

C = TypeVar("C", bound=TensorDictBase)

# By a name of its own: dynamo guards that the `torch` of each module it looks into is the same.
_stack_tensors = torch.stack


def stack(tensors: Sequence[C], dim: int = 0, *, out: C | None = None) -> C:
    """Stack containers along a new batch dimension; `torch.stack` comes here too.

    Args:
        tensors: containers of the same keys and batch size.
        dim: where the new dimension goes; negative ones count from behind the last one.
        out: a container whose leaves the result is written to.

    Raises:
        KeySetMismatch: if a container has other keys than the first.
        ShapeMismatch: if a batch size or the shape of an entry differs.
        InvalidValue: if they hold different values of data that is no tensor.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, stack
        >>> stack([TensorDict({"a": torch.zeros(3)}, [3]) for _ in range(2)]).batch_size
        torch.Size([2, 3])
    """
    return combined(tensors, _stacking(dims_of(tensors, "stack"), dim), out)


@remembered
def _stacking(ndim: int, dim: int) -> Join:
    return Join("stack", wrap_dim(dim, ndim + 1), _stack_tensors, stacked_shape)
