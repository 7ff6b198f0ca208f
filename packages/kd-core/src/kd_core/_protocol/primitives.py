"""The primitives of a container: the few methods on which everything else is written once.

A container kind supplies what is abstract here and inherits every method of the library. The
primitives are private by their underscore and public by contract: `docs/extending` documents them
for authors of containers, and `kd_core.testing.ContainerContract` proves an implementation.

| primitive | meaning |
| --- | --- |
| `_entries` | this level, a mapping of key to entry, in insertion order |
| `_desc` | the shared descriptor: batch size, device, lock |
| `_set_entry`, `_del_entry` | write one checked entry, remove one |
| `_like` | the container of other entries: same kind, or a plain one where the kind says so |
| `_with_descriptor` | a shallow copy under another batch size, device or lock |
| `_describe` | take another descriptor, in place |
| `_writes` | the in-place writes that store a value in an entry |

What follows from these alone stands here too: `_map_each` (one leaf at a time), `_zip_each` and
`_collect_pair` (the leaves of two containers), `_deal` (several containers of one), `_shallow` (a
copy that shares tensors), `_hold` (locks of enclosing ones). What a container of members supplies
beside them stands in `composite`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar, cast

from torch import Tensor

from kd_core import _registry
from kd_core._errors import InvalidArgument, locked
from kd_core._keys import format_key
from kd_core._leaves.loops import (
    collect,
    collect_pairs,
    deal,
    entries_of,
    has_entry,
    map_each,
    missing_key,
    rebuild,
    walk_error,
    zip_each,
)
from kd_core._leaves.writes import writable_source
from kd_core._protocol.validation import admit, refuse_cycle

if TYPE_CHECKING:
    from typing import Self

    from kd_core._batch.caching import Plan
    from kd_core._batch.descriptor import Descriptor
    from kd_core._entry import DealMemo, Entry, Memo, Node
    from kd_core._leaves.writes import Write
    from kd_core._types import Batch, BatchFn, DealFn, LeafFn


W = TypeVar("W", bound="AbstractContainer")


class AbstractContainer:
    """The primitives of a container, and what follows directly from them."""

    __slots__ = ()

    _owns_leaves: ClassVar[bool] = True
    """Whether the tensors of `_entries` are the container's own: not so for a `Composite`."""

    @property
    @abstractmethod
    def _entries(self) -> Mapping[str, Entry]:
        """This level: key to entry, in insertion order."""

    @property
    @abstractmethod
    def _desc(self) -> Descriptor:
        """The shared descriptor."""

    @abstractmethod
    def _describe(self, desc: Descriptor) -> None:
        """Take another descriptor; entries were checked by the caller."""

    @abstractmethod
    def _set_entry(self, key: str, value: Entry) -> None:
        """Store a checked entry; locks were checked by the caller."""

    @abstractmethod
    def _del_entry(self, key: str) -> None:
        """Remove an entry that is there."""

    @abstractmethod
    def _like(self, entries: dict[str, Entry], desc: Descriptor) -> Self:
        """A container that holds these checked entries (the dict is handed over)."""

    @abstractmethod
    def _with_descriptor(self, desc: Descriptor) -> Self:
        """A shallow copy with another descriptor; entries that do not fit are an error."""

    def _writes(self, key: str, value: object, path: tuple[str, ...]) -> list[Write]:
        """Return the checked writes that store a value in the entry at `key`, found at `path`."""
        entry = self._entries[key]
        return [(cast(Tensor, entry), writable_source(path, entry, value), path)]

    def _item(self) -> object:
        return self

    def _admit(self, key: str, value: object, path: tuple[str, ...] = ()) -> Entry:
        """Check and convert a value for this container, which messages find at a path."""
        entry = admit(key, value, self._desc, path)
        if entry.__class__ is not Tensor and not isinstance(entry, Tensor):
            refuse_cycle(key, entry, cast("Node", self), path)
        return entry

    def _put(self, key: str, value: object) -> None:
        """Check a value and store it: `td[key] = value`."""
        if self._desc.frozen:
            self._check_unlocked(f"set {format_key(key)}")
        self._set_entry(key, self._admit(key, value))

    def _check_unlocked(self, action: str) -> None:
        desc = self._desc
        if desc.frozen:
            raise locked(action, desc.locked_by)

    def _read(self, path: tuple[str, ...]) -> Entry:
        """The entry at a path, or the error that tells where the path went wrong."""
        node: Entry = cast("Entry", self)
        for depth, part in enumerate(path):
            entries = None if isinstance(node, Tensor) else entries_of(node)
            if entries is None:
                raise walk_error(path, depth, node)
            child = entries.get(part)
            if child is None:
                raise missing_key(path, depth, entries, self._entries)
            node = child
        return node

    def _store(self, path: tuple[str, ...], value: object) -> None:
        """Store a value at a path, making containers on the way; nothing changes if it fails."""
        level: AbstractContainer = self
        depth = 0
        for part in path[:-1]:
            child = level._entries.get(part)
            if child is None:
                break
            if not isinstance(child, AbstractContainer):
                raise walk_error(path, depth + 1, child)
            level = child
            depth += 1
        desc = level._desc
        if desc.frozen:
            level._check_unlocked(f"set {format_key(path)}")
        if depth == len(path) - 1:
            level._set_entry(path[-1], level._admit(path[-1], value, path[:-1]))
            return
        entry = admit(path[-1], value, desc, path[:-1])
        for part in reversed(path[depth + 1 :]):
            entry = _registry.make_dense({part: entry}, desc)
        refuse_cycle(path[depth], cast("Node", entry), cast("Node", level), path[:depth])
        level._set_entry(path[depth], entry)

    def _map_each(self, fn: LeafFn, batch: BatchFn | None = None, memo: Memo = None) -> Self:
        """Apply `fn` to one leaf at a time.

        Args:
            fn: from a leaf to a leaf.
            batch: from a batch shape to the new one, at every level. `None`: `fn` asks for no
                batch, so that members of a stack may be mapped one by one.
            memo: a descriptor and its successor, so that children which share it do not ask again.
        """
        desc = self._desc
        if memo is not None and memo[0] is desc:
            new = memo[1]
        elif batch is None:
            new = desc.unlocked()
        else:
            new = desc.with_batch(batch(desc.batch))
        return self._like(map_each(self._entries, fn, batch, (desc, new)), new)

    def _deal(
        self, fn: DealFn, batches: Sequence[BatchFn], memo: DealMemo = None
    ) -> Sequence[Self]:
        """Make several containers: `fn` gives the part of a leaf that goes to each.

        Args:
            fn: from a leaf to as many parts as there are `batches`.
            batches: from a batch shape to that of each part, at every level.
            memo: a descriptor and its successors, for children which share it.
        """
        desc = self._desc
        if memo is None or memo[0] is not desc:
            memo = desc, [desc.with_batch(batch(desc.batch)) for batch in batches]
        parts = deal(self._entries, fn, batches, memo)
        return [self._like(part, after) for part, after in zip(parts, memo[1], strict=True)]

    def _collect(self, leaves: list[Tensor]) -> None:
        """Append the tensors that hold the values; those of members lack the stacked dimension."""
        collect(self._entries, leaves)

    def _rebuild(self, leaves: Iterator[Tensor]) -> Self:
        """Put as many new leaves of the same batch in the places of what `_collect` appended."""
        return self._like(rebuild(self._entries, leaves), self._desc.unlocked())

    def _collect_pair(
        self, other: Entry, mine: list[Tensor], theirs: list[Tensor], path: tuple[str, ...]
    ) -> None:
        collect_pairs(self._entries, _entries_to_match(other), mine, theirs, path)

    def _zip_each(
        self, other: Entry, fn: Callable[[Tensor, Tensor], Tensor], path: tuple[str, ...] = ()
    ) -> Self:
        """Apply `fn` to the leaves of two containers, one pair at a time, whole batches each."""
        entries = zip_each(self._entries, _entries_to_match(other), fn, path)
        return self._like(entries, self._desc.unlocked())

    def _shallow(self) -> Self:
        """A copy of all levels, not locked, that shares the tensors."""
        return self._map_each(_same)

    def _hold(self, count: int) -> None:
        desc = self._desc
        self._describe(desc.with_lock(desc.lock, desc.held + count))
        self._hold_below(count)

    def _hold_below(self, count: int) -> None:
        """Count `count` more locked containers around all that this one encloses."""
        for node in self._below():
            node._hold(count)

    def _below(self) -> Sequence[Node]:
        return [value for value in self._entries.values() if not isinstance(value, Tensor)]


def _entries_to_match(other: Entry) -> Mapping[str, Entry]:
    if isinstance(other, AbstractContainer):
        return other._entries
    raise InvalidArgument(
        f"expected a container to match with, but a `{type(other).__name__}` came."
    )


def map_by(how: Plan, container: W) -> W:
    """Do what a plan for the batch size of a container says."""
    leaf, batch, inner = how
    desc = container._desc
    return container._map_each(leaf, inner, (desc, desc.with_batch(batch)))


def whole(batch: Batch) -> Batch:
    """Return a batch shape as it is: for `_map_each` of what moves rows, but keeps their number."""
    return batch


def level_at(container: AbstractContainer, path: tuple[str, ...]) -> AbstractContainer:
    """The container at a path (of length zero: this one)."""
    node = container._read(path) if path else container
    if not isinstance(node, AbstractContainer):
        raise walk_error((*path, "..."), len(path), node)
    return node


def writes_at(container: AbstractContainer, path: tuple[str, ...], value: object) -> list[Write]:
    """Return the checked writes that store a value in the entry at a path, which must exist."""
    check_has(container, path)
    return level_at(container, path[:-1])._writes(path[-1], value, path)


def check_has(container: AbstractContainer, path: tuple[str, ...]) -> None:
    """Raise `KeyNotFound` where there is no entry at a path; the entry is not read."""
    if not has_entry(container._entries, path):
        container._read(path)


def _same(leaf: Tensor) -> Tensor:
    return leaf
