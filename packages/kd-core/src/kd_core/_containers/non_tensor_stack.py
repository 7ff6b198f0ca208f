"""`NonTensorStack`: a non-tensor entry with one value per row.

It holds its values in a list, the *pool*, and a tensor of the batch size with the position of each
row's value in the pool; trailing dimensions of it are lists of values. An operation that moves rows
is applied to the positions as to any leaf, so rows stay aligned with the tensors. A write to rows
is a write to the positions.

A pool belongs to one storage of positions: views share both, copies have a pool of their own. So a
pool that many writes have filled can be compacted in place. Compiled code cannot compare storages,
and its copies share the pool: it only grows then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kd_core._batch.descriptor import describe, describe_on
from kd_core._batch.plans import Fresh, Padded, Reduced
from kd_core._batch.shapes import batch_of, wrap_dim
from kd_core._containers.non_tensor import (
    NonTensorData,
    NonTensorDataBase,
    refuse_tensors,
    wrap_data,
)
from kd_core._containers.row_pool import (
    add_values,
    compact,
    count_rows,
    flat_values,
    join_rows,
    move_positions,
    nested_values,
    own_pool,
    pool_rows,
    share_storage,
    without_wrappers,
)
from kd_core._errors import ShapeMismatch, batch_does_not_fit, shape_text
from kd_core._keys import format_key
from kd_core._leaves.loops import Selection, same_data
from kd_core._leaves.writes import Targets
from kd_core._naming import explains_parameters
from kd_core._nodes import registry
from kd_core._protocol.validation import values_of_rows

if TYPE_CHECKING:
    from typing import Self

    from kd_core._batch.descriptor import Descriptor
    from kd_core._nodes.entry import Entry, Memo, Node, PartsMemo
    from kd_core._types import Batch, BatchFn, BatchSize, DeviceLike, LeafFn, PartsFn

_SHOWN: Final = 20
"""How many values `repr` shows before it leaves out the rest."""


class NonTensorStack(NonTensorDataBase):
    """A non-tensor entry: one value for each row of the batch.

    `td["key"]` returns the values as nested lists of shape `batch_size`, `td.get("key")` this
    wrapper. Indexing, splitting, joining, repeating and reshaping a container move the values with
    their rows. Equal values stay one per row. Reductions collect the values of the rows they
    reduce in lists; other arithmetic does not change them.

    Args:
        *values: one value for each row. If all are wrappers, they are stacked.
        stack_dim: the position of the new batch dimension, if wrappers are stacked.
        device: the device of the container.

    Raises:
        ShapeMismatch: if wrappers of different batch sizes are stacked.

    Example:
        >>> import torch
        >>> from kd_core import NonTensorStack, TensorDict
        >>> td = TensorDict({"x": torch.arange(3), "word": ["to", "be", "to"]}, [3])
        >>> td["word"], td[1]["word"], td[td["x"] != 1]["word"]
        (['to', 'be', 'to'], 'be', ['to', 'to'])
        >>> td.get("word") == NonTensorStack("to", "be", "to")
        True
    """

    __slots__ = ("_pool", "_positions")

    _pool: list[object]
    _positions: Tensor

    @explains_parameters
    def __init__(
        self, *values: object, stack_dim: int = 0, device: DeviceLike | None = None
    ) -> None:
        nodes = [value for value in values if isinstance(value, NonTensorDataBase)]
        if nodes and len(nodes) == len(values):
            at = wrap_dim(stack_dim, nodes[0]._desc.ndim + 1)
            for number, node in enumerate(nodes):
                if node._desc.batch != nodes[0]._desc.batch:
                    raise ShapeMismatch(
                        f"batch sizes must be equal, got {shape_text(nodes[0]._desc.batch)} in "
                        f"value 0 and {shape_text(node._desc.batch)} in value {number} of "
                        "`NonTensorStack`."
                    )
            self._pool, self._positions = join_rows(nodes, torch.stack, at)
        else:
            self._pool = list(values)
            self._positions = count_rows(len(values))
        self._desc = describe_on(tuple(self._positions.shape), device)

    @classmethod
    @explains_parameters
    def from_list(
        cls,
        values: Sequence[object],
        batch_size: BatchSize | None = None,
        device: DeviceLike | None = None,
    ) -> NonTensorStack:
        """Build the entry from nested lists.

        Args:
            values: one value for each row, as nested lists of shape `batch_size`.
            batch_size: the batch size; `None`: one dimension, with one row for each item.
            device: the device of the container.

        Raises:
            ShapeMismatch: if the lists do not have this shape.

        Example:
            >>> from kd_core import NonTensorStack
            >>> NonTensorStack.from_list([["a", "b"], ["c", "d"]], [2, 2]).batch_size
            torch.Size([2, 2])
        """
        batch = (len(values),) if batch_size is None else batch_of(batch_size)
        return restore_rows(values_of_rows(values, batch, "the list"), batch, device)

    @classmethod
    def from_nontensordata(cls, non_tensor: NonTensorDataBase) -> NonTensorDataBase:
        """Return the values of an entry, one for each row; see `maybe_to_stack`."""
        return non_tensor.maybe_to_stack()

    @property
    def data(self) -> object:
        """The values as nested lists of shape `batch_size`."""
        return self.tolist()

    def __len__(self) -> int:
        return self._desc.batch[0] if self._desc.ndim else 0

    def __iter__(self) -> Iterator[object]:
        values = self.tolist()
        return iter(values if isinstance(values, list) else (values,))

    def __getitem__(self, index: object) -> object:
        """Return the value of one row, or the entry of several rows."""
        rows = self._positions[index]  # type: ignore[index]  # torch checks it
        found = self._with(rows, describe(tuple(rows.shape), self._desc.device))
        node = cast("NonTensorDataBase", found)
        return node if isinstance(node, NonTensorStack) else node._item()

    def tolist(self) -> object:
        """Return the values as nested lists of shape `batch_size`."""
        return nested_values(self._positions.tolist(), self._pool)

    def maybe_to_stack(self) -> NonTensorStack:
        """Return the entry itself."""
        return self

    def _with(self, positions: Tensor, desc: Descriptor) -> Self:
        """Return the entry of other positions in the pool."""
        positions = without_wrappers(positions)
        if not desc.ndim and not is_compiling():
            return cast("Self", _value_of_row(self._pool, positions, desc))
        new = object.__new__(type(self))
        new._pool, new._positions, new._desc = self._pool, positions, desc._unlocked
        if not is_compiling() and not share_storage(positions, self._positions):
            new._pool, new._positions = own_pool(self._pool, positions)
        return new

    def _map_each(self, fn: LeafFn, batch: BatchFn | None = None, memo: Memo = None) -> Self:
        desc = self._desc
        if batch is None:
            return self._copy(desc if memo is None or memo[0] is not desc else memo[1])
        new = desc.with_batch(batch(desc.batch))
        if isinstance(batch, Reduced):
            return self._collected(batch.gone(desc.ndim), new, batch.lead)
        if isinstance(batch, Fresh):
            return self._fresh(new)
        if isinstance(batch, Padded):
            return cast("Self", _padded(self, fn, new))
        return self._with(move_positions(self, fn), new)

    def _map_to_parts(
        self, fn: PartsFn, batches: Sequence[BatchFn], memo: PartsMemo = None
    ) -> Sequence[Self]:
        desc = self._desc
        parts = fn(self._positions)
        return [
            self._with(part, desc.with_batch(batch(desc.batch)))
            for part, batch in zip(parts, batches, strict=True)
        ]

    def _collected(self, gone: tuple[int, ...], desc: Descriptor, lead: Batch) -> Self:
        """Return the values of reduced rows, in one list for each remaining row."""
        kept = [dim for dim in range(self._positions.ndim) if dim not in gone]
        lists = self._positions
        if gone:
            moved = lists.permute(*kept, *gone)
            lists = moved.reshape(*desc.batch[len(lead) :], *moved.shape[len(kept) :])
        return self._with(lists.expand((*lead, *lists.shape)).clone(), desc)

    def _fresh(self, desc: Descriptor) -> Self:
        """Return the values of new rows: none."""
        if not desc.ndim:
            return cast("Self", wrap_data(None, desc))
        return cast("Self", wrap_rows([None], torch.zeros((), dtype=torch.int64), desc))

    def _copy(self, desc: Descriptor) -> Self:
        return self._with(self._positions.clone(), desc)

    def _shallow(self) -> Self:
        return self._with(self._positions, self._desc)

    def _rebuild(self, leaves: Iterator[Tensor]) -> Self:
        return self._copy(self._desc)

    def _collect_pair(
        self, other: Entry, mine: list[Tensor], theirs: list[Tensor], path: tuple[str, ...]
    ) -> None:
        super()._collect_pair(other, mine, theirs, path)
        if isinstance(mine, Targets):
            mine.add_values(self, other, path)

    def _zip_each(
        self, other: Entry, fn: Callable[[Tensor, Tensor], Tensor], path: tuple[str, ...] = ()
    ) -> Self:
        self._collect_pair(other, [], [], path)
        if not isinstance(fn, Selection):
            return self._copy(self._desc)
        nodes: list[NonTensorDataBase] = [self, cast("NonTensorDataBase", other)]
        pool, (mine, theirs) = pool_rows(nodes)
        chosen = fn(mine, theirs)
        build = wrap_rows if self._desc.ndim or is_compiling() else _value_of_row
        return cast("Self", build(pool, chosen, self._desc))

    def _with_descriptor(self, desc: Descriptor) -> Self:
        shape = self._desc.batch
        if shape[: desc.ndim] != desc.batch:
            raise batch_does_not_fit("of non-tensor data", desc.batch, shape)
        new = object.__new__(type(self))
        new._pool, new._positions = self._pool, self._positions
        new._desc = desc._unlocked if desc.ndim == len(shape) else desc.with_batch(shape)
        return new

    def _restored(self, desc: Descriptor, ndim: int) -> NonTensorDataBase:
        # Under `vmap`, which maps its first dimension, it is not split, and fits again outside.
        if self._desc.batch[: desc.ndim] == desc.batch and desc.ndim >= ndim:
            return self._with_descriptor(desc)
        whole = object.__new__(NonTensorData)
        whole.data, whole._desc, whole._of_batch = self, desc._unlocked, True
        return whole

    def _encode(
        self, value: object, path: tuple[str, ...], shape: Batch | None = None
    ) -> tuple[Tensor, Tensor]:
        """Add values to the pool; return the positions of all rows, and those of the values.

        Args:
            value: a wrapper, nested lists with one value for each row, or one value for all.
            path: the path of the entry, for messages.
            shape: the shape of the rows that are written; `None`: all rows are written.

        Raises:
            InvalidArgument: if the value is a tensor.
            ShapeMismatch: if there is not one value for each row.
        """
        refuse_tensors(value, path)
        if isinstance(value, NonTensorStack) and is_compiling():  # positions cannot be read
            return self._positions, value._positions + add_values(self, value._pool)
        rows = self._desc.batch if shape is None else shape
        node = value if isinstance(value, NonTensorDataBase) else None
        if isinstance(node, NonTensorStack):
            values, batch = flat_values(node), node._desc.batch
        elif node is not None or not rows or not isinstance(value, (list, tuple)):
            values, batch = [value if node is None else node._item()], ()
        else:
            values, batch = values_of_rows(value, rows, format_key(path)), rows
        compact(self, len(values))
        if self._positions.ndim > self._desc.ndim:  # its values are lists
            self._pool = flat_values(self)
            self._positions = count_rows(len(self._pool)).reshape(self._desc.batch)
        start = add_values(self, values)
        return self._positions, (count_rows(len(values)) + start).reshape(batch)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NonTensorStack):
            return NotImplemented
        if self._desc.batch != other._desc.batch:
            return False
        pairs = zip(flat_values(self), flat_values(other), strict=True)
        return all(same_data(mine, theirs) for mine, theirs in pairs)

    __hash__ = None  # type: ignore[assignment]  # the values may not be hashable

    def __reduce__(self) -> tuple[object, ...]:
        return restore_rows, (flat_values(self), self._desc.batch, self._desc.device)

    def __repr__(self) -> str:
        desc = self._desc
        if self._positions.numel() <= _SHOWN or self._positions.ndim > desc.ndim:
            shown = repr(self.tolist())
        else:
            first = self._positions.reshape(-1)[:_SHOWN].tolist()
            rest = self._positions.numel() - _SHOWN
            values = ", ".join(repr(self._pool[position]) for position in first)
            shown = f"[{values}, ... ({rest} more)]"
        return f"NonTensorStack({shown}, batch_size={self.batch_size}, device={desc.device})"


def _padded(node: NonTensorStack, fn: LeafFn, desc: Descriptor) -> NonTensorStack:
    """Return the values with `None` for the rows that were added."""
    rows = node._positions.double()  # what is added may be no integer
    moved, marked = fn(rows), fn(rows + len(node._pool))
    added = (moved == marked) | moved.isnan()
    padded = torch.where(added, len(node._pool), moved).long()
    return wrap_rows([*node._pool, None], padded, desc)


def _value_of_row(pool: list[object], positions: Tensor, desc: Descriptor) -> NonTensorData:
    """Build an entry without batch dimensions, which is the value of one row."""
    return wrap_data(nested_values(positions.tolist(), pool), desc)


def join_data(
    nodes: Sequence[NonTensorDataBase], call: Callable[..., Tensor], dim: int, desc: Descriptor
) -> NonTensorDataBase:
    """Stack or concatenate non-tensor entries.

    Values of whole batches that are all equal stay one value. Otherwise each row keeps its own.

    Args:
        nodes: the entries, of batch sizes that fit.
        call: `torch.stack` or `torch.cat`.
        dim: the batch dimension.
        desc: the descriptor of the result.
    """
    first = nodes[0]
    if isinstance(first, NonTensorData) and all(
        isinstance(node, NonTensorData) and node._of_batch and first._holds_same(node)
        for node in nodes
    ):
        return first._under(desc)
    return wrap_rows(*join_rows(nodes, call, dim), desc)


def wrap_rows(pool: list[object], positions: Tensor, desc: Descriptor) -> NonTensorStack:
    """Build an entry that takes ownership of a pool and of positions, which are broadcast."""
    node = object.__new__(NonTensorStack)
    positions = without_wrappers(positions)
    if positions.shape[: desc.ndim] != desc.size:
        positions = positions.expand(desc.batch).clone()
    node._pool, node._positions, node._desc = pool, positions, desc._unlocked
    return node


def restore_rows(
    values: list[object], batch: Batch, device: DeviceLike | None = None
) -> NonTensorStack:
    """Build an entry from the values of all rows in one list; called by pickle."""
    return wrap_rows(values, count_rows(len(values)).reshape(batch), describe_on(batch, device))


def _wrap_list(values: list[object], desc: Descriptor) -> Node:
    return wrap_rows(values, count_rows(len(values)).reshape(desc.batch), desc)


registry.register("wrap_rows", wrap_rows)
registry.register("wrap_list", _wrap_list)
registry.register("join_data", join_data)
