"""The primitives of a container: the few methods on which everything else is written once.

A container kind implements the abstract methods and inherits every other method of the library.
The primitives have an underscore but are public for authors of containers: `docs/extending`
documents them, and `kd_core.testing.ContainerContract` tests an implementation.

| primitive | meaning |
| --- | --- |
| `_kd_entries` | the entries of this level: a mapping in insertion order |
| `_kd_desc` | the shared descriptor: batch size, device, lock |
| `_kd_set_entry`, `_kd_del_entry` | store one checked entry, remove one |
| `_kd_like` | a container of other entries, of the same kind or plain, as the kind decides |
| `_kd_with_descriptor` | a shallow copy with another batch size, device or lock |
| `_kd_describe` | replace the descriptor in place |
| `_kd_writes` | the in-place writes that store a value in an entry |

Methods written on these alone are here too: `_kd_map_each` (one leaf at a time), `_kd_zip_each` and
`_kd_collect_pair` (the leaves of two containers), `_kd_map_to_parts` (several containers from one),
`_kd_shallow` (a copy that shares tensors), `_kd_hold` (counts the locks of enclosing containers).
Containers that are made of members implement more: see `composite`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeGuard, cast

from torch import Tensor
from torch.compiler import is_compiling

from kd_core._batch.descriptor import LOCKED_BY_USER
from kd_core._errors import InvalidValue, KdError, Locked, locked, shape_text, wrong_type
from kd_core._keys import format_key, path_of
from kd_core._leaves.loops import (
    collect,
    collect_pairs,
    entries_of,
    has_entry,
    kinds_of,
    map_each,
    map_to_parts,
    missing_key,
    name_of_leaf,
    rebuild,
    walk_error,
    zip_each,
)
from kd_core._leaves.writes import writable_source
from kd_core._nodes import registry
from kd_core._nodes.entry import Node, encodes, is_data, is_unbatched
from kd_core._protocol.validation import as_entry, refuse_cycle

if TYPE_CHECKING:
    from typing import Self, TypeVar

    from kd_core._batch.descriptor import Descriptor
    from kd_core._batch.plans import Plan
    from kd_core._leaves.writes import Write
    from kd_core._nodes.entry import Entry, Memo, Node, PartsMemo
    from kd_core._types import Batch, BatchFn, LeafFn, PartsFn

    W = TypeVar("W", bound="AbstractContainer")


class AbstractContainer(Node):
    """The base class of every container: the primitives, and the methods written on them alone."""

    __slots__ = ()

    _kd_scope: object
    """How the operation that made the container is undone; see `kd_core._ops.scopes.undoing`."""

    _kd_tensor_class: ClassVar[type | None] = None
    """The class whose fields are attributes: of an instance, or of the members of a lazy stack."""

    _kd_engine: ClassVar[type]
    """The class whose methods kd calls: `td._engine.clone(td)`.

    It is the class of the container, except for classes with fields, whose authors may give a field
    or a method the name of a method of kd: it is the class of kd that they derive from.
    """

    _kd_owns_leaves: ClassVar[bool] = True
    """Whether the container stores the tensors of `_kd_entries` itself; a `Composite` does not."""

    _kd_nested: bool = True
    """Whether an entry may be other than a plain tensor; `False` enables fast paths."""

    @property
    @abstractmethod
    def _kd_entries(self) -> Mapping[str, Entry]:
        """The entries of this level, in insertion order."""

    @property
    @abstractmethod
    def _kd_desc(self) -> Descriptor:
        """The shared descriptor."""

    @abstractmethod
    def _kd_describe(self, desc: Descriptor) -> None:
        """Replace the descriptor; the caller has checked the entries."""

    @abstractmethod
    def _kd_set_entry(self, key: str, value: Entry) -> None:
        """Store a checked entry; the caller has checked the lock."""

    @abstractmethod
    def _kd_del_entry(self, key: str) -> None:
        """Remove an existing entry; the caller has checked the lock."""

    @abstractmethod
    def _kd_like(self, entries: dict[str, Entry], desc: Descriptor) -> Self:
        """Return a container of these checked entries, which takes ownership of the dict."""

    @abstractmethod
    def _kd_with_descriptor(self, desc: Descriptor) -> Self:
        """Return a shallow copy with another descriptor; raise if an entry does not fit."""

    def _kd_keeps(self, key: str) -> bool:
        """Return whether an entry cannot be removed, only replaced where it is: a field."""
        return False

    def _kd_unset(self) -> Sequence[str]:
        """Return the keys without an entry that read as `None`: fields."""
        return ()

    @classmethod
    def _kd_of_other_keys(cls) -> type[Self]:
        """Return the class of what is built of positions or listed keys, not of named values."""
        return cls

    def _kd_check_key(self, key: str) -> None:
        """Raise if no entry may be stored under a key: it is not a field."""

    def _kd_writes(self, key: str, value: object, path: tuple[str, ...]) -> list[Write]:
        """Return the checked writes that store a value in the entry at `key`, found at `path`."""
        entry = self._kd_entries[key]
        if encodes(entry):
            return [(*entry._encode(value, path), path)]
        if is_unbatched(entry):
            source = value._tensor if is_unbatched(value) else value
            return [(entry._tensor, writable_source(path, entry._tensor, source), path)]
        return [(cast(Tensor, entry), writable_source(path, entry, value), path)]

    def _kd_item(self) -> object:
        return self

    def _kd_as_entry(self, key: str, value: object, path: tuple[str, ...] = ()) -> Entry:
        """Check and convert a value for this container; messages name its path."""
        entry = as_entry(key, value, self._kd_desc, path)
        if not isinstance(entry, Tensor):
            refuse_cycle(key, entry, cast("Node", self), path)
        return entry

    def _kd_put(self, key: str, value: object) -> None:
        """Check a value and store it: `td[key] = value`."""
        if self._kd_desc.frozen:
            self._kd_check_unlocked(f"set {format_key(key)}")
        self._kd_set_entry(key, self._kd_as_entry(key, value))

    def _kd_check_unlocked(self, action: str) -> None:
        desc = self._kd_desc
        if desc.frozen:
            raise locked(action, desc.locked_by)

    def _kd_read(self, path: tuple[str, ...]) -> Entry:
        """Return the entry at a path; raise the error that names the missing part."""
        node: Entry = cast("Entry", self)
        for depth, part in enumerate(path):
            entries = None if isinstance(node, Tensor) else entries_of(node)
            if entries is None:
                raise walk_error(path, depth, node)
            child = entries.get(part)
            if child is None:
                raise missing_key(path, depth, entries, self._kd_entries)
            node = child
        return node

    def _kd_store(self, path: tuple[str, ...], value: object) -> None:
        """Store a value at a path and create missing containers; nothing changes if it fails."""
        level, depth = lowest_level(self, path)
        desc = level._kd_desc
        if desc.frozen:
            level._kd_check_unlocked(f"set {format_key(path)}")
        if depth == len(path) - 1:
            level._kd_set_entry(path[-1], level._kd_as_entry(path[-1], value, path[:-1]))
            return
        entry = as_entry(path[-1], value, desc, path[:-1])
        for part in reversed(path[depth + 1 :]):
            entry = registry.make_dense({part: entry}, desc)
        refuse_cycle(path[depth], cast("Node", entry), cast("Node", level), path[:depth])
        level._kd_set_entry(path[depth], entry)

    def _kd_map_each(self, fn: LeafFn, batch: BatchFn | None = None, memo: Memo = None) -> Self:
        """Apply `fn` to one leaf at a time.

        Args:
            fn: a function from a leaf to the new leaf.
            batch: a function from a batch shape to the new one, for every level. `None`: `fn` does
                not depend on the batch, so members of a stack may be mapped one by one.
            memo: a descriptor and its replacement, reused by children that share the descriptor.
        """
        desc = self._kd_desc
        if memo is not None and memo[0] is desc:
            new = memo[1]
        elif batch is None:
            new = desc.unlocked()
        else:
            new = desc.with_batch(batch(desc.batch))
        return self._kd_like(map_each(self._kd_entries, fn, batch, (desc, new)), new)

    def _kd_map_to_parts(
        self, fn: PartsFn, batches: Sequence[BatchFn], memo: PartsMemo = None
    ) -> Sequence[Self]:
        """Create several containers from the parts into which `fn` divides each leaf.

        Args:
            fn: a function from a leaf to as many parts as there are `batches`.
            batches: for each part, a function from a batch shape to that of the part.
            memo: a descriptor and its replacements, reused by children that share the descriptor.
        """
        desc = self._kd_desc
        if memo is None or memo[0] is not desc:
            memo = desc, [desc.with_batch(batch(desc.batch)) for batch in batches]
        parts = map_to_parts(self._kd_entries, fn, batches, memo)
        return [self._kd_like(part, after) for part, after in zip(parts, memo[1], strict=True)]

    def _kd_collect(self, leaves: list[Tensor]) -> None:
        """Append all leaves; those of members do not have the stacked dimension."""
        collect(self._kd_entries, leaves)

    def _kd_rebuild(self, leaves: Iterator[Tensor]) -> Self:
        """Return a container in which new leaves replace those that `_kd_collect` appends."""
        return self._kd_like(rebuild(self._kd_entries, leaves), self._kd_desc.unlocked())

    def _kd_collect_pair(
        self, other: Entry, mine: list[Tensor], theirs: list[Tensor], path: tuple[str, ...]
    ) -> None:
        collect_pairs(self._kd_entries, _entries_to_match(other), mine, theirs, path)

    def _kd_zip_each(
        self, other: Entry, fn: Callable[[Tensor, Tensor], Tensor], path: tuple[str, ...] = ()
    ) -> Self:
        """Apply `fn` to the leaves of two containers, one pair of stacked leaves at a time."""
        entries = zip_each(self._kd_entries, _entries_to_match(other), fn, path)
        return self._kd_like(entries, self._kd_desc.unlocked())

    def _kd_shallow(self) -> Self:
        """Return an unlocked copy of all levels that shares the tensors."""
        return self._kd_map_each(_same)

    def _kd_hold(self, count: int) -> None:
        desc = self._kd_desc
        self._kd_describe(desc.with_lock(desc.lock, desc.held + count))
        self._kd_hold_below(count)

    def _kd_hold_below(self, count: int) -> None:
        """Add `count` to the number of enclosing locks of all nested containers."""
        for node in self._kd_below():
            node._kd_hold(count)

    def _kd_below(self) -> Sequence[Node]:
        if not self._kd_nested:
            return ()
        return [value for value in self._kd_entries.values() if not isinstance(value, Tensor)]


def _entries_to_match(other: Entry) -> Mapping[str, Entry]:
    if isinstance(other, AbstractContainer):
        return other._kd_entries
    raise wrong_type("the other operand", "a container", other)


def map_by(how: Plan, container: W) -> W:
    """Apply a plan for the batch size of a container to it."""
    leaf, batch, inner = how
    desc = container._kd_desc
    return container._kd_map_each(leaf, inner, (desc, desc.with_batch(batch)))


def same_batch(batch: Batch) -> Batch:
    """Return a batch shape unchanged: for functions that move rows but keep the shape."""
    return batch


def engine(td: W) -> type[W]:
    """Return the class whose methods kd calls for a container: `engine(td).view(td, 3)`.

    See `_kd_engine`. Where the type of a container has that attribute it is read directly.
    """
    return td._kd_engine


def is_container(value: object, concern: W) -> TypeGuard[W]:
    """Return whether a value is a container, which has the methods of the concern that asks.

    It inherits from no concern when programs run: see `kd_core._base`.
    """
    return isinstance(value, AbstractContainer)


def level_at(container: AbstractContainer, path: tuple[str, ...]) -> AbstractContainer:
    """Return the container at a path; an empty path is the container itself."""
    node = container._kd_read(path) if path else container
    if not isinstance(node, AbstractContainer):
        raise walk_error((*path, "..."), len(path), node)
    return node


def lock(container: W, reason: str = LOCKED_BY_USER) -> W:
    """Lock a container, and all below it; return it. Messages name the reason."""
    desc = container._kd_desc
    if desc.lock is None:  # as `relock`, inlined: "lock" in the benchmarks
        container._kd_describe(desc.with_lock(reason, desc.held))
        container._kd_hold_below(1)
    return container


def locked_as(container: AbstractContainer, result: W) -> W:
    """Lock what was computed from a container, or is a view of it, as the container is locked."""
    return lock(result) if container._kd_desc.frozen and result is not container else result


def relock(container: W, reason: str | None) -> W:
    """Restore the lock that a container had: its reason, or `None`; return the container."""
    desc = container._kd_desc
    if desc.lock != reason:
        container._kd_describe(desc.with_lock(reason, desc.held))
        if desc.lock is None or reason is None:
            container._kd_hold_below(-1 if reason is None else 1)
    return container


def unlock(container: W) -> W:
    """Undo the lock of a user; return the container.

    Raises:
        Locked: if an enclosing container is locked.
    """
    desc = container._kd_desc
    check_not_held(desc)
    if desc.lock is not None:  # as above
        container._kd_describe(desc._unlocked)
        container._kd_hold_below(-1)
    return container


def check_not_held(desc: Descriptor) -> None:
    """Raise if an enclosing container is locked, so that a part of it cannot be unlocked."""
    if desc.held:
        raise Locked(
            "cannot unlock a container that is locked with the one that encloses it. Unlock "
            "the outer one, or use `clone(recurse=False)`, which is not locked."
        )


def writes_at(container: AbstractContainer, path: tuple[str, ...], value: object) -> list[Write]:
    """Return the checked writes that store a value in the entry at a path, which must exist."""
    check_has(container, path)
    level = level_at(container, path[:-1])
    if isinstance(value, (AbstractContainer, Mapping)):
        entry = level._kd_entries[path[-1]]
        if isinstance(entry, AbstractContainer):
            return _writes_below(container, path, value)
    return level._kd_writes(path[-1], value, path)


def _writes_below(
    container: AbstractContainer,
    path: tuple[str, ...],
    value: AbstractContainer | Mapping[str, object],
) -> list[Write]:
    """Return the writes of all entries of a container into the one at a path."""
    writes: list[Write] = []
    items = value._kd_entries if isinstance(value, AbstractContainer) else value
    for key, each in items.items():
        below = (*path, *path_of(key))
        entry = container._kd_read(below)
        if not (is_data(entry) and entry._agrees(each)):
            writes += writes_at(container, below, each)
    return writes


def lowest_level(
    container: AbstractContainer, path: tuple[str, ...]
) -> tuple[AbstractContainer, int]:
    """Return the lowest container that is there on the way to an entry, and its depth."""
    level, depth = container, 0
    for part in path[:-1]:
        child = level._kd_entries.get(part)
        if child is None:
            break
        if not isinstance(child, AbstractContainer):
            raise walk_error(path, depth + 1, child)
        level, depth = child, depth + 1
    return level, depth


def check_has(container: AbstractContainer, path: tuple[str, ...]) -> None:
    """Raise `KeyNotFound` if there is no entry at a path; the entry is not read."""
    if not has_entry(container._kd_entries, path):
        container._kd_read(path)


def leaves_of(td: AbstractContainer) -> list[Tensor]:
    """Return all leaves, depth first."""
    leaves: list[Tensor] = []
    td._kd_collect(leaves)
    return leaves


def unbatched_in(td: AbstractContainer, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the paths of the tensors without batch dimensions; `path` is that of the container."""
    found: list[tuple[str, ...]] = []
    if td._kd_nested:
        for key, value in kinds_of(td._kd_entries):
            if isinstance(value, AbstractContainer):
                found += unbatched_in(value, (*path, key))
            elif is_unbatched(value):
                found.append((*path, key))
    return found


def refuse_unbatched(td: AbstractContainer, what: str, path: tuple[str, ...] = ()) -> None:
    """Refuse an operation along rows for a container with tensors without batch dimensions.

    Args:
        td: the container.
        what: what cannot be done with such a tensor, for the message.
        path: the path of the container.

    Raises:
        InvalidValue: if it has one; the message names the entry.
    """
    found = unbatched_in(td, path)
    if found:
        raise InvalidValue(
            f"entry {format_key(found[0])} is an `UnbatchedTensor`, which has no batch dimension "
            f"and cannot be {what}. `exclude` it first, or give it the batch dimensions: "
            "`td[key] = td[key].expand(*td.batch_size, *td[key].shape)`."
        )


def name_in(td: AbstractContainer, leaf: Tensor) -> str:
    """Return the name of the entry that holds a leaf, for messages."""
    path = name_of_leaf(td._kd_entries, leaf)
    return "a leaf" if path is None else f"entry {format_key(path)}"


def note_entry(
    error: Exception, td: AbstractContainer, fn: Callable[..., object], *beside: Sequence[Tensor]
) -> None:
    """Add a note to an error of torch: the first entry for which a function raises.

    The function is called again for one leaf after the other; `beside` are further arguments.
    """
    if isinstance(error, KdError) or is_compiling():
        return
    for row in zip(leaves_of(td), *beside, strict=True):
        try:
            fn(*row)
        except Exception:
            leaf = row[0]
            where, shape = name_in(td, leaf), shape_text(leaf.shape)
            error.add_note(f"This is {where} of shape {shape} and {leaf.dtype}.")
            return


def _same(leaf: Tensor) -> Tensor:
    return leaf
