"""The layout of rows as vectors, loaded when a container is first packed."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from kd_core._errors import ShapeMismatch, shape_text
from kd_core._naming import public_in
from kd_core._ops.values.moving import moved
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from kd_core._types import NestedKey

C_co = TypeVar("C_co", bound=AbstractContainer, covariant=True)


@public_in("kd_core")
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
        if row._kd_desc.device not in (None, flat.device):
            row = moved(row, flat.device, False)
        return row._kd_map_each(
            lambda leaf: next(parts).reshape((*batch, *leaf.shape)), lambda inner: batch + inner
        )
