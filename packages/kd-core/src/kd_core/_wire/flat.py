"""Tensors of one dtype and device as one flat tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from kd_core._torch_private import flatten


def flat_of(leaves: list[Tensor]) -> Tensor:
    """Return all elements of tensors of one dtype and device, one behind the other.

    The result is a view where the elements are in that order already: of one contiguous tensor, and
    of the leaves of a consolidated container.
    """
    with torch.no_grad():
        flat = view_of(leaves)
        if flat is None:
            flat = flatten(leaves)
        flat = flat.resolve_conj().resolve_neg().detach()
        # One element or none may have any stride, with which torch does not view it as bytes.
        return flat.as_strided(flat.shape, (1,))


def view_of(leaves: list[Tensor]) -> Tensor | None:
    """Return a flat view of leaves that follow one another in one storage, else `None`."""
    storage = leaves[0].untyped_storage().data_ptr()
    end, count = leaves[0].data_ptr(), 0
    for leaf in leaves:
        beside = leaf.data_ptr() == end and leaf.untyped_storage().data_ptr() == storage
        if not beside or not leaf.is_contiguous() or leaf.is_conj() or leaf.is_neg():
            return None
        end += leaf.nbytes
        count += leaf.numel()
    return leaves[0].as_strided((count,), (1,)) if count else None
