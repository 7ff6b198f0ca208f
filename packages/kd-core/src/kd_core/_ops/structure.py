"""Changing the keys: update, select, rename, flatten.

Every change is all or nothing: it is checked as a whole first, then committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kd_core import _registry as registry
from kd_core._descriptor import describe_on, device_of
from kd_core._errors import (
    InvalidArgument,
    InvalidValue,
    KdError,
    KeyCollision,
    KeySetMismatch,
    OutOfRange,
    given_twice,
    wrong_type,
)
from kd_core._keys import KeyPath, format_key, is_prefix, path_of, plain_str, several
from kd_core._leaves.loops import find_entry, has_entry
from kd_core._leaves.writes import Targets, Write, collect_writes, copy_pairs, write_all
from kd_core._nodes import is_data, is_node, tensor_of
from kd_core._ops.access import (
    Update,
    add_writes,
    keys_to_take,
    merge,
    renamed,
    sources_of,
    store_moved,
    with_own_data,
)
from kd_core._ops.description import named, put_on, resize, take_batch_size
from kd_core._ops.scopes import Flattened, Unflattened, record, recording
from kd_core._protocol import (
    AbstractContainer,
    Composite,
    check_has,
    engine,
    is_container,
    level_at,
    unchanged_on_error,
)
from kd_core._shapes import batch_of, names_of, with_names
from kd_core._types import NO_DEFAULT
from kd_core._validation import MAX_DEPTH, is_both, too_deep

if TYPE_CHECKING:
    from typing import Self, TypeVar

    from kd_core._descriptor import Descriptor
    from kd_core._nodes import AnyKey, Entries, Entry, Source
    from kd_core._ops.access import IsLeaf, KeyFn
    from kd_core._types import BatchSize, DeviceLike, NestedKey, NoDefault

    A = TypeVar("A", bound=AbstractContainer)
    Join = Callable[..., Tensor]
    W = TypeVar("W", bound=AbstractContainer)


@recording
class Structure(AbstractContainer):
    """Changes of keys."""

    __slots__ = ()

    def update(  # no `*`, which takes a tenth of a call: "update(2 leaves)" in the benchmarks
        self,
        input_dict_or_td: Source[AnyKey] | NoDefault | None = NO_DEFAULT,
        clone: bool = False,
        inplace: bool = False,
        non_blocking: bool = False,
        keys_to_update: Iterable[NestedKey] | None = None,
        is_leaf: IsLeaf | None = None,
        update_batch_size: bool = False,
        **entries: object,
    ) -> Self:
        """Store the entries of a mapping or container, merging nested ones. All or nothing.

        Tensors are stored by reference. If any entry does not fit, the container is left as it
        was.

        Args:
            input_dict_or_td: the source: a mapping (its keys may be nested tuples) or a container;
                `None` is not one.
            clone: store copies of the tensors.
            inplace: write into the storage of entries that exist.
            non_blocking: do not wait for copies between pinned memory and a GPU.
            keys_to_update: take only these keys of the source, and what is below them.
            is_leaf: returns for the type of a nested container of the source whether it replaces
                the one that is there, instead of being merged into it.
            update_batch_size: take the batch size of the source, too, if it is a container, and of
                nested ones; it must have all keys of this one then.
            **entries: further entries by keyword, which replace those of the source.

        Raises:
            ShapeMismatch: if a value does not fit the batch size.
            KeySetMismatch: if an entry would keep another batch size.
            Locked: if a key would be added or rebound in a locked container.

        Example:
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": 0.0, "b": {"c": 1.0}})
            >>> td.update({"b": {"d": 2.0}}, a=3.0).to_dict()
            {'a': tensor(3.), 'b': {'c': tensor(1.), 'd': tensor(2.)}}
        """
        sources = sources_of(input_dict_or_td, entries)
        if update_batch_size and sources and isinstance(sources[0], AbstractContainer):
            if entries:
                raise InvalidArgument(
                    "`update_batch_size=True` takes the batch size of one source, a container, and "
                    "cannot be combined with entries by keyword."
                )
            if take_batch_size(self, sources[0], clone, keys_to_update):
                return self
        only = None if keys_to_update is None or not sources else keys_to_take(keys_to_update)
        merge(self, sources, Update(clone, inplace, only, non_blocking, is_leaf, update_batch_size))
        return self

    def update_(
        self,
        input_dict_or_td: Source[AnyKey] | NoDefault | None = NO_DEFAULT,
        clone: bool = False,
        *,
        non_blocking: bool = False,
        keys_to_update: Iterable[NestedKey] | None = None,
        **entries: object,
    ) -> Self:
        """Write the values of a source into entries that exist, in place. All or nothing.

        Allowed on a locked container.

        Args:
            input_dict_or_td: a mapping (its keys may be nested tuples) or a container.
            clone: of no effect, because values are copied anyway.
            non_blocking: do not wait for copies between pinned memory and a GPU.
            keys_to_update: take only these keys of the source, and what is below them.
            **entries: further values by keyword, which replace those of the source.

        Raises:
            KeyNotFound: if the source has a key that does not exist here.
            ShapeMismatch: if a value cannot be broadcast to its entry.
        """
        plain = keys_to_update is None and not (clone or non_blocking or entries)
        if plain and isinstance(input_dict_or_td, AbstractContainer):
            try:
                targets, sources = collect_writes(self, input_dict_or_td)
            except KeySetMismatch:  # a source may have fewer keys: entry by entry below
                targets, sources = Targets(), []
            if targets and copy_pairs(targets, sources):
                return self
        given = sources_of(input_dict_or_td, entries)
        only = None if keys_to_update is None or not given else keys_to_take(keys_to_update)
        writes: list[Write] = []
        for each in given:
            add_writes(writes, self, each, only)
        write_all(writes, non_blocking)
        return self

    def replace(self, source: Source[AnyKey] | None = None, /, **entries: object) -> Self:
        """Return a shallow copy in which entries are replaced; self if there are no new ones.

        Args:
            source: a mapping or container of the new entries.
            **entries: new entries as keywords.

        Example:
            >>> from kd_core import TensorDict
            >>> td = TensorDict(a=1, b=2)
            >>> td.replace(b=3).to_dict(), td["b"]
            ({'a': tensor(1), 'b': tensor(3)}, tensor(2))
        """
        new_ones = source._kd_entries if isinstance(source, AbstractContainer) else source
        if not new_ones and not entries:
            return self
        new = self._kd_shallow()
        if source is not None:
            engine(new).update(new, source)
        return engine(new).update(new, entries) if entries else new

    def select(
        self,
        *keys: NestedKey,
        strict: bool = True,
        inplace: bool = False,
        as_tensordict: bool = False,
    ) -> Self:
        """Keep only some keys; tensors are shared.

        Args:
            *keys: what to keep; a nested container is kept whole, or by some of its keys.
            strict: a missing key is an error.
            inplace: change this container instead of making a new one.
            as_tensordict: return a `TensorDict`, of whatever kind this container is, or a lazy
                stack of them.

        Raises:
            KeyNotFound: if `strict` and a key is missing.
            Locked: if `inplace` on a locked container.

        Example:
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": 0.0, "b": {"c": 1.0, "d": 2.0}})
            >>> list(td.select(("b", "c")).keys(True, True))
            [('b', 'c')]
        """
        if inplace:
            self._kd_check_unlocked("select in place")
        kept = self._kd_selected(keys, strict)
        if kept is None:
            for key in keys:
                check_has(self, path_of(key))
            raise AssertionError("a key is missing")
        if as_tensordict and not inplace:
            return _plain(kept)
        return self._kd_replace_entries(kept, "select in place") if inplace else kept

    def exclude(self, *keys: NestedKey, inplace: bool = False) -> Self:
        """Drop some keys; tensors are shared, missing keys ignored.

        Excluding the last entry of a nested container leaves it there, empty.

        Args:
            *keys: what to drop.
            inplace: change this container instead of making a new one.
        """
        if not keys and not inplace:
            return self._kd_shallow()
        kept = self._kd_without(keys)
        if not inplace:
            return kept
        entries = self._kd_entries
        if self._kd_desc.frozen and not any(has_entry(entries, path_of(key)) for key in keys):
            return self
        return self._kd_replace_entries(kept, "exclude in place")

    def rename_key_(self, old_key: NestedKey, new_key: NestedKey, safe: bool = False) -> Self:
        """Rename a key; the entry moves to the end of its level.

        Args:
            old_key: a key that is there.
            new_key: its new name, in the same or another nested container; below `old_key`, the
                entry is in a new container of the old name.
            safe: refuse to overwrite an entry that has the new name.

        Raises:
            KeyNotFound: if `old_key` is missing.
            KeyCollision: if `safe` and `new_key` is taken.
            ShapeMismatch: if the entry does not fit the batch size of its new level.
            Locked: if the container is locked.
        """
        old, new = old_key, new_key
        if type(old) is str and type(new) is str and not (safe or self._kd_desc.frozen):
            moved = self._kd_entries.get(old)
            if moved is not None and old != new:  # without making paths, which takes half of it
                self._kd_check_key(new)
                self._kd_del_entry(old)
                self._kd_set_entry(new, moved)
                return self
        source, target = path_of(old), path_of(new)
        if self._kd_desc.frozen:
            self._kd_check_unlocked(f"rename {format_key(old)}")
        entry = find_entry(self._kd_entries, source)
        if entry is None:
            entry = self._kd_read(source)
        if source == target:
            return self
        if safe and find_entry(self._kd_entries, target) is not None:
            raise KeyCollision(
                f"cannot rename {format_key(old)} to {format_key(new)}: there is an entry "
                "of that name. Remove it first, or pass `safe=False`."
            )
        level = level_at(self, source[:-1])
        level._kd_check_unlocked(f"rename {format_key(old)}")
        if source[:-1] == target[:-1]:
            level._kd_check_key(target[-1])
            level._kd_del_entry(source[-1])
            level._kd_set_entry(target[-1], entry)
            return self
        if is_compiling() and not is_prefix(source, target):
            store_moved(self, target, entry)
            level._kd_del_entry(source[-1])
            return self
        with unchanged_on_error(level):
            level._kd_del_entry(source[-1])
            store_moved(self, target, entry)
        return self

    def flatten_keys(
        self, separator: str = ".", inplace: bool = False, is_leaf: IsLeaf | None = None
    ) -> Self:
        """Join the keys of nested entries, so that there is one level.

        Args:
            separator: stands between the parts of a key.
            inplace: change this container instead of making a new one.
            is_leaf: returns for the type of a nested container whether it is kept as it is.

        Raises:
            KeyCollision: if two entries would have the same name.

        Example:
            >>> from kd_core import TensorDict
            >>> list(TensorDict({"a": {"b": 0.0}}).flatten_keys(".").keys())
            ['a.b']
        """
        flat: dict[str, Entry] = {}
        if type(separator) is not str:
            separator = _checked_separator(separator)
        _flatten_into(self._kd_entries, separator, "", flat, is_leaf)
        if inplace:  # entries that stay come first, as where the others are renamed
            flat = {key: flat[key] for key in self._kd_entries if key in flat} | flat
        result = self._kd_like(flat, self._kd_desc._unlocked)
        if inplace:
            return self._kd_replace_entries(result, "flatten keys in place")
        return record(result, self, Flattened, (separator, is_leaf))

    def unflatten_keys(self, separator: str = ".", inplace: bool = False) -> Self:
        """Split keys at a separator into nested containers: the inverse of `flatten_keys`.

        Entries whose keys are not split come first. A container that has the name already gets the
        entries, in a copy.

        Raises:
            KeyCollision: if a name would be a leaf and a container at once, or is there twice.
            InvalidValue: if the separator is empty.
        """
        if not separator:
            raise InvalidValue("the separator must not be empty. Pass one such as `'.'`.")
        if type(separator) is not str:
            separator = _checked_separator(separator)
        desc = self._kd_desc._unlocked
        entries = self._kd_entries
        frozen = self._kd_desc.frozen
        if frozen and inplace and not any(separator in key for key in entries):
            return self
        if frozen or not inplace:  # what it encloses stays as it is
            entries = with_own_data(self._kd_shallow())._kd_entries
        result = self._kd_like(_unflattened(entries, separator, "", desc), desc)
        if inplace:
            return self._kd_replace_entries(result, "unflatten keys in place")
        return record(result, self, Unflattened, separator)

    def empty(
        self,
        recurse: bool = False,
        *,
        batch_size: BatchSize | None = None,
        device: DeviceLike | NoDefault | None = NO_DEFAULT,
        names: Sequence[str | None] | NoDefault | None = NO_DEFAULT,
    ) -> Self:
        """Return a container of the same batch size and device without entries.

        Args:
            recurse: keep the nested containers, empty, and the data that is not a tensor.
            batch_size: another batch size, whose first dimensions keep their names; that of a
                nested container stays, and must start with it.
            device: another device.
            names: other names of the batch dimensions; `None`: no names.
        """
        if names is not NO_DEFAULT:
            return named(
                engine(self).empty(self, recurse, batch_size=batch_size, device=device), names
            )
        desc = self._kd_desc._unlocked
        if batch_size is not None or device is not NO_DEFAULT:
            if recurse:
                made = engine(self).empty(self, recurse)
                if device is not NO_DEFAULT:
                    put_on(made, None if device is None else device_of(device))
                if batch_size is not None:
                    resize(made, batch_size)
                return made
            batch = desc.batch
            if batch_size is not None:
                batch = with_names(batch_of(batch_size), names_of(batch))
            where = desc.device if device is NO_DEFAULT else device
            return self._kd_like({}, describe_on(batch, where))
        if not recurse:
            return self._kd_like({}, desc)
        kept: dict[str, Entry] = {}
        for key, value in self._kd_entries.items():
            if is_container(value, self):
                kept[key] = engine(value).empty(value, recurse=True)
            elif is_data(value):
                kept[key] = value._kd_shallow()
        return self._kd_like(kept, desc)

    def is_empty(self) -> bool:
        """Return whether there is no leaf and no data at any level."""
        for value in self._kd_entries.values():
            if type(value) is Tensor or not (
                is_container(value, self) and engine(value).is_empty(value)
            ):
                return False
        return True

    def _kd_selected(self, keys: Sequence[NestedKey], strict: bool) -> Self | None:
        """Return the part of this level that some keys name; `None` if `strict` and one is missing.

        The caller raises the error, because it knows the whole path.
        """
        kept: dict[str, Entry] = {}
        parts: dict[str, list[NestedKey]] = {}
        entries = self._kd_entries
        for key in keys:
            if type(key) is str:
                first = key
            else:
                first, below = _parted(key)
                if below:
                    parts.setdefault(first, []).append(below)
                    kept.setdefault(first, _PLACE)
                    continue
            value = entries.get(first)
            if value is not None:
                kept[first] = value
            elif strict:
                return None
        for first in parts:
            value = entries.get(first)
            part = value._kd_selected(parts[first], strict) if is_container(value, self) else None
            if strict and part is None:
                return None
            if kept[first] is not _PLACE:
                continue  # kept whole
            if part is None:
                del kept[first]
            else:
                kept[first] = part
        return self._kd_like(kept, self._kd_desc._unlocked)

    def _kd_without(self, keys: Sequence[NestedKey]) -> Self:
        kept: dict[str, Entry] = {**self._kd_entries}
        parts: dict[str, list[NestedKey]] = {}
        for key in keys:
            if type(key) is str:
                first = key
            else:
                first, below = _parted(key)
                if below:
                    parts.setdefault(first, []).append(below)
                    continue
            kept.pop(first, None)
        for first, rest in parts.items() if parts else ():
            value = kept.get(first)
            if is_container(value, self):
                kept[first] = value._kd_without(rest)
        return self._kd_like(kept, self._kd_desc._unlocked)

    def _kd_replace_entries(self, other: AbstractContainer, action: str) -> Self:
        self._kd_check_unlocked(action)
        entries = dict(other._kd_entries)
        for key in entries.keys() - self._kd_entries.keys():
            self._kd_check_key(key)
        for key in list(self._kd_entries):
            self._kd_del_entry(key)
        for key, value in entries.items():
            self._kd_set_entry(key, value)
        return self


_PLACE: Final = cast("Entry", None)
"""Holds the place of a nested container until the part of it that is kept is known."""


def _unflattened(
    entries: Entries,
    separator: str,
    prefix: str,
    desc: Descriptor,
    beside: AbstractContainer | None = None,
) -> dict[str, Entry]:
    """Return the entries of a level whose keys are split at a separator.

    At the root, those whose keys are not split come first.

    Args:
        entries: the entries of the level, under the rest of their keys.
        separator: what splits the keys.
        prefix: what stands in front of them.
        desc: the descriptor of the containers that are made.
        beside: a container that has the name of the level, which gets the entries.
    """
    if len(prefix) > MAX_DEPTH and prefix.count(separator) > MAX_DEPTH:
        raise too_deep(tuple(prefix.split(separator)))
    level: dict[str, Entry] = {}
    below: dict[str, dict[str, Entry]] = {}
    known: dict[str, AbstractContainer] = {}
    deeper = False
    for key, value in entries.items():
        name, found, rest = key.partition(separator)
        deeper = deeper or separator in rest
        if name in below and found:
            below[name][rest] = value
        elif name in level:
            other = level[name] if found else value
            if not isinstance(other, AbstractContainer):
                raise is_both(prefix + key, prefix + name, "container" if found else "value")
            known[name] = other
            if found:
                below[name] = {rest: value}
            else:
                level[name] = level.pop(name)
        else:
            level[name] = value  # holds the place of a container
            if found:
                below[name] = {rest: value}
    if beside is not None:
        there = beside._kd_entries
        for name in level:
            if name in there:
                other = there[name]
                if name not in below or not isinstance(other, AbstractContainer):
                    raise given_twice(format_key(prefix + name))
                known[name] = other
    for name, inner in below.items():
        base = known.get(name)
        if deeper or prefix or base is not None:
            inner = _unflattened(inner, separator, prefix + name + separator, desc, base)
        level[name] = registry.make_dense(inner, desc) if base is None else _with_more(base, inner)
    if not prefix:
        for name in below:
            if name not in known:
                level[name] = level.pop(name)
    return level


def _with_more(base: AbstractContainer, entries: Entries) -> AbstractContainer:
    """Return a shallow copy of a container with further entries."""
    joined = base._kd_shallow()
    for key, value in entries.items():
        joined._kd_set_entry(key, joined._kd_as_entry(key, value))
    return joined


def _plain(td: W) -> W:
    """Return a `TensorDict` of the same entries, or a lazy stack of them."""
    if isinstance(td, Composite):
        return td._by_member(_plain)
    return registry.make_dense(dict(td._kd_entries), td._kd_desc)


def _checked_separator(separator: object) -> str:
    if not isinstance(separator, str):
        raise wrong_type("`separator`", "a string", separator)
    return plain_str(separator)


def _flatten_into(
    entries: Entries, separator: str, prefix: str, flat: dict[str, Entry], is_leaf: IsLeaf | None
) -> None:
    for key, value in entries.items():
        name = prefix + key
        if (
            type(value) is not Tensor
            and isinstance(value, AbstractContainer)
            and not (is_leaf and is_leaf(type(value)))
        ):
            _flatten_into(value._kd_entries, separator, name + separator, flat, is_leaf)
        elif name in flat:
            raise KeyCollision(
                f"two entries would have the flat key `{name}`. Choose another separator than "
                f"{separator!r}."
            )
        else:
            flat[name] = value


def _parted(key: NestedKey) -> tuple[str, NestedKey]:
    """Split a key into its first part and the rest, `()` if there is none."""
    if type(key) is tuple and len(key) == 2:  # as most nested keys
        first, last = key
        if type(first) is str and type(last) is str and last:
            return key  # type: ignore[return-value]  # two strings
    path = path_of(key)
    return path[0], path[1:]


# Nested containers: creating and emptying them; splitting, renaming and joining entries.


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
        return (*parts, copy)

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
        if isinstance(default, Tensor):
            return default.unbind(stack._dim)
        if isinstance(default, AbstractContainer):
            return default._kd_engine.unbind(default, stack._dim)
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


def _dense(td: W) -> W:
    """Return a plain copy, because the fields of a tensor class cannot be removed."""
    if isinstance(td, Composite):
        return td._by_member(_dense)
    return registry.make_dense(dict(td._kd_shallow()._kd_entries), td._kd_desc.unlocked())


def empty_levels(td: AbstractContainer) -> dict[str, Entry]:
    """Return all nested containers, without their leaves and data."""
    return {
        key: value._kd_like(empty_levels(value), value._kd_desc.unlocked())
        for key, value in td._kd_entries.items()
        if isinstance(value, AbstractContainer)
    }


def _copied(levels: dict[str, Entry]) -> dict[str, Entry]:
    return {key: level._kd_shallow() for key, level in levels.items() if is_node(level)}


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
            entries[key] = _only_tensors(value)
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
    if isinstance(level, Composite):  # what a member alone has is not an entry of the stack
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
        level = level_at(level, (part,))
    level._kd_check_unlocked(f"remove {format_key(path)}")
    level._kd_del_entry(path[-1])
    for parent, key in reversed(above if empty_ones else []):
        if level_at(parent, (key,))._kd_entries:
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
