"""Non-tensor entries of a container: the base of all, and one value for the whole batch.

A value that is stored in a container without batch dimensions belongs to that one row. It becomes
one value per row (`NonTensorStack`) where an operation adds batch dimensions or stacks rows, so
rows of equal values never collapse. A value that is stored in a batch belongs to all of its rows,
and stays one value.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kd_core._batch.descriptor import Descriptor, describe, describe_on
from kd_core._batch.plans import Fresh, Reduced
from kd_core._batch.shapes import batch_of
from kd_core._errors import InvalidArgument, KeySetMismatch, shape_text
from kd_core._keys import format_key
from kd_core._leaves.loops import Selection, same_data, unwrapped
from kd_core._leaves.writes import Targets
from kd_core._naming import explains_parameters, leaves_out
from kd_core._nodes import registry
from kd_core._nodes.entry import Data, is_node

if TYPE_CHECKING:
    from typing import Self, TypeGuard

    from kd_core._nodes.entry import Entry, Memo, Node, PartsMemo
    from kd_core._types import BatchFn, BatchSize, DeviceLike, LeafFn, PartsFn


class NonTensorDataBase(Data):
    """The base class of non-tensor entries: `NonTensorData`, `MetaData` and `NonTensorStack`.

    `td["key"]` returns the value, `td.get("key")` the wrapper.

    Example:
        >>> from kd_core import NonTensorDataBase, TensorDict
        >>> isinstance(TensorDict({"task": "reach"}).get("task"), NonTensorDataBase)
        True
    """

    __slots__ = ("_desc",)

    _desc: Descriptor
    _of_batch: bool = False
    """Whether it is one value that belongs to all rows of a batch."""

    @property
    def batch_size(self) -> torch.Size:
        """The batch size of the container that it belongs to."""
        return self._desc.size

    @property
    def shape(self) -> torch.Size:
        """The batch size."""
        return self._desc.size

    @property
    def device(self) -> torch.device | None:
        """The device of the container that it belongs to."""
        return self._desc.device

    @abstractmethod
    def tolist(self) -> object:
        """Return the value of each row, as nested lists of shape `batch_size`."""

    @abstractmethod
    def maybe_to_stack(self) -> NonTensorDataBase:
        """Return the same values, one for each row; without batch dimensions, the entry itself.

        Example:
            >>> from kd_core import NonTensorData
            >>> NonTensorData("reach", [2]).maybe_to_stack()
            NonTensorStack(['reach', 'reach'], batch_size=torch.Size([2]), device=None)
        """

    def _item(self) -> object:
        return self.tolist()

    def _constant(self) -> object:
        """Return what a pytree stores in its structure to rebuild the entry."""
        return self

    def _restored(self, desc: Descriptor, ndim: int) -> NonTensorDataBase:
        """Rebuild the entry from what `_constant` returned, with the batch of a rebuilt parent.

        Args:
            desc: the descriptor of the parent.
            ndim: how many batch dimensions the parent had when it was taken apart.
        """
        return self._with_descriptor(desc)

    @abstractmethod
    def _with_descriptor(self, desc: Descriptor) -> Self:
        """Return the entry under another descriptor."""

    def _collect(self, leaves: list[Tensor]) -> None:
        pass

    def _collect_pair(
        self, other: Entry, mine: list[Tensor], theirs: list[Tensor], path: tuple[str, ...]
    ) -> None:
        if not isinstance(other, NonTensorDataBase):
            raise KeySetMismatch(
                f"entry {format_key(path)} must be a non-tensor entry in both containers, got a "
                f"`{type(other).__name__}` in the second."
            )

    def _join(
        self,
        nodes: Sequence[Entry],
        call: Callable[..., Tensor],
        dim: int,
        desc: Descriptor,
        path: tuple[str, ...],
    ) -> Node:
        return registry.join_data(nodes, call, dim, desc)

    def _agrees(self, value: object) -> bool:
        return same_data(unwrapped(self), unwrapped(value))

    def _below(self) -> tuple[()]:
        return ()

    def _hold(self, count: int) -> None:
        pass  # it does not have a structure to lock


@leaves_out("fields", "from_tensordict", "extend")
class NonTensorData(NonTensorDataBase):
    """A non-tensor entry: one value for the whole batch.

    `td["key"]` returns the value, `td.get("key")` this wrapper. Operations of the container pass it
    through: indexing and reshaping change only its batch size, arithmetic does not change it.
    Without batch dimensions it is the value of one row: stacking such rows makes a
    `NonTensorStack`, one value per row.

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

    __slots__ = ("_boxed", "_of_batch")

    _boxed: tuple[object]
    """The value in a tuple: compiled code that passes it on adds no guard on the value."""

    _of_batch: bool

    @explains_parameters
    def __init__(
        self, data: object, batch_size: BatchSize = (), device: DeviceLike | None = None
    ) -> None:
        self.data = data
        self._desc = describe_on(batch_of(batch_size), device)
        self._of_batch = self._always_of_batch() or self._desc.ndim > 0

    @classmethod
    def _always_of_batch(cls) -> bool:
        return False

    @property
    def data(self) -> object:
        """The value."""
        return self._boxed[0]

    @data.setter
    def data(self, data: object) -> None:
        self._boxed = (data,)

    def tolist(self) -> object:
        """Return the value once for each row, as nested lists of shape `batch_size`."""
        value: object = self.data
        for size in reversed(self._desc.batch):
            value = [value for _ in range(size)]
        return value

    def maybe_to_stack(self) -> NonTensorDataBase:
        """Return the value once for each row; without batch dimensions, the entry itself."""
        return cast("NonTensorDataBase", self._spread(self._desc)) if self._desc.ndim else self

    def _item(self) -> object:
        data = self.data
        return data._item() if isinstance(data, NonTensorDataBase) else data

    def _constant(self) -> object:
        if isinstance(self.data, NonTensorDataBase):  # see `NonTensorStack._restored`
            return self.data
        if type(self) is NonTensorData and self._of_batch is (self._desc.ndim > 0):
            return self.data
        return self

    def _spread(self, desc: Descriptor) -> Node:
        """Return the value once for each row of a batch."""
        return registry.wrap_rows([self.data], torch.zeros((), dtype=torch.int64), desc)

    def _under(self, desc: Descriptor) -> Self:
        """Return the value under another batch size that an operation made of the present one."""
        if desc.ndim and not self._of_batch:
            return cast("Self", self._spread(desc))
        new = object.__new__(self.__class__)
        new._boxed = self._boxed
        new._desc = desc._unlocked
        new._of_batch = self._of_batch
        return new

    def _map_each(self, fn: LeafFn, batch: BatchFn | None = None, memo: Memo = None) -> Self:
        desc = self._desc
        if batch is None:
            return self._under(desc if memo is None or memo[0] is not desc else memo[1])
        if not self._of_batch:
            if isinstance(batch, Reduced) and not batch.lead:
                return self._shallow()
            if isinstance(batch, Fresh):
                new = desc.with_batch(batch(desc.batch))
                return cast("Self", wrap_data(None, desc)._under(new))
        return self._under(desc.with_batch(batch(desc.batch)))

    def _shallow(self) -> Self:
        return self  # a write to a row of a stack is seen in all copies that share its tensors

    def _map_to_parts(
        self, fn: PartsFn, batches: Sequence[BatchFn], memo: PartsMemo = None
    ) -> Sequence[Self]:
        desc = self._desc
        return [self._under(desc.with_batch(batch(desc.batch))) for batch in batches]

    def _rebuild(self, leaves: Iterator[Tensor]) -> Self:
        return self._under(self._desc)

    def _zip_each(
        self, other: Entry, fn: Callable[[Tensor, Tensor], Tensor], path: tuple[str, ...] = ()
    ) -> Self:
        self._collect_pair(other, [], [], path)
        if isinstance(fn, Selection) and not self._is_same(other):
            return cast("Self", self._spread(self._desc)._zip_each(other, fn, path))
        return self._under(self._desc)

    def _collect_pair(
        self, other: Entry, mine: list[Tensor], theirs: list[Tensor], path: tuple[str, ...]
    ) -> None:
        super()._collect_pair(other, mine, theirs, path)
        if isinstance(mine, Targets) and not self._is_same(other):
            mine.add_values(self, other, path)

    def _is_same(self, other: Entry) -> bool:
        return isinstance(other, NonTensorData) and self._holds_same(other)

    def _holds_same(self, other: NonTensorData) -> bool:
        """Return whether the values are equal; compiled code reads only those of other boxes."""
        return self._boxed is other._boxed or same_data(self.data, other.data)

    def _with_descriptor(self, desc: Descriptor) -> Self:
        new = object.__new__(self.__class__)
        new._boxed = self._boxed
        new._desc = desc._unlocked
        new._of_batch = self._of_batch or desc.ndim > 0
        return new

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NonTensorData):
            return NotImplemented
        return self._desc.batch == other._desc.batch and self._holds_same(other)

    __hash__ = None  # type: ignore[assignment]  # the value may not be hashable

    def __reduce__(self) -> tuple[object, ...]:
        desc = self._desc
        if self._of_batch and not desc.ndim and not self._always_of_batch():
            return restore_row_of_batch, (self.data, desc.device)
        return type(self), (self.data, desc.batch, desc.device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(data={self.data!r}, batch_size={self.batch_size})"


def refuse_tensors(value: object, path: tuple[str, ...]) -> None:
    """Refuse to write tensors, or a container or mapping of them, as a value.

    Raises:
        InvalidArgument: if it is refused; the message names the path.
    """
    if _holds_tensors(value):
        of_shape = f" of shape {shape_text(value.shape)}" if isinstance(value, Tensor) else ""
        raise InvalidArgument(
            f"entry {format_key(path)} holds values that are not tensors, got a "
            f"`{type(value).__name__}`{of_shape}. Use `set` to replace the entry, or wrap the "
            "value in `NonTensorData` to store it."
        )


def _holds_tensors(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    return isinstance(value, Tensor) or (
        is_node(value) and not isinstance(value, NonTensorDataBase)
    )


class MetaData(NonTensorData):
    """A non-tensor entry that describes the whole container, whatever its batch size.

    In a container without batch dimensions too it is one value for all rows: stacking containers
    with equal values keeps one value. Different values become one per row.

    Args:
        data: the value; kept by reference.
        batch_size: the batch size of the container that it belongs to.
        device: the device of the container.

    Example:
        >>> from kd_core import MetaData, TensorDict, stack
        >>> rows = [TensorDict({"unit": MetaData("m"), "name": "x"}) for _ in range(2)]
        >>> stack(rows)["unit"], stack(rows)["name"]
        ('m', ['x', 'x'])
    """

    __slots__ = ()

    @classmethod
    def _always_of_batch(cls) -> bool:
        return True


def restore_row_of_batch(data: object, device: torch.device | None) -> NonTensorData:
    """Rebuild the entry of one row that holds the value of its whole batch; called by pickle."""
    node = wrap_data(data, describe((), device))
    node._of_batch = True
    return node


def wrap_data(data: object, desc: Descriptor) -> NonTensorData:
    """Wrap a value with an existing descriptor."""
    node = object.__new__(NonTensorData)
    node.data = data
    node._desc = desc._unlocked
    node._of_batch = desc.ndim > 0
    return node


def _state_of_data(node: NonTensorData) -> tuple[bool, bool]:
    return node._always_of_batch(), node._of_batch


def _restore_data(
    data: object, desc: Descriptor, always_of_batch: bool, of_batch: bool
) -> NonTensorData:
    node: NonTensorData = object.__new__(MetaData if always_of_batch else NonTensorData)
    node.data, node._desc, node._of_batch = data, desc._unlocked, of_batch
    return node


@explains_parameters
def is_non_tensor(value: object) -> TypeGuard[NonTensorDataBase]:
    """Return whether a value is the wrapper of a non-tensor entry.

    Example:
        >>> from kd_core import TensorDict, is_non_tensor
        >>> td = TensorDict({"word": "reach"})
        >>> is_non_tensor(td.get("word")), is_non_tensor(td["word"])
        (True, False)
    """
    return isinstance(value, NonTensorDataBase)


registry.register("wrap_data", wrap_data)
registry.register("state_of_data", _state_of_data)
registry.register("restore_data", _restore_data)
