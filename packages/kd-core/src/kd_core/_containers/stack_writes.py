"""How a lazy stack stores: its members, their entries, and writes that reach all or none.

The path of `stack[index] = value`: `LazyStackedTensorDict.__setitem__`; `_row_writes` here, which
asks `stack_moves.pick` for the members of an index and `stage_rows` for the writes; `_kd_writes` of
each member, in `_protocol`; `_leaves.writes.write_all`, which writes all or none. Must not know how
a stack is read, moved or printed (`lazy_stack`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeGuard, cast
from weakref import ref

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from kd_core import _registry as registry
from kd_core._base import TensorDictBase
from kd_core._containers.field_declarations import Declaration, converted
from kd_core._containers.non_tensor import NonTensorData, RowValue
from kd_core._containers.stack_moves import (
    Picked,
    members_kept,
    moved_members,
    numbered_rows,
    pick,
    pick_several,
    positions_of,
    reduced_members,
    regrouped,
    stack_class,
    viewed_members,
)
from kd_core._descriptor import describe
from kd_core._errors import (
    InvalidArgument,
    InvalidValue,
    KdError,
    KeySetMismatch,
    ShapeMismatch,
    a_type,
    shape_text,
)
from kd_core._keys import format_key
from kd_core._leaves.arrays import values_of_rows
from kd_core._leaves.foreach import StandIn
from kd_core._leaves.loops import (
    Selection,
    explain_shapeless,
    is_shapeless,
    kinds_by_key,
    padded_stack,
)
from kd_core._leaves.writes import (
    Targets,
    Write,
    Written,
    as_source,
    check_same_data,
    read_first,
    unknown_below,
    without_ones,
    writable_source,
)
from kd_core._nodes import (
    Data,
    Encodes,
    RowData,
    Values,
    are_tensors,
    is_any_data,
    is_node,
    is_row_data,
    is_unbatched,
    leaf_or_node,
    own_attributes,
)
from kd_core._ops.binary import cloned
from kd_core._ops.indexing import for_nested
from kd_core._protocol import (
    AbstractContainer,
    Composite,
    MemberList,
    are_alike,
    has_partial_entries,
    index_of,
    lock,
    locked_as,
    note_holder,
    take_names,
)
from kd_core._shapes import (
    Expanded,
    Padded,
    Reduced,
    Resized,
    batch_of_member,
    broadcasts_to,
    refuse_open,
    resized,
    stacked_batch,
    without_names,
)
from kd_core._validation import as_entry

if TYPE_CHECKING:
    from typing import Self

    from kd_core._descriptor import Descriptor
    from kd_core._keys import KeyPath
    from kd_core._nodes import Entry, Memo, Node, PartsMemo, TensorData
    from kd_core._protocol import Side
    from kd_core._types import BatchFn, LeafFn, PartsFn


# Reading an entry of which every member has a row of another shape.
#
# Knows the rows of an entry; must not know how a stack is written.


def rows_of(stack: Composite, path: KeyPath) -> list[object]:
    """Return the entry of each member, those of stacks as lists."""
    return [_row_of(member, path) for member in stack._members]


def _row_of(member: AbstractContainer, path: KeyPath) -> object:
    if isinstance(member, Composite):
        return rows_of(member, path)
    level: Entry = member
    for depth in range(len(path)):
        if isinstance(level, Composite):
            return rows_of(level, path[depth:])
        level = member._kd_read(path[: depth + 1])
    return level if isinstance(level, Tensor) else level._kd_item()


def padded_rows(stack: Composite, path: KeyPath, padding: float, side: Side) -> Tensor:
    """Return the rows of an entry, padded to one shape and stacked."""
    if side not in ("left", "right"):
        raise InvalidArgument(f'`padding_side` must be "left" or "right", got {side!r}.')
    rows = [
        padded_rows(member, path, padding, side)
        if isinstance(member, Composite)
        else _tensor_of(member, path)
        for member in stack._members
    ]
    _check_ranks(rows, path)
    return padded_stack(rows, padding, side, stack._dim)


def nested_rows(stack: Composite, path: KeyPath, layout: torch.layout) -> Tensor:
    """Return the rows of an entry as one nested tensor."""
    if stack._dim:
        raise InvalidValue(
            f"entry {format_key(path)} cannot be a nested tensor: the rows of a nested tensor are "
            f"those of dimension 0, got a stack along dimension {stack._dim}. "
            f"{_elsewhere(path, 'as_padded_tensor=True')}"
        )
    rows = [_tensor_of(member, path) for member in stack._members]
    _check_ranks(rows, path)
    try:
        return torch.nested.as_nested_tensor(rows, layout=layout)
    except (RuntimeError, ValueError) as error:
        shapes = ", ".join({shape_text(row.shape): None for row in rows})
        raise ShapeMismatch(
            f"entry {format_key(path)} cannot be a nested tensor of shapes {shapes}: "
            f"{str(error).partition(chr(10))[0].rstrip('.')}. "
            f"{_elsewhere(path, 'as_padded_tensor=True')}"
        ) from None


def _tensor_of(member: AbstractContainer, path: KeyPath) -> Tensor:
    entry = member._kd_read(path)
    if not isinstance(entry, Tensor):
        raise InvalidValue(
            f"entry {format_key(path)} must be a tensor in every member, got "
            f"{a_type(entry)}. {_elsewhere(path)}"
        )
    return entry


def _check_ranks(rows: Sequence[Tensor], path: KeyPath) -> None:
    if len({row.ndim for row in rows}) > 1:
        shapes = ", ".join({shape_text(row.shape): None for row in rows})
        raise ShapeMismatch(
            f"the rows of entry {format_key(path)} must have the same number of dimensions, got "
            f"shapes {shapes}. {_elsewhere(path)}"
        )


def _elsewhere(path: KeyPath, *options: str) -> str:
    """Return the remedy for an entry that is read in another way, or left out of the others."""
    key: object = path[0] if len(path) == 1 else path
    calls = " or ".join(f"`get({key!r}, {option})`" for option in (*options, "as_list=True"))
    return f"Read it with {calls}, and the others after `exclude({key!r})`."


# The entries of several members, stacked when they are read.
#
# Knows how the entries of members become one entry of the stack, and which errors they raise; must
# not know the operations on a stack.


class StackedEntries(Mapping[str, "Entry"]):
    """The mapping of the entries that all members have, in the order of the first member."""

    __slots__ = ("_stack",)

    def __init__(self, stack: Composite) -> None:
        self._stack = stack

    def __getitem__(self, key: str) -> Entry:
        entry = self.get(key)
        if entry is None:
            raise KeyError(key)
        return entry

    def get(self, key: str, default: Any = None) -> Entry | None:  # type: ignore[override]  # `Mapping` has overloads
        """Return the stacked entry, or `default` where a member has none."""
        stack = self._stack
        found: list[Any] = [member._kd_entries.get(key) for member in stack._members]
        if type(found[0]) is Tensor:
            try:  # checking the class of each first is slow
                return torch.stack(found, stack._dim)
            except (KdError, RuntimeError, TypeError):
                pass  # one of them is not a tensor
        if any(entry is None for entry in found):
            missing: Entry | None = default
            return missing
        return _stacked(stack, key, found)

    def __iter__(self) -> Iterator[str]:
        first, *others = (member._kd_entries for member in self._stack._members)
        keys = first.keys()
        if all(keys == other.keys() for other in others):
            return iter(keys)
        return iter([key for key in keys if all(key in other for other in others)])

    def _kinds(self) -> list[tuple[str, Entry]]:
        """Return the keys and, for each, an entry of the same kind; nothing is stacked."""
        stack = self._stack
        found: list[tuple[str, Entry]] = []
        levels = [kinds_by_key(member._kd_entries) for member in stack._members]
        for key in self:
            rows = [level[key] for level in levels]
            entry = rows[0]
            if _are_containers(rows):
                entry = _stacked_nodes(stack, rows)
            elif not any(_is_tensor_or_container(row) for row in rows):
                entry = _stacked(stack, key, rows)
            found.append((key, entry))
        return found

    def _partial(self) -> dict[str, str]:
        """Describe the entries that only some members have; the stack does not show them."""
        levels = [member._kd_entries for member in self._stack._members]
        found: dict[str, str] = {}
        for key in {key: None for level in levels for key in level if key not in self}:
            having = [level for level in levels if key in level]
            kinds, shapes = zip(*(_kind_and_shape(level, key) for level in having), strict=True)
            found[key] = (
                f"{' or '.join(dict.fromkeys(kinds))} in {len(having)} of {len(levels)} members, "
                f"of shape {' or '.join(dict.fromkeys(shapes))}"
            )
        return found

    def _ragged(self, key: str) -> str:
        """Describe an entry whose shapes differ among the members."""
        if holds_unbatched(self._stack, key):
            return "differs among the members"
        return f"ragged, of shapes {', '.join(dict.fromkeys(_shapes(self._stack, key)))}"

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        return all(key in member._kd_entries for member in self._stack._members)


def holds_unbatched(level: AbstractContainer, key: str) -> bool:
    """Return whether an entry has no batch dimensions in a member, those of stacks included."""
    if isinstance(level, Composite):
        return any(holds_unbatched(member, key) for member in level._members)
    return is_unbatched(level._kd_entries.get(key))


def _shapes(stack: Composite, key: str) -> Iterator[str]:
    """Yield the shape of an entry in each member, those of the members of stacks one by one."""
    for member in stack._members:
        if isinstance(member, type(stack)):
            yield from _shapes(member, key)
        else:
            yield shape_text(_shape_of(member._kd_entries[key]))


def _are_containers(entries: Sequence[Entry]) -> TypeGuard[list[AbstractContainer]]:
    return all(isinstance(each, AbstractContainer) for each in entries)


def _is_tensor_or_container(entry: Entry) -> bool:
    return isinstance(entry, (Tensor, AbstractContainer)) or is_unbatched(entry)


def _shape_of(entry: Entry) -> tuple[int, ...]:
    leaf = leaf_or_node(entry)
    return tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf._kd_desc.batch


def _kind_and_shape(level: Mapping[str, Entry], key: str) -> tuple[str, str]:
    """Describe an entry, which need not be one that can be stacked."""
    try:
        entry = level[key]
    except ShapeMismatch:
        return "Tensor", "that differs"
    return type(entry).__name__, shape_text(_shape_of(entry))


def _stacked(stack: Composite, key: str, found: list[Entry]) -> Entry:
    """Return one entry stacked from all members, or raise the error that says why it cannot be."""
    if are_tensors(found):
        try:
            return torch.stack(found, stack._dim)
        except RuntimeError as error:
            explain_shapeless(error, f"entry {format_key(key)} of each member", *found)
            raise ragged(key, found, error) from None
    if _are_containers(found):
        return _stacked_nodes(stack, found)
    if any(map(_is_tensor_or_container, found)) and not all(map(is_unbatched, found)):
        kinds = " and ".join(sorted(set(map(a_type, found))))
        raise KeySetMismatch(
            f"entry {format_key(key)} must be of one kind in all members, got {kinds}. Read it "
            f"from each member, as in `[member[{key!r}] for member in td.unbind({stack._dim})]`."
        )
    strange = next((entry for entry in found if not is_node(entry)), None)
    if strange is not None:  # `tree_map` put it in place of a tensor
        raise InvalidValue(f"entry {format_key(key)} cannot be stacked, got {a_type(strange)}.")
    nodes: list[Any] = found
    if is_unbatched(found[0]):
        return _one_for_all(stack, key, nodes)
    batches = [node._kd_desc.batch for node in nodes]
    batch = batches[0]
    if any(other != batch for other in batches):
        if stack._kd_desc.open or not all(map(is_row_data, nodes)):
            return _data_of_sizes(stack, key, nodes)
        batch = stack._members[0]._kd_desc.batch
        nodes = [_as_lists(node, stack._members[0]._kd_desc) for node in nodes]
    batch = (*batch[: stack._dim], len(nodes), *batch[stack._dim :])
    desc = describe(batch, stack._kd_desc.device)
    joined: Data = nodes[0]._join(nodes, torch.stack, stack._dim, desc, (key,))
    return joined


def _as_lists(node: Values, desc: Descriptor) -> Data:
    """Return values of rows of which each is the list of what is behind the batch size."""
    values = values_of_rows(node.tolist(), desc.batch, "the data")
    made: Data = registry.wrap_rows(values, None, describe(desc.batch))
    return made if desc.ndim else registry.wrap_data(values[0], describe(()))


def _data_of_sizes(stack: Composite, key: str, found: list[Values]) -> Entry:
    """Return the values of members of different sizes: for each member a list, one for each row."""
    if stack._dim:
        raise ShapeMismatch(
            f"entry {format_key(key)} has values for the rows of members of different sizes, which "
            f"cannot be stacked along dimension {stack._dim}. {_elsewhere((key,))}"
        )
    lists = [each.tolist() for each in found]
    return registry.wrap_rows(lists, None, describe((len(lists),), stack._kd_desc.device))


def _one_for_all(stack: Composite, key: str, found: list[TensorData]) -> Entry:
    """Return the tensor without batch dimensions that all members share."""
    if not all(map(found[0]._agrees, found)):
        raise ShapeMismatch(
            f"entry {format_key(key)} is an `UnbatchedTensor` that differs among the members, and "
            "has no batch dimension along which it could be stacked. Read it with "
            f"`get({key!r}, as_list=True)`, and the others after `exclude({key!r})`."
        )
    return found[0]._kd_with_descriptor(stack._kd_desc)


def _stacked_nodes(stack: Composite, members: list[AbstractContainer]) -> Entry:
    if len({member._kd_desc.ndim for member in members}) > 1:  # only the sizes may differ
        outer = [member._kd_desc.batch for member in stack._members]
        pairs = zip(members, outer, strict=True)
        members = [
            member
            if member._kd_desc.batch == batch
            else member._kd_with_descriptor(member._kd_desc.with_batch(batch))
            for member, batch in pairs
        ]
    nested = stack._of(members)
    if stack._kd_desc.frozen:
        free = nested._kd_desc
        nested._kd_describe(free.with_lock(None, 1))
        if not is_dynamo_compiling():
            note_holder(nested, free, (ref(stack),))
    return nested


def ragged(
    key: str, leaves: list[Tensor], error: Exception | str = "", remedy: str = ""
) -> KdError:
    """Build the error for an entry that cannot be stacked."""
    shapes = {shape_text(leaf.shape): None for leaf in leaves}
    if len(shapes) == 1:
        return InvalidValue(f"entry {format_key(key)} cannot be stacked: {error}")
    remedy = remedy or (
        f"Read it with `get({key!r}, as_list=True)`, `as_padded_tensor=True` or "
        "`as_nested_tensor=True`, or pad the members to one shape."
    )
    return ShapeMismatch(  # libraries tell by how the message begins that an entry is ragged
        f"Failed to stack tensors within a tensordict: entry {format_key(key)} is ragged: its "
        f"shapes among the {len(leaves)} members are {', '.join(shapes)}. {remedy}"
    )


# In-place writes into the members of a stack.
#
# Knows stacks and values; must not know an index. The functions check and return all writes; the
# caller performs them.


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
    if not are_tensors(entries):
        return _values_of_members(stack, entries, value, path)
    leaves = entries
    one_each = rows_of_list(stack, value)
    if one_each is not None:
        check_held_alike(stack._members, one_each, f"write rows to {format_key(path)}")
        return one_each
    source = value if isinstance(value, Tensor) else as_source(path, value)
    if not source.ndim:
        return [source] * len(leaves)
    shapes = {leaf.shape for leaf in leaves}
    if _has_rows(stack, source) and (len(shapes) > 1 or source.ndim <= leaves[0].ndim):
        rows = source.unbind(stack._dim)
        pairs = zip(rows, leaves, strict=True)
        if all(broadcasts_to(row.shape, leaf.shape) for row, leaf in pairs):
            check_held_alike(stack._members, rows, f"write rows to {format_key(path)}")
            return rows
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


def _has_rows(stack: Composite, source: Tensor) -> bool:
    """Return whether a tensor begins with the batch dimensions of a stack: it has its rows.

    With fewer dimensions than the entry it is lined up from the left all the same, each row with
    the entry of its member.
    """
    sizes = stack._kd_desc.batch
    if is_shapeless(source):
        return False
    return not stack._kd_desc.open and tuple(source.shape[: len(sizes)]) == tuple(map(int, sizes))


def rows_of_list(stack: Composite, value: object) -> Sequence[object] | None:
    """Return a list with a tensor or container for each member; `None` for other values.

    Where the members have different sizes, the rows of a nested tensor are such a list.
    """
    if isinstance(value, MemberList):
        return value
    if isinstance(value, Tensor):
        nested = stack._kd_desc.open and not stack._dim and value.is_nested
        return value.unbind(0) if nested and value.size(0) == len(stack._members) else None
    if stack._dim or not isinstance(value, (list, tuple)) or len(value) != len(stack._members):
        return None
    kinds = (Tensor, AbstractContainer)
    return value if all(isinstance(row, kinds) for row in value) else None


def _no_rows_of_members(stack: Composite, path: KeyPath) -> ShapeMismatch:
    """Build the error for an entry that cannot be split over members of different sizes."""
    batches = {shape_text(member._kd_desc.batch): None for member in stack._members}
    return ShapeMismatch(
        f"entry {format_key(path)} cannot be split over members of the batch sizes "
        f"{', '.join(batches)}. Pass a list with a value for each of the {len(stack._members)} "
        "members, a nested tensor with a row for each, or a lazy stack of members of their sizes."
    )


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
        value = registry.wrap_rows(rows, None, describe(batch, first.device))
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
            leaf = without_ones(leaf, ndim)
            if isinstance(target, Composite) and not isinstance(value, AbstractContainer):
                leaf = _lined_up(target, key, leaf, ndim)
            writes += target._kd_writes(key, leaf, where_)
        elif is_any_data(entry) and not entry._agrees(new):
            if is_unbatched(entry):
                check_same_data(entry, new, where_)
            writes += writes_of_member(target, key, new, where_)


def _lined_up(stack: Composite, key: str, leaf: Tensor, ndim: int) -> Tensor:
    """Return a tensor of fewer dimensions than a stacked entry with all, the missing ones in front.

    So does torch where it broadcasts. One that does not fit that way stays as it is.
    """
    if not 0 < leaf.ndim < ndim or not _has_rows(stack, leaf):
        return leaf
    shapes = [list(_shape_of(member._kd_entries[key])) for member in stack._members]
    shape = (*shapes[0][: stack._dim], len(shapes), *shapes[0][stack._dim :])
    if any(each != shapes[0] for each in shapes) or not broadcasts_to(tuple(leaf.shape), shape):
        return leaf
    return leaf.expand(shape)


def stage_with_new(
    target: AbstractContainer,
    source: AbstractContainer,
    path: tuple[str, ...],
    writes: list[Write],
    added: list[tuple[AbstractContainer, str, Entry]],
) -> None:
    """Append the writes of a source to a container of its batch size, and the keys that it adds.

    Args:
        target: the container that is written.
        source: what is written; its new entries are kept by reference.
        path: the path of the target.
        writes: the list to which the writes are appended.
        added: the list to which levels and their new entries are appended.
    """
    known: dict[str, object] = {}
    for key, entry in source._kd_entries.items():
        below = target._kd_entries.get(key)
        if below is None:
            target._kd_check_unlocked(f"set {format_key((*path, key))}")
            added.append((target, key, target._kd_as_entry(key, entry)))
        elif (
            isinstance(below, AbstractContainer)
            and isinstance(entry, AbstractContainer)
            and below._kd_desc.batch == entry._kd_desc.batch
        ):
            stage_with_new(below, entry, (*path, key), writes, added)
        else:
            known[key] = entry
    stage_rows(target, known, path, writes)


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


def own_row(entry: object) -> Encodes | None:
    """Return what writes to an entry of a member, if that is the value of one row."""
    if not isinstance(entry, NonTensorData) or entry._of_batch:
        return None
    return RowValue(entry)


class _NewEntry(StandIn):
    """A tensor that stands for the entry of a container: a write into it sets the entry."""

    level: AbstractContainer
    key: str
    entry: RowData

    def store(self, numbers: Tensor, source: Tensor) -> None:
        """Set the entry, unless all rows have the one value that is there."""
        one: Any = self.level._kd_entries[self.key]
        rows: Any = self.entry
        if not all(map(one._agrees, rows.reshape(-1).tolist())):
            self.level._kd_set_entry(self.key, self.entry)


def spread_values(
    member: AbstractContainer, value: Mapping[str, object] | AbstractContainer, added: list[Write]
) -> AbstractContainer:
    """Return a member with one value for each row, where rows of one value for all are written.

    Args:
        member: the member, which stays as it is until `added` is written.
        value: what is written.
        added: where the writes are appended that set these entries.
    """
    source = value._kd_entries if isinstance(value, AbstractContainer) else value
    if isinstance(member, MemberStorage):
        members = [spread_values(each, value, added) for each in member._members]
        return member._of(members) if added else member
    entries = dict(member._kd_entries)
    for key, entry in member._kd_entries.items():
        if isinstance(entry, AbstractContainer) and key in source:
            new = source[key]
            if isinstance(new, (AbstractContainer, Mapping)):
                entries[key] = spread_values(entry, new, added)
        elif isinstance(entry, NonTensorData) and entry._kd_desc.ndim and key in source:
            if entry._always_of_batch() or entry._agrees(source[key]):
                continue
            entries[key] = rows = entry._spread(entry._kd_desc)
            added.append(_new_entry(member, key, rows))
    return member._kd_like(entries, member._kd_desc) if added else member


def _new_entry(level: AbstractContainer, key: str, entry: RowData) -> Write:
    """Return the write that sets an entry of a container, a locked one too."""
    above = level._kd_desc
    if above.frozen:
        entry._kd_hold(above.held + (above.lock is not None), (ref(level),))
    source = torch.zeros((), dtype=torch.int64, device="cpu")
    target = source.clone().as_subclass(_NewEntry)
    target.plain, target.level, target.key, target.entry = source, level, key, entry
    return target, source, (key,)


# The primitives of a container whose storage is its members.
#
# An entry is stacked when it is read, and a write to it writes its rows to the members. Operations
# that do not need the whole batch run on the members, which keep their keys, shapes, dtypes and
# storage.


class MemberStorage(TensorDictBase, Composite):
    """A container that holds its entries in members."""

    __slots__ = ("__weakref__", "_dim", "_kd_desc", "_kd_holders", "_kd_scope", "_members")

    _kd_desc: Descriptor
    _dim: int
    _members: list[TensorDictBase]  # type: ignore[assignment]  # of containers with all methods

    @property
    def _kd_entries(self) -> Mapping[str, Entry]:
        return StackedEntries(self)

    def _kd_describe(self, desc: Descriptor) -> None:
        if desc.batch != self._kd_desc.batch:
            inner_batches = self._inner_batches(desc)
            for member, inner in zip(self._members, inner_batches, strict=True):
                old = member._kd_desc
                member._kd_describe(old.with_batch(inner).with_lock(old.lock, old.held))
        self._kd_desc = desc

    def _inner_batches(self, desc: Descriptor) -> list[tuple[int, ...]]:
        """Return the batch size of each member for a batch size of the stack."""
        batch, dim = desc.batch, self._dim
        if batch[dim : dim + 1] != (len(self._members),):
            raise ShapeMismatch(
                f"batch_size {shape_text(batch)} does not fit {len(self._members)} containers "
                f"stacked along dimension {dim}: the size of that dimension must not change. Call "
                "`contiguous()` first."
            )
        if desc.open:
            return [batch_of_member(batch, dim, row) for row in range(len(self._members))]
        return [batch[:dim] + batch[dim + 1 :]] * len(self._members)

    def _kd_with_descriptor(self, desc: Descriptor) -> Self:
        device = desc.device
        members = [
            member._kd_with_descriptor(describe(inner, device or member._kd_desc.device))
            for member, inner in zip(self._members, self._inner_batches(desc), strict=True)
        ]
        new = self._of(members)
        new._kd_desc = desc
        return new

    def _of(self, members: Sequence[AbstractContainer], dim: int | None = None) -> Self:
        kind = type(self)
        if members[0]._kd_tensor_class is not None or kind._kd_tensor_class is not None:
            kind = stack_class(kind, members)
        new = object.__new__(kind)
        new._members = list(cast("Sequence[TensorDictBase]", members))
        new._dim = self._dim if dim is None else dim
        size = resized(self._kd_desc.batch[self._dim], len(members))
        new._kd_desc = describe_stack(members, new._dim, size)
        own = own_attributes(self)
        if own:
            new.__dict__.update(own)
        return new

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Copy all members, unlocked, as `clone` does."""
        new = object.__new__(type(self))
        memo[id(self)] = new
        new._members, new._dim = deepcopy(self._members, memo), self._dim
        new._kd_desc = self._kd_desc.unlocked()
        own = own_attributes(self)
        if own:
            new.__dict__.update(deepcopy(own, memo))
        return new

    def _replace_members(self, members: Sequence[AbstractContainer]) -> None:
        self._members = list(cast("Sequence[TensorDictBase]", members))

    def _kd_like(self, entries: dict[str, Entry], desc: Descriptor) -> Self:
        # A result of stacked entries is dense, and of the class that all members have.
        if desc.open:
            refuse_open(desc.batch)
        if self._kd_tensor_class is not None:
            return object.__new__(self._kd_tensor_class)._kd_like(entries, desc)
        members = self._members
        if members and all(type(each) is type(members[0]) for each in members):
            return cast("Self", members[0]._kd_like(entries, desc))
        return registry.make_dense(entries, desc)

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
        if isinstance(value, AbstractContainer) and not self._kd_desc.named:
            take_names(self, value)

    def _kd_del_entry(self, key: str) -> None:
        self._change_members(f"remove {format_key(key)}", lambda member: member._kd_del_entry(key))

    def _kd_as_entry(self, key: str, value: object, path: tuple[str, ...] = ()) -> Entry:
        rows = rows_of_list(self, value)  # which cannot be stacked if they are ragged
        if rows is None:
            cls = self._kd_tensor_class
            declaration: Declaration | None = getattr(cls, "_kd_declared", None)
            if cls is not None and declaration is not None and declaration.converts:
                value = converted(cls, declaration.options, key, value, self._kd_desc.unlocked())
            try:
                return super()._kd_as_entry(key, value, path)
            except ShapeMismatch:
                if not self._kd_desc.open:
                    raise
                raise _no_rows_of_members(self, (*path, key)) from None
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
            return value._members
        count = len(self._members)
        if self._kd_desc.open and is_any_data(value):
            return [value] * count  # it takes the batch size of each member
        return [value._kd_map_each(_Row(dim, row), _without(dim)) for row in range(count)]

    def _rows_of_operand(self, other: Entry) -> Sequence[Entry]:
        batch = self._kd_desc.batch
        if is_row_data(other):
            shape = other._kd_desc.batch
            if self._kd_desc.open or len(shape) > len(batch) or shape == batch:
                return self._rows(other)
            if broadcasts_to(shape, batch):
                other = other._kd_map_each(lambda numbers: numbers.expand(batch), lambda _: batch)
            return self._rows(other)
        if not isinstance(other, AbstractContainer):
            return [other] * len(self._members)  # refused by the members
        if not other._kd_desc.batch:
            count, dim = len(self._members), self._dim
            return [
                _row_without_batch(member, other, dim, row, count)
                for row, member in enumerate(self._members)
            ]
        if other._kd_desc.batch[: len(batch)] != batch:
            raise ShapeMismatch(
                f"batch sizes must be equal, got {shape_text(batch)} and "
                f"{shape_text(other._kd_desc.batch)}."
            )
        return self._rows(other)

    def _kd_writes(self, key: str, value: object, path: tuple[str, ...]) -> list[Write]:
        rows = rows_to_write(self, key, value, path)
        pairs = zip(self._members, rows, strict=True)
        return [
            write for member, row in pairs for write in writes_of_member(member, key, row, path)
        ]

    def _row_writes(self, index: object, value: object, path: tuple[str, ...]) -> list[Write]:
        picked = pick(index, self._kd_desc.batch, self._dim)
        if picked is None or picked.inner:  # rows of members
            added: list[Write] = []
            stack = self._with_rows(picked, value, added)
            if added:  # last: they replace what the stack holds
                return stack._row_writes(index, value, path) + added
        try:
            return self._writes_of_rows(picked, index, value, path)
        except ShapeMismatch:  # one value per row, for members of different shapes
            spread = self._spread_to_rows(index, value)
            if spread is None:
                raise
            return self._lone_writes(index, spread, path)

    def _with_rows(self, picked: Picked | None, value: object, added: list[Write]) -> Self:
        """Return a stack whose members have one value for each row where rows are written.

        Args:
            picked: the members that are written; `None`: all.
            value: what is written.
            added: where the writes are appended that give the members these entries.
        """
        if is_compiling() or not isinstance(value, (AbstractContainer, Mapping)):
            return self
        members = self._members if picked is None else self._picked(picked)
        spread = {id(member): spread_values(member, value, added) for member in members}
        return self._of([spread.get(id(each), each) for each in self._members]) if added else self

    def _spread_to_rows(self, index: object, value: object) -> AbstractContainer | None:
        """Return a container with the batch size of the rows that it is written to; see `expand`.

        Returns:
            `None` if it is not a container, does not fit, or has that batch size.
        """
        if not isinstance(value, AbstractContainer):
            return None
        if self._kd_desc.open:
            return None  # its rows have no numbers
        batch = value._kd_desc.batch
        shape = tuple(numbered_rows(self, index)[1].shape)
        if batch == shape or len(batch) > len(shape) or not broadcasts_to(batch, shape):
            return None
        return value._kd_engine.expand(value, shape)

    def _writes_of_rows(
        self, picked: Picked | None, index: object, value: object, path: tuple[str, ...]
    ) -> list[Write]:
        writes: list[Write] = []
        alone = not isinstance(value, (AbstractContainer, Mapping, Tensor))  # the same for all rows
        if picked is not None and picked.in_place and (alone or picked.distinct):
            taken = self._taken(picked)
            if not picked.inner or _are_views((taken, *self._picked(picked))):
                stage_rows(taken, _with_all_rows(value, taken._kd_desc), path, writes)
                return writes if alone else _read_first(writes)
        if picked is not None and (alone or picked.distinct):
            members = self._picked(picked)
            values: Sequence[object] | None = [value] * len(members)
            if not alone:  # the value of one row is written through the stack of its rows
                lone = any(map(holds_value_of_row, members))
                values = None if lone else rows_at(picked, value)
            if values is not None:
                for member, row in zip(members, values, strict=True):
                    copy = cloned(member)
                    copy[picked.inner] = row
                    stage_rows(member, copy, path, writes)
                return writes
        if (
            isinstance(value, AbstractContainer)
            and not is_compiling()
            and has_partial_entries(self)
        ):
            spread = self._spread_to_rows(index, value)
            return self._lone_writes(index, value if spread is None else spread, path)
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
        if not alone:
            value = self._as_rows(value, tuple(taken.shape))
        copies: dict[int, TensorDictBase] = {}
        for position, number in zip(positions_of(taken), taken.reshape(-1).tolist(), strict=True):
            inner = list(rows[number])
            member = inner.pop(self._dim)
            if member not in copies:
                held = self._members[member]
                copies[member] = cloned(held)
            row = value[position] if isinstance(value, TensorDictBase) else value
            copies[member][tuple(inner)] = row
        writes: list[Write] = []
        for member, copy in copies.items():
            stage_rows(self._members[member], copy, path, writes)
        return writes

    def _as_rows(self, value: object, batch: tuple[int, ...]) -> TensorDictBase:
        """Return what is written to rows of ragged members as a container of these rows."""
        if isinstance(value, Mapping) and not isinstance(value, AbstractContainer):
            desc = describe(batch)
            entries = {key: as_entry(key, each, desc) for key, each in value.items()}
            return registry.make_dense(entries, desc)
        if not isinstance(value, TensorDictBase) or value._kd_desc.batch != batch:
            self._kd_engine.contiguous(self)  # raises: it says how the shapes differ
        return cast("TensorDictBase", value)

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
        several = None if found is None else self._several(index)
        if several is not None:
            return cast("Self", several)
        if self._kd_desc.open:
            return self._by_size(fn, batch)
        if isinstance(batch, Resized) and not is_compiling():
            made = regrouped(self, batch)
            if made is not None:
                return made
        # What is expanded is dense if it can be: in a storage made like it, entries are written in
        # place.
        if not isinstance(batch, (Reduced, Padded, Expanded)) and not is_compiling():
            seen = viewed_members(self, fn, batch)
            if seen is not None:
                return seen
        # Rows keep the entries that only some members have, but for what joins rows of several.
        if not isinstance(batch, Padded) and not is_compiling() and has_partial_entries(self):
            apart = self._moved_apart(fn, batch)
            if apart is not None:
                return apart
        try:
            return super()._kd_map_each(fn, batch, memo)
        except ShapeMismatch:
            if isinstance(batch, Padded):
                raise
            apart = self._moved_apart(fn, batch)
            if apart is None:  # it takes all rows of an entry
                raise
            return apart

    def _moved_apart(self, fn: LeafFn, batch: BatchFn) -> Self | None:
        """Move rows whose entries cannot be stacked; members that are expanded stay members."""
        if isinstance(batch, Expanded) and not is_compiling():
            after = batch(self._kd_desc.batch)
            dim = self._dim + len(after) - self._kd_desc.ndim
            if after[dim] == len(self._members):
                size = without_names((*after[:dim], *after[dim + 1 :]))
                stack = self._of(
                    [each._kd_engine.expand(each, size) for each in self._members], dim
                )
                stack._kd_describe(stack._kd_desc.with_batch(after))
                return stack
        return self._moved(fn, batch)

    def _by_size(self, fn: LeafFn, batch: BatchFn) -> Self:
        """Apply a function of stacked leaves to each of several members of different sizes.

        Raises:
            ShapeMismatch: if it does not keep the rows of each member together.
        """
        made = None
        if isinstance(batch, Reduced):
            made = reduced_members(self, fn, batch)
        elif not isinstance(batch, Padded):
            made = members_kept(self, fn, batch)
        if made is None:
            refuse_open(self._kd_desc.batch)
        return cast("Self", made)

    def _moved(self, fn: LeafFn, batch: BatchFn) -> Self | None:
        """Return a stack of moved or reduced rows; `None` where rows of several members join."""
        if isinstance(batch, Reduced):
            return reduced_members(self, fn, batch)
        return moved_members(self, fn, batch)

    def _several(self, index: object) -> TensorDictBase | None:
        """Return what numbers of members in several dimensions take; `None` for another index."""
        found = None if is_compiling() else pick_several(index, self._kd_desc.batch, self._dim)
        if found is None:
            return None
        flat, shape, at = found
        picked = pick(flat, self._kd_desc.batch, self._dim)
        if picked is None:
            return None
        rows = self._result(picked)
        return rows._kd_engine.unflatten(rows, at, shape)

    def _result(self, picked: Picked) -> TensorDictBase:
        """Return the result of an index: a copy where torch copies.

        Members are locked as the stack; rows of one member are not, as those of a `TensorDict`.
        """
        taken = self._taken(picked)
        if picked.in_place and not picked.views:
            return locked_as(self, cloned(taken))
        if not self._kd_desc.frozen:
            rows_of_several = picked.inner and not isinstance(picked.rows, int)
            return locked_as(self, taken) if rows_of_several else taken
        if isinstance(picked.rows, int) and picked.inner:
            # a stack in this one has found which of its members are locked
            below = self._members[picked.rows]
            return taken if isinstance(below, Composite) else taken._kd_shallow()
        return lock(taken._kd_shallow())

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
        start, ends = len(theirs), []
        for member, row in zip(self._members, self._rows_of_operand(other), strict=True):
            member._kd_collect_pair(row, mine, theirs, path)
            ends.append(len(theirs))
        if isinstance(mine, Written):
            read_first(mine, theirs, start, ends)
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


def _read_first(writes: list[Write]) -> list[Write]:
    """Return writes whose sources do not change before they are read."""
    sources = [source for _, source, _ in writes]
    read_first([target for target, _, _ in writes], sources, 0, range(1, len(writes) + 1))
    return [
        (target, source, where) for (target, _, where), source in zip(writes, sources, strict=True)
    ]


def _with_all_rows(value: object, desc: Descriptor) -> object:
    """Return a container that has rows, but fewer dimensions than a batch, as one of that batch.

    As for a tensor, its dimensions are the last ones of the batch.
    """
    if not isinstance(value, AbstractContainer) or desc.open:
        return value
    batch = value._kd_desc.batch
    if not 0 < len(batch) < desc.ndim or not broadcasts_to(batch, desc.batch):
        return value
    return value._kd_engine.expand(value, desc.batch)


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
    """Return the descriptor of a stack of members of as many batch dimensions.

    Args:
        members: the members.
        dim: the stacked dimension.
        size: the number of members, which may carry the name of the dimension.
    """
    first = members[0]._kd_desc
    device, alike = first.device, not first.open
    for member in members:  # a loop: "lazy_stack 8" in the benchmarks
        if member._kd_desc is not first:
            alike = alike and member._kd_desc.batch == first.batch
            if member._kd_desc.device != device:
                device = None
    count = len(members) if size is None else size
    if alike:
        return describe((*first.batch[:dim], count, *first.batch[dim:]), device)
    batches = [member._kd_desc.batch for member in members]
    return describe(stacked_batch(batches, dim, count), device)


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
            entries[key] = _row_without_batch(kind, value, dim, row, count)
    if all(map(operator.is_, entries.values(), other._kd_entries.values())):
        return other
    return registry.make_dense(entries, describe((), None))


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
