"""What an entry of a container is, for type checkers and readers.

A container holds *entries*. An entry is a leaf (a `torch.Tensor`) or a *node*: a nested container,
or non-tensor data. Nodes have the same few methods, so a loop over entries asks one question only:
is it a tensor?
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, TypeVar

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from kd_core._torch_private import assume_constant_result, without_torch_function
from kd_core._types import NestedKey

if TYPE_CHECKING:
    from weakref import ReferenceType

    from typing_extensions import TypeIs

    from kd_core._descriptor import Descriptor
    from kd_core._types import Batch, BatchFn, LeafFn, PartsFn

Memo: TypeAlias = "tuple[Descriptor, Descriptor] | None"
PartsMemo: TypeAlias = "tuple[Descriptor, list[Descriptor]] | None"

Holders: TypeAlias = "tuple[ReferenceType[Node], ...]"
"""What encloses a node and was locked: weak references, so that a part keeps nothing alive."""


class Node:
    """Base class of non-tensor entries. Private: container authors inherit it with the primitives.

    What inherits from it is a node, whatever other values look like.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        _kd_holders: Holders
        """What holds it locked; unset where nothing ever did."""

        @property
        @abstractmethod
        def _kd_desc(self) -> Descriptor: ...

        @abstractmethod
        def _kd_item(self) -> object:
            """Return what `td[key]` gives for this entry."""

        @abstractmethod
        def _kd_map_each(
            self, fn: LeafFn, batch: BatchFn | None = None, memo: Memo = None
        ) -> Node: ...

        @abstractmethod
        def _kd_shallow(self) -> Node: ...

        @abstractmethod
        def _kd_map_to_parts(
            self, fn: PartsFn, batches: Sequence[BatchFn], memo: PartsMemo = None
        ) -> Sequence[Node]: ...

        @abstractmethod
        def _kd_collect(self, leaves: list[Tensor]) -> None: ...

        @abstractmethod
        def _kd_rebuild(self, leaves: Iterator[Tensor]) -> Node: ...

        @abstractmethod
        def _kd_collect_pair(
            self, other: Entry, mine: list[Tensor], theirs: list[Tensor], path: tuple[str, ...]
        ) -> None: ...

        @abstractmethod
        def _kd_zip_each(
            self, other: Entry, fn: Callable[[Tensor, Tensor], Tensor], path: tuple[str, ...] = ()
        ) -> Node: ...

        @abstractmethod
        def _kd_with_descriptor(self, desc: Descriptor) -> Node:
            """Return a shallow copy that has another batch size, device or lock."""

        @abstractmethod
        def _kd_below(self) -> Sequence[Node]:
            """Return the nodes that it encloses."""

        @abstractmethod
        def _kd_hold(self, count: int, by: Holders = ()) -> bool:
            """Count `count` more enclosing containers that are locked.

            Args:
                count: how many more, or fewer.
                by: a weak reference to the container that encloses it.

            Returns:
                Whether it or a node below is locked after that.
            """


def is_node(value: object) -> TypeIs[Node]:
    """Return whether a value is a node: its type answers, not a class that it claims to have.

    The loops of `_leaves`, and methods of containers that are overridden for speed, spell it out: a
    call for each entry shows in the benchmarks.
    """
    return issubclass(type(value), Node)


class Data(Node):
    """Non-tensor data."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        @abstractmethod
        def _of_batch(self) -> bool:
            """Whether it is one value that belongs to all rows of a batch."""

        @abstractmethod
        def _join(
            self,
            nodes: Sequence[Entry],
            call: Callable[..., Tensor],
            dim: int,
            desc: Descriptor,
            path: tuple[str, ...],
        ) -> Data:
            """Return the entry of containers that are joined.

            Args:
                nodes: the entry of each container, of one kind; this one is the first.
                call: `torch.stack` or `torch.cat`.
                dim: the batch dimension.
                desc: the descriptor of the result.
                path: the path of the entry, for messages.
            """

        @abstractmethod
        def _agrees(self, value: object) -> bool:
            """Return whether a value, wrapped or not, is that of the entry."""


def is_any_data(value: object) -> TypeIs[Data]:
    """Return whether a value is an entry that is neither a tensor nor a container."""
    return issubclass(type(value), Data)


def are_data(values: object) -> bool:
    """Return whether a value is a list or tuple of such entries, and not empty."""
    return isinstance(values, (list, tuple)) and len(values) > 0 and all(map(is_any_data, values))


class TensorData(Data):
    """One tensor for the whole batch, without batch dimensions."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        @abstractmethod
        def _tensor(self) -> Tensor: ...

        @abstractmethod
        def _kd_item(self) -> Tensor:
            """Return what `td[key]` gives: the tensor as an `UnbatchedView`, if it can be one."""


def is_unbatched(value: object) -> TypeIs[TensorData]:
    """Return whether a value is an entry that is one tensor for the whole batch."""
    return issubclass(type(value), TensorData)


@assume_constant_result
def _has_place(kind: type) -> bool:
    """Return whether instances of a class have a `__dict__`."""
    return kind.__dictoffset__ != 0


def own_attributes(node: Node) -> dict[str, object] | None:
    """Return the attributes of an instance beside its entries; `None` if it has no place for them.

    A class may find something else as `__dict__`, which is not asked.
    """
    if is_dynamo_compiling():  # which traces no `object.__getattribute__`
        return node.__dict__ if _has_place(type(node)) else None
    try:
        found: dict[str, object] = object.__getattribute__(node, "__dict__")
    except AttributeError:
        return None
    return found


class UnbatchedView(Tensor):
    """Base class of what `td[key]` gives for such an entry. It is never an entry itself."""

    _kd_held: Tensor
    _kd_in_graph: bool
    _kd_desc: Descriptor

    @property
    def _kd_tensor(self) -> Tensor:
        """The tensor of the entry, or what a custom `torch.autograd.Function` made of the view.

        Such a function is called with the view itself, and returns it as a part of the graph.
        """
        if not self._kd_in_graph and not self._kd_held.requires_grad:
            with without_torch_function():
                if self.requires_grad:
                    self._kd_held = self.as_subclass(Tensor)
        return self._kd_held


Value = TypeVar("Value")


def operand_of(value: Value) -> Value | Tensor:
    """Return the tensor of an entry that was read, and anything else as it is."""
    return value._kd_tensor if isinstance(value, UnbatchedView) else value


class Values(Data):
    """Data that is not a tensor."""

    __slots__ = ()

    if TYPE_CHECKING:

        @abstractmethod
        def tolist(self) -> object:
            """Return the values of all rows, in lists."""

        @abstractmethod
        def _kd_state(self) -> tuple[bool, bool]:
            """Return whether it always belongs to a whole batch, as `MetaData`, and if it does."""

        @abstractmethod
        def _copy_values(self) -> None:
            """Replace each value by a copy, where one can be made."""

        @abstractmethod
        def _kd_describe(self, desc: Descriptor) -> None:
            """Replace the descriptor, by one of as many rows."""

        @abstractmethod
        def _spread(self, desc: Descriptor) -> RowData:
            """Return the value once for each row of a batch."""

        @abstractmethod
        def _equal_rows(self, other: Entry, equal: bool) -> Tensor:
            """Return for each row whether its value is equal to that of another entry, or not."""


def is_data(value: object) -> TypeIs[Values]:
    """Return whether a value is wrapped data that is not a tensor."""
    return issubclass(type(value), Values)


def rows_of_data(node: Values, dims: int | None = None) -> list[object]:
    """Return the values of all rows, or of those of the first dimensions alone, in one list."""
    rows: list[Any] = [node.tolist()]
    for _ in range(node._kd_desc.ndim if dims is None else dims):
        rows = [row for level in rows for row in level]
    return rows


def kept_value(node: Node) -> object:
    """Return the value of an entry, or those of its rows, as `is_row_data` tells them apart."""
    return node.tolist() if is_row_data(node) else node._kd_item()


def tensor_of(entry: object) -> Tensor | None:
    """Return the tensor that an entry is, with or without batch dimensions; else `None`."""
    if isinstance(entry, Tensor):
        return entry
    return entry._tensor if is_unbatched(entry) else None


def as_read(entry: object) -> Tensor:
    """Return an entry, typed as `td[key]` is: as a tensor, which most entries are."""
    return entry  # type: ignore[return-value]  # those who read others know it


def are_tensors(values: Sequence[object]) -> TypeGuard[list[Tensor]]:
    """Return whether all of some entries are tensors with batch dimensions."""
    return all(isinstance(each, Tensor) for each in values)


def leaf_or_node(entry: Entry) -> Entry:
    """Return the tensor that an entry is, with or without batch dimensions; else the node."""
    return entry._tensor if is_unbatched(entry) else entry


class Encodes:
    """Base class of what encodes the values that are written to it: data of rows, and one row."""

    __slots__ = ()

    if TYPE_CHECKING:

        @abstractmethod
        def _encode(
            self, value: object, path: tuple[str, ...], shape: Batch | None = None
        ) -> tuple[Tensor, Tensor]:
            """Return a tensor that stands for all rows, and one that stands for new values of them.

            `shape` is that of the rows that are written; `None`: all rows are.
            """


class RowData(Values, Encodes):
    """Non-tensor data with one value per row, which is written as its rows are."""

    __slots__ = ()


def is_row_data(value: object) -> TypeIs[RowData]:
    """Return whether a value is non-tensor data with one value per row."""
    return issubclass(type(value), RowData)


def encodes(value: object) -> TypeIs[Encodes]:
    """Return whether a value encodes what is written to it."""
    return issubclass(type(value), Encodes)


AnyKey = TypeVar("AnyKey", bound=NestedKey)

Source: TypeAlias = "Mapping[AnyKey, object] | Node"
"""Where an update takes its entries from: a mapping, or a container.

A variable, because the key of a mapping is invariant to a type checker: a dict whose keys are pairs
of strings is not a mapping of `NestedKey` to it.
"""

Entry: TypeAlias = "Tensor | Node"
Entries: TypeAlias = Mapping[str, Entry]
