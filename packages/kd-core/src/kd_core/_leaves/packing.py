"""How a leaf is pickled: with its own bytes, not those of its base; from protocol 4 as a buffer.

A pickle of a tensor holds a whole file of torch, which takes long to write and to read; a buffer
holds the bytes alone: "pickle round trip" in the benchmarks. From protocol 5 it can be handed over
without a copy (`buffer_callback` of `pickle.dumps`). Tensors that are one object stay one.
`torch.save` gets a storage from either, which it maps to devices. Of dtypes like `uint16` and
`float8_e4m3fn` torch 2.15 still writes pickles that it cannot read: their leaves are pickled by
their bits.
"""

from __future__ import annotations

import functools
import pickle
import weakref
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, UntypedStorage
from torch.storage import TypedStorage

from kd_core._errors import not_valid, restores
from kd_core._torch_private import untyped

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self


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
        args = (LeafStorage(leaf), _name(leaf.dtype), tuple(leaf.shape), leaf.requires_grad)
        return restore_leaf, args


class LeafStorage(TypedStorage):
    """The numbers of a leaf: a storage in `torch.save`, a buffer in other pickles.

    `torch.save` stores every instance of `TypedStorage` by itself and does not call
    `__reduce_ex__`.
    """

    leaf: Tensor

    def __new__(cls, leaf: Tensor) -> Self:
        return object.__new__(cls)

    def __init__(self, leaf: Tensor) -> None:
        self.leaf = leaf

    @functools.cached_property
    def _untyped_storage(self) -> UntypedStorage:  # type: ignore[override]  # made when asked
        return own_bytes(self.leaf).untyped_storage()

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]  # as above
        return self.leaf.dtype if self.leaf.dtype in _READABLE else torch.uint8

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        leaf = self.leaf.detach() if self.leaf.requires_grad else self.leaf
        # The step of a dimension of one element may be any number.
        octets = leaf.as_strided((leaf.numel(),), (1,)).view(torch.uint8).numpy()
        if protocol == 4:
            return bytearray, (octets.tobytes(),)
        return memoryview, (pickle.PickleBuffer(octets),)  # type: ignore[arg-type]  # it is one


@functools.cache
def _name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in pickles: one object, which a pickle holds once."""
    return str(dtype).removeprefix("torch.")


class LeafOfBits(Packed):
    """A tensor that is pickled as one of integers, bit by bit."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        leaf = self.leaf
        bits = leaf.detach().resolve_conj().resolve_neg().view(BITS[leaf.dtype.itemsize])
        return restore_from_bits, (own_bytes(bits), _name(leaf.dtype), leaf.requires_grad)


# A pickler holds what it has pickled, so a second reference to a tensor finds the same object.
_PACKED: Final[weakref.WeakValueDictionary[tuple[type, int], Packed]] = (
    weakref.WeakValueDictionary()
)


def packed(leaf: Tensor, protocol: int) -> Packed | Tensor:
    """Return what is pickled for a leaf: its buffer, or itself if it has none."""
    kind: type[Packed]
    if protocol >= 4 and _has_buffer(leaf):
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
    if type(leaf) is not Tensor or leaf.layout is not torch.strided or not leaf.is_cpu:
        return False
    if leaf.is_quantized or leaf.is_nested or leaf.is_conj() or leaf.is_neg() or leaf.__dict__:
        return False
    return bool(leaf.numel()) and leaf.is_contiguous() and _has_numpy()


@functools.cache
def _has_numpy() -> bool:
    """Return whether torch can hand the numbers of a tensor to Python."""
    try:
        torch.empty(0, device="cpu").numpy()
    except RuntimeError:  # numpy is not installed
        return False
    return True


def restore_leaf(buffer: object, dtype: str, shape: Sequence[int], requires_grad: bool) -> Tensor:
    """Rebuild a leaf on a buffer, or on a storage from `torch.load`; called by pickle.

    The tensor uses the memory of the buffer, or a copy if that must not be written to.
    """
    kind: torch.dtype = getattr(torch, dtype)
    if isinstance(buffer, TypedStorage):
        leaf = torch.empty(0, dtype=kind, device=buffer.device).set_(untyped(buffer))
    else:
        leaf = numbers_of(buffer, kind)
    if len(shape) != 1:
        leaf = leaf.view(tuple(shape))
    return leaf.requires_grad_() if requires_grad else leaf


def octets_of(buffer: object) -> Tensor:
    """Return the bytes of an object that has a buffer as a flat tensor.

    The tensor uses the memory of the buffer, or a copy if that must not be written to.

    Raises:
        TypeError: if it has none.
    """
    return numbers_of(buffer, torch.uint8)


def numbers_of(buffer: Any, dtype: torch.dtype) -> Tensor:
    """Return the numbers in a buffer as a flat tensor, in the way of `octets_of`."""
    view = memoryview(buffer)
    if not view.nbytes:
        return torch.empty(0, dtype=dtype, device="cpu")
    if view.readonly or not view.c_contiguous:
        view = memoryview(bytearray(view.tobytes()))
    return torch.frombuffer(view.cast("B"), dtype=dtype)


def _has_bits(leaf: Tensor) -> bool:
    """Return whether a leaf can be viewed as integers of its size."""
    return type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_quantized


@restores
def restore_from_bits(bits: object, dtype: str, requires_grad: bool) -> Tensor:
    """Rebuild a leaf from integers of its size; called by pickle."""
    kind = getattr(torch, dtype)
    if not isinstance(bits, Tensor) or not isinstance(kind, torch.dtype):
        raise not_valid(f"{bits!r} are not the bits of a tensor of `{dtype}`")
    leaf = bits.view(kind)
    return leaf.requires_grad_() if requires_grad else leaf


def own_bytes(leaf: Tensor) -> Tensor:
    """Return a leaf, copied if it is a view: pickle would save the whole storage of the base.

    Dimensions that are expanded stay so. What a new process is given stays a view: nothing would
    hold a copy, whose memory is shared by its file, until the process has opened it.
    """
    if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.is_meta:
        return leaf
    stored = leaf.untyped_storage().nbytes()
    if stored == leaf.nbytes:  # the fast path
        return leaf
    span = _span(leaf)
    if stored <= span * leaf.element_size() or leaf.is_shared():
        return leaf
    if get_spawning_popen() is not None:
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
