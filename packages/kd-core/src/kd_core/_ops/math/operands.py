"""The second operand of a pointwise operation: what it may be, and its value beside each leaf.

The second operand is

- a number: for every leaf;
- a tensor: its dimensions are the *first* batch dimensions, so its shape is padded on the right
  with ones to the rank of each leaf; it must not enlarge the batch;
- a container: leaves are matched by key. Both must have the same keys and the same batch size, or
  one of them the batch size ().

Knows operands; must not know the operation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, TypeAlias, TypeGuard, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kd_core._batch.names import without_names
from kd_core._batch.shapes import check_lines_up
from kd_core._errors import ShapeMismatch, wrap_mapping, wrong_type
from kd_core._ops.math.alignment import beside_members, keeps_batch
from kd_core._protocol.primitives import AbstractContainer, refuse_unbatched

if TYPE_CHECKING:
    from kd_core._types import Batch

Operand: TypeAlias = "AbstractContainer | Tensor | complex"
"""A number, a tensor that broadcasts over the batch dimensions, or a container."""

# A tuple, because the guard of dynamo on a class in a set fails at once.
NUMBERS: Final = (int, float, bool, complex)
_OPERANDS: Final = (AbstractContainer, Tensor, int, float, complex)


def is_operand(value: object) -> TypeGuard[Operand]:
    """Return whether a pointwise operation takes this value."""
    return isinstance(value, _OPERANDS) or _is_array(value)


def as_operand(value: object) -> Tensor | complex:
    """Return a number or a tensor.

    Raises:
        InvalidArgument: if the value is neither.
    """
    if isinstance(value, (Tensor, complex, float, int)):
        return value
    if _is_array(value):
        tensor = torch.as_tensor(value)
        return tensor if tensor.ndim else cast(complex, tensor.item())
    what = "a number, a tensor or a container"
    raise wrong_type("the other operand", what, value, wrap_mapping(value))


def is_plain(operand: object) -> bool:
    """Return whether an operand is a number or `None`."""
    return operand is None or operand.__class__ in NUMBERS


def padded(td: AbstractContainer, operand: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return a tensor operand for each collected leaf; members receive their rows."""
    batch = td._desc.batch
    if not operand.ndim:
        return [operand] * len(leaves)
    refuse_unbatched(td, "combined with a tensor over the batch")
    if keeps_batch(td):
        return pad_to_leaves(operand, leaves, batch)
    check_lines_up(tuple(operand.shape), batch, "a tensor")
    return beside_members(td, operand)


def pad_to_leaves(operand: Tensor, leaves: Iterable[Tensor], batch: Batch) -> list[Tensor]:
    """Return a tensor over the first batch dimensions, made broadcastable to each leaf.

    Raises:
        ShapeMismatch: if its shape does not fit, or would enlarge the batch.
    """
    shape = tuple(operand.shape)
    check_lines_up(shape, batch, "a tensor")
    ndim = operand.ndim
    made: dict[int, Tensor] = {}
    for leaf in leaves:
        extra = leaf.ndim - ndim
        if extra not in made:
            made[extra] = operand.reshape(*shape, *(1,) * extra)
    return [made[leaf.ndim - ndim] for leaf in leaves]


def check_batches(mine: Batch, theirs: Batch) -> None:
    """Refuse two containers of different batch sizes, unless one of them is ()."""
    if not mine or not theirs or (not is_compiling() and mine == theirs):
        return
    # To dynamo no symbol is equal to a named size, and that of torch 2.10 compares no named sizes.
    if without_names(mine) != without_names(theirs):
        raise ShapeMismatch(
            f"batch sizes must be equal, or one of them (), got {mine} and {theirs}. Use `expand` "
            "or `reshape` first."
        )


def _is_array(value: object) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "dtype")
