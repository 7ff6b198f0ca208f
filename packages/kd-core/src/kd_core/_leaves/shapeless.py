"""Tensors without a shape: nested tensors of the layout `torch.strided`.

torch raises an internal error wherever their shape is read. They fit containers of at most one
batch dimension, that of their rows. Loops do not ask for them; what fails on one asks here why.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kd_core._errors import InvalidValue


def is_shapeless(leaf: Tensor) -> bool:
    """Return whether the shape of a tensor cannot be read."""
    return leaf.is_nested and leaf.layout is torch.strided


def have_same_rows(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors without a shape have rows of the same sizes."""
    if not (is_shapeless(one) and is_shapeless(other)):
        return False
    return torch.equal(one._nested_tensor_size(), other._nested_tensor_size())


def explain_shapeless(error: Exception | None, what: str, *tensors: Tensor) -> None:
    """Raise the clear error if the one of torch is that a tensor has no shape.

    Raises:
        InvalidValue: if one of the tensors has none.
    """
    if any(map(is_shapeless, tensors)):
        raise without_shape(what) from error


def without_shape(what: str) -> InvalidValue:
    """Build the error for a tensor without a shape where one is needed.

    Args:
        what: the value, with its key.
    """
    return InvalidValue(
        f"{what} must have a shape, got a nested tensor of the layout torch.strided, which has "
        "none. Build it with `layout=torch.jagged`, or pad it with "
        "`torch.nested.to_padded_tensor`."
    )
