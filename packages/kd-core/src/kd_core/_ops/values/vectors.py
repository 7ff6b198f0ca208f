"""Rows as vectors: all leaves in one tensor, and the layout that takes them out again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import torch
from torch import Tensor

from kd_core._batch.names import without_names
from kd_core._batch.shapes import wrap_dim
from kd_core._errors import InvalidValue, ShapeMismatch, different_keys, shape_text
from kd_core._keys import format_key
from kd_core._leaves.views import walk_items
from kd_core._ops.values.moving import moved
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from typing import Self

    from kd_core._types import NestedKey

C = TypeVar("C", bound=AbstractContainer)
C_co = TypeVar("C_co", bound=AbstractContainer, covariant=True)


@dataclass(frozen=True)
class PackLayout(Generic[C_co]):
    """Where each leaf stands in the tensor that `TensorDict.pack` returns.

    Two layouts are equal if they have the same keys, shapes and dimension.

    Attributes:
        keys: the keys of the leaves in their order; those of nested ones are tuples.
        shapes: the dimensions of each leaf after the batch size.
        dim: the dimension of the features, counted from the end.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": torch.zeros(3, 2), "b": {"c": torch.ones(3)}}, [3])
        >>> flat, layout = td.pack()
        >>> layout.keys, layout.offsets, layout.numel
        (('a', ('b', 'c')), (0, 2), 3)
        >>> layout.unpack(flat[0])["b", "c"]
        tensor(1.)
    """

    keys: tuple[NestedKey, ...]
    shapes: tuple[torch.Size, ...]
    dim: int
    _row: C_co = field(repr=False, compare=False)

    @property
    def numel(self) -> int:
        """The number of features: the size of the dimension `dim`."""
        return sum(map(prod, self.shapes))

    @property
    def offsets(self) -> tuple[int, ...]:
        """The position of the first feature of each leaf."""
        return tuple(accumulate(map(prod, self.shapes), initial=0))[:-1]

    def unpack(self, flat: Tensor) -> C_co:
        """Return a container whose leaves are views of a tensor of this layout.

        Nested containers and classes are those of the container that was packed. The batch size is
        that of the tensor without the dimension of the features, so rows may have been selected,
        stacked or computed.

        Args:
            flat: a tensor of `numel` features in dimension `dim`, of any dtype.

        Raises:
            ShapeMismatch: if it does not have as many features.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> flat, layout = TensorDict({"a": torch.zeros(3, 2), "b": torch.ones(3)}, [3]).pack()
            >>> layout.unpack(torch.stack([flat, flat * 2])).batch_size
            torch.Size([2, 3])
        """
        if flat.ndim < -self.dim or flat.shape[self.dim] != self.numel:
            raise ShapeMismatch(
                f"a tensor of this layout must have {self.numel} features in dimension "
                f"{self.dim}, got shape {shape_text(flat.shape)}."
            )
        last = flat.movedim(self.dim, -1)
        batch = tuple(last.shape[:-1])
        parts = iter(torch.split(last, [prod(shape) for shape in self.shapes], -1))
        row = self._row
        if row._desc.device not in (None, flat.device):
            row = moved(row, flat.device, False)
        return row._map_each(
            lambda leaf: next(parts).reshape((*batch, *leaf.shape)), lambda inner: batch + inner
        )


class Vectors(AbstractContainer):
    """All leaves in one tensor."""

    __slots__ = ()

    def pack(
        self, dim: int = -1, *, layout: PackLayout[AbstractContainer] | None = None
    ) -> tuple[Tensor, PackLayout[Self]]:
        """Concatenate the features of all leaves: each row of the batch becomes a vector.

        For what computes with vectors, such as a solver, an evolution strategy or a network on all
        entries. `layout.unpack` makes a container of the result again. Gradients flow through both.

        Args:
            dim: the position of the features among the batch dimensions.
            layout: a layout whose dimension and order of keys are taken, so that vectors of
                containers that were built in another order fit together; `None`: the order of the
                entries.

        Returns:
            A tensor of shape `batch_size` with one dimension more, and its layout.

        Raises:
            InvalidValue: if leaves have different dtypes, or an entry is not a dense tensor.
            KeySetMismatch: if the keys are not those of `layout`.
            ShapeMismatch: if a leaf does not have the shape of `layout`.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.zeros(3, 2), "b": {"c": torch.ones(3, 2, 2)}}, [3])
            >>> flat, layout = td.pack()
            >>> flat.shape
            torch.Size([3, 6])
            >>> layout.unpack(flat * 2)["b", "c"].sum()
            tensor(24.)
        """
        leaves = _leaves(self)
        ndim, batch = self._desc.ndim, without_names(self._desc.batch)
        at = wrap_dim(dim if layout is None else layout.dim, ndim + 1) - ndim - 1
        if layout is None:
            shapes = tuple(leaf.shape[ndim:] for leaf in leaves.values())
            layout = PackLayout(tuple(leaves), shapes, at, _row_of(self))
        else:
            _check_layout(leaves, layout, ndim)
        parts = [
            leaves[key].reshape(*batch, prod(shape)).movedim(-1, at)
            for key, shape in zip(layout.keys, layout.shapes, strict=True)
        ]
        if not parts:
            parts = [torch.zeros(*batch, 0, device=self._desc.device).movedim(-1, at)]
        return torch.cat(parts, at), cast("PackLayout[Self]", layout)


def _leaves(td: AbstractContainer) -> dict[NestedKey, Tensor]:
    """Return the leaves by key, checked to fit into one tensor."""
    leaves: dict[NestedKey, Tensor] = {}
    dtype = None
    for key, leaf in walk_items(td._entries, (True, True, _is_data, False)):
        if not isinstance(leaf, Tensor):
            raise InvalidValue(
                f"entry {format_key(key)} is not a tensor and cannot be packed. Pack "
                "`td.filter_non_tensor_data()`."
            )
        if leaf.is_nested or leaf.layout is not torch.strided:
            raise InvalidValue(
                f"entry {format_key(key)} is of layout {leaf.layout}: only dense leaves can be "
                "packed. `exclude` it first, or make it dense."
            )
        dtype = dtype or leaf.dtype
        if leaf.dtype is not dtype:
            raise InvalidValue(
                f"leaves must have one dtype to be packed, got {leaf.dtype} in entry "
                f"{format_key(key)} after {dtype}. Cast the container first, with `td.float()`."
            )
        leaves[key] = leaf
    return leaves


def _is_data(kind: type) -> bool:
    return not issubclass(kind, AbstractContainer)


def _row_of(td: C) -> C:
    """Return a container of the same structure for one row, whose values take no memory."""
    ndim = td._desc.ndim

    def row(leaf: Tensor) -> Tensor:
        return torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape[ndim:])

    return td._map_each(row, lambda batch: batch[ndim:])


def _check_layout(
    leaves: Mapping[NestedKey, Tensor], layout: PackLayout[AbstractContainer], ndim: int
) -> None:
    if leaves.keys() != set(layout.keys):
        raise different_keys(
            map(str, leaves), map(str, layout.keys), ("the container", "the layout")
        )
    for key, shape in zip(layout.keys, layout.shapes, strict=True):
        found = leaves[key].shape[ndim:]
        if found != shape:
            raise ShapeMismatch(
                f"entry {format_key(key)} must have the shape {shape_text(shape)} of the layout "
                f"after the batch size, got {shape_text(found)}."
            )
