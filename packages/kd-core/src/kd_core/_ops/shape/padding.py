"""Adding rows before and after those of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kd_core._batch.caching import cached
from kd_core._batch.computing import Padded
from kd_core._batch.names import resized
from kd_core._batch.shapes import as_ints
from kd_core._errors import InvalidValue
from kd_core._naming.parameters import explains_parameters
from kd_core._ops.shape.rebatching import become
from kd_core._protocol.primitives import AbstractContainer, map_by

if TYPE_CHECKING:
    from typing import Self

    from kd_core._types import Batch


class Padding(AbstractContainer):
    """The method that pads a batch."""

    __slots__ = ()

    @explains_parameters
    def pad(self, pad_size: Sequence[int], value: float = 0.0, *, inplace: bool = False) -> Self:
        """Add rows before and after those along each batch dimension.

        Args:
            pad_size: the numbers of rows to add before and after, for the first batch dimension,
                then for the second, and so on; negative numbers remove rows.
            value: the value of the new rows.
            inplace: change this container instead of making a new one.

        Raises:
            InvalidValue: if the numbers are not pairs, or there are too many.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": torch.ones(2)}, [2]).pad([0, 1], value=5)["a"]
            tensor([1., 1., 5.])
        """
        batch = self._desc.batch
        new, backwards = _padded_sizes(batch, as_ints(pad_size))

        def pad_leaf(leaf: Tensor) -> Tensor:
            return torch.constant_pad_nd(leaf, [0, 0] * (leaf.ndim - len(batch)) + backwards, value)

        result = map_by((pad_leaf, new, Padded(new, len(batch))), self)
        return become(self, result, "pad in place") if inplace else result


@cached
def _padded_sizes(batch: Batch, pad_size: Batch) -> tuple[Batch, list[int]]:
    """Return the batch size after padding, and the rows to add with the last dimension first.

    The padding value is not an argument: -0.0 and 0.0 would be the same key of the cache.
    """
    ndim = len(batch)
    if len(pad_size) % 2 or len(pad_size) > 2 * ndim:
        raise InvalidValue(
            f"`pad_size` must hold a pair (rows before, rows after) for at most {ndim} batch "
            f"dimensions, got {pad_size}."
        )
    pairs = [pad_size[i : i + 2] for i in range(0, len(pad_size), 2)]
    pairs += [(0, 0)] * (ndim - len(pairs))
    new = tuple(resized(size, size + sum(pair)) for size, pair in zip(batch, pairs, strict=True))
    if any(size < 0 for size in new):
        raise InvalidValue(
            f"`pad_size` must not remove more rows than batch_size {batch} has, got {pad_size}."
        )
    return new, [rows for pair in reversed(pairs) for rows in pair]
