"""Functions of two for which torch takes no number: it becomes a 0-dim tensor beside each leaf.

Knows which tensor stands for a number; the rules of other operands are those of `operands`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import torch
from torch import Tensor

from kd_core._errors import InvalidValue
from kd_core._leaves.foreach import Kernel, run_pairs, run_pairs_
from kd_core._leaves.in_place import check_in_place
from kd_core._ops.math.binary import binary, binary_
from kd_core._ops.math.operands import as_operand
from kd_core._protocol.primitives import AbstractContainer, leaves_of

if TYPE_CHECKING:
    from typing import TypeVar

    W = TypeVar("W", bound=AbstractContainer)


_LeafOp: TypeAlias = Callable[..., Tensor]
_UNSIGNED: Final = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def as_truth(other: object) -> AbstractContainer | Tensor:
    """Return an operand; a number becomes a 0-dim tensor of its truth, which every dtype holds."""
    operand = _operand(other)
    if isinstance(operand, (AbstractContainer, Tensor)):
        return operand
    return torch.tensor(bool(operand))


def as_float(other: object) -> AbstractContainer | Tensor | complex:
    """Return an operand of a function that computes in floating point; an integer as a float."""
    operand = _operand(other)
    return float(operand) if isinstance(operand, int) else operand


def binary_of_tensors(td: W, other: object, fn: _LeafOp, kernel: Kernel | None = None) -> W:
    """Apply a function of two tensors to every leaf and the operand; see `binary`.

    Raises:
        InvalidValue: if the operand is an integer that the dtype of a leaf does not hold.
    """
    operand = _operand(other)
    if isinstance(operand, (AbstractContainer, Tensor)):
        return binary(td, operand, fn, kernel)
    leaves = leaves_of(td)
    beside = [number_beside(leaf, operand) for leaf in leaves]
    return td._rebuild(iter(run_pairs(leaves, beside, fn, kernel)))


def binary_of_tensors_(td: W, other: object, fn: _LeafOp, kernel: Kernel | None = None) -> W:
    """Apply a function of two tensors that writes into the storage of each leaf; see `binary_`."""
    operand = _operand(other)
    if isinstance(operand, (AbstractContainer, Tensor)):
        return binary_(td, operand, fn, kernel)
    leaves = leaves_of(td)
    beside = [number_beside(leaf, operand) for leaf in leaves]
    run_pairs_(leaves, beside, fn, kernel, check_in_place(td._entries, leaves, fn, beside))
    return td


def _operand(other: object) -> AbstractContainer | Tensor | complex:
    return other if isinstance(other, AbstractContainer) else as_operand(other)


def promoted(dtype: torch.dtype, number: complex) -> torch.dtype:
    """Return `torch.result_type` of a tensor and a number, which dynamo does not trace."""
    if isinstance(number, (bool, int)):
        is_wider = dtype is torch.bool and not isinstance(number, bool)
        return torch.int64 if is_wider else dtype
    floats = dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()
    return floats if isinstance(number, float) else floats.to_complex()


def number_beside(leaf: Tensor, number: complex) -> Tensor:
    """Return a number as a 0-dim tensor on the device of a leaf.

    Raises:
        InvalidValue: if it is an integer that the promoted dtype does not hold.
    """
    dtype = promoted(leaf.dtype, number)
    try:
        if isinstance(number, int) and dtype in _UNSIGNED and number < 0:
            raise OverflowError
        if _rounds_to_infinity(dtype, number):
            return torch.tensor(number, dtype=dtype, device=leaf.device)
        # Unlike `torch.tensor`, this is traced without a constant.
        return torch.full((), cast("float", number), dtype=dtype, device=leaf.device)
    except (RuntimeError, OverflowError) as error:
        if not isinstance(number, int):
            raise
        raise InvalidValue(
            f"a number beside a leaf of {dtype} must be one that {dtype} holds, got {number}. "
            "Cast the leaf to a wider dtype first."
        ) from error


def _rounds_to_infinity(dtype: torch.dtype, number: complex) -> bool:
    """Return whether `torch.full` may refuse a number because it is infinite in a dtype."""
    return (dtype.is_floating_point or dtype.is_complex) and abs(number) > torch.finfo(dtype).max
