"""Cells: where the values of rows are, one cell a row; and the tensors that stand for writes.

An entry with one value per row holds a list of cells, and a tensor of the batch size with the
number of each row's cell. These numbers never change. A write to a row puts its value into the
cell of the row, so it reaches every view, needs no further memory, and does not touch other rows:
threads may write different rows, and read others meanwhile.

Three rules keep this right:

1. A view of the numbers of an entry has its cells. Two entries that are not views of each other
   never share cells, though equal copies may share the numbers.
2. Each element of a storage of numbers has a cell of its own. So whatever makes other numbers than
   a view does (a copy, a selection, a stack) takes the values out into cells of its own.
3. A list that a copy made in compiled code still needs is *lent*: the next write replaces it by a
   copy first.

Compiled code knows neither the numbers nor whether tensors share storage, so both wait for the
first eager access. What is made there is *loose*: it keeps the list as it is, and gets cells then.
What is written there is noted in a chain of `Later`. Values are not read there, and what is loose
is not written: torch runs such a call without a graph.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from kd_core._batch.descriptor import device_beside
from kd_core._containers.non_tensor import NonTensorData, NonTensorDataBase
from kd_core._errors import InvalidValue
from kd_core._leaves.foreach import StandIn
from kd_core._torch_private import get_unwrapped, is_gradtrackingtensor

if TYPE_CHECKING:
    from typing import Protocol

    from kd_core._batch.descriptor import Descriptor
    from kd_core._types import LeafFn

    class Rows(Protocol):
        """What holds the numbers of the cells of its rows; loose, perhaps further dimensions."""

        _kd_desc: Descriptor
        _positions: Tensor
        _cells: Cells
        _loose: Loose | None


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
    """

    __slots__ = ("__weakref__", "kin", "later", "lent", "positions", "values")

    def __init__(self, values: list[object], positions: Tensor) -> None:
        self.values = values
        self.positions = positions
        self.lent = False
        self.later: Later | None = None
        self.kin: list[weakref.ref[Cells]] = []

    def read(self, number: int) -> object:
        """Return what is in a cell."""
        self.settle()
        return self.values[number]

    def settle(self) -> None:
        """Make the writes that compiled code left to be done."""
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
                return


def cells_of(node: Rows) -> Cells:
    """Return the cells of an entry, after what compiled code left to be done."""
    if node._loose is not None:
        with _LENDING:
            if node._loose is not None:
                _settle(node, node._loose)
    node._cells.settle()
    return node._cells


def _settle(node: Rows, loose: Loose) -> None:
    """Give cells to an entry that compiled code made: of its own, unless it is a view."""
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
    return cast("list[int]", (numbers if numbers.ndim == 1 else numbers.reshape(-1)).tolist())


def nested_values(positions: object, values: list[object]) -> object:
    """Return the values in cells, whose numbers are given as nested lists or as one number.

    Raises:
        InvalidValue: in compiled code, which knows no number that a tensor holds.
    """
    if is_dynamo_compiling() and positions != []:
        raise _not_compiled("read")
    if not isinstance(positions, list):
        return values[cast(int, positions)]
    if positions and not isinstance(positions[0], list):
        return [values[position] for position in positions]
    return [nested_values(inner, values) for inner in positions]


def _not_compiled(action: str) -> InvalidValue:
    return InvalidValue(
        f"values of rows that are not tensors cannot be {action} in compiled code, got a "
        f"{'read' if action == 'read' else 'write'} of them. Read and write them outside of it."
    )


def without_wrappers(positions: Tensor) -> Tensor:
    """Return numbers without the wrapper of `torch.func.grad`, which is void when that ends."""
    if not is_compiling():
        while is_gradtrackingtensor(positions):
            positions = get_unwrapped(positions)
    return positions


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
    if node._positions is cells.positions:
        return cells.values.copy()
    return list(map(cells.values.__getitem__, listed(node._positions)))


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


def pool_rows(nodes: Sequence[NonTensorDataBase]) -> tuple[list[object], list[Tensor]]:
    """Return the values of several entries in one list, and the numbers of their rows in it."""
    values: list[object] = []
    columns = []
    for node in nodes:
        if isinstance(node, NonTensorData):
            columns.append(torch.full(node._kd_desc.batch, len(values), device="cpu"))
            values.append(node._kd_item())
        elif is_compiling():
            rows = cast("Rows", node)
            columns.append(rows._positions + len(values))
            values += table_of(rows)
        else:
            own = flat_values(cast("Rows", node))
            columns.append(count_rows(len(own)).reshape(node._kd_desc.batch) + len(values))
            values += own
    return values, columns


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
    return encoded(node, flat_values(source), source._kd_desc.batch)


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
