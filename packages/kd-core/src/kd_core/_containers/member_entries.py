"""The entries of several members, stacked when they are read.

Knows how the entries of members become one entry of the stack, and which errors they raise; must
not know the operations on a stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kd_core._batch.descriptor import describe
from kd_core._errors import InvalidValue, KdError, KeySetMismatch, ShapeMismatch, a_type, shape_text
from kd_core._keys import format_key
from kd_core._leaves.loops import kinds_by_key
from kd_core._leaves.shapeless import explain_shapeless
from kd_core._nodes.entry import is_node, is_unbatched, tensor_of
from kd_core._protocol.composite import Composite
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from kd_core._nodes.entry import Data, Entry, Node, TensorData


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

    def get(self, key: str, default: object = None) -> Entry | None:  # type: ignore[override]  # one
        """Return the stacked entry, or `default` where a member has none."""
        stack = self._stack
        found = [member._kd_entries.get(key) for member in stack._members]
        if found[0].__class__ is Tensor:
            try:  # checking the class of each first is slow
                return torch.stack(cast("list[Tensor]", found), stack._dim)
            except (KdError, RuntimeError, TypeError):
                pass  # one of them is not a tensor
        if any(entry is None for entry in found):
            return cast("Entry | None", default)
        return _stacked(stack, key, cast("list[Entry]", found))

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
            nodes = all(isinstance(row, AbstractContainer) for row in rows)
            entry = rows[0]
            if nodes:
                entry = _stacked_nodes(stack, cast("list[AbstractContainer]", rows))
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
        if isinstance(member, stack.__class__):
            yield from _shapes(member, key)
        else:
            yield shape_text(_shape_of(member._kd_entries[key]))


def _is_tensor_or_container(entry: Entry) -> bool:
    return isinstance(entry, (Tensor, AbstractContainer)) or is_unbatched(entry)


def _shape_of(entry: Entry) -> tuple[int, ...]:
    leaf = tensor_of(entry)
    return cast("Node", entry)._kd_desc.batch if leaf is None else tuple(leaf.shape)


def _kind_and_shape(level: Mapping[str, Entry], key: str) -> tuple[str, str]:
    """Describe an entry, which need not be one that can be stacked."""
    try:
        entry = level[key]
    except ShapeMismatch:
        return "Tensor", "that differs"
    return type(entry).__name__, shape_text(_shape_of(entry))


def _stacked(stack: Composite, key: str, found: list[Entry]) -> Entry:
    """Return one entry stacked from all members, or raise the error that says why it cannot be."""
    if all(isinstance(entry, Tensor) for entry in found):
        leaves = cast("list[Tensor]", found)
        try:
            return torch.stack(leaves, stack._dim)
        except RuntimeError as error:
            explain_shapeless(error, f"entry {format_key(key)} of each member", *leaves)
            raise ragged(key, leaves, error) from None
    if all(isinstance(entry, AbstractContainer) for entry in found):
        return _stacked_nodes(stack, cast("list[AbstractContainer]", found))
    if any(map(_is_tensor_or_container, found)) and not all(map(is_unbatched, found)):
        kinds = " and ".join(sorted(set(map(a_type, found))))
        raise KeySetMismatch(
            f"entry {format_key(key)} must be of one kind in all members, got {kinds}. Read it "
            f"from each member, as in `[member[{key!r}] for member in td.unbind({stack._dim})]`."
        )
    strange = next((entry for entry in found if not is_node(entry)), None)
    if strange is not None:  # `tree_map` put it in place of a tensor
        raise InvalidValue(f"entry {format_key(key)} cannot be stacked, got {a_type(strange)}.")
    nodes = cast("list[Data]", found)
    if is_unbatched(found[0]):
        return _one_for_all(stack, key, cast("list[TensorData]", found))
    batch = nodes[0]._kd_desc.batch
    batch = (*batch[: stack._dim], len(nodes), *batch[stack._dim :])
    desc = describe(batch, stack._kd_desc.device)
    return nodes[0]._join(nodes, torch.stack, stack._dim, desc, (key,))


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
    first = members[0]._kd_desc.batch
    if any(member._kd_desc.batch != first for member in members):
        outer = [member._kd_desc.batch for member in stack._members]
        pairs = zip(members, outer, strict=True)
        members = [
            member._kd_with_descriptor(member._kd_desc.with_batch(batch)) for member, batch in pairs
        ]
    nested = stack._of(members)
    if stack._kd_desc.frozen:
        nested._kd_describe(nested._kd_desc.with_lock(None, 1))
    return cast("Entry", nested)


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
    return ShapeMismatch(
        f"entry {format_key(key)} is ragged: its shapes among the {len(leaves)} members are "
        f"{', '.join(shapes)}. {remedy}"
    )
