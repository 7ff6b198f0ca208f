"""Live views of the keys, values and items of a container, nested ones included on request.

Knows entries; must not know containers. A view that is not nested returns the view of the dict
itself, so iterating a flat container is as fast as iterating a dict.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from kd_core._errors import ShapeMismatch
from kd_core._keys import is_key, path_of
from kd_core._leaves.loops import has_entry, kinds_of
from kd_core._nodes import is_unbatched

if TYPE_CHECKING:
    from kd_core._nodes import Entries, Entry, Node
    from kd_core._types import NestedKey

    IsLeaf = Callable[[type], bool] | None
    Options = tuple[bool, bool, IsLeaf, bool]
    Items = list[tuple[NestedKey, Entry]]
    Read = Callable[[Entries], Iterable[tuple[str, Entry]]]


def _items_of(entries: Entries) -> Iterable[tuple[str, Entry]]:
    return entries.items()


def walk_items(
    entries: Entries, options: Options, read: Read = _items_of, found: Items | None = None
) -> Items:
    """List keys and entries, a container before what it holds.

    Args:
        entries: the top level.
        options: whether to include nested entries, whether to list leaves only, which types of
            container count as leaves, whether to sort the keys of each level.
        read: returns the keys and entries of a level.
        found: where they are listed, which tells what came before an error.
    """
    found = [] if found is None else found
    nested, leaves_only, is_leaf, sort = options
    for key, value in sorted(read(entries), key=_first) if sort else read(entries):
        if isinstance(value, Tensor):
            found.append((key, value))
            continue
        inner = _container_entries(value, is_leaf)
        if leaves_only and is_unbatched(value):
            found.append((key, value._kd_item()))
        elif not leaves_only or _counts(value, is_leaf):
            found.append((key, value))
        if inner is not None and nested:
            _walk_below(inner, (key,), options, found, read)
    return found


def _walk_below(
    entries: Entries, prefix: tuple[str, ...], options: Options, found: Items, read: Read
) -> None:
    _, leaves_only, is_leaf, sort = options
    for key, value in sorted(read(entries), key=_first) if sort else read(entries):
        if isinstance(value, Tensor):
            found.append(((*prefix, key), value))
            continue
        inner = _container_entries(value, is_leaf)
        if leaves_only and is_unbatched(value):
            found.append(((*prefix, key), value._kd_item()))
        elif not leaves_only or _counts(value, is_leaf):
            found.append(((*prefix, key), value))
        if inner is not None:
            _walk_below(inner, (*prefix, key), options, found, read)


def _then_raise(found: list[Any], error: ShapeMismatch) -> Iterator[Any]:
    """Yield what comes before a ragged entry: a caller may need no more."""
    yield from found
    raise error


def _first(item: tuple[str, Entry]) -> str:
    return item[0]


def _container_entries(value: Node, is_leaf: IsLeaf) -> Entries | None:
    inner: Entries | None = getattr(value, "_kd_entries", None)
    return None if inner is None or _counts(value, is_leaf) else inner


def _counts(value: Node, is_leaf: IsLeaf) -> bool:
    """Return whether a node counts as a leaf."""
    return is_unbatched(value) or (is_leaf is not None and is_leaf(type(value)))


def _count(entries: Entries, options: Options) -> int:
    """Return how many items `walk_items` lists; `list(view)` calls it too."""
    count = len(entries)
    for _, value in kinds_of(entries):
        if type(value) is Tensor or isinstance(value, Tensor):
            continue
        inner = _container_entries(value, options[2])
        if inner is not None and options[0]:
            count += _count(inner, options)
        if options[1] and not _counts(value, options[2]):
            count -= 1
    return count


def _is_leaf_at(entries: Entries, path: tuple[str, ...], is_leaf: IsLeaf) -> bool:
    """Return whether the entry at an existing path counts as a leaf."""
    level: Mapping[str, Any] = entries
    for part in path[:-1]:
        level = level[part]._kd_entries  # a container, as it has the path
    found = next(value for key, value in kinds_of(level) if key == path[-1])
    return isinstance(found, Tensor) or _counts(found, is_leaf)


class NestedKeys(KeysView["NestedKey"]):
    """The keys of a container, those of nested ones included as tuples."""

    __slots__ = ("_kd_entries", "_options")

    def __init__(self, entries: Entries, options: Options) -> None:
        self._kd_entries = entries
        self._options = options

    def __iter__(self) -> Iterator[NestedKey]:
        return iter([key for key, _ in walk_items(self._kd_entries, self._options, kinds_of)])

    def __len__(self) -> int:
        return _count(self._kd_entries, self._options)

    def __contains__(self, key: object) -> bool:
        nested, leaves_only, is_leaf, _ = self._options
        if not is_key(key):
            return False
        path = path_of(key)
        if not (nested or len(path) == 1) or not has_entry(self._kd_entries, path):
            return False
        return not leaves_only or _is_leaf_at(self._kd_entries, path, is_leaf)

    def __repr__(self) -> str:
        return f"keys({list(self)})"


class NestedValues(ValuesView["Tensor"]):
    """The entries of a container, those of nested ones included."""

    __slots__ = ("_kd_entries", "_options")

    def __init__(self, entries: Entries, options: Options) -> None:
        self._kd_entries = entries
        self._options = options

    def __iter__(self) -> Iterator[Tensor]:
        items: Items = []
        try:
            walk_items(self._kd_entries, self._options, found=items)
        except ShapeMismatch as error:
            return _then_raise([value for _, value in items], error)
        found: list[Any] = [value for _, value in items]
        return iter(found)  # typed as tensors, as `td[key]` is

    def __len__(self) -> int:
        return _count(self._kd_entries, self._options)

    def __contains__(self, value: object) -> bool:
        return any(value is entry for entry in self)

    def __repr__(self) -> str:
        return f"values({list(self)})"


class NestedItems(ItemsView["NestedKey", "Tensor"]):
    """Keys and entries of a container, those of nested ones included."""

    __slots__ = ("_kd_entries", "_options")

    def __init__(self, entries: Entries, options: Options) -> None:
        self._kd_entries = entries
        self._options = options

    def __iter__(self) -> Iterator[tuple[NestedKey, Tensor]]:
        items: Items = []
        try:
            walk_items(self._kd_entries, self._options, found=items)
        except ShapeMismatch as error:
            return _then_raise(items, error)
        found: list[Any] = items
        return iter(found)  # typed as tensors, as `td[key]` is

    def __len__(self) -> int:
        return _count(self._kd_entries, self._options)

    def __contains__(self, item: object) -> bool:
        if not isinstance(item, tuple) or len(item) != 2:
            return False
        return any(item[0] == key and item[1] is value for key, value in self)

    def __repr__(self) -> str:
        return f"items({list(self)})"


# The fast path for all leaves in insertion order: "list(items(True, True))" in the benchmarks.
# These views iterate over the top level and the flat containers below it in one frame; `list(view)`
# calls `len` too.

ALL_LEAVES: Final[Options] = (True, True, None, False)


def _below(key: str, value: Entry, read: Read = _items_of) -> Items:
    """Return the leaves of an entry that is not a plain tensor: itself, or what it encloses."""
    if isinstance(value, Tensor):
        return [(key, value)]
    inner: Entries | None = getattr(value, "_kd_entries", None)
    found: Items = []
    if inner is None:
        return [(key, value._kd_item())] if is_unbatched(value) else found
    _walk_below(inner, (key,), ALL_LEAVES, found, read)
    return found


class _Leaves:
    """The base class of the views of all leaves."""

    __slots__ = ()

    _kd_entries: Mapping[str, Any]

    def __len__(self) -> int:
        entries = self._kd_entries
        count = len(entries)
        value: Any
        for _, value in entries.items() if type(entries) is dict else kinds_of(entries):
            if type(value) is not Tensor:
                if getattr(value, "_kd_nested", True) is False:
                    count += len(value._kd_entries) - 1
                elif not isinstance(value, Tensor):
                    inner = _container_entries(value, None)
                    below = int(is_unbatched(value)) if inner is None else _count(inner, ALL_LEAVES)
                    count += below - 1
        return count


class LeafKeys(_Leaves, NestedKeys):
    """The keys of all leaves."""

    __slots__ = ()

    def __iter__(self) -> Iterator[NestedKey]:
        entries = self._kd_entries
        found: list[NestedKey] = []
        value: Any
        for key, value in entries.items() if type(entries) is dict else kinds_of(entries):
            if type(value) is Tensor:
                found.append(key)
            elif getattr(value, "_kd_nested", True) is False:
                for name in value._kd_entries:
                    found.append((key, name))  # a comprehension costs a frame
            else:
                found.extend([path for path, _ in _below(key, value, kinds_of)])
        return iter(found)


class LeafValues(_Leaves, NestedValues):
    """All leaves."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Tensor]:
        found: list[Any] = []
        for key, value in self._kd_entries.items():
            if type(value) is Tensor:
                found.append(value)
            elif getattr(value, "_kd_nested", True) is False:
                found.extend(value._kd_entries.values())
            else:
                found.extend([leaf for _, leaf in _below(key, value)])
        return iter(found)  # typed as tensors, as `td[key]` is


class LeafItems(_Leaves, NestedItems):
    """The keys of all leaves, and the leaves."""

    __slots__ = ()

    def __iter__(self) -> Iterator[tuple[NestedKey, Tensor]]:
        found: list[Any] = []
        for item in self._kd_entries.items():
            key, value = item
            if type(value) is Tensor:
                found.append(item)
            elif getattr(value, "_kd_nested", True) is False:
                for name, leaf in value._kd_entries.items():
                    found.append(((key, name), leaf))  # as above
            else:
                found.extend(_below(key, value))
        return iter(found)  # typed as tensors, as `td[key]` is
