"""Alignment of tensor operands with the leaves of members: the rows that belong to each leaf.

Knows containers of members; must not know the operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kd_core._protocol.composite import Composite, as_for_a_batch
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from kd_core._types import Batch


def beside_members(td: AbstractContainer, operand: Tensor) -> list[Tensor]:
    """Return the part of a tensor over the batch that belongs to each leaf of `_collect`."""
    batch: Batch = td._desc.batch
    beside: list[Tensor] = []
    if operand.ndim:
        rows = operand.reshape((*operand.shape, *(1,) * (len(batch) - operand.ndim)))
        _stand_beside(td, rows.expand(batch), len(batch), beside)
    else:
        _stand_alone(td, operand, beside)
    return beside


def _stand_beside(td: AbstractContainer, operand: Tensor, ndim: int, beside: list[Tensor]) -> None:
    """Append a tensor over the first `ndim` dimensions for each leaf of `_collect`."""
    if isinstance(td, Composite):
        over = td._dim < ndim
        rows = operand.unbind(td._dim) if over else [operand] * len(td._members)
        for member, row in zip(td._members, rows, strict=True):
            _stand_beside(member, row, ndim - over, beside)
        return
    for value in td._entries.values():
        if isinstance(value, AbstractContainer):
            _stand_beside(value, operand, ndim, beside)
        elif isinstance(value, Tensor):
            beside.append(operand.reshape((*operand.shape, *(1,) * (value.ndim - ndim))))


def _stand_alone(td: AbstractContainer, operand: Tensor, beside: list[Tensor]) -> None:
    """Append a 0-d tensor for each leaf of `_collect`, with the dtype that promotes correctly."""
    if isinstance(td, Composite):
        leaves: list[Tensor] = []
        td._collect(leaves)
        beside += [as_for_a_batch(leaf, operand) for leaf in leaves]
        return
    for value in td._entries.values():
        if isinstance(value, AbstractContainer):
            _stand_alone(value, operand, beside)
        elif isinstance(value, Tensor):
            beside.append(operand)
