"""Stacking containers along a new batch dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kd_core._base import TensorDictBase
from kd_core._batch.shapes import new_dim
from kd_core._combine.joining import Join, first_of
from kd_core._naming.parameters import explains_parameters
from kd_core._nodes import registry

if TYPE_CHECKING:
    from typing import TypeVar

    from kd_core._types import Batch

    C = TypeVar("C", bound=TensorDictBase)


# Under its own name: reading it from `torch` while dynamo traces would add a guard on `torch`.
_stack_tensors = torch.stack


@explains_parameters
def stack(tensors: Sequence[C], dim: int | str = 0, *, out: C | None = None) -> C:
    """Stack containers along a new batch dimension; `torch.stack` calls this function too.

    Args:
        tensors: containers of the same keys and batch size.
        dim: the position of the new dimension; a negative one counts from the end of the result,
            and the name of a dimension is its position.
        out: a container into whose leaves the result is written.

    Raises:
        KeySetMismatch: if a container has other keys than the first.
        ShapeMismatch: if a batch size or the shape of an entry differs.
        InvalidValue: if an entry of `out` holds one value for all rows, and it differs.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, stack
        >>> stack([TensorDict({"a": torch.zeros(3)}, [3]) for _ in range(2)]).batch_size
        torch.Size([2, 3])
    """
    if isinstance(dim, str):
        dim = new_dim(dim, first_of(tensors, "stack")._desc.batch)
    how = object.__new__(_Stacking)  # calling a class is slow to trace
    how.name, how.call = "stack", _stack_tensors
    how.dim = how.wrapped(dim, tensors, 1)
    return how.combined(tensors, out)


class _Stacking(Join):
    __slots__ = ()

    def shape(self, shapes: Sequence[Batch]) -> Batch | None:
        first = shapes[0]
        for shape in shapes:
            if shape is not first and shape != first:
                return None
        return self.even(first, len(shapes))

    def even(self, shape: Batch, count: int) -> Batch:
        return (*shape[: self.dim], count, *shape[self.dim :])


registry.register("stack", stack)
