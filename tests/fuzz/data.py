"""Data that is not tensors, as the reference has it: one value for all rows, or one for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import torch
from torch import Tensor

from kd_core import MetaData, NonTensorData, NonTensorDataBase, NonTensorStack

Batch: TypeAlias = tuple[int, ...]


class Unknown(Exception):  # nothing is wrong
    """The reference cannot say."""


class Ragged(Exception):  # it is no error of the program under test
    """Members that cannot be stacked: there is no dense reading."""


WORDS = ("to", "be", "to", None, ("x", 1), "", "text", "word", [1, 2], 1, 0, 2.5, -1, "reach")
"""What rows of data hold: the value at a position; two are equal, and stay one per row."""


@dataclass
class Data:
    """A value that is not a tensor: one for all rows, or one for each row.

    Attributes:
        value: the value of all rows.
        kind: the class of its wrapper.
        rows: for values of rows, the position of each in `WORDS`, -1 for a row that was added;
            what lies behind the batch dimensions are lists.
        mixed: whether it is that of a stack of which some members hold one value for all of their
            rows: such a member, taken out alone, still does.
    """

    value: object
    kind: type[NonTensorData] = MetaData
    rows: Tensor | None = None
    mixed: bool = False

    def of_rows(self, batch: Batch) -> Tensor:
        """Return the position of each row of a batch."""
        if self.rows is not None:
            return self.rows
        if self.value not in WORDS:
            raise Unknown("a value that has no position")
        return torch.full(batch, WORDS.index(self.value))

    def rearranged(self, move: Callable[[Tensor], Tensor]) -> Data:
        """Return the data of rows that were moved."""
        return self if self.rows is None else replace(self, rows=move(self.rows))

    def written(self, index: object, value: object) -> Data:
        """Return the data after a write to rows; one value of all rows is only written by itself.

        Raises:
            Unknown: if it is another one, which we refuse.
        """
        if isinstance(value, Data) and (self.rows is None or value.rows is None):
            if self.rows is None and value.rows is None and self.value == value.value:
                return self
            if self.rows is None or value.value not in WORDS:
                raise Unknown("one value for all rows")
            value = value.value
        elif self.rows is None:
            raise Unknown("one value for all rows")
        rows = self.rows.clone()
        source = value.rows if isinstance(value, Data) else torch.tensor(WORDS.index(value))
        rows[index] = cast("Tensor", source)  # type: ignore[index]  # any index
        if self.mixed and not torch.equal(rows, self.rows):
            raise Unknown("one value for all rows of some members")
        return Data(None, self.kind, rows, self.mixed)

    def read(self) -> object:
        """Return the value, or the nested lists of all."""
        return self.value if self.rows is None else _words(self.rows.tolist())

    def wrapper(self, batch: Batch) -> NonTensorDataBase:
        """Return what `get` gives."""
        if self.rows is None:
            return self.kind(self.value, batch)
        if not batch:
            return NonTensorData(self.read())
        return NonTensorStack.from_list(cast("list[object]", self.read()), batch)

    def agrees(self, found: object, batch: Batch) -> bool:
        """Whether a wrapper holds this data: the value, and whether rows have their own.

        One from a deeper level, where there are more dimensions, keeps them as leaves do.
        """
        if not isinstance(found, NonTensorDataBase):
            return False
        shape = tuple(found.batch_size)
        if shape[: len(batch)] != batch:
            return False
        if self.rows is not None and tuple(self.rows.shape[: len(shape)]) != shape:
            return False
        if self.rows is None and self.kind is NonTensorData and isinstance(found, NonTensorStack):
            return bool((found == NonTensorData(self.value, shape)).all())  # rows were stacked
        want = self.wrapper(shape)
        if type(found) is type(want) and bool((found == want).all()):
            return True
        if self.rows is None or not isinstance(found, NonTensorData):
            return False
        if not self.mixed and self.rows.unique().numel() > 1:
            return False  # else it may be the one value of a batch of one row, or repeats of it
        return all(_words(row) == found.data for row in self.rows.flatten().tolist())


def of_rows(read: object) -> list[object]:
    """Return the values of nested lists of rows, or one value, in one list."""
    if not isinstance(read, list):
        return [read]
    return [value for part in read for value in of_rows(part)]


def _words(positions: object) -> object:
    if isinstance(positions, list):
        return [_words(each) for each in positions]
    position = cast("int", positions)
    return None if position < 0 else WORDS[position]


class Found(Data):
    """The wrapper of data that a container holds, as it was read."""

    def __init__(self, wrapper: NonTensorDataBase) -> None:
        super().__init__(None)
        self.found = wrapper

    def agrees(self, found: object, batch: Batch) -> bool:
        return type(found) is type(self.found) and bool((found == self.found).all())

    def __repr__(self) -> str:
        return repr(self.found)


def stored(value: object, batch: Batch) -> Data:
    """Return what a bare value is in a batch: that of all its rows, or of the one row."""
    if batch:
        return Data(value, NonTensorData)
    return Data(None, NonTensorData, torch.tensor(WORDS.index(value)))


def joined_data(
    column: list[Data], batches: list[Batch], call: Callable[[list[Tensor]], Tensor]
) -> Data:
    """Return the data of several containers: one value where all have one and the same.

    Where rows are stacked, that holds of metadata alone.
    """
    first = column[0]
    if all(data.rows is None and data.value == first.value for data in column):
        stacks = call([torch.zeros(batch) for batch in batches]).ndim > len(batches[0])
        if not stacks or all(data.kind is MetaData for data in column):
            return first
    pairs = zip(column, batches, strict=True)
    return Data(None, NonTensorData, call([data.of_rows(batch) for data, batch in pairs]))


def chosen_data(
    mine: Data, other: object, choose: Callable[[Tensor, Tensor], Tensor], batch: Batch
) -> Data:
    """Return data of which some rows are those of other data; what is no data has none."""
    if not isinstance(other, Data):
        return mine
    if mine.rows is None and other.rows is None and mine.value == other.value:
        return mine
    columns = [data.of_rows(batch) for data in (mine, other)]
    return Data(None, mine.kind, choose(*columns))
