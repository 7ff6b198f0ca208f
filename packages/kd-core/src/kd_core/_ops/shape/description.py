"""Batch size and device: reading them, and changing the batch size in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kd_core._batch.names import has_names, plain_size
from kd_core._batch.shapes import batch_of, numel, wrap_dim
from kd_core._compat import is_possible
from kd_core._errors import FROZEN, InvalidArgument, InvalidValue
from kd_core._leaves.loops import common_batch, kinds_of
from kd_core._leaves.shapeless import is_shapeless
from kd_core._nodes.entry import is_row_data, is_unbatched
from kd_core._ops.shape.rebatching import put_on, redescribe
from kd_core._protocol.composite import Composite
from kd_core._protocol.primitives import AbstractContainer, leaves_of

if TYPE_CHECKING:
    from typing import Self

    from kd_core._batch.descriptor import Descriptor
    from kd_core._types import Batch, BatchSize


class Description(AbstractContainer):
    """Batch size and device."""

    __slots__ = ()

    @property
    def batch_size(self) -> torch.Size:
        """The leading dimensions shared by all entries.

        Assigning to it checks every entry and changes nothing if one does not fit. The first
        dimensions keep their names, as far as their sizes stay. A lock does not cover it.
        """
        return self._kd_desc.size

    @batch_size.setter
    def batch_size(self, batch_size: BatchSize) -> None:
        resize(self, batch_size)

    @property
    def shape(self) -> torch.Size:
        """The batch size; assigning to it is assigning to `batch_size`."""
        return self._kd_desc.size

    @shape.setter
    def shape(self, shape: BatchSize) -> None:
        resize(self, shape)

    def size(self, dim: int | str | None = None) -> torch.Size | int:
        """Return the batch size, or one of its dimensions."""
        return (
            self._kd_desc.size
            if dim is None
            else self._kd_desc.size[wrap_dim(dim, self._kd_desc.batch)]
        )

    @property
    def batch_dims(self) -> int:
        """The number of batch dimensions."""
        return self._kd_desc.ndim

    @property
    def ndim(self) -> int:
        """The number of batch dimensions."""
        return self._kd_desc.ndim

    def dim(self) -> int:
        """Return the number of batch dimensions."""
        return self._kd_desc.ndim

    def ndimension(self) -> int:
        """Return the number of batch dimensions."""
        return self._kd_desc.ndim

    def numel(self) -> int:
        """Return the number of rows: the product of the batch size (1 if it is empty)."""
        return numel(self._kd_desc.batch)

    @property
    def device(self) -> torch.device | None:
        """The device of all entries, or `None` where they may be on different ones."""
        return self._kd_desc.device

    @device.setter
    def device(self, device: torch.device | None) -> None:
        raise InvalidArgument(
            f"`device` cannot be assigned, got {device!r}. Move the container with `to(device)`, "
            "or call `clear_device_()` or `auto_device_()`."
        )

    def clear_device_(self) -> Self:
        """Clear the device, here and below: entries may be on different ones; return self."""
        put_on(self, None)
        return self

    def auto_device_(self) -> Self:
        """Set the device to the one that all leaves share, else to `None`; return self.

        Example:
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": 0.0}).auto_device_().device
            device(type='cpu')
        """
        found = {leaf.device for leaf in leaves_of(self)}
        put_on(self, found.pop() if len(found) == 1 else None)
        return self

    def auto_batch_size_(
        self, batch_dims: int | None = None, keep_compliant_size: bool = False
    ) -> Self:
        """Set the batch size to the leading dimensions that all entries share; return self.

        Nested containers come first, each by its own entries. One without entries keeps its batch
        size, or so many dimensions of it. Values of rows that are not tensors share the dimensions
        of their rows.

        Args:
            batch_dims: how many dimensions at most; `None`: all that they share.
            keep_compliant_size: nothing: a batch size that fits grows to the same one.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": torch.zeros(3, 4), "b": torch.zeros(3)}).auto_batch_size_().shape
            torch.Size([3])
        """
        if batch_dims is not None and batch_dims < 0:
            raise InvalidValue(
                f"`batch_dims` must be non-negative, got {batch_dims}. Pass how many leading "
                "dimensions to share."
            )
        _refuse_frozen(self)
        _share_batch(self, batch_dims)
        return self


def _refuse_frozen(level: AbstractContainer) -> None:
    """Refuse to change an instance of a frozen class; other locks cover the entries alone."""
    if level._kd_desc.lock == FROZEN:
        level._kd_check_unlocked("change the batch size")


def _share_batch(level: AbstractContainer, batch_dims: int | None) -> None:
    """Set the batch size to the dimensions that all entries share, at every level from below."""
    shapes: list[tuple[int, ...]] = []
    for _, value in kinds_of(level._kd_entries):
        if isinstance(value, Composite):
            shapes.append(value._kd_desc.batch)
        elif isinstance(value, AbstractContainer):
            _share_batch(value, batch_dims)
            shapes.append(value._kd_desc.batch)
        elif isinstance(value, Tensor):
            shapes.append(() if is_shapeless(value) else value.shape)
        elif is_row_data(value):
            shapes.append(value._kd_desc.batch)
    if not shapes and batch_dims:
        shapes.append(level._kd_desc.batch)
    if shapes:
        batch = _with_same_names(common_batch(shapes, batch_dims), level._kd_desc.batch)
        desc = level._kd_desc.with_batch(batch)
        _grow_children(level, desc)
        redescribe(level, desc)


def _grow_children(level: AbstractContainer, desc: Descriptor) -> None:
    """Set nested entries to at least the batch size of `desc`, which fits all leaves."""
    if isinstance(level, Composite):
        inner = desc.batch[: level._dim] + desc.batch[level._dim + 1 :]
        for member in level._members:
            _grow_children(member, member._kd_desc.with_batch(inner))
        return
    for key, value in list(kinds_of(level._kd_entries)):
        if isinstance(value, Tensor):
            continue
        own = value._kd_desc
        if own.batch[: desc.ndim] != desc.batch or (is_unbatched(value) and own is not desc):
            own = desc if own.device == desc.device else own.with_batch(desc.batch)
            if not isinstance(value, AbstractContainer):
                level._kd_set_entry(key, value._kd_with_descriptor(own))
                continue
            redescribe(value, own.unlocked())
        if isinstance(value, AbstractContainer):
            _grow_children(value, own)


def resize(td: AbstractContainer, batch_size: BatchSize) -> None:
    """Set the batch size of a container, and of those in it that start with the old one."""
    _refuse_frozen(td)
    desc = td._kd_desc.with_batch(_with_same_names(batch_of(batch_size), td._kd_desc.batch))
    td._kd_with_descriptor(desc)  # refuses what does not fit, before anything is changed
    _grow_children(td, desc)
    redescribe(td, desc)


def _with_same_names(batch: Batch, old: Batch) -> Batch:
    """Return a batch size whose first sizes are the old ones, with their names, while equal."""
    if not has_names(old):
        return batch
    same: list[int] = []
    for before, size in zip(old, batch, strict=False):
        if is_possible(plain_size(before) != size):  # to dynamo no symbol is equal to a named size
            break
        same.append(before)
    return (*same, *batch[len(same) :])


def shapes_of(level: AbstractContainer) -> Iterator[tuple[int, ...]]:
    """Yield the shape of each leaf, and of the values of rows that are not tensors."""
    if isinstance(level, Composite):  # stacking them may be impossible
        dim, count = level._dim, len(level._members)
        for member in level._members:
            yield from ((*shape[:dim], count, *shape[dim:]) for shape in shapes_of(member))
        return
    for value in level._kd_entries.values():
        if isinstance(value, Tensor):
            yield () if is_shapeless(value) else value.shape
        elif isinstance(value, AbstractContainer):
            yield from shapes_of(value)
        elif is_row_data(value):
            yield value._kd_desc.batch
