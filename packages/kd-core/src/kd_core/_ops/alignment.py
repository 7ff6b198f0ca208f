"""Tensor operands beside the leaves of members: which rows of one stand beside which leaf.

Knows containers of members; must not know what is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kd_core._protocol.composite import Composite, as_for_a_batch
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from kd_core._types import Batch


def beside_members(td: AbstractContainer, operand: Tensor) -> list[Tensor]:
    """Return what of a tensor over the batch stands beside each leaf that `_collect` gives."""
    batch: Batch = td._desc.batch
    beside: list[Tensor] = []
    if operand.ndim:
        rows = operand.reshape((*operand.shape, *(1,) * (len(batch) - operand.ndim)))
        _stand_beside(td, rows.expand(batch), len(batch), beside)
    else:
        _stand_alone(td, operand, beside)
    return beside


def _stand_beside(td: AbstractContainer, operand: Tensor, ndim: int, beside: list[Tensor]) -> None:
    """Append, for each leaf that `_collect` gives, a tensor over the first `ndim` dimensions."""
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
    """Append a 0-d tensor for each leaf that `_collect` gives, as it promotes beside the leaf."""
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
