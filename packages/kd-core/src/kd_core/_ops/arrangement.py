"""Nested containers: creating and emptying them, and splitting a container by its keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kd_core import _registry
from kd_core._keys import path_of
from kd_core._leaves.loops import find_entry
from kd_core._protocol.composite import unchanged_on_error
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from kd_core._types import NestedKey


class Arrangement(AbstractContainer):
    """The methods that create, empty and split nested containers."""

    __slots__ = ()

    def clear(self) -> Self:
        """Remove all entries; return self.

        Raises:
            Locked: if the container is locked.
        """
        self._check_unlocked("remove all entries")
        for key in list(self._entries):
            self._del_entry(key)
        return self

    def create_nested(self, key: NestedKey) -> Self:
        """Store an empty container at `key`, of the same batch size and device; return self.

        An existing entry is replaced.

        Example:
            >>> from kd_core import TensorDict
            >>> list(TensorDict().create_nested(("a", "b")).keys(True))
            ['a', ('a', 'b')]
        """
        self._store(path_of(key), _registry.make_dense({}, self._desc.unlocked()))
        return self

    def filter_empty_(self) -> Self:
        """Remove nested containers without entries, the innermost first; return self.

        Example:
            >>> from kd_core import TensorDict
            >>> list(TensorDict({"a": {"b": {}}, "c": 1.0}).filter_empty_().keys(True))
            ['c']
        """
        self._check_unlocked("remove empty containers")
        with unchanged_on_error(self):
            for level, key in _empty_below(self)[0]:
                level._check_unlocked("remove empty containers")
                level._del_entry(key)
        return self

    def split_keys(self, *key_sets: Sequence[NestedKey], strict: bool = True) -> tuple[Self, ...]:
        """Return a container for each set of keys, and one of the others; tensors are shared.

        Args:
            *key_sets: sets of keys; each key must be in one set only.
            strict: whether a missing key is an error.

        Returns:
            One container for each set, and one of the remaining keys.

        Raises:
            KeyNotFound: if `strict` and a key is missing or in an earlier set.

        Example:
            >>> from kd_core import TensorDict
            >>> first, rest = TensorDict(a=1, b={"c": 2, "d": 3}).split_keys([("b", "c")])
            >>> list(first.keys(True, True)), list(rest.keys(True, True))
            ([('b', 'c')], ['a', ('b', 'd')])
        """
        # A plain container, because the fields of a tensor class cannot be removed.
        dense = _registry.make_dense(dict(self._shallow()._entries), self._desc.unlocked())
        rest = cast(AbstractContainer, dense)
        parts: list[Self] = []
        for keys in key_sets:
            part = self._like({}, self._desc.unlocked())
            for key in keys:
                path = path_of(key)
                entry = rest._read(path) if strict else find_entry(rest._entries, path)
                if entry is not None:
                    part._store(path, entry)
                    _drop(rest, path)
            parts.append(part)
        return (*parts, cast("Self", rest))


def _empty_below(level: AbstractContainer) -> tuple[list[tuple[AbstractContainer, str]], bool]:
    """Find the nested containers without entries, the outermost ones only.

    Returns:
        Where each of them is, and whether nothing else is in the container.
    """
    found: list[tuple[AbstractContainer, str]] = []
    is_empty = True
    for key, value in level._entries.items():
        below, empty = _empty_below(value) if isinstance(value, AbstractContainer) else ([], False)
        found += [(level, key)] if empty else below
        is_empty = is_empty and empty
    return found, is_empty


def _drop(level: AbstractContainer, path: tuple[str, ...]) -> None:
    """Remove an existing entry, and the containers that become empty."""
    above: list[tuple[AbstractContainer, str]] = []
    for part in path[:-1]:
        above.append((level, part))
        level = cast(AbstractContainer, level._entries[part])
    level._del_entry(path[-1])
    for parent, key in reversed(above):
        if cast(AbstractContainer, parent._entries[key])._entries:
            return
        parent._del_entry(key)
