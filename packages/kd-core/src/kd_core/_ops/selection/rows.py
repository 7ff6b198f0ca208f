"""Selection of rows of leaves by a mask or by row numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kd_core._batch.names import resized, without_names
from kd_core._errors import InvalidArgument, ShapeMismatch

if TYPE_CHECKING:
    from kd_core._types import Batch, LeafFn


def check_mask(mask: object) -> Tensor:
    """Check that a value is a mask, and return it.

    Raises:
        InvalidArgument: if it is not a tensor of booleans.
    """
    if isinstance(mask, Tensor) and mask.dtype is torch.bool:
        return mask
    kind = f"a tensor of {mask.dtype}" if isinstance(mask, Tensor) else f"`{type(mask).__name__}`"
    raise InvalidArgument(f"a mask must be a tensor of torch.bool, got {kind}.")


def rows_where(mask: Tensor, batch: Batch) -> tuple[LeafFn, Batch]:
    """Return a function that selects the rows of a leaf where a mask is true, and the batch size.

    The row numbers are computed once, not for each leaf.

    Raises:
        ShapeMismatch: if the mask does not have the first dimensions of the batch.
    """
    ndim = mask.ndim
    if mask.shape != without_names(batch[:ndim]):  # to dynamo no symbol is equal to a named size
        raise ShapeMismatch(
            f"the shape of a mask must be the first dimensions of batch_size {batch}, got "
            f"{tuple(mask.shape)}."
        )
    if not ndim:  # as in torch, a new dimension in front
        return lambda leaf: leaf[beside(mask, leaf)], (int(mask), *batch)
    rows = (mask if ndim == 1 else mask.flatten()).nonzero().view(-1)
    count = rows.shape[0]
    if ndim == 1:
        return lambda leaf: take_rows(leaf, rows), (resized(batch[0], count), *batch[1:])
    return lambda leaf: take_rows(leaf.flatten(0, ndim - 1), rows), (count, *batch[ndim:])


def take_rows(leaf: Tensor, rows: Tensor, dim: int = 0) -> Tensor:
    """Copy the rows of the given numbers along a dimension."""
    there = rows if rows.is_cpu and leaf.is_cpu else beside(rows, leaf)
    try:
        return leaf.index_select(dim, there)
    except NotImplementedError:  # torch.uint16, torch.uint32, torch.uint64
        return leaf.movedim(dim, 0)[there.view(-1)].movedim(0, dim)


def beside(tensor: Tensor, leaf: Tensor) -> Tensor:
    """Return a tensor moved to the device of a leaf."""
    return tensor if tensor.device == leaf.device else tensor.to(leaf.device)
