"""Nested tensors of the jagged layout: rows of different lengths in one tensor.

Knows `torch.nested`; must not know containers. torch has no indexing, splitting or joining of these
along the batch, so it is written here on rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_lengths(leaf: Tensor) -> Tensor:
    """Return the length of each row in the ragged dimension."""
    lengths: Tensor | None = leaf.lengths()  # type: ignore[attr-defined]  # of a nested tensor
    if lengths is not None:
        return lengths
    offsets: Tensor = leaf.offsets()  # type: ignore[attr-defined]  # as above
    return offsets.diff()


def padded_leaf(leaf: Tensor, padding: float) -> Tensor:
    """Return a nested tensor padded to its longest row."""
    padded: Tensor = torch.nested.to_padded_tensor(leaf, padding)
    return padded


def row_mask(leaf: Tensor) -> Tensor:
    """Return a mask of shape (rows, longest row): true for elements that are not padding."""
    lengths = row_lengths(leaf)
    longest = int(lengths.max()) if lengths.numel() else 0
    return torch.arange(longest, device=lengths.device) < lengths[:, None]
