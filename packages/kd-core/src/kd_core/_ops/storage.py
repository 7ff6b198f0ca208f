"""All leaves in one storage: one allocation, one copy to a device, one write to a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kd_core._errors import InvalidValue
from kd_core._ops.operands import leaves_of, name_in
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

ALIGNMENT: Final = 16
"""Bytes: where the leaves of a dtype start, so that each dtype may be viewed there."""


class Storage(AbstractContainer):
    """All leaves in one storage."""

    __slots__ = ()

    def consolidate(self) -> Self:
        """Copy all leaves into one storage.

        Leaves of one dtype stand one behind the other in it. The copies are outside the graph.

        Returns:
            A container, not locked, whose leaves are views of that storage.

        Raises:
            InvalidValue: if the leaves are on several devices, or one is sparse.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.ones(2), "b": torch.arange(2)}, [2]).consolidate()
            >>> td.is_consolidated(), td["a"].untyped_storage().nbytes()
            (True, 32)
        """
        leaves = leaves_of(self)
        if not leaves:
            return self._shallow()
        with torch.no_grad():
            groups = _by_dtype(self, leaves)
            if len(groups) == 1:
                flat = torch._C._nn.flatten_dense_tensors(leaves)
                if len(leaves) == 1:  # then it is a view of the leaf
                    flat = flat.clone()
                return self._rebuild(iter(_parts(flat, leaves)))
            return self._rebuild(iter(_together(leaves, groups)))

    def is_consolidated(self) -> bool:
        """Return whether all leaves are in one storage; a leaf that was replaced is not."""
        return len({leaf.untyped_storage().data_ptr() for leaf in leaves_of(self)}) == 1


def _by_dtype(td: AbstractContainer, leaves: list[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    """Return the leaves by dtype, checked to fit into one storage."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    device = leaves[0].device
    for leaf in leaves:
        if leaf.device != device:
            raise InvalidValue(
                f"{name_in(td, leaf)} is on {leaf.device}, but others are on {device}: one storage "
                "is on one device. Move the container first, with `to`."
            )
        if leaf.layout is not torch.strided:
            raise InvalidValue(
                f"{name_in(td, leaf)} is of layout {leaf.layout}: only dense leaves fit into one "
                "storage. `exclude` it first, or make it dense."
            )
        groups.setdefault(leaf.dtype, []).append(leaf)
    return groups


def _together(leaves: list[Tensor], groups: dict[torch.dtype, list[Tensor]]) -> list[Tensor]:
    """Copy leaves of several dtypes, one dtype behind the other."""
    sizes = [sum(leaf.nbytes for leaf in group) for group in groups.values()]
    starts = [0]
    for size in sizes:
        starts.append(-(-(starts[-1] + size) // ALIGNMENT) * ALIGNMENT)
    buffer = torch.empty(starts[-1], dtype=torch.uint8, device=leaves[0].device)
    placed: dict[torch.dtype, Iterator[Tensor]] = {}
    for (dtype, group), start, size in zip(groups.items(), starts, sizes, strict=False):
        parts = _parts(buffer[start : start + size].view(dtype), group)
        torch._foreach_copy_(list(parts), group)
        placed[dtype] = iter(parts)
    return [next(placed[leaf.dtype]) for leaf in leaves]


def _parts(flat: Tensor, like: list[Tensor]) -> Sequence[Tensor]:
    """Return views of a flat tensor in the shapes of others."""
    parts: Sequence[Tensor] = torch._C._nn.unflatten_dense_tensors(flat, like)
    return parts
