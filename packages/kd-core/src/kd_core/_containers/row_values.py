"""Writes to the value of one row in a member of a stack.

Rows of a batch are written by their positions; the member of a stack that is one row holds its
value itself. So a tensor stands for the value, and all writes are checked and made together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kd_core._containers.non_tensor import NonTensorData, NonTensorDataBase, refuse_tensors

if TYPE_CHECKING:
    from typing import Self


class RowValue:
    """The value of one row in a member of a stack, which is written as the rows of the stack are.

    A container without batch dimensions alone refuses such a write: it may be a row of a batch,
    whose value is a copy.
    """

    __slots__ = ("_desc", "_node")

    def __init__(self, node: NonTensorData) -> None:
        self._node, self._desc = node, node._desc

    def _encode(self, value: object, path: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Return a tensor that stands for the value, and one to copy into it."""
        refuse_tensors(value, path)
        source = torch.zeros((), dtype=torch.int64)
        target = source.clone().as_subclass(_StandIn)
        target.node = self._node
        target.value = value._item() if isinstance(value, NonTensorDataBase) else value
        return target, source


class _StandIn(Tensor):
    """A tensor that stands for the value of one row: a copy into it replaces the value."""

    node: NonTensorData
    value: object

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Self:
        """Replace the value."""
        self.node.data = self.value
        return self
