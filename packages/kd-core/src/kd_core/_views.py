"""Live views of keys, entries and both, nested on request.

Know entries; must not know containers. A view that is not nested hands out the view of the dict
below it, so that iterating a flat container costs what iterating a dict costs.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from typing import TYPE_CHECKING, cast

from torch import Tensor

from kd_core._keys import is_key, path_of
from kd_core._leaves import find_entry

if TYPE_CHECKING:
    from kd_core._types import Entries, Entry, NestedKey, Node

    IsLeaf = Callable[[type], bool] | None
    Options = tuple[bool, bool, IsLeaf, bool]
    Items = list[tuple[NestedKey, Entry]]


def walk_items(entries: Entries, options: Options) -> Items:
    """List keys and entries, a container before what it holds.

    Args:
        entries: the top level.
        options: whether to go into containers, whether to list leaves only, which types of
            container count as leaves, whether to sort the keys of each level.
    """
    found: Items = []
    nested, leaves_only, is_leaf, sort = options
    for key, value in sorted(entries.items(), key=_first) if sort else entries.items():
        if isinstance(value, Tensor):
            found.append((key, value))
            continue
        inner = _container_entries(value, is_leaf)
        if inner is None or not leaves_only:
            found.append((key, value))
        if inner is not None and nested:
            _walk_below(inner, (key,), options, found)
    return found


def _walk_below(entries: Entries, prefix: tuple[str, ...], options: Options, found: Items) -> None:
    _, leaves_only, is_leaf, sort = options
    for key, value in sorted(entries.items(), key=_first) if sort else entries.items():
        if isinstance(value, Tensor):
            found.append(((*prefix, key), value))
            continue
        inner = _container_entries(value, is_leaf)
        if inner is None or not leaves_only:
            found.append(((*prefix, key), value))
        if inner is not None:
            _walk_below(inner, (*prefix, key), options, found)


def _first(item: tuple[str, Entry]) -> str:
    return item[0]


def _container_entries(value: Node, is_leaf: IsLeaf) -> Entries | None:
    inner: Entries | None = getattr(value, "_entries", None)
    if inner is not None and is_leaf is not None and is_leaf(type(value)):
        return None
    return inner


def _count(entries: Entries, options: Options) -> int:
    """How many items `walk_items` lists; `list(view)` asks for it too."""
    count = len(entries)
    for value in entries.values():
        if value.__class__ is Tensor or isinstance(value, Tensor):
            continue
        inner = _container_entries(value, options[2])
        if inner is not None:
            if options[0]:
                count += _count(inner, options)
            if options[1]:
                count -= 1
    return count


class NestedKeys(KeysView["NestedKey"]):
    """The keys of a container, those of nested ones included as tuples."""

    __slots__ = ("_entries", "_options")

    def __init__(self, entries: Entries, options: Options) -> None:
        self._entries = entries
        self._options = options

    def __iter__(self) -> Iterator[NestedKey]:
        return iter([key for key, _ in walk_items(self._entries, self._options)])

    def __len__(self) -> int:
        return _count(self._entries, self._options)

    def __contains__(self, key: object) -> bool:
        nested, leaves_only, is_leaf, _ = self._options
        if not is_key(key):
            return False
        path = path_of(cast("NestedKey", key))
        found = find_entry(self._entries, path) if nested or len(path) == 1 else None
        if found is None or not leaves_only or isinstance(found, Tensor):
            return found is not None
        return _container_entries(found, is_leaf) is None

    def __repr__(self) -> str:
        return f"keys({list(self)})"


class NestedValues(ValuesView["Tensor"]):
    """The entries of a container, those of nested ones included."""

    __slots__ = ("_entries", "_options")

    def __init__(self, entries: Entries, options: Options) -> None:
        self._entries = entries
        self._options = options

    def __iter__(self) -> Iterator[Tensor]:
        found = [value for _, value in walk_items(self._entries, self._options)]
        return iter(cast("list[Tensor]", found))

    def __len__(self) -> int:
        return _count(self._entries, self._options)

    def __contains__(self, value: object) -> bool:
        return any(value is entry for entry in self)

    def __repr__(self) -> str:
        return f"values({list(self)})"


class NestedItems(ItemsView["NestedKey", "Tensor"]):
    """Keys and entries of a container, those of nested ones included."""

    __slots__ = ("_entries", "_options")

    def __init__(self, entries: Entries, options: Options) -> None:
        self._entries = entries
        self._options = options

    def __iter__(self) -> Iterator[tuple[NestedKey, Tensor]]:
        found = walk_items(self._entries, self._options)
        return iter(cast("list[tuple[NestedKey, Tensor]]", found))

    def __len__(self) -> int:
        return _count(self._entries, self._options)

    def __contains__(self, item: object) -> bool:
        if not isinstance(item, tuple) or len(item) != 2:
            return False
        return any(item[0] == key and item[1] is value for key, value in self)

    def __repr__(self) -> str:
        return f"items({list(self)})"
