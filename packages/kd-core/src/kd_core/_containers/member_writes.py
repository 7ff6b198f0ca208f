"""In-place writes into the members of a stack.

Knows stacks and values; must not know an index. The functions check and return all writes; the
caller performs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kd_core._batch.descriptor import describe
from kd_core._containers.member_entries import ragged
from kd_core._containers.non_tensor import NonTensorData, RowValue
from kd_core._errors import InvalidValue
from kd_core._keys import format_key
from kd_core._leaves.loops import kinds_by_key
from kd_core._leaves.shapeless import is_shapeless
from kd_core._leaves.writes import (
    Write,
    as_source,
    check_same_data,
    unknown_below,
    without_ones,
    writable_source,
)
from kd_core._nodes import registry
from kd_core._nodes.entry import is_row_data, is_unbatched
from kd_core._protocol.composite import Composite, MemberList
from kd_core._protocol.primitives import AbstractContainer
from kd_core._protocol.validation import values_of_rows

if TYPE_CHECKING:
    from kd_core._keys import KeyPath
    from kd_core._nodes.entry import Data, Entry, Node, RowData
    from kd_core._types import LeafFn


def rows_to_write(stack: Composite, key: str, value: object, path: KeyPath) -> Sequence[object]:
    """Return the part of a value that is written into the entry of each member.

    Raises:
        ShapeMismatch: if the value cannot be broadcast to the stacked entry.
        InvalidValue: if a member is held twice and would receive two rows.
    """
    if isinstance(value, MemberList):
        check_held_alike(stack._members, value, f"write rows to {format_key(path)}")
        return value
    entries = [member._kd_entries[key] for member in stack._members]
    if not all(isinstance(entry, Tensor) for entry in entries):
        return _values_of_members(stack, entries, value, path)
    leaves = cast("list[Tensor]", entries)
    one_each = rows_of_list(stack, value)
    if one_each is not None:
        check_held_alike(stack._members, one_each, f"write rows to {format_key(path)}")
        return one_each
    source = value if isinstance(value, Tensor) else as_source(path, value)
    if not source.ndim:
        return [source] * len(leaves)
    shapes = {leaf.shape for leaf in leaves}
    if len(shapes) > 1:
        lists = "Pass a list with a tensor for each member to write to it."
        remedy = "Write to the members one by one." if stack._dim else lists
        raise ragged(key, leaves, remedy=remedy)
    shape = list(shapes.pop())
    shape.insert(stack._dim, len(leaves))
    stacked = torch.empty((), dtype=source.dtype, device="meta").expand(shape)
    rows = writable_source(path, stacked, source).expand(shape).unbind(stack._dim)
    check_held_alike(stack._members, rows, f"write rows to {format_key(path)}")
    return rows


def rows_of_list(stack: Composite, value: object) -> Sequence[object] | None:
    """Return a list with a tensor or container for each member; `None` for other values."""
    if isinstance(value, MemberList):
        return value
    if stack._dim or not isinstance(value, (list, tuple)) or len(value) != len(stack._members):
        return None
    kinds = (Tensor, AbstractContainer)
    return value if all(isinstance(row, kinds) for row in value) else None


def check_held_alike(
    members: Sequence[AbstractContainer], rows: Sequence[object], action: str
) -> None:
    """Refuse a write that gives a member which a stack holds twice two different rows.

    Raises:
        InvalidValue: if rows of one member differ, or cannot be compared.
    """
    if len({id(member) for member in members}) == len(members):
        return
    first: dict[int, object] = {}
    for member, row in zip(members, rows, strict=True):
        before = first.setdefault(id(member), row)
        if before is not row and not (
            isinstance(before, Tensor)
            and isinstance(row, Tensor)
            and not (is_shapeless(before) or is_shapeless(row))
            and torch.equal(before, row)
        ):
            raise held_twice(action)


class MemberRows:
    """The checked entries of the members that one value is stored as."""

    __slots__ = ("rows",)

    def __init__(self, rows: Sequence[Entry]) -> None:
        self.rows = rows

    def _kd_map_each(self, fn: LeafFn) -> MemberRows:
        return MemberRows(
            [fn(row) if isinstance(row, Tensor) else row._kd_map_each(fn) for row in self.rows]
        )


def _values_of_members(
    stack: Composite, entries: Sequence[Entry], value: object, path: KeyPath
) -> Sequence[object]:
    """Return the values of rows that belong to each member; one value belongs to all."""
    if isinstance(value, (list, tuple)) and all(map(_is_of_rows, entries)):
        first = cast("Node", entries[0])._kd_desc
        batch = (*first.batch[: stack._dim], len(entries), *first.batch[stack._dim :])
        rows = values_of_rows(value, batch, format_key(path))
        value = registry.wrap_list(rows, describe(batch, first.device))
    if is_row_data(value):
        return stack._rows_of_operand(value)
    return [value] * len(entries)


def writes_of_member(
    member: AbstractContainer, key: str, value: object, path: KeyPath
) -> list[Write]:
    """Return the checked writes that store a value in the entry of a member of a stack."""
    row = None if isinstance(member, Composite) else own_row(member._kd_entries[key])
    if row is None:
        return member._kd_writes(key, value, path)
    return [(*row._encode(value, path), path)]


def _is_of_rows(entry: Entry) -> bool:
    return is_row_data(entry) or own_row(entry) is not None


def held_twice(action: str) -> InvalidValue:
    """Build the error for a stack that holds a member twice."""
    return InvalidValue(
        f"cannot {action}: the stack must hold each member once, got one twice. Stack "
        "`clone(recurse=False)` of that member instead."
    )


def stage_rows(
    target: AbstractContainer, value: object, path: KeyPath, writes: list[Write]
) -> None:
    """Append the writes that store a value in all rows of a container.

    Args:
        target: the container that is written.
        value: a container or mapping, which may have fewer keys, or one value for all leaves.
        path: the path of the target.
        writes: the list to which the writes are appended.
    """
    if isinstance(target, Composite):
        rows = _rows_of(target, value)
        if rows is not None:
            for pair in zip(target._members, rows, strict=True):
                stage_rows(*pair, path, writes)
            return
    kinds = kinds_by_key(target._kd_entries)
    source = _by_key(kinds, value)
    if any(key not in kinds for key in source):
        raise unknown_below(source, kinds, path)
    for key, new in source.items():
        entry, where_ = kinds[key], (*path, key)
        if isinstance(entry, AbstractContainer):
            stage_rows(entry, new, where_, writes)
        elif isinstance(entry, Tensor):
            leaf = new if isinstance(new, Tensor) else as_source(where_, new, entry.dtype)
            ndim = entry.ndim + isinstance(target, Composite)
            writes += writes_of_member(target, key, without_ones(leaf, ndim), where_)
        elif not cast("Data", entry)._agrees(new):
            if is_unbatched(entry):
                check_same_data(entry, new, where_)
            writes += writes_of_member(target, key, new, where_)


def holds_value_of_row(node: AbstractContainer) -> bool:
    """Return whether a container, or a member of a stack, holds the value of one row."""
    if isinstance(node, Composite):
        return any(map(holds_value_of_row, node._members))
    return any(
        holds_value_of_row(entry)
        if isinstance(entry, AbstractContainer)
        else own_row(entry) is not None
        for entry in node._kd_entries.values()
    )


def _rows_of(target: Composite, value: object) -> Sequence[object] | None:
    """Return the part of a value for each member; `None` if its keys must be matched first."""
    if isinstance(value, Composite) and _match(target, value):
        return value._members
    if isinstance(value, (AbstractContainer, Mapping)) or (
        isinstance(value, Tensor) and value.ndim
    ):
        return None
    return [value] * len(target._members)


def _match(one: Composite, other: Composite) -> bool:
    return one._dim == other._dim and one._kd_desc.batch == other._kd_desc.batch


def _by_key(kinds: Mapping[str, Entry], value: object) -> Mapping[str, object]:
    if isinstance(value, AbstractContainer):
        return value._kd_entries
    if isinstance(value, Mapping):
        return value
    return {
        key: value
        for key, kind in kinds.items()
        if isinstance(kind, (Tensor, AbstractContainer)) or is_unbatched(kind)
    }


def own_row(entry: Entry) -> RowData | None:
    """Return what writes to an entry of a member, if that is the value of one row."""
    if not isinstance(entry, NonTensorData) or entry._of_batch:
        return None
    return cast("RowData", RowValue(entry))
