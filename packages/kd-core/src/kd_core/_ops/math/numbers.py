"""Functions of two for which torch takes no number: it becomes a 0-dim tensor beside each leaf.

Knows which tensor stands for a number; the rules of other operands are those of `operands`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from kd_core._leaves.foreach import Kernel, run_pairs, run_pairs_
from kd_core._leaves.in_place import check_in_place
from kd_core._leaves.numbers import number_beside
from kd_core._ops.math.binary import binary, binary_
from kd_core._ops.math.operands import as_operand
from kd_core._protocol.primitives import AbstractContainer, leaves_of

W = TypeVar("W", bound=AbstractContainer)
_LeafOp: TypeAlias = Callable[..., Tensor]


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
