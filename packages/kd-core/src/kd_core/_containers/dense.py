"""The dense storage of a container: a dict of entries and a descriptor.

`TensorDict` and `TensorClass` both store their entries this way. Results are created with
`object.__new__` and not through `__init__`, because their entries need no further check.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import (
    Callable,
    ItemsView,
    Iterator,
    KeysView,
    Mapping,
    MutableMapping,
    Sequence,
    ValuesView,
)
from typing import TYPE_CHECKING, Any, Final, SupportsIndex, cast
from weakref import ref

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from kd_core import _registry as registry
from kd_core._base import TensorDictBase
from kd_core._descriptor import LOCKED_BY_USER, describe, restored
from kd_core._errors import InvalidArgument, a_type, not_valid, restores, shape_text
from kd_core._leaves.loops import (
    MANY,
    collect,
    collect_pairs,
    is_shapeless,
    leaf_fits,
    map_to_parts,
    mapped,
    rebuild,
    zip_each,
)
from kd_core._leaves.packing import packed
from kd_core._nodes import Node, is_node, is_row_data, own_attributes
from kd_core._ops.modules import StackedUninitialized
from kd_core._ops.scopes import WAS_LOCKED, WAS_UNLOCKED
from kd_core._protocol import free_parts, note_holder, take_names, unlock_all
from kd_core._torch_private import traced_as
from kd_core._validation import as_entry

if TYPE_CHECKING:
    from typing import Protocol, Self, TypeVar

    from kd_core._descriptor import Descriptor
    from kd_core._nodes import Entry, Holders, Memo, PartsMemo
    from kd_core._types import Batch, BatchFn, LeafFn, PartsFn

    class Owner(Protocol):
        """The container that holds the entries."""

        _kd_entries: dict[str, Entry]

    D = TypeVar("D", bound="Dense")


# An overlay for entries that are written in compiled code.
#
# dynamo replays a write into a dict from outside the graph and adds guards on all keys of that
# dict: a function that writes one entry would be recompiled whenever an unrelated key is added or
# removed. The assignment of an attribute has no such guards. So compiled code stores the new
# entries in an overlay, and assigns the overlay in place of the dict. The first read in eager code
# moves the entries into the dict and restores it.
#
# Knows dicts and the one attribute that holds them; must not know containers.


class LateEntries(MutableMapping[str, "Entry"]):
    """A dict with an overlay of later entries, which it merges when it is read in eager code."""

    __slots__ = ("below", "late", "owner")

    owner: Owner
    below: dict[str, Entry]
    late: dict[str, Entry]

    def merged(self) -> dict[str, Entry]:
        """Return the merged dict: a new one while compiling, else the original, restored."""
        if is_dynamo_compiling():
            return {**self.below, **self.late}
        below = self.below
        below.update(self.late)
        self.late = {}
        held: object = self.owner._kd_entries
        if held is self:
            self.owner._kd_entries = below
        return below

    def get(self, key: str, default: Any = None) -> Entry:
        """Return one entry; compiled code reads only this key."""
        if is_dynamo_compiling():
            return self.late[key] if key in self.late else self.below.get(key, default)
        entry: Entry = self.merged().get(key, default)
        return entry

    def __getitem__(self, key: str) -> Entry:
        if is_dynamo_compiling():
            return self.late[key] if key in self.late else self.below[key]
        return self.merged()[key]

    def __contains__(self, key: object) -> bool:
        if is_dynamo_compiling():
            return key in self.late or key in self.below
        return key in self.merged()

    def __setitem__(self, key: str, value: Entry) -> None:
        self.merged()[key] = value

    def __delitem__(self, key: str) -> None:
        del self.merged()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.merged())

    def __len__(self) -> int:
        return len(self.merged())

    def keys(self) -> KeysView[str]:
        """Return the keys of the merged dict."""
        return self.merged().keys()

    def values(self) -> ValuesView[Entry]:
        """Return the entries of the merged dict."""
        return self.merged().values()

    def items(self) -> ItemsView[str, Entry]:
        """Return the keys and entries of the merged dict."""
        return self.merged().items()

    def copy(self) -> dict[str, Entry]:
        """Return a copy of the merged dict."""
        return dict(self.merged())

    def __deepcopy__(self, memo: dict[int, object]) -> dict[str, Entry]:
        return copy.deepcopy(self.merged(), memo)


def overlay(owner: Owner, late: Mapping[str, Entry]) -> None:
    """Write entries in compiled code."""
    entries: object = owner._kd_entries
    # The slots are set one by one because calling a class is slow to trace.
    entries_with_late = object.__new__(LateEntries)
    entries_with_late.owner = owner
    if isinstance(entries, LateEntries):
        entries_with_late.below = entries.below
        entries_with_late.late = {**entries.late, **late}
    else:
        entries_with_late.below = owner._kd_entries
        entries_with_late.late = {**late}
    owner._kd_entries = entries_with_late  # type: ignore[assignment]  # behaves like a dict


def own_dict(owner: Owner) -> dict[str, Entry]:
    """Return the dict of entries; merge the overlay of compiled code into it."""
    entries: object = owner._kd_entries
    if isinstance(entries, LateEntries):
        owner._kd_entries = entries.merged()
    return owner._kd_entries


class Dense(TensorDictBase):
    """A container that holds its entries in a dict."""

    __slots__ = ("__weakref__", "_kd_desc", "_kd_entries", "_kd_holders", "_kd_nested", "_kd_scope")

    _kd_desc: Descriptor
    _kd_entries: dict[str, Entry]
    _kd_nested: bool

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if Dense not in cls.__bases__:
            _check_shortcuts(cls)

    def _kd_describe(self, desc: Descriptor) -> None:
        self._kd_desc = desc

    def _kd_set_entry(self, key: str, value: Entry) -> None:
        if type(value) is not Tensor and (
            isinstance(value, Dense) or not isinstance(value, Tensor) or value.is_nested
        ):
            self._kd_nested = True
            if isinstance(value, Node) and value._kd_desc.named and not self._kd_desc.named:
                take_names(self, value)
        if is_dynamo_compiling():
            overlay(self, {key: value})
        else:
            self._kd_entries[key] = value

    def _kd_set_leaves(self, leaves: Mapping[str, Tensor]) -> None:
        # Overridden for speed: "tutorial Sequential(td)" in the benchmarks.
        if is_dynamo_compiling():
            overlay(self, leaves)
        else:
            self._kd_entries.update(leaves)

    def _kd_del_entry(self, key: str) -> None:
        entries = self._kd_entries
        if type(entries) is not dict:
            entries = own_dict(self)
        del entries[key]

    def _kd_like(self, entries: dict[str, Entry], desc: Descriptor) -> Self:
        kind = type(self)
        nested = False
        for value in entries.values():  # `holds_nodes`, inlined: "keys" in the benchmarks
            if type(value) is not Tensor and (
                type(value) is kind or not isinstance(value, Tensor) or value.is_nested
            ):
                nested = True
                break
        new = object.__new__(kind)
        new._kd_desc = desc
        new._kd_entries = entries
        new._kd_nested = nested
        return new

    def _kd_shallow(self) -> Self:
        # Overridden for speed: "clone(False)" and "replace" in the benchmarks.
        new = object.__new__(type(self))
        new._kd_entries = entries = self._kd_entries.copy()
        new._kd_desc = self._kd_desc._unlocked
        new._kd_nested = self._kd_nested
        if self._kd_nested:
            for key, value in entries.items():
                if type(value) is not Tensor and isinstance(value, Node):
                    entries[key] = value._kd_shallow()
        return new

    def _kd_traced_map_each(
        self, fn: LeafFn, batch: BatchFn | None = None, memo: Memo = None
    ) -> Self:
        """Map without the flags and classes of entries, which dynamo would guard."""
        desc = self._kd_desc
        if memo is not None and memo[0] is desc:
            after = memo[1]
        elif batch is None:
            after = desc._unlocked if desc.frozen else desc
        else:
            after = desc.with_batch(batch(desc.batch))
        entries: dict[str, Entry] = {}
        nested = False
        for key, value in self._kd_entries.items():
            if not isinstance(value, Tensor):
                nested = True
                entries[key] = value._kd_map_each(fn, batch, (desc, after))
            elif value.is_nested:
                nested = True
                entries[key] = mapped(value, fn, batch)
            else:
                entries[key] = fn(value)
        new = object.__new__(type(self))
        new._kd_desc = after
        new._kd_entries = entries
        new._kd_nested = nested
        return new

    @traced_as(_kd_traced_map_each)
    def _kd_map_each(self, fn: LeafFn, batch: BatchFn | None = None, memo: Memo = None) -> Self:
        # Overridden for speed: "index", "shape" in the benchmarks.
        # Loops, because a comprehension costs a frame; for the same reason a flat container of the
        # same kind is filled in this frame.
        desc = self._kd_desc
        if memo is not None and memo[0] is desc:
            after = memo[1]
        else:
            after = desc._unlocked if batch is None else desc.with_batch(batch(desc.batch))
        kind = type(self)
        new = object.__new__(kind)
        new._kd_desc = after
        new._kd_nested = nested = self._kd_nested
        entries: dict[str, Entry] = {}
        new._kd_entries = entries
        held: Mapping[str, Any] = self._kd_entries
        if not nested:
            for key, value in held.items():
                entries[key] = fn(value)
            return new
        for key, value in held.items():
            if type(value) is Tensor:
                entries[key] = fn(value)
            elif type(value) is kind and not value._kd_nested and value._kd_desc is desc:
                inner = object.__new__(kind)
                inner._kd_desc = after
                inner._kd_nested = False
                below: dict[str, Entry] = {}
                inner._kd_entries = below
                plain: Mapping[str, Any] = value._kd_entries
                for name, leaf in plain.items():
                    below[name] = fn(leaf)
                entries[key] = inner
            elif isinstance(value, Node):
                entries[key] = value._kd_map_each(fn, batch, (desc, after))
            else:
                entries[key] = mapped(value, fn, batch)
        return new

    def _kd_map_to_parts(
        self, fn: PartsFn, batches: Sequence[BatchFn], memo: PartsMemo = None
    ) -> list[Self]:
        # Overridden for speed: "split" and "unbind" in the benchmarks.
        desc = self._kd_desc
        if memo is None or memo[0] is not desc:
            memo = desc, [desc.with_batch(batch(desc.batch)) for batch in batches]
        make, kind, nested = object.__new__, type(self), self._kd_nested
        parts: list[Self] = []
        for entries, after in zip(map_to_parts(self._kd_entries, fn, batches, memo), memo[1]):  # noqa: B905  # see `map_to_parts`
            part = make(kind)
            part._kd_entries = entries
            part._kd_desc = after
            part._kd_nested = nested
            parts.append(part)
        return parts

    def _kd_collect(self, leaves: list[Tensor]) -> None:
        # Overridden for speed: "math" in the benchmarks.
        if self._kd_nested:
            collect(self._kd_entries, leaves)
        else:
            entries: dict[str, Any] = self._kd_entries
            leaves.extend(entries.values())

    def _kd_rebuild(self, leaves: Iterator[Tensor]) -> Self:
        # Overridden for speed: "math" in the benchmarks.
        new = object.__new__(type(self))
        new._kd_desc = self._kd_desc._unlocked
        new._kd_nested = nested = self._kd_nested
        if nested or len(self._kd_entries) < MANY:
            new._kd_entries = rebuild(self._kd_entries, leaves)
        else:
            new._kd_entries = dict(zip(self._kd_entries, leaves))  # noqa: B905  # see `map_to_parts`
        return new

    def _kd_zip_each(
        self, other: Entry, fn: Callable[[Tensor, Tensor], Tensor], path: tuple[str, ...] = ()
    ) -> Self:
        # Overridden for speed: "math" in the benchmarks.
        if type(other) is not type(self) and not isinstance(other, Dense):
            return super()._kd_zip_each(other, fn, path)
        new = object.__new__(type(self))
        new._kd_entries = zip_each(self._kd_entries, other._kd_entries, fn, path)
        new._kd_nested = self._kd_nested or other._kd_nested  # a plain leaf beside a ragged one
        new._kd_desc = self._kd_desc._unlocked
        return new

    def _kd_collect_pair(
        self, other: Entry, mine: list[Tensor], theirs: list[Tensor], path: tuple[str, ...]
    ) -> None:
        # Overridden for speed: "math" in the benchmarks.
        if not isinstance(other, Dense):
            super()._kd_collect_pair(other, mine, theirs, path)
            return
        left: dict[str, Any] = self._kd_entries
        right: dict[str, Any] = other._kd_entries
        if not self._kd_nested and not other._kd_nested and [*left] == [*right]:
            mine.extend(left.values())
            theirs.extend(right.values())
        else:
            collect_pairs(left, right, mine, theirs, path)

    @traced_as(TensorDictBase.lock_)
    def lock_(self) -> Self:
        # Overridden for speed: "lock_ + unlock_" in the benchmarks.
        twin = self._kd_desc._locked_alone
        if twin is None or twin.lock is not LOCKED_BY_USER:
            return super().lock_()
        self._kd_scope = WAS_UNLOCKED
        self._kd_desc = twin
        if self._kd_nested:
            self._kd_hold_below(1)
        return self

    @traced_as(TensorDictBase.unlock_)
    def unlock_(self) -> Self:
        # Overridden for speed, as `lock_`.
        desc = self._kd_desc
        if desc.held or desc.lock is not LOCKED_BY_USER:
            return super().unlock_()
        self._kd_scope = WAS_LOCKED
        self._kd_desc = desc._unlocked
        if self._kd_nested and self._kd_hold_below(-1):  # others hold what it holds, or did
            self._kd_desc = desc
            self._kd_hold_below(1)
            unlock_all(self)
        return self

    @traced_as(TensorDictBase._kd_hold)  # type: ignore[arg-type]  # `self` is a `Dense`
    def _kd_hold(self, count: int, by: Holders = ()) -> bool:
        # Overridden for speed: "lock" in the benchmarks.
        desc = self._kd_desc
        if count == 1 and desc._held_once is not None:
            self._kd_desc = desc._held_once
            self._kd_holders = by
            if self._kd_nested:
                self._kd_hold_below(1)
            return True
        if count == -1 and desc.held == 1 and desc.lock is None:
            self._kd_desc = desc._unlocked
            return self._kd_nested and self._kd_hold_below(-1)
        self._kd_desc = after = desc.with_lock(desc.lock, desc.held + count)
        note_holder(self, desc, by)
        return self._kd_hold_below(count) or after.frozen

    @traced_as(TensorDictBase._kd_hold_below)  # type: ignore[arg-type]  # as above
    def _kd_hold_below(self, count: int) -> bool:
        # Overridden for speed: "lock" in the benchmarks.
        if not self._kd_nested:
            return False
        found = False
        own = type(self)
        by = (ref(self),) if count > 0 else ()
        entries: Mapping[str, Any] = self._kd_entries
        for value in entries.values():
            kind = type(value)
            if kind is own or (kind is not Tensor and isinstance(value, Node)):
                found |= value._kd_hold(count, by)
        return found

    def _kd_with_descriptor(self, desc: Descriptor) -> Self:
        if desc.batch == self._kd_desc.batch and desc.device == self._kd_desc.device:
            return self._kd_like(dict(self._kd_entries), desc)
        entries = {
            key: as_entry(key, value, desc)
            if isinstance(value, (Tensor, TensorDictBase)) or is_row_data(value)
            else value._kd_with_descriptor(desc)  # one value fits any batch size
            for key, value in self._kd_entries.items()
        }
        return self._kd_like(entries, desc)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        number, desc = operator.index(protocol), self._kd_desc
        entries = {
            key: packed(value, number) if isinstance(value, Tensor) else value
            for key, value in self._kd_entries.items()
        }
        args = (type(self), entries, desc.batch, desc.device, desc.pickled_lock)
        own = own_attributes(self)
        return restore_dense, (*args, own) if own else args

    def __copy__(self) -> Self:
        new = self._kd_engine.copy(self)
        own = own_attributes(self)
        if own:
            new.__dict__.update(own)
        return new

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Copy all levels, unlocked, as `clone` does."""
        desc = self._kd_desc
        if is_dynamo_compiling():  # which copies no tensor so
            new = self._kd_engine.clone(self)
        else:
            entries = copy.deepcopy(self._kd_entries, memo)
            new = _built(type(self), entries, describe(desc.batch, desc.device), None)
        memo[id(self)] = new
        own = own_attributes(self)
        if own:
            new.__dict__.update(copy.deepcopy(own, memo))
        return new


# The methods that bypass a primitive for speed: those on the right do not ask the one on the left.
_SHORTCUTS: Final = {
    "_kd_set_entry": ("_kd_put", "_kd_set_leaves", "_kd_store", "update", "rename_key_"),
    "_kd_del_entry": ("rename_key_",),
    "_kd_as_entry": ("_kd_put", "_kd_store", "update"),
    "_kd_like": (
        "_kd_map_each",
        "_kd_map_to_parts",
        "_kd_rebuild",
        "_kd_zip_each",
        "_kd_shallow",
        "empty",
    ),
    "_kd_describe": ("_kd_hold", "lock_", "unlock_"),
}


class GeneralMethods:
    """The methods that ask primitives, for a subclass of a dense container that overrides some.

    Those of dense containers store entries and make results without asking, for speed. The class
    stands in front of the container, and behind what overrides a method or a primitive.

    Example:
        >>> from kd_core import TensorDict
        >>> from kd_core.extending import GeneralMethods
        >>> class Loud(GeneralMethods, TensorDict):
        ...     def _kd_set_entry(self, key, value):
        ...         print(f"write {key}")
        ...         super()._kd_set_entry(key, value)
        >>> _ = Loud().update({"a": 1.0})
        write a
    """

    __slots__ = ()

    if not TYPE_CHECKING:  # to whom a container has the same methods
        _kd_put = TensorDictBase._kd_put
        _kd_set_leaves = TensorDictBase._kd_set_leaves
        _kd_store = TensorDictBase._kd_store
        update = TensorDictBase.update
        rename_key_ = TensorDictBase.rename_key_
        _kd_map_each = TensorDictBase._kd_map_each
        _kd_map_to_parts = TensorDictBase._kd_map_to_parts
        _kd_rebuild = TensorDictBase._kd_rebuild
        _kd_zip_each = TensorDictBase._kd_zip_each
        _kd_shallow = TensorDictBase._kd_shallow
        empty = TensorDictBase.empty
        _kd_hold = TensorDictBase._kd_hold
        lock_ = TensorDictBase.lock_
        unlock_ = TensorDictBase.unlock_


def _check_shortcuts(cls: type[Dense]) -> None:
    """Refuse a class that overrides a primitive and has a method that does not ask it.

    Raises:
        InvalidArgument: if there is one.
    """
    order = cls.__mro__
    kind = next(at for at, base in enumerate(order) if Dense in base.__bases__)
    own = {name for base in order[:kind] for name in vars(base)}
    for primitive in own & _SHORTCUTS.keys():
        skipping = [name for name in _SHORTCUTS[primitive] if name not in own]
        if skipping:
            raise InvalidArgument(
                f"`{cls.__name__}` overrides `{primitive}`, which `{skipping[0]}` of "
                f"`{order[kind].__name__}` does not ask. Derive it from "
                f"`kd_core.extending.GeneralMethods` and `{order[kind].__name__}`, in this order."
            )


@restores
def restore_dense(
    cls: type[D],
    entries: dict[str, Entry],
    batch: Batch,
    device: torch.device | None,
    lock: str | None,
    own: dict[str, object] | None = None,
) -> D:
    """Rebuild a container; called by pickle.

    A container that was locked itself is locked again, with all nested ones. One that is restored
    without the locked container that enclosed it is locked itself.

    Raises:
        FormatError: if the class, a key, an entry or a batch size does not fit: a pickle may say
            anything.
    """
    kind = registry.kind_named(cls, Dense)
    desc = restored(batch, device, lock)
    if type(entries) is not dict:
        raise not_valid(f"expected the entries in a dict, got {a_type(entries)}")
    entries = dict(entries)  # a pickle may go on to change its own
    free = desc if device is None else describe(desc.batch, _found_device(entries, device))
    _check_restored(entries, free)
    if free.device != device:
        for key, value in entries.items():
            if not isinstance(value, Tensor) and value._kd_desc.device == device:
                entries[key] = value._kd_with_descriptor(free.with_batch(value._kd_desc.batch))
    free_parts(entries.values())
    new = _built(kind, entries, free, lock)
    if own is not None:
        if type(own) is not dict or not all(type(key) is str for key in own):
            raise not_valid(f"{own!r} are not the attributes of a container")
        new.__dict__.update(own)  # which only a subclass has
    return cast("D", new)


def _built(kind: type[D], entries: dict[str, Entry], free: Descriptor, lock: str | None) -> D:
    new = object.__new__(kind)
    new._kd_entries = entries
    new._kd_nested = holds_nodes(entries)
    new._kd_desc = free
    if lock is not None:
        new._kd_desc = free.with_lock(lock, 0)
        new._kd_hold_below(1)
    return new


def _check_restored(entries: Mapping[str, object], desc: Descriptor) -> None:
    for key, value in entries.items():
        if isinstance(value, StackedUninitialized):
            found = tuple(value.batch_size)
            fits = found[: desc.ndim] == desc.batch
        elif isinstance(value, Tensor):
            fits = leaf_fits(value, desc)
            found = () if fits or is_shapeless(value) else tuple(value.shape)
        else:
            found = value._kd_desc.batch if is_node(value) else ()
            fits = is_node(value) and found[: desc.ndim] == desc.batch
        if type(key) is not str or not fits:
            raise not_valid(
                f"entry {key!r} must start with the batch size {shape_text(desc.batch)}, got "
                f"{a_type(value)} of shape {shape_text(found)}"
            )


def _found_device(entries: dict[str, Entry], device: torch.device) -> torch.device | None:
    """Return the device of restored entries, which `torch.load(map_location=)` may have moved."""
    found = {
        value.device if isinstance(value, Tensor) else value._kd_desc.device
        for value in entries.values()
        if isinstance(value, Tensor) or value._kd_desc.device != device
    }
    if not found or found == {device}:
        return device
    return found.pop() if len(found) == 1 else None


def holds_nodes(entries: dict[str, Entry]) -> bool:
    """Return whether an entry is something other than a tensor, or a nested tensor."""
    for value in entries.values():
        if type(value) is not Tensor and (
            isinstance(value, Dense) or not isinstance(value, Tensor) or value.is_nested
        ):
            return True
    return False
