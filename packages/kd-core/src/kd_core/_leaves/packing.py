"""How a leaf is pickled: with its own bytes, not those of its base; from protocol 5 as a buffer.

A buffer can be handed over without a copy (`buffer_callback` of `pickle.dumps`), and tensors that
are one object stay one. Of dtypes like `uint16` and `float8_e4m3fn` torch 2.15 still writes pickles
that it cannot read: their leaves are pickled by their bits.
"""

from __future__ import annotations

import pickle
import weakref
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_READABLE: Final = {*_FLOATS, *_INTEGERS, torch.complex128, torch.complex64}
"""The dtypes of which torch reads the pickles."""

BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size: what holds the bits of another dtype."""


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


class LeafOfBits(Packed):
    """A tensor that is pickled as one of integers, bit by bit."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        leaf = self.leaf
        bits = leaf.detach().resolve_conj().resolve_neg().view(BITS[leaf.dtype.itemsize])
        dtype = str(leaf.dtype).removeprefix("torch.")
        return restore_from_bits, (own_bytes(bits), dtype, leaf.requires_grad)


# A pickler holds what it has pickled, so a second reference to a tensor finds the same object.
_PACKED: Final[weakref.WeakValueDictionary[tuple[type, int], Packed]] = (
    weakref.WeakValueDictionary()
)


def packed(leaf: Tensor, protocol: int) -> Packed | Tensor:
    """Return what is pickled for a leaf: its buffer, or itself if it has none."""
    kind: type[Packed]
    if protocol >= 5 and _has_buffer(leaf):
        kind = PackedLeaf
    elif leaf.dtype not in _READABLE and _has_bits(leaf):
        kind = LeafOfBits
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
    leaf = octets_of(buffer).view(getattr(torch, dtype)).reshape(tuple(shape))
    return leaf.requires_grad_() if requires_grad else leaf


def octets_of(buffer: object) -> Tensor:
    """Return the bytes of an object that has a buffer as a flat tensor.

    The tensor uses the memory of the buffer, or a copy if that must not be written to.

    Raises:
        TypeError: if it has none.
    """
    view = memoryview(buffer)  # type: ignore[arg-type]  # anything may be asked
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    if view.readonly or not view.c_contiguous:
        view = memoryview(bytearray(view.tobytes()))
    return torch.frombuffer(view.cast("B"), dtype=torch.uint8)


def _has_bits(leaf: Tensor) -> bool:
    """Return whether a leaf can be viewed as integers of its size."""
    return leaf.__class__ is Tensor and leaf.layout is torch.strided and not leaf.is_quantized


def restore_from_bits(bits: Tensor, dtype: str, requires_grad: bool) -> Tensor:
    """Rebuild a leaf from integers of its size; called by pickle."""
    leaf = bits.view(getattr(torch, dtype))
    return leaf.requires_grad_() if requires_grad else leaf


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
