"""Rows as vectors: all leaves in one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kd_core._batch.names import without_names
from kd_core._batch.shapes import wrap_dim
from kd_core._errors import InvalidValue, ShapeMismatch, different_keys, shape_text
from kd_core._keys import format_key
from kd_core._leaves.views import walk_items
from kd_core._protocol.primitives import AbstractContainer, refuse_unbatched

if TYPE_CHECKING:
    from typing import Self, TypeVar

    from kd_core._ops.values.pack_layout import PackLayout
    from kd_core._types import NestedKey

    C = TypeVar("C", bound=AbstractContainer)


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
        from kd_core._ops.values.pack_layout import PackLayout  # a dataclass, which few need

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
    refuse_unbatched(td, "packed")
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
