"""Live views of keys, entries and both, nested on request.

Know entries; must not know containers. A view that is not nested hands out the view of the dict
below it, so that iterating a flat container costs what iterating a dict costs.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from typing import TYPE_CHECKING, cast

from torch import Tensor

from kd_core._keys import is_key, path_of
from kd_core._leaves import entries_of, find_entry

if TYPE_CHECKING:
    from kd_core._types import Entries, Entry, NestedKey

    IsLeaf = Callable[[type], bool] | None


def walk_items(
    entries: Entries,
    leaves_only: bool,
    is_leaf: IsLeaf,
    sort: bool,
    include_nested: bool = True,
    prefix: tuple[str, ...] = (),
    found: list[tuple[NestedKey, Entry]] | None = None,
) -> list[tuple[NestedKey, Entry]]:
    """List keys and entries, a container before what it holds."""
    if found is None:
        found = []
    for key in sorted(entries) if sort else entries:
        value = entries[key]
        name: NestedKey = (*prefix, key) if prefix else key
        if value.__class__ is Tensor:
            found.append((name, value))
            continue
        inner = None if isinstance(value, Tensor) else entries_of(value)
        if inner is not None and is_leaf is not None and is_leaf(type(value)):
            inner = None
        if inner is None or not leaves_only:
            found.append((name, value))
        if inner is not None and include_nested:
            walk_items(inner, leaves_only, is_leaf, sort, True, (*prefix, key), found)
    return found


class NestedKeys(KeysView["NestedKey"]):
    """The keys of a container, those of nested ones included as tuples."""

    __slots__ = ("_entries", "_options")

    def __init__(
        self, entries: Entries, nested: bool, leaves_only: bool, is_leaf: IsLeaf, sort: bool
    ) -> None:
        self._entries = entries
        self._options = (leaves_only, is_leaf, sort, nested)

    def __iter__(self) -> Iterator[NestedKey]:
        return iter([key for key, _ in walk_items(self._entries, *self._options)])

    def __len__(self) -> int:
        return len(walk_items(self._entries, *self._options))

    def __contains__(self, key: object) -> bool:
        leaves_only, is_leaf, _, nested = self._options
        if not is_key(key):
            return False
        path = path_of(cast("NestedKey", key))
        found = find_entry(self._entries, path) if nested or len(path) == 1 else None
        if found is None or not leaves_only or isinstance(found, Tensor):
            return found is not None
        is_container = entries_of(found) is not None
        return not is_container or (is_leaf is not None and is_leaf(type(found)))

    def __repr__(self) -> str:
        return f"keys({list(self)})"


class NestedValues(ValuesView["Tensor"]):
    """The entries of a container, those of nested ones included."""

    __slots__ = ("_entries", "_options")

    def __init__(
        self, entries: Entries, nested: bool, leaves_only: bool, is_leaf: IsLeaf, sort: bool
    ) -> None:
        self._entries = entries
        self._options = (leaves_only, is_leaf, sort, nested)

    def __iter__(self) -> Iterator[Tensor]:
        return iter([cast(Tensor, value) for _, value in walk_items(self._entries, *self._options)])

    def __len__(self) -> int:
        return len(walk_items(self._entries, *self._options))

    def __contains__(self, value: object) -> bool:
        return any(value is entry for entry in self)

    def __repr__(self) -> str:
        return f"values({list(self)})"


class NestedItems(ItemsView["NestedKey", "Tensor"]):
    """Keys and entries of a container, those of nested ones included."""

    __slots__ = ("_entries", "_options")

    def __init__(
        self, entries: Entries, nested: bool, leaves_only: bool, is_leaf: IsLeaf, sort: bool
    ) -> None:
        self._entries = entries
        self._options = (leaves_only, is_leaf, sort, nested)

    def __iter__(self) -> Iterator[tuple[NestedKey, Tensor]]:
        found = walk_items(self._entries, *self._options)
        return iter(cast("list[tuple[NestedKey, Tensor]]", found))

    def __len__(self) -> int:
        return len(walk_items(self._entries, *self._options))

    def __contains__(self, item: object) -> bool:
        return (
            any(item[0] == key and item[1] is value for key, value in self)
            if (isinstance(item, tuple) and len(item) == 2)
            else False
        )

    def __repr__(self) -> str:
        return f"items({list(self)})"
