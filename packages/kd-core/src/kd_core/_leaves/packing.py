"""How a leaf is pickled: with its own bytes, not those of its base; from protocol 5 as a buffer.

A buffer can be handed over without a copy (`buffer_callback` of `pickle.dumps`), and tensors that
are one object stay one. Other unsigned integers than `uint8` are pickled by their bits as signed
ones: torch 2.13 writes pickles of them that it cannot read.
"""

from __future__ import annotations

import pickle
import weakref
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


_SIGNED: Final = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


class Packed:
    """What is pickled for a tensor and unpickled as a tensor."""

    __slots__ = ("__weakref__", "leaf")

    def __init__(self, leaf: Tensor) -> None:
        self.leaf = leaf


class PackedLeaf(Packed):
    """A tensor that is pickled as a buffer."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        leaf = self.leaf
        octets = leaf.detach().reshape(-1).view(torch.uint8).numpy()
        dtype = str(leaf.dtype).removeprefix("torch.")
        buffer = pickle.PickleBuffer(octets)  # type: ignore[arg-type]  # an array is a buffer
        return restore_leaf, (buffer, dtype, tuple(leaf.shape), leaf.requires_grad)


class UnsignedLeaf(Packed):
    """A tensor of unsigned integers that is pickled as one of signed integers."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        dtype = self.leaf.dtype
        signed = own_bytes(self.leaf.view(_SIGNED[dtype]))
        return restore_unsigned, (signed, str(dtype).removeprefix("torch."))


# A pickler holds what it has pickled, so a second reference to a tensor finds the same object.
_PACKED: Final[weakref.WeakValueDictionary[tuple[type, int], Packed]] = (
    weakref.WeakValueDictionary()
)


def packed(leaf: Tensor, protocol: int) -> Packed | Tensor:
    """Return what is pickled for a leaf: its buffer, or itself if it has none."""
    kind: type[Packed]
    if protocol >= 5 and _has_buffer(leaf):
        kind = PackedLeaf
    elif leaf.dtype in _SIGNED and leaf.__class__ is Tensor and leaf.layout is torch.strided:
        kind = UnsignedLeaf
    else:
        return own_bytes(leaf)
    known = _PACKED.get((kind, id(leaf)))
    if known is None or known.leaf is not leaf:
        known = _PACKED[kind, id(leaf)] = kind(leaf)
    return known


def _has_buffer(leaf: Tensor) -> bool:
    """Return whether a leaf is nothing but numbers in a row that Python can reach."""
    if leaf.__class__ is not Tensor or leaf.layout is not torch.strided or not leaf.is_cpu:
        return False
    if leaf.is_quantized or leaf.is_conj() or leaf.is_neg() or leaf.is_shared() or leaf.__dict__:  # type: ignore[no-untyped-call]  # by torch
        return False
    if not leaf.numel() or not leaf.is_contiguous():
        return False
    try:
        torch.empty(0).numpy()
    except RuntimeError:  # numpy is not installed
        return False
    return True


def restore_leaf(buffer: object, dtype: str, shape: Sequence[int], requires_grad: bool) -> Tensor:
    """Rebuild a leaf on a buffer; called by pickle.

    The tensor uses the memory of the buffer, or a copy if that must not be written to.
    """
    view = memoryview(buffer)  # type: ignore[arg-type]  # pickle gives a buffer
    writable = bytearray(view) if view.readonly else view
    leaf = torch.frombuffer(writable, dtype=getattr(torch, dtype)).reshape(tuple(shape))
    return leaf.requires_grad_() if requires_grad else leaf


def restore_unsigned(signed: Tensor, dtype: str) -> Tensor:
    """Rebuild a leaf of unsigned integers; called by pickle."""
    return signed.view(getattr(torch, dtype))


def own_bytes(leaf: Tensor) -> Tensor:
    """Return a leaf, copied if it is a view: pickle would save the whole storage of the base.

    Dimensions that are expanded stay so.
    """
    if leaf.__class__ is not Tensor or leaf.layout is not torch.strided or leaf.is_meta:
        return leaf
    stored = leaf.untyped_storage().nbytes()
    if stored == leaf.nbytes:  # the fast path
        return leaf
    span = _span(leaf)
    if stored <= span * leaf.element_size() or leaf.is_shared():  # type: ignore[no-untyped-call]  # by torch
        return leaf
    plain = leaf.detach()
    if span < leaf.numel():
        row = plain.as_strided((span,), (1,)).clone()
        own = row.as_strided(plain.shape, plain.stride())
    else:
        own = plain.clone()
    return own.requires_grad_() if leaf.requires_grad else own


def _span(leaf: Tensor) -> int:
    """Return how many numbers of the storage lie between the first and the last of a leaf."""
    if not leaf.numel():
        return 0
    steps = zip(leaf.shape, leaf.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)
