"""Rows of one entry: `get_at`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast, overload

import torch
from torch import Tensor

from kd_core._keys import path_of
from kd_core._leaves.loops import has_entry
from kd_core._nodes import registry
from kd_core._ops.selection.index_plan import leading, resolve, rows_at
from kd_core._protocol.composite import Composite, Reading, read_as, reading
from kd_core._protocol.primitives import AbstractContainer, check_has
from kd_core._types import NO_DEFAULT

if TYPE_CHECKING:
    from kd_core._protocol.composite import Side
    from kd_core._types import Index


class RowReading(AbstractContainer):
    """Reading rows by key and index."""

    __slots__ = ()

    @overload
    def get_at(
        self,
        key: str | tuple[str, ...],
        index: Index,
        default: object = NO_DEFAULT,
        *,
        as_list: Literal[False] = False,
        as_padded_tensor: bool = False,
        as_nested_tensor: bool = False,
        padding_value: float = 0.0,
        padding_side: Side = "right",
        layout: torch.layout = torch.jagged,
    ) -> Tensor: ...
    @overload
    def get_at(
        self,
        key: str | tuple[str, ...],
        index: Index,
        default: object = NO_DEFAULT,
        *,
        as_list: Literal[True],
    ) -> Tensor | list[Tensor]: ...
    def get_at(
        self,
        key: str | tuple[str, ...],
        index: Index,
        default: object = NO_DEFAULT,
        *,
        as_list: bool = False,
        as_padded_tensor: bool = False,
        as_nested_tensor: bool = False,
        padding_value: float = 0.0,
        padding_side: Side = "right",
        layout: torch.layout = torch.jagged,
    ) -> Tensor | list[Tensor]:
        """Read rows of one entry; only batch dimensions are indexed.

        Args:
            key: the key of the entry.
            index: an index of the batch dimensions.
            default: what is returned for a missing key.
            as_list: how rows of a lazy stack are read, as are the arguments after it: see `get`.
            as_padded_tensor: the same, padded to one shape.
            as_nested_tensor: the same, as a nested tensor.
            padding_value: the value of the elements that are added.
            padding_side: where they are added: `"left"` or `"right"`.
            layout: the layout of a nested tensor.

        Raises:
            KeyNotFound: if the key is missing, and no default is given.
        """
        path = path_of(key)
        if default is not NO_DEFAULT and not has_entry(self._entries, path):
            return cast(Tensor, default)
        how: Reading | None = None
        if as_list or as_padded_tensor or as_nested_tensor:
            options = padding_value, padding_side, layout
            how = reading(as_list, as_padded_tensor, as_nested_tensor, *options)
        if how is None and not isinstance(self, Composite):
            entry = self._read(path)
            batch = self._desc.batch
            fn, after = resolve(index, batch)
            if isinstance(entry, Tensor):
                return fn(entry)
            return cast(Tensor, entry._map_each(fn, leading(batch, after)))
        check_has(self, path)
        rows = rows_at(_alone(self, path[0]), index)
        return cast(Tensor, rows._read(path) if how is None else read_as(rows, path, None, how))


def _alone(container: AbstractContainer, key: str) -> AbstractContainer:
    """Return a container of one entry alone, so that a stack chooses rows of no other one."""
    if isinstance(container, Composite):
        return container._by_member(lambda member: _alone(member, key))
    entries = {key: container._read((key,))}
    return cast("AbstractContainer", registry.make_dense(entries, container._desc.unlocked()))
