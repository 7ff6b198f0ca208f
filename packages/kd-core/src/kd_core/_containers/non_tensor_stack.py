"""`NonTensorStack`: a non-tensor entry with one value per row.

It holds the numbers of its rows' cells (`Cells`), a tensor of the batch size. An operation that
moves rows is applied to the numbers as to any leaf, so rows stay aligned with the tensors. Views
share the cells, copies have cells of their own. A write to a row replaces what is in its cell.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from kd_core import _registry as registry
from kd_core._containers.non_tensor import (
    Cell,
    Constant,
    MetaData,
    NonTensorData,
    NonTensorDataBase,
    Shared,
    _no_keys,
    linked,
    plain_value,
    pool_rows,
    refuse_tensors,
    row_of_cell,
    stand_in_for,
    without_share,
    wrap_data,
)
from kd_core._descriptor import describe_on, device_beside, restored
from kd_core._errors import (
    InvalidValue,
    KeyNotFound,
    ShapeMismatch,
    batch_does_not_fit,
    cannot_broadcast,
    locked,
    not_valid,
    restores,
    shape_text,
    wrong_type,
)
from kd_core._keys import format_key
from kd_core._leaves.arrays import shape_of_lists, values_of_rows
from kd_core._leaves.foreach import StandIn
from kd_core._leaves.loops import Selection, same_data
from kd_core._leaves.writes import Targets
from kd_core._nodes import RowData
from kd_core._shapes import (
    Fresh,
    Padded,
    Reduced,
    Resized,
    as_int,
    batch_of,
    broadcasts_to,
    checked_names,
    with_names,
    without_names,
    wrap_dim,
)
from kd_core._torch_private import is_batchedtensor, traced_as, without_wrappers
from kd_core._types import NO_DEFAULT

if TYPE_CHECKING:
    from typing import Protocol, Self

    from kd_core._descriptor import Descriptor
    from kd_core._nodes import Entry, Memo, PartsMemo
    from kd_core._types import Batch, BatchFn, BatchSize, DeviceLike, LeafFn, NestedKey, PartsFn

    class Rows(Protocol):
        """What holds the numbers of the cells of its rows; loose, perhaps further dimensions."""

        _kd_desc: Descriptor
        _positions: Tensor
        _cells: Cells
        _loose: Loose | None
        _in_parts: bool


# Cells: where the values of rows are, one cell a row; and the tensors that stand for writes.
#
# An entry with one value per row holds a list of cells, and a tensor of the batch size with the
# number of each row's cell. These numbers never change. A write to a row puts its value into the
# cell of the row, so it reaches every view, needs no further memory, and does not touch other
# rows: threads may write different rows, and read others meanwhile.
#
# Three rules keep this right:
#
# 1. A view of the numbers of an entry has its cells. Two entries that are not views of each other
# never share cells, though equal copies may share the numbers. 2. Each element of a storage of
# numbers has a cell of its own. So whatever makes other numbers than a view does (a copy, a
# selection, a stack) takes the values out into cells of its own. 3. A list that a copy made in
# compiled code still needs is *lent*: the next write replaces it by a copy first.
#
# Compiled code knows neither the numbers nor whether tensors share storage, so both wait for the
# first eager access. What is made there is *loose*: it keeps the list as it is, and gets cells
# then. What is written there is noted in a chain of `Later`. Values are not read there, and what
# is loose is not written: torch runs such a call without a graph.

_LENDING: Final = Lock()
"""Held while a lent list is replaced, and while loose entries get their cells."""


class Later:
    """A write of compiled code, for the next eager access to make.

    Attributes:
        previous: the write before it.
        positions: the numbers of the cells.
        sources: for each of them the position in `values` of its new value; negative: none.
        values: the values that are written.
    """

    __slots__ = ("positions", "previous", "sources", "values")

    def __init__(
        self, previous: Later | None, positions: Tensor, sources: Tensor, values: list[object]
    ) -> None:
        self.previous = previous
        self.positions = positions
        self.sources = sources
        self.values = values


class Loose:
    """The values that the numbers of an entry count which compiled code made.

    Attributes:
        values: the values, a list that is not written.
        later: what is still to be written.
    """

    __slots__ = ("later", "values")

    values: list[object]
    later: Later | None

    def written(self) -> list[object]:
        """Return the values with all writes."""
        writes = []
        later = self.later
        while later is not None:
            writes.append(later)
            later = later.previous
        values = self.values.copy() if writes else self.values
        for write in reversed(writes):
            for number, source in zip(listed(write.positions), listed(write.sources), strict=True):
                if source >= 0:
                    values[number] = write.values[source]
        return values


class Cells:
    """The cells of an entry and of its views.

    Attributes:
        values: the value in each cell.
        positions: the numbers of all cells.
        lent: whether a copy that compiled code made needs `values` as it is.
        later: the last write of compiled code that is still to be made.
        kin: the cells of such copies, which views of them share.
        shares: whether some may hold a `Shared`.
        whole: the value of an entry for all rows that these are the rows of, if there is one.
    """

    __slots__ = ("__weakref__", "kin", "later", "lent", "positions", "shares", "values", "whole")

    def __init__(self, values: list[object], positions: Tensor) -> None:
        self.values = values
        self.positions = positions
        self.shares = Shared in map(type, values)
        self.lent = False
        self.later: Later | None = None
        self.kin: list[weakref.ref[Cells]] = []
        self.whole: Whole | None = None

    def read(self, number: int) -> object:
        """Return what is in a cell."""
        self.settle()
        return self.values[number]

    def settle(self) -> None:
        """Run the writes that compiled code left to be done."""
        if self.later is not None:
            with _LENDING:
                if self.later is not None:
                    self.values = loosely(self.values, self.later).written()
                    self.later, self.lent = None, False

    def write(self, numbers: Iterable[int], values: Iterable[object]) -> None:
        """Put values into cells; other cells may be read and written meanwhile."""
        pairs = list(zip(numbers, values, strict=True))
        while True:
            if self.lent:
                with _LENDING:
                    if self.lent:
                        self.values, self.lent = self.values.copy(), False
            cells = self.values
            for number, value in pairs:
                cells[number] = value
            if cells is self.values:  # else it was replaced by a copy of itself meanwhile
                break
        if self.whole is not None and len(pairs) == len(cells):
            self.whole.take(cells)


def cells_of(node: Rows) -> Cells:
    """Return the cells of an entry, after what compiled code left to be done."""
    if node._loose is not None:
        with _LENDING:
            if node._loose is not None:
                _settle(node, node._loose)
    node._cells.settle()
    return node._cells


def _settle(node: Rows, loose: Loose) -> None:
    """Add cells to an entry that compiled code made: its own, unless it is a view."""
    root, positions = node._cells, node._positions
    known = [cells for cells in (root, *(ref() for ref in root.kin)) if cells is not None]
    shared = next((each for each in known if share_storage(each.positions, positions)), None)
    if positions.ndim > node._kd_desc.ndim:  # its values are lists
        node._positions, cells = cells_for(nested_rows(node, loose.written()), node._kd_desc.batch)
    elif shared is not None:
        cells = shared
    else:
        cells = Cells(_renumbered(positions, loose.written()), positions)
        root.kin = [ref for ref in root.kin if ref() is not None]
        root.kin.append(weakref.ref(cells))
        cells.kin = root.kin
    node._cells, node._loose = cells, None


def _renumbered(positions: Tensor, values: list[object]) -> list[object]:
    """Number all elements of a storage in order; return the value that each had."""
    storage = positions.untyped_storage()
    everywhere = torch.empty(0, dtype=torch.int64, device="cpu").set_(
        storage, 0, (storage.nbytes() // 8,), (1,)
    )
    found = [
        values[number] if 0 <= number < len(values) else None  # no row has an unused element
        for number in everywhere.tolist()
    ]
    everywhere.copy_(count_rows(len(found)))
    return found


def cells_for(values: list[object], batch: Sequence[int]) -> tuple[Tensor, Cells]:
    """Return the numbers of new cells, one for each row, and the cells."""
    positions = count_rows(len(values))
    if len(batch) != 1:
        positions = positions.reshape(batch)
    positions = without_wrappers(positions)
    return positions, Cells(values, positions)


def count_rows(rows: int) -> Tensor:
    """Return the numbers of rows with one value each, in order."""
    return torch.arange(rows, device="cpu")


def listed(numbers: Tensor) -> list[int]:
    """Return the elements of a tensor in one list."""
    return (numbers if numbers.ndim == 1 else numbers.reshape(-1)).tolist()


def nested_values(positions: Any, values: list[object]) -> object:
    """Return the values in cells, whose numbers are given as nested lists or as one number.

    Raises:
        InvalidValue: in compiled code, which knows no number that a tensor holds.
    """
    if is_dynamo_compiling() and positions != []:
        raise _not_compiled("read")
    if not isinstance(positions, list):
        return values[positions]
    if positions and not isinstance(positions[0], list):
        return [values[position] for position in positions]
    return [nested_values(inner, values) for inner in positions]


def _values_in_order(node: Rows) -> list[object] | None:
    """Return the values of all rows where compiled code knows them; `None` where it does not.

    They are in the order of the cells while nothing was done with the entry. Its guards are on the
    values.
    """
    cells = node._cells
    known = node._loose is None and cells.later is None and not cells.shares and cells.values
    return cells.values if known and node._positions is cells.positions else None


def _nested_in_order(values: list[object], batch: Batch) -> object:
    """Return values in order as nested lists of the shape of a batch."""
    rows = list(values)
    for size in reversed(batch[1:]):
        rows = [rows[start : start + size] for start in range(0, len(rows), size)]
    return rows


def _traced_hold_wrapped(values: list[object]) -> bool:
    return any(type(value) in _HOLDS for value in values)  # 2.10 traces no `isdisjoint`


@traced_as(_traced_hold_wrapped)
def _hold_wrapped(values: list[object]) -> bool:
    """Return whether a value is wrapped, or shared by the rows of a part."""
    return not _HOLDS.isdisjoint(map(type, values))


def _not_compiled(action: str) -> InvalidValue:
    return InvalidValue(
        f"values of rows that are not tensors cannot be {action} in compiled code, got a "
        f"{'read' if action == 'read' else 'write'} of them. Read and write them outside of it."
    )


def _repeated(positions: Tensor, size: Sequence[int]) -> Tensor | None:
    """Return numbers that are the same along some dimensions for more of them, or None.

    `vmap` in chunks builds its result of what the first chunk made.
    """
    if positions.ndim != len(size):
        return None
    one: list[slice] = []
    for count, stride, wanted in zip(positions.shape, positions.stride(), size, strict=True):
        if count != wanted and count != 1 and (stride or not count):
            return None
        one.append(slice(None) if count == wanted else slice(1))
    return positions[tuple(one)].expand(*size)


def repeated_dims(entry: object) -> set[int]:
    """Return the batch dimensions along which rows of an entry are one row, repeated."""
    if not isinstance(entry, NonTensorStack):
        return set()
    return {dim for dim in range(entry._kd_desc.ndim) if not entry._positions.stride(dim)}


def repeated_along(node: NonTensorStack, dims: Iterable[int]) -> NonTensorDataBase:
    """Return an entry whose values are the same along some dimensions as one row, repeated."""
    one = [slice(None)] * node._kd_desc.ndim
    for dim in dims:
        one[dim] = slice(1)
    return node._with(node._positions[tuple(one)].expand(*node._positions.shape), node._kd_desc)


def _no_single_value(rows: NonTensorStack) -> str:
    return (
        f"expected rows with one value for `data`, got {rows!r}. Use `tolist()` for the values of "
        "all rows."
    )


def _refused_inside_vmap(rows: object) -> InvalidValue:
    return InvalidValue(
        "a non-tensor entry with one value per row cannot be moved, joined, compared or written "
        f"inside of `vmap`, got {rows!r}. `exclude` the entry inside, or do it outside of `vmap`."
    )


def share_storage(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of numbers have the same storage."""
    return one is other or (
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and one.numel() > 0
    )


def lend(node: Rows) -> Loose:
    """Return the values that the numbers of an entry count, for what compiled code makes of it."""
    loose = node._loose
    if loose is None:
        cells = node._cells
        cells.lent = True
        loose = loosely(cells.values, cells.later)
    return loose


def loosely(values: list[object], later: Later | None = None) -> Loose:
    """Build a `Loose`; without `__init__`, for whose arguments dynamo guards each value."""
    loose = object.__new__(Loose)
    loose.values, loose.later = values, later
    return loose


def table_of(node: Rows) -> list[object]:
    """Return the list that the numbers of an entry count.

    Raises:
        InvalidValue: in compiled code, if it is to be written first.
    """
    if not is_compiling():
        return cells_of(node).values
    loose = lend(node)
    if loose.later is not None:
        raise _not_compiled("read")
    return loose.values


def flat_values(node: Rows) -> list[object]:
    """Return the values of all rows in one list."""
    cells = cells_of(node)
    values = held_by(node, cells)
    if node._positions is cells.positions:
        return values.copy()
    return list(map(values.__getitem__, listed(node._positions)))


def held_by(node: Rows, cells: Cells) -> list[object]:
    """Return what the cells of an entry hold, values alone if its rows are not those of parts."""
    if cells.shares and not node._in_parts:
        return list(map(without_share, cells.values))
    return cells.values


def nested_rows(node: Rows, values: list[object]) -> list[object]:
    """Return the values of an entry whose numbers have further dimensions: lists."""
    desc, positions = node._kd_desc, node._positions
    rows = positions.reshape(math.prod(desc.batch), *positions.shape[desc.ndim :])
    return [nested_values(row, values) for row in rows.tolist()]


def move_positions(node: Rows, fn: LeafFn) -> Tensor:
    """Apply a function that moves rows to the numbers."""
    try:
        return fn(node._positions)
    except RuntimeError:  # its index is on another device, or it needs a contiguous leaf
        return fn(node._positions.contiguous().to(device_beside(node._kd_desc))).cpu()


class RowTarget(StandIn):
    """The numbers of rows that are written: a copy into them puts values into their cells.

    Its sources are numbers too: they count the values that are written.
    """

    cells: Cells
    written: list[object]
    ready: tuple[list[int], list[object]] | None = None

    def prepare(self, source: Tensor) -> None:
        """List the cells and the values of the copy that follows, which asks torch for memory."""
        if self.ready is None:
            self.ready = self._pairs(self.plain, source)

    def store(self, numbers: Tensor, source: Tensor) -> None:
        """Put the values that a source counts into cells."""
        cells, values = self.ready or self._pairs(numbers, source)
        self.ready = None
        self.cells.write(cells, values)

    def _pairs(self, numbers: Tensor, source: Tensor) -> tuple[list[int], list[object]]:
        if source.shape != numbers.shape:
            source = source.expand(numbers.shape)
        return listed(numbers), list(map(self.written.__getitem__, listed(source)))


def encoded(node: Rows, values: list[object], batch: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return a tensor that stands for all rows of an entry, and one for values to write there."""
    source = count_rows(len(values))
    if len(batch) != 1:
        source = source.reshape(batch)
    if is_compiling():
        return _written_later(node, values), source
    target = node._positions.as_subclass(RowTarget)
    target.plain, target.cells, target.written = node._positions, cells_of(node), values
    return target, source


def encoded_rows(node: Rows, source: Rows) -> tuple[Tensor, Tensor]:
    """Return a tensor that stands for all rows of an entry, and one for rows to write there."""
    if is_compiling():
        return _written_later(node, table_of(source)), source._positions
    return encoded(node, list(map(without_share, flat_values(source))), source._kd_desc.batch)


def _written_later(node: Rows, values: list[object]) -> Tensor:
    """Note a write of compiled code; return the tensor that it writes.

    Raises:
        InvalidValue: if compiled code made the entry: it may be a view or a copy.
    """
    if node._loose is not None:
        raise _not_compiled("written")
    cells = node._cells
    sources = torch.full_like(node._positions, -1)
    cells.later = Later(cells.later, node._positions, sources, values)
    return sources


_SHOWN: Final = 20
"""How many values `repr` shows before it leaves out the rest."""


_HOLDS: Final = frozenset({NonTensorData, MetaData, Shared})
"""Wrappers that values may be, which reading takes off."""


class RowCell(Cell):
    """The cell of one row."""

    __slots__ = ("_cells", "_number", "_positions")

    def __init__(self, cells: Cells, positions: Tensor) -> None:
        self._cells, self._positions = cells, positions
        self._number = int(positions)

    def __getitem__(self, index: int) -> object:
        """Return the value."""
        return without_share(self._cells.read(self._number))

    def write(self, value: object) -> None:
        """Replace the value, for every view of the row."""
        self._cells.write((self._number,), (value,))

    def moved(self) -> RowCell:
        """Return the cell itself: a view of the row writes it."""
        return self

    def rows(self, desc: Descriptor) -> NonTensorStack:
        """Return the entry of a batch of one row, which is this one."""
        return self.spread(desc)

    def spread(self, desc: Descriptor) -> NonTensorStack:
        """Return the entry of a batch whose rows all are this one."""
        node = object.__new__(NonTensorStack)
        node._positions, node._cells = self._positions.expand(desc.batch), self._cells
        node._kd_desc, node._loose, node._in_parts = desc._unlocked, None, True
        return node


class Whole(Cell):
    """The value of an entry that is one for all rows, and of the rows that `unsqueeze` made of it.

    What is written to the entry is written to the rows. One value that is written to all of them
    is that of the entry.
    """

    __slots__ = ("_cells", "_desc", "_held")

    def __init__(self, value: object, desc: Descriptor) -> None:
        self._held, self._desc = value, desc
        self._cells: weakref.ref[Cells] | None = None  # they live as long as what reads them

    def __getitem__(self, index: int) -> object:
        """Return the value."""
        return self._held

    def write(self, value: object) -> None:
        """Replace the value, and that of all rows."""
        self._held = value
        rows = self._linked()
        if rows is not None:
            rows.settle()
            count = len(rows.values)
            rows.write(range(count), [self._of_row()] * count)

    def moved(self) -> tuple[object]:
        """Return the value alone: only the entry and the rows share it."""
        return (self._held,)

    def take(self, values: list[object]) -> None:
        """Take what all rows hold, if it is one object."""
        if values and all(value is values[0] for value in values):
            self._held = without_share(values[0])

    def spread(self, desc: Descriptor) -> NonTensorStack:
        """Return an entry of a batch whose rows all have the value, as a copy."""
        return wrap_rows([self._of_row()], torch.zeros((), dtype=torch.int64, device="cpu"), desc)

    def rows(self, desc: Descriptor) -> NonTensorStack:
        """Return the entry of the rows, under a descriptor of as many."""
        rows = self._linked()
        if rows is None:
            node = self.spread(desc)
            node._cells.whole, self._cells = self, weakref.ref(node._cells)
            return node
        node = object.__new__(NonTensorStack)
        node._positions, node._cells, node._loose = rows.positions.reshape(desc.size), rows, None
        node._kd_desc, node._in_parts = desc._unlocked, True
        return node

    def _linked(self) -> Cells | None:
        return None if self._cells is None else self._cells()

    def _of_row(self) -> object:
        return Shared(self._held, self._desc.ndim) if self._desc.ndim else self._held


class NonTensorStack(NonTensorDataBase, RowData):
    """A non-tensor entry: one value for each row of the batch.

    `td["key"]` returns the values as nested lists of shape `batch_size`, `td.get("key")` this
    wrapper. Indexing, splitting, joining, repeating and reshaping a container move the values with
    their rows. Equal values stay one per row. Reductions collect the values of the rows they
    reduce in lists; other arithmetic does not change them.

    Args:
        *values: one value for each row. If all are wrappers, they are stacked.
        stack_dim: the position of the new batch dimension, if wrappers are stacked.
        device: the device of the container.
        batch_size: the batch size, which the values have anyway.
        strict_shape: of no effect: the values have one batch size in any case.
        names: the names of the batch dimensions.
        stack_dim_name: the name of the dimension at `stack_dim`.

    Raises:
        ShapeMismatch: if wrappers of different batch sizes are stacked, or `batch_size` is another.

    Example:
        >>> import torch
        >>> from kd_core import NonTensorStack, TensorDict
        >>> td = TensorDict({"x": torch.arange(3), "word": ["to", "be", "to"]}, [3])
        >>> td["word"], td[1]["word"], td[td["x"] != 1]["word"]
        (['to', 'be', 'to'], 'be', ['to', 'to'])
        >>> td.get("word") == NonTensorStack("to", "be", "or")
        tensor([ True,  True, False])
    """

    __slots__ = ("_cells", "_in_parts", "_loose", "_positions")

    def __class_getitem__(cls, item: object) -> type[Self]:
        """Return the class: its values may be annotated with their type."""
        return cls

    _positions: Tensor
    _cells: Cells
    _loose: Loose | None
    """The values that the numbers count, in what compiled code made; see `Loose`."""

    _in_parts: bool
    """Whether its rows are those of the parts that were stacked; see `Shared`."""

    def __init__(
        self,
        *values: object,
        stack_dim: int = 0,
        device: DeviceLike | None = None,
        batch_size: BatchSize | None = None,
        strict_shape: bool = False,
        names: Sequence[str | None] | None = None,
        stack_dim_name: str | None = None,
    ) -> None:
        nodes = [value for value in values if isinstance(value, NonTensorDataBase)]
        if nodes and len(nodes) == len(values):
            at = wrap_dim(stack_dim, nodes[0]._kd_desc.ndim + 1)
            for number, node in enumerate(nodes):
                if node._kd_desc.batch != nodes[0]._kd_desc.batch:
                    raise ShapeMismatch(
                        f"batch sizes must be equal, got {shape_text(nodes[0]._kd_desc.batch)} in "
                        f"value 0 and {shape_text(node._kd_desc.batch)} in value {number} of "
                        "`NonTensorStack`."
                    )
            pool, columns = pool_rows(nodes, stacked=True)
            joined = torch.stack(columns, at)
            _fill(self, pool, joined, describe_on(tuple(joined.shape), device))
        else:
            self._positions, self._cells = cells_for(list(values), (len(values),))
            self._loose, self._in_parts = None, True
            self._kd_desc = describe_on((len(values),), device)
        if batch_size is not None and batch_of(batch_size) != self._kd_desc.batch:
            raise ShapeMismatch(
                f"`batch_size` must be that of the values, {shape_text(self._kd_desc.batch)}, got "
                f"{shape_text(batch_of(batch_size))}. Leave it out."
            )
        batch = self._kd_desc.batch
        if names is None and stack_dim_name is not None:
            at = wrap_dim(stack_dim, len(batch))
            names = [stack_dim_name if dim == at else None for dim in range(len(batch))]
        if names is not None:
            self._kd_desc = self._kd_desc.with_batch(with_names(batch, checked_names(names, batch)))

    @classmethod
    def from_list(
        cls,
        non_tensors: Sequence[object],
        batch_size: BatchSize | None = None,
        device: DeviceLike | None = None,
    ) -> NonTensorStack:
        """Build the entry from nested lists.

        Args:
            non_tensors: one value for each row, as nested lists of shape `batch_size`; wrappers
                are taken off.
            batch_size: the batch size; `None`: a dimension for each level of lists that have the
                same length.
            device: the device of the container.

        Raises:
            ShapeMismatch: if the lists do not have this shape.

        Example:
            >>> from kd_core import NonTensorStack
            >>> NonTensorStack.from_list([["a", "b"], ["c", "d"]], [2, 2]).batch_size
            torch.Size([2, 2])
        """
        batch = shape_of_lists(non_tensors) if batch_size is None else batch_of(batch_size)
        rows = values_of_rows(non_tensors, batch, "the list")
        rows = [each._kd_item() if isinstance(each, NonTensorDataBase) else each for each in rows]
        return restore_rows(rows, batch, device)

    @classmethod
    def from_nontensordata(cls, non_tensor: NonTensorDataBase) -> NonTensorDataBase:
        """Return the values of an entry, one for each row; see `maybe_to_stack`."""
        return non_tensor.maybe_to_stack()

    @property
    def data(self) -> object:
        """The value that all rows have.

        Raises:
            AttributeError: if rows have different values, or there are none; see `tolist`.
        """
        shared = self._one_value()
        if shared is not None:
            return shared.value
        values = list(map(without_share, flat_values(self)))
        if not values or not all(same_data(values[0], value) for value in values):
            raise AttributeError(_no_single_value(self))
        return values[0]

    if not TYPE_CHECKING:

        def __getattr__(self, item: str) -> object:
            """Return a method or property of containers; `data` has raised if it comes here."""
            if item == "data":
                raise AttributeError(_no_single_value(self))
            return super().__getattr__(item)

    @property
    def stack_dim(self) -> int:
        """The dimension along which `tensordicts` are stacked: the first one."""
        return 0

    @property
    def tensordicts(self) -> list[NonTensorDataBase]:
        """The entries of the rows along the first dimension."""
        return list(self)

    def get_nestedtensor(
        self, key: NestedKey, default: object = NO_DEFAULT, **options: object
    ) -> object:
        """Return the default: there are no entries, as those of the members of a stack.

        Raises:
            KeyNotFound: if there is none.
        """
        if default is NO_DEFAULT:
            raise KeyNotFound(f"key {format_key(key)} not found: a non-tensor entry has no keys.")
        return default

    def valid_keys(self, *args: object, **options: object) -> Iterator[NestedKey]:
        """Return an empty iterator: no entries can be stacked."""
        return iter(())

    def append(self, tensordict: NonTensorDataBase) -> None:
        """Add a row at the end; see `insert`."""
        self.insert(self._kd_desc.batch[0], tensordict)

    def extend(self, tensordict: Sequence[NonTensorDataBase]) -> None:
        """Add rows at the end; see `insert`."""
        for each in tuple(tensordict):
            self.append(each)

    def insert(self, index: int, tensordict: NonTensorDataBase) -> None:
        """Add a row along the first dimension; views of the other rows stay views.

        Args:
            index: where, as in `list.insert`.
            tensordict: the row, which has the batch size of one.

        Raises:
            ShapeMismatch: if it has another batch size.

        Example:
            >>> from kd_core import NonTensorData, NonTensorStack
            >>> words = NonTensorStack("to", "be")
            >>> words.insert(1, NonTensorData("not"))
            >>> words.tolist()
            ['to', 'not', 'be']
        """
        if not isinstance(tensordict, NonTensorDataBase):
            raise wrong_type("the row", "a non-tensor entry", tensordict)
        if self._kd_desc.frozen:
            raise locked("add a row", "`lock_()`")
        at, batch = as_int(index), self._kd_desc.batch
        row = tensordict
        if row._kd_desc.batch != batch[1:] and row._kd_desc.batch:
            raise ShapeMismatch(
                f"a row must have batch_size {shape_text(batch[1:])}, got "
                f"{shape_text(row._kd_desc.batch)}."
            )
        pool, (numbers,) = pool_rows([row])
        cells = cells_of(self)
        added = numbers.expand(batch[1:])[None] + len(cells.values)
        cells.values = [*cells.values, *pool]
        cells.shares = Shared in map(type, cells.values)
        head, tail = self._positions[:at], self._positions[at:]
        self._positions = torch.cat([head, added, tail])
        self._kd_desc = self._kd_desc.with_batch((batch[0] + 1, *batch[1:]))

    def setdefault(
        self, key: NestedKey, default: object, *args: object, **options: object
    ) -> object:
        """Refuse any key.

        Raises:
            InvalidKey: always.
        """
        raise _no_keys(key)

    def contiguous(self, **options: object) -> NonTensorDataBase:
        """Return the entry itself: the order of its rows in memory is of no effect."""
        return self

    def is_contiguous(self) -> bool:
        """Return whether the rows are in order in memory: each value is where it is."""
        return False

    def numpy(self) -> object:
        """Return the values as nested lists."""
        return self.tolist()

    @property
    def grad(self) -> NonTensorDataBase:
        """The entry itself: values have no gradients."""
        return self._kd_shallow()

    def auto_batch_size_(
        self, batch_dims: int | None = None, *args: object, **options: object
    ) -> Self:
        """Return self: the batch size is that of the values."""
        return self

    def flatten(
        self, start_dim: int = 0, end_dim: int = -1, **options: object
    ) -> NonTensorDataBase:
        """Return the entry with several dimensions in one; itself, if it is one already."""
        ndim = self._kd_desc.ndim
        alone = ndim > 0 and wrap_dim(start_dim, ndim) == wrap_dim(end_dim, ndim)
        return self if alone else super().flatten(start_dim, end_dim, **options)

    def permute(self, *dims: object, **options: object) -> NonTensorDataBase:
        """Return a view with its dimensions reordered."""
        made = super().permute(*dims, **options)
        return self._kd_shallow() if made is self else made

    def apply(self, fn: object, *others: object, **options: object) -> NonTensorDataBase:
        """Return a copy: functions are called with tensors alone."""
        return self._applied("apply", fn, *others, **options)

    def named_apply(self, fn: object, *others: object, **options: object) -> NonTensorDataBase:
        """Return a copy: functions are called with tensors alone."""
        return self._applied("named_apply", fn, *others, **options)

    def _applied(self, method: str, *args: object, **options: object) -> NonTensorDataBase:
        options.pop("call_on_nested", None)
        return self._called(method, *args, **options)

    def _write_at(self, index: Any, value: object) -> None:
        rows = self._positions[index]
        target, source = self._encode(value, ("data",), tuple(rows.shape))
        if not broadcasts_to(source.shape, rows.shape):
            raise cannot_broadcast(source.shape, "rows of the entry", tuple(rows.shape))
        target[index] = source

    def _write_all(self, source: object) -> None:
        self[...] = source

    def _take_values(self, entry: Self) -> None:
        self._positions, self._cells, self._loose = entry._positions, entry._cells, entry._loose
        self._in_parts = entry._in_parts

    def _under(self, desc: Descriptor) -> NonTensorDataBase:
        return self._copy(desc if desc.size == self._kd_desc.size else self._kd_desc)

    def tolist(
        self,
        *,
        convert_tensors: bool = False,
        as_linked_list: bool = False,
        convert_nodes: bool = True,
        tolist_first: bool = False,
    ) -> object:
        """Return the values as nested lists of shape `batch_size`."""
        in_order = _values_in_order(self) if is_compiling() else None
        values = cells_of(self).values if not is_compiling() else in_order or []
        if convert_tensors or _hold_wrapped(values):
            values = [plain_value(value, convert_tensors) for value in values]
        if in_order is None:
            rows = nested_values(self._positions.tolist(), values)
        else:
            rows = _nested_in_order(values, self._kd_desc.batch)
        return linked(rows, self) if as_linked_list else rows

    def _kd_item(self) -> object:
        shared = self._one_value()
        return self.tolist(as_linked_list=True) if shared is None else shared.value

    def _one_value(self) -> Shared | None:
        """Return what all rows hold, if they are those of a part that has one value."""
        if is_compiling() or not self._in_parts:
            return None
        cells = cells_of(self)
        if not cells.shares or not self._positions.numel():
            return None
        numbers = listed(self._positions)
        first = cells.values[numbers[0]]
        if not isinstance(first, Shared) or first.ndim < self._kd_desc.ndim:
            return None
        return first if all(cells.values[number] is first for number in numbers) else None

    def maybe_to_stack(self) -> NonTensorDataBase:
        """Return a view of all rows."""
        return self._kd_shallow()

    def to_lazystack(self, dim: int = 0) -> NonTensorDataBase:
        """Return the entry itself, or a copy whose first dimension is another one."""
        return self._called("to_lazystack", dim) if dim else self

    def _spread(self, desc: Descriptor) -> NonTensorStack:
        return self

    def _with(self, positions: Tensor, desc: Descriptor, parts: bool = True) -> NonTensorDataBase:
        """Return the entry of other numbers: a view, or a copy with cells of its own.

        Args:
            positions: the numbers.
            desc: the descriptor.
            parts: whether rows that were those of one part still are.
        """
        positions = without_wrappers(positions)
        new = object.__new__(type(self))
        if is_compiling():
            new._loose, new._cells = lend(self), self._cells
            new._positions, new._kd_desc, new._in_parts = positions, desc._unlocked, parts
            return new
        if is_batchedtensor(positions):
            raise _refused_inside_vmap(self)
        cells = cells_of(self)
        if not desc.ndim:
            row = int(positions)
            if share_storage(positions, self._positions):
                return row_of_cell(RowCell(cells, positions), desc)
            return wrap_data(without_share(cells.values[row]), desc)
        new._in_parts = parts and self._in_parts
        if share_storage(positions, self._positions):
            new._cells, new._loose = cells, None
            new._positions, new._kd_desc = positions, desc._unlocked
        else:
            new._in_parts = new._in_parts and desc.ndim == self._kd_desc.ndim
            _fill(new, held_by(new, cells), positions, desc)
        return new

    def _kd_map_each(
        self, fn: LeafFn, batch: BatchFn | None = None, memo: Memo = None
    ) -> NonTensorDataBase:
        desc = self._kd_desc
        if batch is None:
            return self._copy(desc if memo is None or memo[0] is not desc else memo[1])
        new = desc.with_batch(batch(desc.batch))
        if isinstance(batch, Reduced):
            return self._collected(batch.gone(desc.ndim), new, batch.lead)
        if isinstance(batch, Fresh):
            return self._fresh(new)
        if isinstance(batch, Padded):
            return _padded(self, fn, new)
        apart = isinstance(batch, Resized) and new.ndim <= desc.ndim
        return self._with(move_positions(self, fn), new, not apart)

    def _kd_map_to_parts(
        self, fn: PartsFn, batches: Sequence[BatchFn], memo: PartsMemo = None
    ) -> Sequence[NonTensorDataBase]:
        desc = self._kd_desc
        parts = fn(self._positions)
        return [
            self._with(part, desc.with_batch(batch(desc.batch)))
            for part, batch in zip(parts, batches, strict=True)
        ]

    def _collected(self, gone: tuple[int, ...], desc: Descriptor, lead: Batch) -> NonTensorDataBase:
        """Return the values of reduced rows, in one list for each remaining row."""
        kept = [dim for dim in range(self._positions.ndim) if dim not in gone]
        lists = self._positions
        if gone:
            moved = lists.permute(*kept, *gone)
            lists = moved.reshape(*desc.batch[len(lead) :], *moved.shape[len(kept) :])
        lists = lists.expand((*lead, *lists.shape)).clone()
        found = self._with(lists, desc) if is_compiling() else None
        if found is None:
            build = wrap_rows if desc.ndim else _value_of_row
            found = build(list(map(without_share, cells_of(self).values)), lists, desc)
        return found

    def _fresh(self, desc: Descriptor) -> NonTensorDataBase:
        """Return the values of new rows: none."""
        if not desc.ndim:
            return wrap_data(None, desc)
        return wrap_rows([None], torch.zeros((), dtype=torch.int64, device="cpu"), desc)

    def _copy(self, desc: Descriptor) -> NonTensorDataBase:
        positions = self._positions
        if is_compiling():
            return self._with(positions.clone(), desc)
        cells = cells_of(self)
        if not desc.ndim:
            return wrap_data(without_share(cells.values[int(positions)]), desc)
        if positions is not cells.positions:
            return wrap_rows(held_by(self, cells), positions, desc)
        new = object.__new__(type(self))
        new._positions, new._cells = positions, Cells(cells.values.copy(), positions)
        new._loose, new._kd_desc, new._in_parts = None, desc._unlocked, self._in_parts
        return new

    def _copy_values(self) -> None:
        cells = cells_of(self)
        if not cells.shares:
            cells.values = [_with_own_lists(value) for value in cells.values]
            return
        own: dict[int, object] = {}  # what several cells hold stays one object
        for value in cells.values:
            own.setdefault(id(value), _with_own_lists(value))
        cells.values = [own[id(value)] for value in cells.values]

    def _kd_shallow(self) -> NonTensorDataBase:
        return self._with(self._positions, self._kd_desc)

    def _kd_rebuild(self, leaves: Iterator[Tensor]) -> NonTensorDataBase:
        return self._copy(self._kd_desc)

    def _kd_collect_pair(
        self, other: Entry, mine: list[Tensor], theirs: list[Tensor], path: tuple[str, ...]
    ) -> None:
        super()._kd_collect_pair(other, mine, theirs, path)
        if isinstance(mine, Targets):
            mine.add_values(self, other, path)

    def _pooled(self, first: int) -> tuple[list[object], Tensor]:
        if is_compiling():
            return table_of(self), self._positions + first
        values = flat_values(self)
        return values, count_rows(len(values)).reshape(self._kd_desc.batch) + first

    def _kd_zip_each(
        self, other: Entry, fn: Callable[[Tensor, Tensor], Tensor], path: tuple[str, ...] = ()
    ) -> NonTensorDataBase:
        self._kd_collect_pair(other, [], [], path)
        if not isinstance(fn, Selection):
            return self._copy(self._kd_desc)
        nodes: list[NonTensorDataBase] = [self, cast("NonTensorDataBase", other)]
        pool, (mine, theirs) = pool_rows(nodes)
        chosen = fn(mine, theirs)
        build = wrap_rows if self._kd_desc.ndim or is_compiling() else _value_of_row
        return build(pool, chosen, self._kd_desc)

    def _kd_with_descriptor(self, desc: Descriptor) -> Self:
        shape = self._kd_desc.batch
        if shape[: desc.ndim] != desc.batch:
            raise batch_does_not_fit("of non-tensor data", desc.batch, shape)
        new = object.__new__(type(self))
        new._cells, new._loose, new._in_parts = self._cells, self._loose, self._in_parts
        if self._loose is not None and not is_compiling():
            new._cells, new._loose = cells_of(self), None
        new._positions = self._positions
        new._kd_desc = desc._unlocked if desc.ndim == len(shape) else desc.with_batch(shape)
        return new

    def _is_equal(self, other: NonTensorDataBase) -> bool:
        if not isinstance(other, NonTensorStack) or self._kd_desc.batch != other._kd_desc.batch:
            return False
        mine, theirs = (map(without_share, flat_values(each)) for each in (self, other))
        return all(map(same_data, mine, theirs))

    def _given(self, dim: int, desc: Descriptor) -> NonTensorDataBase:
        """Return the entry with a dimension that `vmap` gave, along which its rows are repeated."""
        repeated = self._kd_map_each(
            lambda rows: rows.unsqueeze(dim).expand(desc.size), lambda _: desc.batch
        )
        return repeated._kd_with_descriptor(desc)

    def _restored(self, desc: Descriptor, ndim: int) -> NonTensorDataBase:
        # Where the rows were moved by `tree_map`, it is not split.
        if self._kd_desc.batch[: desc.ndim] == desc.batch and desc.ndim >= ndim:
            return self._kd_with_descriptor(desc)
        repeated = _repeated(self._positions, desc.size)
        if repeated is not None:
            return self._with(repeated, desc)
        return _unsplit(self, desc)

    def _encode(
        self, value: object, path: tuple[str, ...], shape: Batch | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return a tensor that stands for all rows, and one for the values to write.

        Args:
            value: a wrapper, nested lists with one value for each row, or one value for all.
            path: the path of the entry, for messages.
            shape: the shape of the rows that are written; `None`: all rows are written.

        Raises:
            InvalidArgument: if the value is a tensor.
            ShapeMismatch: if there is not one value for each row.
        """
        refuse_tensors(value, path)
        rows = self._kd_desc.batch if shape is None else shape
        node = value if isinstance(value, NonTensorDataBase) else None
        if isinstance(node, NonTensorStack):
            return encoded_rows(self, node)
        if node is not None or not rows or not isinstance(value, (list, tuple)):
            single = value if node is None else node._kd_item()
            shared = self._one_value() if shape is None else None
            return encoded(self, [single if shared is None else Shared(single, shared.ndim)], ())
        return encoded(self, values_of_rows(value, rows, format_key(path)), rows)

    def __reduce__(self) -> tuple[object, ...]:
        return restore_rows, (flat_values(self), self._kd_desc.batch, self._kd_desc.device)

    def __repr__(self) -> str:
        desc = self._kd_desc
        values = cells_of(self).values
        if self._positions.numel() <= _SHOWN:
            shown = repr(self.tolist())
        else:
            first = self._positions.reshape(-1)[:_SHOWN].tolist()
            rest = self._positions.numel() - _SHOWN
            listed = ", ".join(repr(without_share(values[position])) for position in first)
            shown = f"[{listed}, ... ({rest} more)]"
        return f"NonTensorStack({shown}, batch_size={self.batch_size}, device={desc.device})"


class HiddenRows(NonTensorData):
    """Values of rows inside of `vmap`, which hides the first dimension of them.

    All are read at once. They fit the rows again outside, so inside they are not moved or written.
    """

    __slots__ = ("_level",)

    _level: int

    @classmethod
    def around(cls, node: NonTensorDataBase, desc: Descriptor, level: int) -> HiddenRows:
        """Return the entry of a batch that lacks the first dimension, which a level hides."""
        new = object.__new__(cls)
        new._boxed, new._kd_desc, new._of_batch = (node,), desc._unlocked, False
        new._level = level
        return new

    def _hidden(self) -> NonTensorStack | HiddenRows:
        """Return the entry of the batch that has the first dimension."""
        return cast("NonTensorStack | HiddenRows", self.data)

    def _kd_with_descriptor(self, desc: Descriptor) -> Self:
        new = super()._kd_with_descriptor(desc)
        new._level = self._level
        return new

    def _given(self, dim: int, desc: Descriptor) -> NonTensorDataBase:
        """Return the entry with a dimension that a `vmap` inside of the hiding one gave."""
        hidden = self._hidden()
        return self.around(hidden._given(dim + 1, self._with_first(desc)), desc, self._level)

    def _with_first(self, desc: Descriptor) -> Descriptor:
        """Return the descriptor of the hidden entry where the batch is another."""
        hidden = self._hidden()._kd_desc
        return hidden.with_batch((hidden.batch[0], *desc.batch))

    def _copy_values(self) -> None:
        """Leave the values as they are: inside of `vmap` they are read alone."""

    def _pooled(self, first: int) -> NoReturn:
        raise self.refusal()

    def refusal(self) -> InvalidValue:
        """Return the error for what would move or write rows."""
        return _refused_inside_vmap(self.data)

    def _constant(self) -> object:
        return Constant(self)

    def _is_equal(self, other: NonTensorDataBase) -> bool:
        return isinstance(other, HiddenRows) and self._hidden()._is_equal(other._hidden())

    def _restored(self, desc: Descriptor, ndim: int) -> NonTensorDataBase:
        hidden = self._hidden()
        if desc.ndim == self._kd_desc.ndim + 1:  # it leaves `vmap`
            if isinstance(hidden, HiddenRows) and hidden._kd_desc.batch != desc.batch:
                return _unsplit(hidden, desc)  # one chunk
            return hidden._restored(desc, desc.ndim)
        if desc.batch == self._kd_desc.batch:
            return self._under(desc)
        repeated = self._repeated(desc)
        if repeated is None:
            raise self.refusal()
        return repeated

    def _repeated(self, desc: Descriptor) -> HiddenRows | None:
        """Return the entry with more of the dimensions along which it is repeated, or None."""
        hidden, below = self._hidden(), self._with_first(desc)
        made: NonTensorDataBase | None
        if isinstance(hidden, HiddenRows):
            made = hidden._repeated(below)
        else:
            positions = _repeated(hidden._positions, below.size)
            made = None if positions is None else hidden._with(positions, below)
        return None if made is None else self.around(made, desc, self._level)

    def _kd_map_each(self, fn: LeafFn, batch: BatchFn | None = None, memo: Memo = None) -> Self:
        desc = self._kd_desc
        if isinstance(batch, Reduced) and not batch.lead and not batch.gone(desc.ndim):
            batch = None  # features alone are reduced
        if batch is not None:
            raise self.refusal()
        return self._under(desc if memo is None or memo[0] is not desc else memo[1])

    def _kd_map_to_parts(
        self, fn: PartsFn, batches: Sequence[BatchFn], memo: PartsMemo = None
    ) -> Sequence[Self]:
        raise self.refusal()

    def _spread(self, desc: Descriptor) -> RowData:
        raise self.refusal()

    def _is_same(self, other: Entry) -> bool:
        return isinstance(other, HiddenRows) and self._is_equal(other)

    def _equal_rows(self, other: Entry, equal: bool) -> Tensor:
        if not self._is_same(other):
            raise self.refusal()
        return super()._equal_rows(other, equal)

    def _write_all(self, source: object) -> None:
        raise self.refusal()

    def _encode(
        self, value: object, path: tuple[str, ...], shape: tuple[int, ...] | None = None
    ) -> tuple[Tensor, Tensor]:
        same = isinstance(value, NonTensorDataBase) and self._is_same(value)
        if shape is not None or not same:
            raise self.refusal()
        return stand_in_for(self, self.data)

    def __reduce__(self) -> tuple[object, ...]:
        return NonTensorData, (self.data, self._kd_desc.batch, self._kd_desc.device)


def _unsplit(node: NonTensorDataBase, desc: Descriptor) -> NonTensorData:
    """Return an entry that holds another as it is, whose rows are not those of the batch."""
    whole = object.__new__(NonTensorData)
    whole._boxed, whole._kd_desc, whole._of_batch = (node,), desc._unlocked, True
    return whole


def _padded(node: NonTensorStack, fn: LeafFn, desc: Descriptor) -> NonTensorStack:
    """Return the values with `None` for the rows that were added."""
    rows = node._positions.double()  # what is added may not be an integer
    values = table_of(node)
    moved, marked = fn(rows), fn(rows + len(values))
    added = (moved == marked) | moved.isnan()
    padded = torch.where(added, len(values), moved).long()
    return wrap_rows([*values, None], padded, desc)


def _value_of_row(pool: list[object], positions: Tensor, desc: Descriptor) -> NonTensorData:
    """Build an entry without batch dimensions, which is the value of one row."""
    return wrap_data(nested_values(positions.tolist(), pool), desc)


def _with_own_lists(value: object) -> object:
    """Return a value with lists, tuples and dicts of its own; what they hold is shared."""
    if type(value) is str:  # most are
        return value
    if isinstance(value, Shared):
        return Shared(_with_own_lists(value.value), value.ndim)
    if type(value) is dict:
        return {key: _with_own_lists(each) for key, each in value.items()}
    if type(value) is list or type(value) is tuple:
        own = [_with_own_lists(each) for each in value]
        return own if type(value) is list else tuple(own)
    return value


def wrap_rows(pool: list[object], positions: Tensor | None, desc: Descriptor) -> NonTensorStack:
    """Build an entry of values, and the number of each row's value, which are broadcast.

    Numbers with further dimensions than the batch have stand for lists of values; `None`: there is
    a value for each row, in their order.
    """
    node = object.__new__(NonTensorStack)
    if positions is None:
        node._positions, node._cells = cells_for(pool, desc.batch)
        node._loose, node._kd_desc, node._in_parts = None, desc._unlocked, True
        return node
    positions = without_wrappers(positions)
    if positions.shape[: desc.ndim] != desc.size:
        positions = positions.expand(without_names(desc.batch)).clone()
    _fill(node, pool, positions, desc)
    return node


def _fill(node: NonTensorStack, pool: list[object], positions: Tensor, desc: Descriptor) -> None:
    """Replace the cells of an entry by a copy; in compiled code later."""
    node._kd_desc, node._in_parts = desc._unlocked, True
    if is_compiling():
        node._positions, node._loose = positions, loosely(pool)
        node._cells = Cells(pool, positions)
        return
    node._loose, node._positions = None, positions
    if positions.ndim == desc.ndim:
        values = list(map(pool.__getitem__, listed(positions)))
    else:
        values = nested_rows(node, pool)
    node._positions, node._cells = cells_for(values, desc.batch)


@restores
def restore_rows(
    values: list[object], batch: Batch, device: DeviceLike | None = None
) -> NonTensorStack:
    """Build an entry from the values of all rows in one list; called by pickle."""
    desc = restored(batch, device)
    if len(values) != desc.size.numel():
        raise not_valid(f"{len(values)} values do not fit the batch size {shape_text(desc.batch)}")
    return wrap_rows(list(values), None, desc)  # a pickle may go on to change its own


registry.register("wrap_rows", wrap_rows)
registry.register("whole", Whole)
