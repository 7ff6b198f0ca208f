"""`NonTensorData`: a non-tensor entry of a container, one value for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kd_core import _registry
from kd_core._batch.descriptor import Descriptor, describe_on
from kd_core._batch.shapes import batch_of
from kd_core._errors import KeySetMismatch
from kd_core._keys import format_key
from kd_core._leaves.loops import same_data

if TYPE_CHECKING:
    from kd_core._entry import Entry, Memo, PartsMemo
    from kd_core._types import BatchFn, BatchSize, DeviceLike, LeafFn, PartsFn


class NonTensorData:
    """A non-tensor entry: one value for the whole batch.

    `td["key"]` returns the value, `td.get("key")` this wrapper. Operations of the container pass it
    through: indexing and reshaping change only its batch size, arithmetic does not change it.

    Args:
        data: the value; kept by reference.
        batch_size: the batch size of the container that it belongs to.
        device: the device of the container.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"x": torch.zeros(3), "task": "reach"}, [3])
        >>> td["task"], td[0]["task"], td.get("task")
        ('reach', 'reach', NonTensorData(data='reach', batch_size=torch.Size([3])))
    """

    __slots__ = ("_desc", "data")

    data: object
    _desc: Descriptor

    def __init__(
        self, data: object, batch_size: BatchSize = (), device: DeviceLike | None = None
    ) -> None:
        self.data = data
        self._desc = describe_on(batch_of(batch_size), device)

    @property
    def batch_size(self) -> torch.Size:
        """The batch size of the container that it belongs to."""
        return torch.Size(self._desc.batch)

    @property
    def device(self) -> torch.device | None:
        """The device of the container that it belongs to."""
        return self._desc.device

    def tolist(self) -> object:
        """Return the value once for each row, as nested lists of shape `batch_size`."""
        value: object = self.data
        for size in reversed(self._desc.batch):
            value = [value for _ in range(size)]
        return value

    def _item(self) -> object:
        return self.data

    def _map_each(
        self, fn: LeafFn, batch: BatchFn | None = None, memo: Memo = None
    ) -> NonTensorData:
        desc = self._desc
        new = desc.unlocked() if batch is None else desc.with_batch(batch(desc.batch))
        return wrap_data(self.data, new)

    def _shallow(self) -> NonTensorData:
        return wrap_data(self.data, self._desc)

    def _map_to_parts(
        self, fn: PartsFn, batches: Sequence[BatchFn], memo: PartsMemo = None
    ) -> Sequence[NonTensorData]:
        desc = self._desc
        return [wrap_data(self.data, desc.with_batch(batch(desc.batch))) for batch in batches]

    def _collect(self, leaves: list[Tensor]) -> None:
        pass

    def _rebuild(self, leaves: Iterator[Tensor]) -> NonTensorData:
        return wrap_data(self.data, self._desc.unlocked())

    def _collect_pair(
        self, other: Entry, mine: list[Tensor], theirs: list[Tensor], path: tuple[str, ...]
    ) -> None:
        if not isinstance(other, NonTensorData):
            raise KeySetMismatch(
                f"entry {format_key(path)} must be a non-tensor entry in both containers, got a "
                f"`{type(other).__name__}` in the second."
            )

    def _zip_each(
        self, other: Entry, fn: Callable[[Tensor, Tensor], Tensor], path: tuple[str, ...] = ()
    ) -> NonTensorData:
        self._collect_pair(other, [], [], path)
        return wrap_data(self.data, self._desc)

    def _with_descriptor(self, desc: Descriptor) -> NonTensorData:
        return wrap_data(self.data, desc)

    def _below(self) -> tuple[()]:
        return ()

    def _hold(self, count: int) -> None:
        pass  # it does not have a structure to lock

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NonTensorData):
            return NotImplemented
        return self._desc.batch == other._desc.batch and same_data(self.data, other.data)

    __hash__ = None  # type: ignore[assignment]  # the value may not be hashable

    def __reduce__(self) -> tuple[object, ...]:
        return NonTensorData, (self.data, self._desc.batch, self._desc.device)

    def __repr__(self) -> str:
        return f"NonTensorData(data={self.data!r}, batch_size={self.batch_size})"


def wrap_data(data: object, desc: Descriptor) -> NonTensorData:
    """Wrap a value with an existing descriptor."""
    node = object.__new__(NonTensorData)
    node.data = data
    node._desc = desc.unlocked()
    return node


_registry.register("wrap_data", wrap_data)
