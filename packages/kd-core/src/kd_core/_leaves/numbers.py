"""Numbers as 0-dim tensors, promoted beside a leaf as torch promotes the number itself.

Knows one leaf and one number; must not know containers.
"""

from __future__ import annotations

from typing import Final, cast

import torch
from torch import Tensor

from kd_core._errors import InvalidValue

_UNSIGNED: Final = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)


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
