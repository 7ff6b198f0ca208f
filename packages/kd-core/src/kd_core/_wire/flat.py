"""Tensors of one dtype and device as one flat tensor, and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def flat_of(leaves: Sequence[Tensor]) -> Tensor:
    """Return all elements of tensors of one dtype and device, one behind the other.

    The result is a view where the elements are in that order already: of one contiguous tensor, and
    of the leaves of a consolidated container.
    """
    plain = [_plain(leaf) for leaf in leaves]
    flat = _as_they_are(plain)
    if flat is None:
        flat = torch._C._nn.flatten_dense_tensors(plain)
    return flat


def parts_of(flat: Tensor, shapes: Iterable[Sequence[int]]) -> list[Tensor]:
    """Return views of a flat tensor in some shapes, one behind the other."""
    sizes = list(shapes)
    parts = torch.split(flat, [math.prod(shape) for shape in sizes])
    return [part.view(shape) for part, shape in zip(parts, sizes, strict=True)]


def _plain(leaf: Tensor) -> Tensor:
    if leaf.requires_grad:
        leaf = leaf.detach()
    return leaf.resolve_conj().resolve_neg() if leaf.is_conj() or leaf.is_neg() else leaf


def _as_they_are(leaves: Sequence[Tensor]) -> Tensor | None:
    """Return a view of all leaves if they follow one another in one storage, else `None`."""
    storage = leaves[0].untyped_storage().data_ptr()
    end, count = leaves[0].data_ptr(), 0
    for leaf in leaves:
        beside = leaf.data_ptr() == end and leaf.untyped_storage().data_ptr() == storage
        if not beside or not leaf.is_contiguous():
            return None
        end += leaf.nbytes
        count += leaf.numel()
    return leaves[0].as_strided((count,), (1,)) if count else None
