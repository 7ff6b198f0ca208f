"""Questions about tensors and dtypes, and tensors that get the shape of others from the left.

Knows tensors; must not know entries or containers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kd_core._errors import ShapeMismatch, shape_text, wrong_type


def expand_right(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a view of a tensor that is expanded to a shape, new dimensions on the right.

    Args:
        tensor: the tensor.
        shape: the shape, which must start with that of the tensor.

    Raises:
        ShapeMismatch: if it does not.

    Example:
        >>> import torch
        >>> from kd_core import expand_right
        >>> expand_right(torch.tensor([1, 2]), (2, 3))
        tensor([[1, 1, 1],
                [2, 2, 2]])
    """
    wanted = tuple(shape)
    aligned = tuple(tensor.shape) + (1,) * (len(wanted) - tensor.ndim)
    fits = all(have in (1, want) for have, want in zip(aligned, wanted, strict=False))
    if tensor.ndim > len(wanted) or not fits:
        raise ShapeMismatch(
            f"a tensor of shape {shape_text(tensor.shape)} cannot be expanded on the right to "
            f"{shape_text(wanted)}: its dimensions must be the first ones of that shape, or 1."
        )
    return tensor.reshape(aligned).expand(wanted)


def expand_as_right(tensor: Tensor, dest: Tensor) -> Tensor:
    """Return a view of a tensor that is expanded to the shape of another; see `expand_right`.

    Args:
        tensor: the tensor.
        dest: the other tensor, or a container.

    Raises:
        ShapeMismatch: if its shape does not start with that of the tensor.

    Example:
        >>> import torch
        >>> from kd_core import expand_as_right
        >>> expand_as_right(torch.zeros(2), torch.zeros(2, 3)).shape
        torch.Size([2, 3])
    """
    return expand_right(tensor, dest.shape)


def is_floating(*args: Tensor | torch.dtype) -> bool:
    """Return whether all tensors or dtypes are of floating point.

    Example:
        >>> import torch
        >>> from kd_core import is_floating
        >>> is_floating(torch.zeros(2), torch.bfloat16), is_floating(torch.int8)
        (True, False)
    """
    return _all(args, lambda dtype: dtype.is_floating_point)


def is_inexact(*args: Tensor | torch.dtype) -> bool:
    """Return whether all tensors or dtypes are of floating point or complex.

    Example:
        >>> import torch
        >>> from kd_core import is_inexact
        >>> is_inexact(torch.complex64)
        True
    """
    return _all(args, lambda dtype: dtype.is_floating_point or dtype.is_complex)


def is_bool(*args: Tensor | torch.dtype) -> bool:
    """Return whether all tensors or dtypes are boolean.

    Example:
        >>> import torch
        >>> from kd_core import is_bool
        >>> is_bool(torch.zeros(2) == 0)
        True
    """
    return _all(args, lambda dtype: dtype is torch.bool)


def is_integer(*args: Tensor | torch.dtype) -> bool:
    """Return whether all tensors or dtypes are of integers; booleans are not.

    Example:
        >>> import torch
        >>> from kd_core import is_integer
        >>> is_integer(torch.arange(2)), is_integer(torch.bool)
        (True, False)
    """
    return _all(args, _is_integer)


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _all(args: Sequence[object], question: Callable[[torch.dtype], bool]) -> bool:
    return all(question(_dtype_of(arg)) for arg in args)


def _dtype_of(value: object) -> torch.dtype:
    dtype = value if isinstance(value, torch.dtype) else getattr(value, "dtype", None)
    if not isinstance(dtype, torch.dtype):
        raise wrong_type("each argument", "a tensor or a dtype", value)
    return dtype
