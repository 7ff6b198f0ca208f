"""The primitives of a container whose storage is its members.

An entry is stacked when it is read, and a write to it writes its rows to the members. Operations
that do not need the whole batch run on the members, which keep their keys, shapes, dtypes and
storage.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from torch import Tensor
from torch.compiler import is_compiling

from kd_core._base import TensorDictBase
from kd_core._batch.descriptor import describe
from kd_core._batch.names import resized
from kd_core._batch.plans import Padded, Reduced
from kd_core._containers.field_declarations import Declaration, converted
from kd_core._containers.member_entries import StackedEntries
from kd_core._containers.member_index import Picked, pick
from kd_core._containers.member_moves import (
    moved_members,
    numbered_rows,
    positions_of,
    reduced_members,
    viewed_members,
)
from kd_core._containers.member_writes import (
    MemberRows,
    check_held_alike,
    holds_value_of_row,
    own_row,
    rows_of_list,
    rows_to_write,
    stage_rows,
    writes_of_member,
)
from kd_core._errors import ShapeMismatch, shape_text
from kd_core._keys import format_key
from kd_core._leaves.loops import Selection, kinds_by_key
from kd_core._leaves.writes import Targets
from kd_core._nodes import registry
from kd_core._nodes.entry import is_row_data
from kd_core._ops.selection.index_plan import for_nested
from kd_core._protocol.composite import Composite, are_alike, index_of
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from typing import Self

    from kd_core._batch.descriptor import Descriptor
    from kd_core._leaves.writes import Write
    from kd_core._nodes.entry import Entry, Memo, PartsMemo
    from kd_core._types import BatchFn, LeafFn, PartsFn


class MemberStorage(TensorDictBase, Composite):
    """A container that holds its entries in members."""

    __slots__ = ("__weakref__", "_dim", "_kd_desc", "_kd_scope", "_members")

    _kd_desc: Descriptor
    _dim: int
    _members: list[TensorDictBase]  # type: ignore[assignment]  # of containers with all methods

    @property
    def _kd_entries(self) -> Mapping[str, Entry]:
        return StackedEntries(self)

    def _kd_describe(self, desc: Descriptor) -> None:
        if desc.batch != self._kd_desc.batch:
            inner = self._inner_batch(desc)
            for member in self._members:
                old = member._kd_desc
                member._kd_describe(old.with_batch(inner).with_lock(old.lock, old.held))
        self._kd_desc = desc

    def _inner_batch(self, desc: Descriptor) -> tuple[int, ...]:
        """Return the batch size of each member for a batch size of the stack."""
        batch, dim = desc.batch, self._dim
        if batch[dim : dim + 1] != (len(self._members),):
            raise ShapeMismatch(
                f"batch_size {shape_text(batch)} does not fit {len(self._members)} containers "
                f"stacked along dimension {dim}: the size of that dimension must not change. Call "
                "`contiguous()` first."
            )
        return batch[:dim] + batch[dim + 1 :]

    def _kd_with_descriptor(self, desc: Descriptor) -> Self:
        inner, device = self._inner_batch(desc), desc.device
        members = [
            member._kd_with_descriptor(describe(inner, device or member._kd_desc.device))
            for member in self._members
        ]
        new = self._of(members)
        new._kd_desc = desc
        return new

    def _of(self, members: Sequence[AbstractContainer], dim: int | None = None) -> Self:
        kind = self.__class__
        if members[0]._kd_tensor_class is not None or kind._kd_tensor_class is not None:
            from kd_core._containers.stack_classes import stack_class

            kind = stack_class(kind, members)
        new = object.__new__(kind)
        new._members = list(cast("Sequence[TensorDictBase]", members))
        new._dim = self._dim if dim is None else dim
        size = resized(self._kd_desc.batch[self._dim], len(members))
        new._kd_desc = describe_stack(members, new._dim, size)
        return new

    def _replace_members(self, members: Sequence[AbstractContainer]) -> None:
        self._members = list(cast("Sequence[TensorDictBase]", members))

    def _kd_like(self, entries: dict[str, Entry], desc: Descriptor) -> Self:
        # A result of stacked entries is dense, and of the class that all members have.
        if self._kd_tensor_class is not None:
            return cast("Self", object.__new__(self._kd_tensor_class)._kd_like(entries, desc))
        members = self._members
        if members and all(each.__class__ is members[0].__class__ for each in members):
            return cast("Self", members[0]._kd_like(entries, desc))
        return cast("Self", registry.make_dense(entries, desc))

    def _kd_check_unlocked(self, action: str) -> None:
        super()._kd_check_unlocked(action)
        for member in self._members:
            member._kd_check_unlocked(action)

    def _kd_set_entry(self, key: str, value: Entry) -> None:
        self._kd_check_unlocked(f"set {format_key(key)}")
        rows = self._rows(value)
        if len({id(member) for member in self._members}) < len(rows):
            check_held_alike(self._members, rows, f"set {format_key(key)}")
        pairs = zip(self._members, rows, strict=True)
        entries = [member._kd_as_entry(key, row) for member, row in pairs]
        for member, entry in zip(self._members, entries, strict=True):
            member._kd_set_entry(key, entry)

    def _kd_del_entry(self, key: str) -> None:
        self._change_members(f"remove {format_key(key)}", lambda member: member._kd_del_entry(key))

    def _kd_as_entry(self, key: str, value: object, path: tuple[str, ...] = ()) -> Entry:
        rows = rows_of_list(self, value)  # which cannot be stacked if they are ragged
        if rows is None:
            cls = self._kd_tensor_class
            declaration: Declaration | None = getattr(cls, "_kd_declared", None)
            if cls is not None and declaration is not None and declaration.converts:
                value = converted(cls, declaration.options, key, value, self._kd_desc.unlocked())
            return super()._kd_as_entry(key, value, path)
        pairs = zip(self._members, rows, strict=True)
        entries = [member._kd_as_entry(key, row, path) for member, row in pairs]
        return cast("Entry", MemberRows(entries))

    def _rows(self, value: Entry) -> Sequence[Entry]:
        """Return the part of an entry that belongs to each member."""
        if isinstance(value, MemberRows):
            return value.rows
        dim = self._dim
        if isinstance(value, Tensor):
            return value.unbind(dim)
        if isinstance(value, MemberStorage) and are_alike(self, value):
            return cast("list[Entry]", value._members)
        count = len(self._members)
        return [value._kd_map_each(_Row(dim, row), _without(dim)) for row in range(count)]

    def _rows_of_operand(self, other: Entry) -> Sequence[Entry]:
        batch = self._kd_desc.batch
        if is_row_data(other):
            return self._rows(other)
        if not isinstance(other, AbstractContainer):
            return [other] * len(self._members)  # refused by the members
        if not other._kd_desc.batch:
            count, dim = len(self._members), self._dim
            return [
                cast("Entry", _row_without_batch(member, other, dim, row, count))
                for row, member in enumerate(self._members)
            ]
        if other._kd_desc.batch[: len(batch)] != batch:
            raise ShapeMismatch(
                f"batch sizes must be equal, got {shape_text(batch)} and "
                f"{shape_text(other._kd_desc.batch)}."
            )
        return self._rows(cast("Entry", other))

    def _kd_writes(self, key: str, value: object, path: tuple[str, ...]) -> list[Write]:
        rows = rows_to_write(self, key, value, path)
        pairs = zip(self._members, rows, strict=True)
        return [
            write for member, row in pairs for write in writes_of_member(member, key, row, path)
        ]

    def _row_writes(self, index: object, value: object, path: tuple[str, ...]) -> list[Write]:
        writes: list[Write] = []
        picked = pick(index, self._kd_desc.batch, self._dim)
        alone = not isinstance(value, (AbstractContainer, Mapping, Tensor))  # the same for all rows
        if picked is not None and picked.in_place and (alone or picked.distinct):
            taken = self._taken(picked)
            if not picked.inner or _are_views((taken, *self._picked(picked))):
                stage_rows(taken, value, path, writes)
                return writes
        if picked is not None and (alone or picked.distinct):
            members = self._picked(picked)
            values: Sequence[object] | None = [value] * len(members)
            if not alone:  # the value of one row is written through the stack of its rows
                lone = any(map(holds_value_of_row, members))
                values = None if lone else rows_at(picked, value)
            if values is not None:
                for member, row in zip(members, values, strict=True):
                    copy = member._kd_engine.clone(member)
                    copy[picked.inner] = row
                    stage_rows(member, copy, path, writes)
                return writes
        # Rows of several members at once: write to a stacked copy, then write the copy back.
        source = value._kd_entries if isinstance(value, AbstractContainer) else value
        part = self
        if isinstance(source, Mapping):
            part = self._kd_engine.select(self, *(key for key in source if key in self._kd_entries))
        try:
            dense = part._kd_engine.contiguous(part)
        except ShapeMismatch:
            return self._lone_writes(index, value, path)
        dense[index] = value
        stage_rows(self, dense, path, writes)
        return writes

    def _lone_writes(self, index: object, value: object, path: tuple[str, ...]) -> list[Write]:
        """Return the writes of rows of members that cannot be stacked, one row after the other."""
        rows, taken = numbered_rows(self, index)
        alone = not isinstance(value, (AbstractContainer, Mapping, Tensor))
        if not alone and not (
            isinstance(value, TensorDictBase) and value._kd_desc.batch == taken.shape
        ):
            self._kd_engine.contiguous(self)  # raises: it says how the shapes differ
        copies: dict[int, TensorDictBase] = {}
        for position, number in zip(positions_of(taken), taken.reshape(-1).tolist(), strict=True):
            inner = list(rows[number])
            member = inner.pop(self._dim)
            if member not in copies:
                held = self._members[member]
                copies[member] = held._kd_engine.clone(held)
            row = value if alone else cast("TensorDictBase", value)[position]
            copies[member][tuple(inner)] = row
        writes: list[Write] = []
        for member, copy in copies.items():
            stage_rows(self._members[member], copy, path, writes)
        return writes

    def _taken(self, picked: Picked) -> TensorDictBase:
        """Return the members that an index selects, indexed themselves if it goes on."""
        members = self._picked(picked)
        if picked.inner:
            members = [member[picked.inner] for member in members]
        return members[0] if isinstance(picked.rows, int) else self._of(members, picked.dim)

    def _picked(self, picked: Picked) -> list[TensorDictBase]:
        rows = [picked.rows] if isinstance(picked.rows, int) else picked.rows
        return [self._members[row] for row in rows]

    def _kd_map_each(self, fn: LeafFn, batch: BatchFn | None = None, memo: Memo = None) -> Self:
        if batch is None:
            new = self._by_member(lambda member: member._kd_map_each(fn))
            new._kd_desc = self._kd_desc.unlocked()
            return new
        found = index_of(fn)  # recorded by an enclosing container
        index = None if found is None else for_nested(*found)
        picked = None if found is None else pick(index, self._kd_desc.batch, self._dim)
        if picked is not None:
            return cast("Self", self._result(picked))
        moves = not isinstance(batch, (Reduced, Padded))
        if moves and not is_compiling():
            seen = viewed_members(self, fn, batch)
            if seen is not None:
                return cast("Self", seen)
        try:
            return super()._kd_map_each(fn, batch, memo)
        except ShapeMismatch:
            if isinstance(batch, Padded):
                raise
            if not isinstance(batch, Reduced):
                return cast("Self", moved_members(self, fn, batch))
            reduced = reduced_members(self, fn, batch)
            if reduced is None:  # it takes all rows of an entry
                raise
            return cast("Self", reduced)

    def _result(self, picked: Picked) -> TensorDictBase:
        """Return the result of an index: not locked, and a copy where torch copies."""
        taken = self._taken(picked)
        if picked.in_place and not picked.views:
            return taken._kd_engine.clone(taken)
        return taken._kd_shallow() if self._kd_desc.frozen else taken

    def _kd_map_to_parts(
        self, fn: PartsFn, batches: Sequence[BatchFn], memo: PartsMemo = None
    ) -> Sequence[Self]:
        indices = getattr(fn, "indices", None)
        if indices is None:
            return super()._kd_map_to_parts(fn, batches, memo)
        return [self[index] for index in indices]

    def _kd_collect(self, leaves: list[Tensor]) -> None:
        for member in self._members:
            member._kd_collect(leaves)

    def _kd_rebuild(self, leaves: Iterator[Tensor]) -> Self:
        new = self._by_member(lambda member: member._kd_rebuild(leaves))
        new._kd_desc = self._kd_desc.unlocked()
        return new

    def _kd_collect_pair(
        self, other: Entry, mine: list[Tensor], theirs: list[Tensor], path: tuple[str, ...]
    ) -> None:
        for member, row in zip(self._members, self._rows_of_operand(other), strict=True):
            member._kd_collect_pair(row, mine, theirs, path)
        if isinstance(mine, Targets):
            mine.values = [(own_row(node) or node, new, at) for node, new, at in mine.values]

    def _kd_zip_each(
        self, other: Entry, fn: Callable[[Tensor, Tensor], Tensor], path: tuple[str, ...] = ()
    ) -> Self:
        if not isinstance(fn, Selection) or fn.of_member is None:
            return super()._kd_zip_each(other, fn, path)
        rows = zip(self._members, self._rows_of_operand(other), strict=True)
        new = self._of(
            [
                member._kd_zip_each(row, fn.of_member(self._dim, position), path)
                for position, (member, row) in enumerate(rows)
            ]
        )
        new._kd_desc = self._kd_desc.unlocked()
        return new

    def _kd_shallow(self) -> Self:
        new = self._by_member(lambda member: member._kd_shallow())
        new._kd_desc = self._kd_desc.unlocked()
        return new

    def _kd_below(self) -> list[TensorDictBase]:
        return self._members


def _are_views(taken: Sequence[TensorDictBase]) -> bool:
    """Return whether writes to what an index takes of members reach them.

    The value of one row has no view: neither of itself under another index, nor of the rows of a
    member.
    """
    return not any(map(holds_value_of_row, taken))


def rows_at(picked: Picked, value: object) -> Sequence[object] | None:
    """Return the part of a stack for each member at an index; `None` for another value."""
    if isinstance(picked.rows, int):
        return [value]
    if isinstance(value, MemberStorage) and value._dim == picked.dim:
        return value._members if len(value._members) == len(picked.rows) else None
    return None


def describe_stack(
    members: Sequence[AbstractContainer], dim: int, size: int | None = None
) -> Descriptor:
    """Return the descriptor of a stack of members of the same batch size.

    Args:
        members: the members.
        dim: the stacked dimension.
        size: the number of members, which may carry the name of the dimension.
    """
    first = members[0]._kd_desc
    batch = (*first.batch[:dim], len(members) if size is None else size, *first.batch[dim:])
    device = first.device
    for member in members:  # a loop: "lazy_stack 8" in the benchmarks
        if member._kd_desc is not first and member._kd_desc.device != device:
            return describe(batch, None)
    return describe(batch, device)


def _row_without_batch(
    member: AbstractContainer, other: AbstractContainer, dim: int, row: int, count: int
) -> AbstractContainer:
    """Return the part of a container without batch that belongs to one member of a stack.

    Its leaves line up with the last dimensions of the stacked leaves. Where one reaches the stacked
    dimension, its row is selected.
    """
    kinds, deeper = kinds_by_key(member._kd_entries), isinstance(member, Composite)
    entries = dict(other._kd_entries)
    for key, value in other._kd_entries.items():
        kind = kinds.get(key)
        if isinstance(value, Tensor) and isinstance(kind, Tensor):
            rank = kind.ndim + deeper + 1
            if value.ndim >= rank - dim:
                entries[key] = _selected_row(key, value, rank, dim, row, count)
        elif isinstance(value, AbstractContainer) and isinstance(kind, AbstractContainer):
            entries[key] = cast("Entry", _row_without_batch(kind, value, dim, row, count))
    if all(map(operator.is_, entries.values(), other._kd_entries.values())):
        return other
    return cast("AbstractContainer", registry.make_dense(entries, describe((), None)))


def _selected_row(key: str, value: Tensor, rank: int, dim: int, row: int, count: int) -> Tensor:
    """Return one row of a leaf that is broadcast over a stacked leaf of a rank."""
    at = value.ndim - rank + dim
    if at > dim or value.shape[at] not in (1, count):
        raise ShapeMismatch(
            f"entry {format_key(key)} of a container of batch_size () must be broadcastable to the "
            f"stacked entry, whose dimension {dim} has the size {count}, got shape "
            f"{shape_text(value.shape)}."
        )
    return value.select(at, row if value.shape[at] > 1 else 0)


class _Row:
    """A leaf function that returns one row of a dimension."""

    __slots__ = ("_dim", "_row")

    def __init__(self, dim: int, row: int) -> None:
        self._dim, self._row = dim, row

    def __call__(self, leaf: Tensor) -> Tensor:
        return leaf.select(self._dim, self._row)


def _without(dim: int) -> BatchFn:
    return lambda batch: batch[:dim] + batch[dim + 1 :]
