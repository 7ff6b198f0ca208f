"""Nested containers: creating and emptying them; splitting, renaming and joining entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kd_core._errors import (
    InvalidArgument,
    InvalidValue,
    KdError,
    KeyCollision,
    OutOfRange,
    wrong_type,
)
from kd_core._keys import KeyPath, format_key, path_of, several
from kd_core._leaves.loops import find_entry
from kd_core._nodes import registry
from kd_core._nodes.entry import tensor_of
from kd_core._ops.entries.updating import renamed, store_moved
from kd_core._protocol.composite import Composite, unchanged_on_error
from kd_core._protocol.primitives import AbstractContainer, level_at
from kd_core._types import NO_DEFAULT

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self, TypeVar

    from kd_core._nodes.entry import Entry
    from kd_core._ops.entries.updating import KeyFn
    from kd_core._types import NestedKey

    A = TypeVar("A", bound=AbstractContainer)
    Join = Callable[..., Tensor]
    W = TypeVar("W", bound=AbstractContainer)


class Arrangement(AbstractContainer):
    """The methods that create nested containers, and that split, rename or join entries.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"x": torch.zeros(3), "y": torch.ones(3)}, [3])
        >>> td.stack_from_tensordict(-1).shape
        torch.Size([3, 2])
        >>> td.stack_tensors("x", "y", out_key="xy", dim=-1)["xy"].shape, list(td.keys())
        (torch.Size([3, 2]), ['xy'])
    """

    __slots__ = ()

    def clear(self) -> Self:
        """Remove all entries; return self.

        Raises:
            Locked: if the container is locked.
        """
        self._kd_check_unlocked("remove all entries")
        for key in list(self._kd_entries):
            self._kd_del_entry(key)
        return self

    def create_nested(self, key: NestedKey) -> Self:
        """Store an empty container at `key`, of the same batch size and device; return self.

        An existing entry is replaced.

        Example:
            >>> from kd_core import TensorDict
            >>> list(TensorDict().create_nested(("a", "b")).keys(True))
            ['a', ('a', 'b')]
        """
        if self._kd_desc.frozen:  # before the key is looked at
            self._kd_check_unlocked(f"set {format_key(key)}")
        self._kd_store(path_of(key), registry.make_dense({}, self._kd_desc.unlocked()))
        return self

    def filter_empty_(self) -> Self:
        """Remove nested containers without entries, the innermost first; return self.

        Example:
            >>> from kd_core import TensorDict
            >>> list(TensorDict({"a": {"b": {}}, "c": 1.0}).filter_empty_().keys(True))
            ['c']
        """
        with unchanged_on_error(self):
            for level, key in _empty_below(self)[0]:
                level._kd_check_unlocked("remove empty containers")
                level._kd_del_entry(key)
        return self

    def split_keys(
        self,
        *key_sets: Sequence[NestedKey],
        inplace: bool = False,
        default: object = NO_DEFAULT,
        strict: bool = True,
        reproduce_struct: bool = False,
    ) -> tuple[Self, ...]:
        """Return a container for each set of keys, and one of the others; tensors are shared.

        Args:
            *key_sets: sets of keys; each key must be in one set only.
            inplace: remove the keys from this container, which is then the last one returned.
            default: the value of a key that is missing; without it, see `strict`.
            strict: whether a missing key is an error.
            reproduce_struct: keep all nested containers in every part, empty ones too; else one
                that becomes empty is dropped.

        Returns:
            One container for each set, and one of the remaining keys.

        Raises:
            KeyNotFound: if `strict` and a key is missing or in an earlier set.
            Locked: if `inplace` on a locked container.

        Example:
            >>> from kd_core import TensorDict
            >>> first, rest = TensorDict(a=1, b={"c": 2, "d": 3}).split_keys([("b", "c")])
            >>> list(first.keys(True, True)), list(rest.keys(True, True))
            ([('b', 'c')], ['a', ('b', 'd')])
        """
        for keys in key_sets:
            several(keys, "a set of keys of `split_keys`")
        how = _Taking(default, strict, reproduce_struct, not reproduce_struct)
        if inplace:
            self._kd_check_unlocked("split keys in place")
            with unchanged_on_error(self):
                return (*how.parts(self, self, key_sets), self)
        copy = _dense(self)
        parts = how.parts(self, copy, key_sets)
        if not isinstance(copy, Composite):
            copy = self._kd_like(dict(copy._kd_entries), copy._kd_desc)
        return (*parts, cast("Self", copy))

    def separates(
        self,
        *keys: NestedKey,
        default: object = NO_DEFAULT,
        strict: bool = True,
        filter_empty: bool = True,
    ) -> Self:
        """Remove some keys and return a container of them; tensors are shared.

        Args:
            *keys: what to remove.
            default: the value of a key that is missing; without it, see `strict`.
            strict: whether a missing key is an error; nothing is changed then.
            filter_empty: drop nested containers that become empty.

        Raises:
            KeyNotFound: if `strict` and a key is missing.
            Locked: if the container is locked.

        Example:
            >>> from kd_core import TensorDict
            >>> td = TensorDict(a=1, b={"c": 2})
            >>> list(td.separates("a").keys()), list(td.keys())
            (['a'], ['b'])
        """
        self._kd_check_unlocked("remove keys")
        with unchanged_on_error(self):
            (part,) = _Taking(default, strict, False, filter_empty).parts(self, self, [keys])
        return part

    def rename_keys(
        self, mapping: Mapping[NestedKey, NestedKey] | KeyFn, strict: bool = True
    ) -> Self:
        """Return a container with other names for some keys; tensors are shared.

        All keys are renamed at once, so two may exchange their names. An entry that is renamed
        moves to the end of its level.

        Args:
            mapping: the new name of each key; or a function from every key of every level to its
                name.
            strict: whether a missing key is an error.

        Raises:
            KeyNotFound: if `strict` and a key is missing.
            KeyCollision: if a new name is taken by an entry that keeps it.

        Example:
            >>> from kd_core import TensorDict
            >>> td = TensorDict(a=1, b={"c": 2})
            >>> list(td.rename_keys({"a": "b", "b": "a"}).keys(True, True))
            ['b', ('a', 'c')]
            >>> list(td.rename_keys(str.upper).keys(True, True))
            ['A', ('B', 'C')]
        """
        if callable(mapping):
            return renamed(self, mapping)
        return _under_new_names(self, _pairs(mapping), strict)

    def filter_non_tensor_data(self) -> Self:
        """Return a container without non-tensor entries, at any level; tensors are shared.

        Example:
            >>> from kd_core import TensorDict
            >>> list(TensorDict(a=1, s="text", b={"s": "text"}).filter_non_tensor_data().keys(True))
            ['a', 'b']
        """
        return _only_tensors(self)

    def stack_tensors(
        self, *keys: NestedKey, out_key: NestedKey, dim: int = 0, keep_entries: bool = False
    ) -> Self:
        """Stack some leaves to one entry, which takes their place; return self.

        Args:
            *keys: the leaves, in their order.
            out_key: the key of the new entry.
            dim: the new dimension of the leaves; the result must start with the batch size, so it
                is behind the batch, or counted from the end.
            keep_entries: keep the leaves as well.

        Raises:
            ShapeMismatch: if the result does not fit the batch size; then nothing is changed.
        """
        return _joined(self, torch.stack, keys, out_key, dim, keep_entries)

    def cat_tensors(
        self, *keys: NestedKey, out_key: NestedKey, dim: int = 0, keep_entries: bool = False
    ) -> Self:
        """Concatenate some leaves to one entry, which takes their place; see `stack_tensors`."""
        return _joined(self, torch.cat, keys, out_key, dim, keep_entries)

    def stack_from_tensordict(
        self,
        dim: int = 0,
        *,
        sorted: bool | Sequence[NestedKey] = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Stack all leaves to one tensor.

        Args:
            dim: the new dimension.
            sorted: order the leaves by their keys, or as these keys; else as they were added.
            out: a tensor into which the result is written.
        """
        return torch.stack(_leaves(self, sorted), dim, out=out)

    def cat_from_tensordict(
        self,
        dim: int = 0,
        *,
        sorted: bool | Sequence[NestedKey] = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Concatenate all leaves to one tensor; see `stack_from_tensordict`."""
        return torch.cat(_leaves(self, sorted), dim, out=out)


class _Taking:
    """How keys are taken out of a container."""

    def __init__(self, default: object, strict: bool, reproduce: bool, drop_empty: bool) -> None:
        self.default, self.strict = default, strict
        self.reproduce, self.drop_empty = reproduce, drop_empty

    def parts(
        self, kind: A, rest: AbstractContainer, key_sets: Sequence[Sequence[NestedKey]]
    ) -> list[A]:
        """Remove each set of keys from `rest`; the parts are of the kind of a container."""
        if isinstance(kind, Composite) and isinstance(rest, Composite):
            defaults = self._rows_of_default(rest)
            columns = [
                _Taking(row, self.strict, self.reproduce, self.drop_empty).parts(a, b, key_sets)
                for row, a, b in zip(defaults, kind._members, rest._members, strict=True)
            ]
            return [kind._of(members) for members in zip(*columns, strict=True)]
        levels = empty_levels(rest) if self.reproduce else {}
        return [self._part(kind, rest, keys, levels) for keys in key_sets]

    def _rows_of_default(self, stack: Composite) -> Sequence[object]:
        default, count = self.default, len(stack._members)
        if isinstance(default, (Tensor, AbstractContainer)):
            return cast("Tensor", default).unbind(stack._dim)
        return [default] * count

    def _part(
        self,
        kind: A,
        rest: AbstractContainer,
        keys: Sequence[NestedKey],
        levels: dict[str, Entry],
    ) -> A:
        part = kind._kd_like(_copied(levels), kind._kd_desc.unlocked())
        for key in keys:
            path = path_of(key)
            entry: object = find_entry(rest._kd_entries, path)
            if entry is None and self.default is not NO_DEFAULT:
                entry = self.default
                part._kd_store(path, entry)
            elif entry is not None:
                part._kd_store(path, entry)
                _drop(rest, path, self.drop_empty)
            elif self.strict:
                rest._kd_read(path)  # raises
        return part


def _dense(td: AbstractContainer) -> AbstractContainer:
    """Return a plain copy, because the fields of a tensor class cannot be removed."""
    if isinstance(td, Composite):
        return td._by_member(_dense)
    made = registry.make_dense(dict(td._kd_shallow()._kd_entries), td._kd_desc.unlocked())
    return cast(AbstractContainer, made)


def empty_levels(td: AbstractContainer) -> dict[str, Entry]:
    """Return all nested containers, without their leaves and data."""
    return {
        key: cast("Entry", value._kd_like(empty_levels(value), value._kd_desc.unlocked()))
        for key, value in td._kd_entries.items()
        if isinstance(value, AbstractContainer)
    }


def _copied(levels: dict[str, Entry]) -> dict[str, Entry]:
    return {key: cast("AbstractContainer", level)._kd_shallow() for key, level in levels.items()}


def _pairs(mapping: object) -> list[tuple[KeyPath, KeyPath]]:
    if not isinstance(mapping, Mapping):
        raise wrong_type("`mapping`", "a mapping of keys or a function", mapping)
    return [(path_of(old), path_of(new)) for old, new in mapping.items()]


def _under_new_names(td: A, pairs: Sequence[tuple[KeyPath, KeyPath]], strict: bool) -> A:
    """Remove the entries from a copy of one level, then store them under their new names."""
    if isinstance(td, Composite):
        return td._by_member(lambda member: _under_new_names(member, pairs, strict))
    copy = _dense(td)
    moved: list[tuple[KeyPath, KeyPath, Entry]] = []
    for old, new in pairs:
        entry = find_entry(copy._kd_entries, old)
        if entry is None:
            if strict:
                td._kd_read(old)  # raises, unless another key of the mapping encloses it
                raise InvalidArgument(
                    f"cannot rename {format_key(old)}: the container that holds it is renamed too. "
                    "Rename it in a second step."
                )
            continue
        _drop(copy, old, False)
        moved.append((old, new, entry))
    for old, new, entry in moved:
        if find_entry(copy._kd_entries, new) is not None:
            raise KeyCollision(
                f"cannot rename {format_key(old)} to {format_key(new)}: there is an entry of that "
                "name, which keeps it. Rename that one too, or choose another name."
            )
        store_moved(copy, new, entry)
    return td._kd_like(dict(copy._kd_entries), td._kd_desc.unlocked())


def _only_tensors(td: A) -> A:
    if isinstance(td, Composite):
        return td._by_member(_only_tensors)
    entries: dict[str, Entry] = {}
    for key, value in td._kd_entries.items():
        if isinstance(value, AbstractContainer):
            entries[key] = cast("Entry", _only_tensors(value))
        elif tensor_of(value) is not None:
            entries[key] = value
    return td._kd_like(entries, td._kd_desc.unlocked())


def _empty_below(level: AbstractContainer) -> tuple[list[tuple[AbstractContainer, str]], bool]:
    """Find the nested containers without entries, the outermost ones only.

    Returns:
        Where each of them is, and whether nothing else is in the container.
    """
    found: list[tuple[AbstractContainer, str]] = []
    is_empty = True
    if isinstance(level, Composite):  # what a member alone has is no entry of the stack
        for member in level._members:
            below, empty = _empty_below(member)
            found += below
            is_empty = is_empty and empty
        return found, is_empty
    for key, value in level._kd_entries.items():
        below, empty = _empty_below(value) if isinstance(value, AbstractContainer) else ([], False)
        found += [(level, key)] if empty else below
        is_empty = is_empty and empty
    return found, is_empty


def _drop(level: AbstractContainer, path: tuple[str, ...], empty_ones: bool = True) -> None:
    """Remove an existing entry, and the containers that become empty if asked to."""
    above: list[tuple[AbstractContainer, str]] = []
    for part in path[:-1]:
        above.append((level, part))
        level = cast(AbstractContainer, level._kd_entries[part])
    level._kd_check_unlocked(f"remove {format_key(path)}")
    level._kd_del_entry(path[-1])
    for parent, key in reversed(above if empty_ones else []):
        if cast(AbstractContainer, parent._kd_entries[key])._kd_entries:
            return
        parent._kd_del_entry(key)


def _joined(
    td: W, join: Join, keys: Sequence[NestedKey], out_key: NestedKey, dim: int, keep: bool
) -> W:
    paths = [path_of(key) for key in keys]
    if not paths:
        raise InvalidValue("expected the keys of one or more leaves, got none.")
    column = [_leaf_at(td, path) for path in paths]
    try:
        joined = join(column, dim)
    except (RuntimeError, IndexError) as error:
        if isinstance(error, KdError):
            raise
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in column)
        kind = OutOfRange if isinstance(error, IndexError) else InvalidValue
        raise kind(f"cannot join leaves of shapes {shapes}: {error}") from error
    td._kd_check_unlocked(f"set {format_key(out_key)}")
    with unchanged_on_error(td):
        for path in () if keep else dict.fromkeys(paths):
            level = level_at(td, path[:-1])
            level._kd_check_unlocked(f"remove {format_key(path)}")
            level._kd_del_entry(path[-1])
        td._kd_store(path_of(out_key), joined)
    return td


def _leaf_at(td: AbstractContainer, path: tuple[str, ...]) -> Tensor:
    leaf = td._kd_read(path)
    if not isinstance(leaf, Tensor):
        raise wrong_type(f"entry {format_key(path)}", "a tensor", leaf)
    return leaf


def _leaves(td: AbstractContainer, order: bool | Sequence[NestedKey]) -> list[Tensor]:
    """Return the leaves in an order: as they were added, by key, or of the given keys."""
    if not isinstance(order, bool):
        return [_leaf_at(td, path_of(key)) for key in order]
    paths = _paths(td, ())
    if not paths:
        raise InvalidValue("expected at least one tensor, got a container without tensors.")
    return [_leaf_at(td, path) for path in (sorted(paths) if order else paths)]


def _paths(level: AbstractContainer, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for key, value in level._kd_entries.items():
        if isinstance(value, AbstractContainer):
            found += _paths(value, (*path, key))
        elif isinstance(value, Tensor):
            found.append((*path, key))
    return found
