"""Changing the keys: update, select, rename, flatten.

Every change is all or nothing: it is checked as a whole first, then committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeVar, cast

from torch import Tensor
from torch.compiler import is_compiling

from kd_core import _registry
from kd_core._errors import InvalidArgument, InvalidValue, KeyCollision, KeySetMismatch, wrong_type
from kd_core._keys import Path, format_key, is_prefix, path_of, plain_str
from kd_core._leaves.loops import find_entry, kinds_by_key, same_data
from kd_core._leaves.writes import check_write, copy_pairs, write_all
from kd_core._protocol.composite import unchanged_on_error
from kd_core._protocol.primitives import AbstractContainer, level_at
from kd_core._protocol.validation import MAX_DEPTH, is_both, spread_keys, too_deep

if TYPE_CHECKING:
    from typing import Self

    from kd_core._batch.descriptor import Descriptor
    from kd_core._entry import AnyKey, Entries, Entry, Source
    from kd_core._types import NestedKey

    Staged = list[Callable[[], None]]


W = TypeVar("W", bound=AbstractContainer)
_LEVELS: Final = (AbstractContainer, Mapping)
_TENSORS: Final = (AbstractContainer, Tensor)


class Structure(AbstractContainer):
    """Changes of keys."""

    __slots__ = ()

    def update(
        self,
        source: Source[AnyKey],
        clone: bool = False,
        inplace: bool = False,
        *,
        keys_to_update: Iterable[NestedKey] | None = None,
    ) -> Self:
        """Store the entries of a mapping or container, merging nested ones. All or nothing.

        Tensors are stored by reference. If any entry does not fit, the container is left as it
        was.

        Args:
            source: a mapping (its keys may be nested tuples) or a container.
            clone: store copies of the tensors.
            inplace: write into the storage of entries that exist.
            keys_to_update: take only these keys of the source, and what is below them.

        Raises:
            ShapeMismatch: if a value does not fit the batch size.
            Locked: if a key would be added or rebound in a locked container.

        Example:
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": 0.0, "b": {"c": 1.0}})
            >>> td.update({"b": {"d": 2.0}}).to_dict()["b"].keys()
            dict_keys(['c', 'd'])
        """
        items = _source_items(source, "update")
        only = None if keys_to_update is None else [path_of(key) for key in keys_to_update]
        stage: Staged = []
        _stage_update(self, items, (), _Update(clone, inplace, only), stage)
        for commit in stage:
            commit()
        return self

    def update_(
        self,
        source: Source[AnyKey],
        clone: bool = False,
        *,
        keys_to_update: Iterable[NestedKey] | None = None,
    ) -> Self:
        """Write the values of a source into entries that exist, in place. All or nothing.

        Allowed on a locked container.

        Raises:
            KeyNotFound: if the source has a key that does not exist here.
            ShapeMismatch: if a value cannot be broadcast to its entry.
        """
        if isinstance(source, AbstractContainer) and keys_to_update is None and not clone:
            left: list[Tensor] = []
            right: list[Tensor] = []
            try:
                self._collect_pair(cast("Entry", source), left, right, ())
            except KeySetMismatch:  # a source may have fewer keys: entry by entry below
                left = []
            if left and copy_pairs(left, right):
                return self
        items = _source_items(source, "update_")
        only = None if keys_to_update is None else [path_of(key) for key in keys_to_update]
        stage: Staged = []
        _stage_writes(self, items, (), only, stage)
        for commit in stage:
            commit()
        return self

    def replace(self, source: Source[AnyKey]) -> Self:
        """Return a shallow copy in which the entries of `source` replace the old ones."""
        return self._shallow().update(source)

    def select(self, *keys: NestedKey, strict: bool = True, inplace: bool = False) -> Self:
        """Keep only some keys; tensors are shared.

        Args:
            *keys: what to keep; a nested container is kept whole, or by some of its keys.
            strict: a missing key is an error.
            inplace: change this container instead of making a new one.

        Raises:
            KeyNotFound: if `strict` and a key is missing.
            Locked: if `inplace` on a locked container.

        Example:
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": 0.0, "b": {"c": 1.0, "d": 2.0}})
            >>> list(td.select(("b", "c")).keys(True, True))
            [('b', 'c')]
        """
        kept = self._selected(keys, self if strict else None, ())
        return self._replace_entries(kept, "select in place") if inplace else kept

    def exclude(self, *keys: NestedKey, inplace: bool = False) -> Self:
        """Drop some keys; tensors are shared, missing keys ignored.

        Excluding the last entry of a nested container leaves it there, empty.

        Args:
            *keys: what to drop.
            inplace: change this container instead of making a new one.
        """
        kept = self._without(keys)
        return self._replace_entries(kept, "exclude in place") if inplace else kept

    def rename_key_(self, old: NestedKey, new: NestedKey, safe: bool = False) -> Self:
        """Rename a key; the entry moves to the end of its level.

        Args:
            old: a key that is there.
            new: its new name, in the same or another nested container.
            safe: refuse to overwrite an entry that has the new name.

        Raises:
            KeyNotFound: if `old` is missing.
            KeyCollision: if `safe` and `new` is taken.
            Locked: if the container is locked.
        """
        if old.__class__ is str and new.__class__ is str and not (safe or self._desc.frozen):
            moved = self._entries.get(old)
            if moved is not None and old != new:  # without making paths, which takes half of it
                self._del_entry(old)
                self._set_entry(new, moved)
                return self
        source, target = path_of(old), path_of(new)
        entry = find_entry(self._entries, source)
        if entry is None:
            entry = self._read(source)
        if self._desc.frozen:
            self._check_unlocked(f"rename {format_key(old)}")
        if source == target:
            return self
        if is_prefix(source, target):
            raise InvalidArgument(
                f"cannot rename {format_key(old)} to {format_key(new)}, which is inside it. "
                "Choose a name outside it."
            )
        if safe and find_entry(self._entries, target) is not None:
            raise KeyCollision(
                f"cannot rename {format_key(old)} to {format_key(new)}: there is an entry of that "
                "name. Remove it first, or pass `safe=False`."
            )
        level = level_at(self, source[:-1])
        level._check_unlocked(f"rename {format_key(old)}")
        if source[:-1] == target[:-1]:
            level._del_entry(source[-1])
            level._set_entry(target[-1], entry)
            return self
        if is_compiling():
            self._store(target, entry)
            level._del_entry(source[-1])
            return self
        with unchanged_on_error(level):
            level._del_entry(source[-1])
            self._store(target, entry)
        return self

    def flatten_keys(self, separator: str = ".", inplace: bool = False) -> Self:
        """Join the keys of nested entries, so that there is one level.

        Raises:
            KeyCollision: if two entries would have the same name.

        Example:
            >>> from kd_core import TensorDict
            >>> list(TensorDict({"a": {"b": 0.0}}).flatten_keys(".").keys())
            ['a.b']
        """
        flat: dict[str, Entry] = {}
        _flatten_into(self._entries, plain_str(separator), "", flat)
        result = self._like(flat, self._desc._unlocked)
        return self._replace_entries(result, "flatten keys in place") if inplace else result

    def unflatten_keys(self, separator: str = ".", inplace: bool = False) -> Self:
        """Split keys at a separator into nested containers: the inverse of `flatten_keys`.

        Raises:
            KeyCollision: if a name would be a leaf and a container at once.
            InvalidValue: if the separator is empty.
        """
        if not separator:
            raise InvalidValue("the separator must not be empty. Pass one such as `'.'`.")
        desc, separator = self._desc._unlocked, plain_str(separator)
        for key in self._entries:
            if key.count(separator) > MAX_DEPTH:
                raise too_deep(tuple(key.split(separator)))
        result = self._like(_unflattened(self._entries, separator, "", desc), desc)
        return self._replace_entries(result, "unflatten keys in place") if inplace else result

    def empty(self, recurse: bool = False) -> Self:
        """Return a container of the same batch size and device without entries.

        Args:
            recurse: keep the nested containers, empty.
        """
        desc = self._desc.unlocked()
        if not recurse:
            return self._like({}, desc)
        nested: dict[str, Entry] = {
            key: value.empty(recurse=True)
            for key, value in self._entries.items()
            if isinstance(value, Structure)
        }
        return self._like(nested, desc)

    def is_empty(self) -> bool:
        """Return whether there is no leaf and no data at any level."""
        for value in self._entries.values():
            if value.__class__ is Tensor or not (isinstance(value, Structure) and value.is_empty()):
                return False
        return True

    def _selected(
        self, keys: Sequence[NestedKey], top: AbstractContainer | None, prefix: Path
    ) -> Self:
        return _select(self, keys, top, prefix)

    def _without(self, keys: Sequence[NestedKey]) -> Self:
        return _drop(self, keys)

    def _replace_entries(self, other: AbstractContainer, action: str) -> Self:
        self._check_unlocked(action)
        entries = dict(other._entries)
        for key in list(self._entries):
            self._del_entry(key)
        for key, value in entries.items():
            self._set_entry(key, value)
        return self


class _Update:
    """How an update treats each entry."""

    __slots__ = ("clone", "inplace", "only")

    def __init__(
        self, clone: bool = False, inplace: bool = False, only: list[Path] | None = None
    ) -> None:
        self.clone, self.inplace, self.only = clone, inplace, only


def _source_items(source: object, method: str) -> Mapping[str, object]:
    if isinstance(source, AbstractContainer):
        return source._entries
    if not isinstance(source, Mapping):
        raise wrong_type(f"the source of `{method}`", "a mapping or a container", source)
    for key in source:
        if type(key) is not str:
            return spread_keys(source)
    return source


def _unflattened(
    entries: Entries, separator: str, prefix: str, desc: Descriptor
) -> dict[str, Entry]:
    """Return the entries of a level whose keys are split at a separator."""
    level: dict[str, Entry] = {}
    below: dict[str, dict[str, Entry]] = {}
    for key, value in entries.items():
        name, found, rest = key.partition(separator)
        if found and name in below:
            below[name][rest] = value
            continue
        if name in level:
            raise is_both(prefix + key, prefix + name, "container" if found else "value")
        level[name] = value  # holds the place of a container
        if found:
            below[name] = {rest: value}
    for name, inner in below.items():
        nested = _unflattened(inner, separator, prefix + name + separator, desc)
        level[name] = _registry.make_dense(nested, desc)
    return level


def _flatten_into(entries: Entries, separator: str, prefix: str, flat: dict[str, Entry]) -> None:
    for key, value in entries.items():
        name = prefix + key
        if value.__class__ is not Tensor and isinstance(value, AbstractContainer):
            _flatten_into(value._entries, separator, name + separator, flat)
        elif name in flat:
            raise KeyCollision(
                f"two entries would have the flat key `{name}`. Choose another separator than "
                f"{separator!r}."
            )
        else:
            flat[name] = value


def _select(level: W, keys: Sequence[NestedKey], top: AbstractContainer | None, prefix: Path) -> W:
    """Return the part of one level that some keys name; a missing one is an error of `top`."""
    kept: dict[str, Entry] = {}
    parts: dict[str, list[NestedKey]] = {}
    entries = level._entries
    for key in keys:
        first, below = (key, None) if key.__class__ is str else _parted(key)
        value = entries.get(first)
        if value is None:
            _demand(top, (*prefix, first, *(path_of(below) if below else ())))
        elif not below:
            kept[first] = value
            for part in parts.pop(first, ()):
                _demand(top, (*prefix, first, *path_of(part)))
        elif first in parts:
            parts[first].append(below)
        elif first not in kept:
            kept[first] = value  # holds its place until its part is known
            parts[first] = [below]
        else:
            _demand(top, (*prefix, first, *path_of(below)))
    for first, rest in parts.items():
        value = kept[first]
        if isinstance(value, Structure):
            kept[first] = value._selected(rest, top, (*prefix, first))
        else:
            _demand(top, (*prefix, first, *path_of(rest[0])))
            del kept[first]
    desc = level._desc
    return level._like(_released(kept) if desc.frozen else kept, desc._unlocked)


def _demand(top: AbstractContainer | None, path: tuple[NestedKey, ...]) -> None:
    """Raise the error of a missing key, where one was asked for."""
    if top is not None:
        top._read(path_of(path))


def _released(kept: dict[str, Entry]) -> dict[str, Entry]:
    """Return the entries for a result: unlike what a locked container encloses, not locked."""
    return {
        key: value if isinstance(value, Tensor) else value._shallow() for key, value in kept.items()
    }


def _drop(container: W, keys: Sequence[NestedKey]) -> W:
    kept: dict[str, Entry] = {**container._entries}
    parts: dict[str, list[NestedKey]] = {}
    for key in keys:
        if key.__class__ is str:
            kept.pop(key, None)
            continue
        first, below = _parted(key)
        if not below:
            kept.pop(first, None)
        elif first in kept:
            parts.setdefault(first, []).append(below)
    for first, rest in parts.items():
        value = kept.get(first)
        if isinstance(value, Structure):
            kept[first] = value._without(rest)
    desc = container._desc
    return container._like(_released(kept) if desc.frozen else kept, desc._unlocked)


def _parted(key: NestedKey) -> tuple[str, NestedKey]:
    """Split a key into its first part and the rest, `()` if there is none."""
    if key.__class__ is tuple and len(key) == 2:  # as most nested keys
        first, last = key
        if first.__class__ is str and last.__class__ is str and last:
            return first, last
    path = path_of(key)
    return path[0], path[1:]


def _narrowed(only: list[Path] | None, key: str) -> tuple[bool, list[Path] | None]:
    """Return whether an update takes `key`, and which paths below it."""
    if only is None:
        return True, None
    below = [path[1:] for path in only if path[0] == key]
    if not below:
        return False, None
    return True, None if () in below else below


def _stage_update(
    level: AbstractContainer, items: Mapping[str, object], path: Path, how: _Update, stage: Staged
) -> None:
    """Check each entry and append what to do to the stage; nothing is changed here."""
    kinds = kinds_by_key(level._entries)
    for key, value in items.items():
        taken, only = _narrowed(how.only, key)
        if not taken:
            continue
        current = kinds.get(key)
        if isinstance(current, AbstractContainer) and isinstance(value, _LEVELS):
            inner = _source_items(value, "update")
            rule = _Update(how.clone, how.inplace, only)
            _stage_update(current, inner, (*path, key), rule, stage)
            continue
        if how.inplace and isinstance(current, Tensor):
            stage.append(_staged_write(level, (*path, key), value))
            continue
        level._check_unlocked(f"update {format_key((*path, key))}")
        entry = level._as_entry(key, value, path)
        if how.clone:
            entry = entry.clone() if isinstance(entry, Tensor) else entry._map_each(Tensor.clone)
        stage.append(_staged_set(level, key, entry))


def _staged_set(level: AbstractContainer, key: str, entry: Entry) -> Callable[[], None]:
    return lambda: level._set_entry(key, entry)


def _staged_write(level: AbstractContainer, path: Path, value: object) -> Callable[[], None]:
    writes = level._writes(path[-1], value, path)
    if not is_compiling():
        for write in writes:
            check_write(*write)
    return lambda: write_all(writes)


def _is_same_data(current: Entry, value: object) -> bool:
    """Return whether an entry is non-tensor data equal to the value: nothing is to be written."""
    if isinstance(current, _TENSORS) or isinstance(value, _TENSORS):
        return False
    new = cast("Entry", value)._item() if hasattr(value, "_item") else value  # type: ignore[union-attr]  # asked with `hasattr`
    return same_data(current._item(), new)


def _stage_writes(
    level: AbstractContainer,
    items: Mapping[str, object],
    path: Path,
    only: list[Path] | None,
    stage: Staged,
) -> None:
    kinds = kinds_by_key(level._entries)
    for key, value in items.items():
        taken, below = _narrowed(only, key)
        if not taken:
            continue
        current = kinds[key] if key in kinds else level._read((key,))
        if isinstance(current, AbstractContainer) and isinstance(value, _LEVELS):
            inner = _source_items(value, "update_")
            _stage_writes(current, inner, (*path, key), below, stage)
        elif not _is_same_data(current, value):
            stage.append(_staged_write(level, (*path, key), value))
