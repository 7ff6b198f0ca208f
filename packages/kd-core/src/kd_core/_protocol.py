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
Containers that are made of members implement more: see `Composite`.
"""

from __future__ import annotations

import difflib
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias, TypeGuard, cast
from weakref import ref

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.utils.checkpoint import checkpoint

from kd_core import _registry as registry
from kd_core._descriptor import LOCKED_AS_PART, LOCKED_BY_USER
from kd_core._errors import (
    InvalidArgument,
    InvalidValue,
    KdError,
    KeySetMismatch,
    Locked,
    ShapeMismatch,
    UnsupportedFunction,
    listed,
    locked,
    shape_text,
    wrong_type,
)
from kd_core._keys import format_key, nearest_key, path_of
from kd_core._leaves.loops import (
    collect,
    collect_pairs,
    entries_of,
    find_entry,
    has_entry,
    kinds_by_key,
    kinds_of,
    map_each,
    map_to_parts,
    missing_key,
    name_of_leaf,
    rebuild,
    refuse_leaf,
    walk_error,
    zip_each,
)
from kd_core._leaves.writes import not_written, writable_source
from kd_core._nodes import Node, Values, encodes, is_data, is_node, is_unbatched, tensor_of
from kd_core._shapes import names_of, with_names
from kd_core._torch_private import (
    HigherOrderOperator,
    assume_constant_result,
    traced_as,
    without_torch_function,
)
from kd_core._types import NO_DEFAULT, OR_NONE
from kd_core._validation import as_entry, refuse_cycle

if TYPE_CHECKING:
    from typing import Protocol, Self, TypeVar

    from torch.utils.data import Dataset

    from kd_core._descriptor import Descriptor
    from kd_core._leaves.writes import Write
    from kd_core._nodes import Entry, Holders, Memo, PartsMemo
    from kd_core._shapes import Names, Plan
    from kd_core._types import Batch, BatchFn, DeviceLike, Index, LeafFn, NestedKey, PartsFn

    W = TypeVar("W", bound="AbstractContainer")

    class Operations(Protocol):
        """What modules below the concerns, and concerns of each other, call of `_kd_engine`.

        A module that cannot import a concern reaches its method through the class of a container.
        """

        @staticmethod
        def auto_batch_size_(td: AbstractContainer, batch_dims: int | None) -> object: ...
        @staticmethod
        def contiguous(td: W) -> W: ...
        @staticmethod
        def densify(td: W, layout: torch.layout) -> W: ...
        @staticmethod
        def exclude(td: W, *keys: NestedKey) -> W: ...
        @staticmethod
        def expand(td: W, shape: Sequence[int]) -> W: ...
        @staticmethod
        def filter_non_tensor_data(td: W) -> W: ...
        @staticmethod
        def index_select(td: W, dim: int, index: Tensor) -> W: ...
        @staticmethod
        def keys(
            td: AbstractContainer,
            include_nested: bool,
            leaves_only: bool,
            is_leaf: Callable[[type], bool] | None = None,
        ) -> Iterable[NestedKey]: ...
        @staticmethod
        def load_state_dict(td: W, state_dict: object, strict: bool) -> W: ...
        @staticmethod
        def lock_(td: W) -> W: ...
        @staticmethod
        def maybe_dense_stack(input: Sequence[W]) -> W: ...
        @staticmethod
        def narrow(td: W, dim: int, start: int, length: int) -> W: ...
        @staticmethod
        def pad(td: W, pad_size: Sequence[int], value: float | None = None) -> W: ...
        @staticmethod
        def repeat(td: W, repeats: Sequence[int]) -> W: ...
        @staticmethod
        def repeat_interleave(td: W, repeats: int | Tensor, dim: int) -> W: ...
        @staticmethod
        def select(td: W, *keys: NestedKey) -> W: ...
        @staticmethod
        def split(td: W, sizes: int, dim: int) -> Sequence[W]: ...
        @staticmethod
        def squeeze(td: W, dim: int) -> W: ...
        @staticmethod
        def stack(input: Sequence[W]) -> W: ...
        @staticmethod
        def to(td: W, device: DeviceLike | None, *, non_blocking: bool = False) -> W: ...
        @staticmethod
        def to_lazystack(td: W, dim: int) -> W: ...
        @staticmethod
        def unbind(td: W, dim: int) -> Sequence[W]: ...
        @staticmethod
        def unsqueeze(td: W, dim: int) -> W: ...
        @staticmethod
        def update(td: W, source: object, *, inplace: bool = False) -> W: ...
        @staticmethod
        def update_(td: W, source: object) -> W: ...
        @staticmethod
        def __getitem__(td: W, index: Index | str) -> W: ...
        @staticmethod
        def _kd_cat_once(parts: Sequence[W]) -> W: ...
        @staticmethod
        def _kd_dense_entry(td: AbstractContainer, key: str, layout: torch.layout) -> Entry: ...
        @staticmethod
        def _kd_levels(td: AbstractContainer, keep_vars: bool) -> dict[str, object]: ...
        @staticmethod
        def _kd_check_state(td: AbstractContainer, state: object) -> None: ...


class AbstractContainer(Node):
    """The base class of every container: the primitives, and the methods written on them alone."""

    __slots__ = ()

    _kd_scope: object
    """How the operation that made the container is undone; see `kd_core._ops.scopes`."""

    _kd_tensor_class: ClassVar[type | None] = None
    """The class whose fields are attributes: of an instance, or of the members of a lazy stack."""

    _kd_engine: ClassVar[type[Operations]]
    """The class whose methods kd calls: `td._kd_engine.clone(td)`.

    It is the class of the container, except for classes with fields, whose authors may give a field
    or a method the name of a method of kd: it is the class of kd that they derive from.
    """

    _kd_owns_leaves: ClassVar[bool] = True
    """Whether the container stores the tensors of `_kd_entries` itself; a `Composite` does not."""
    _kd_is_linked: ClassVar[bool] = False
    """Whether writes to an instance go elsewhere, too: a pytree rebuilds it as a `TensorDict`."""

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

    def _kd_written(self) -> Self:
        """Write what arithmetic wrote in place elsewhere, too: asked where `_kd_is_linked`."""
        return self

    def _kd_unset(self) -> Sequence[str]:
        """Return the keys without an entry that read as `None`: fields."""
        return ()

    def _kd_is_cleared(self, key: str) -> bool:
        """Return whether `None` at a key removes its entry: as in a field, if it may be `None`."""
        return False

    @classmethod
    def _kd_of_other_keys(cls) -> type[Self]:
        """Return the class of what is built of positions or listed keys, not of named values."""
        return cls

    def _kd_check_key(self, key: str) -> None:
        """Raise if no entry may be stored under a key: it is not a field."""

    def _kd_writes(self, key: str, value: object, path: tuple[str, ...]) -> list[Write]:
        """Return the checked writes that store a value in the entry at `key`, found at `path`."""
        entry = self._kd_entries[key]
        if isinstance(entry, Tensor):
            return [(entry, writable_source(path, entry, value), path)]
        if encodes(entry):
            return [(*entry._encode(value, path), path)]
        if is_unbatched(entry):
            source = value._tensor if is_unbatched(value) else value
            return [(entry._tensor, writable_source(path, entry._tensor, source), path)]
        raise not_written(path, entry, value)

    def _kd_item(self) -> object:
        return self

    def _kd_as_entry(self, key: str, value: object, path: tuple[str, ...] = ()) -> Entry:
        """Check and convert a value for this container; messages name its path."""
        return as_entry(key, value, self._kd_desc, path, self)

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
        node: Entry = self
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
        holder: AbstractContainer = registry.make_dense({path[-1]: entry}, desc)
        made = holder
        for part in reversed(path[depth + 1 : -1]):
            made = registry.make_dense({part: made}, desc)
        refuse_cycle(path[depth], made, level, path[:depth])
        level._kd_set_entry(path[depth], made)
        if not isinstance(entry, Tensor) and not desc.named:
            take_names(holder, entry)

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

    def _kd_hold(self, count: int, by: Holders = ()) -> bool:
        desc = self._kd_desc
        self._kd_describe(desc.with_lock(desc.lock, desc.held + count))
        note_holder(self, desc, by)
        return self._kd_hold_below(count) or self._kd_desc.frozen

    def _kd_hold_below(self, count: int) -> bool:
        """Add `count` to the number of enclosing locks of all nested containers.

        Returns:
            Whether one of them is locked after that.
        """
        found = False
        by = _reference(self) if count > 0 and not is_dynamo_compiling() else ()
        for node in self._kd_below():
            found |= node._kd_hold(count, by)
        return found

    def _kd_below(self) -> Sequence[Node]:
        if not self._kd_nested:
            return ()
        return [value for value in self._kd_entries.values() if not isinstance(value, Tensor)]


if TYPE_CHECKING:

    class Addable(AbstractContainer, Dataset[Any]):
        """A container as a dataset, so that `DataLoader(td)` is allowed; `+` adds in both."""

        __slots__ = ()

else:
    Addable = AbstractContainer


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
    return td._kd_engine  # type: ignore[return-value]  # and not `cast`, for speed


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


def is_frozen(container: AbstractContainer) -> bool:
    """Return whether the structure of a container may not change.

    That of a stack may not where all of its members are locked, each by itself.
    """
    return container._kd_desc.frozen or (
        not container._kd_owns_leaves
        and isinstance(container, Composite)
        and all(map(is_frozen, container._members))
    )


def locked_as(container: AbstractContainer, result: W) -> W:
    """Lock what was computed from a container, or is a view of it, as the container is locked."""
    return lock(result) if result is not container and is_frozen(container) else result


def locked_alone(container: Node, result: W) -> W:
    """Lock a view of a container if the container is locked by itself, not only in another."""
    return lock(result) if container._kd_desc.lock is not None else result


def relock(container: W, reason: str | None) -> W:
    """Restore the lock that a container had: its reason, or `None`; return the container."""
    desc = container._kd_desc
    if desc.lock != reason:
        container._kd_describe(desc.with_lock(reason, desc.held))
        if desc.lock is None or reason is None:
            container._kd_hold_below(-1 if reason is None else 1)
    return container


def free_parts(parts: Iterable[object]) -> None:
    """Take from restored parts of a container the lock that they would have without it."""
    for part in parts:
        if isinstance(part, AbstractContainer) and part._kd_desc.lock == LOCKED_AS_PART:
            relock(part, None)


def unlock(container: W) -> W:
    """Undo the lock of a user; return the container.

    Raises:
        Locked: if an enclosing container is locked.
    """
    desc = container._kd_desc
    check_not_held(container)
    if desc.lock is not None:  # as above
        container._kd_describe(desc._unlocked)
        container._kd_hold_below(-1)
    return container


def _reference(holder: AbstractContainer) -> Holders:
    try:
        return (ref(holder),)
    except TypeError:  # a kind that cannot be referred to weakly
        return ()


def note_holder(node: Node, before: Descriptor, by: Holders) -> None:
    """Note weakly which container, itself locked, encloses a node."""
    if by:
        known = getattr(node, "_kd_holders", ()) if before.held else ()
        if not any(each is by[0] for each in known):
            with suppress(AttributeError):  # a kind that has no place for it
                node._kd_holders = (*known, *by)  # type: ignore[misc]  # the slot is that of the kind


def _traced_unlock_all(container: AbstractContainer) -> None:
    unlock(container)
    for node in container._kd_below():
        if isinstance(node, AbstractContainer) and not node._kd_desc.held:
            _traced_unlock_all(node)


@traced_as(_traced_unlock_all)
def unlock_all(container: AbstractContainer) -> None:
    """Undo the locks of a container and of all below, or of none.

    Data that is not a tensor stays locked where another locked container has it, too: shallow
    copies share it.

    Raises:
        Locked: if a locked container that still exists encloses one of them.
    """
    levels: dict[int, Node] = {}
    found: list[Node] = [container]
    while found:
        node = found.pop()
        if id(node) not in levels:
            levels[id(node)] = node
            found.extend(node._kd_below())
    check_not_held(container)
    for node in levels.values():
        if not isinstance(node, Values):
            check_not_held(node, levels)
    for node in levels.values():
        if isinstance(node, AbstractContainer):
            if node._kd_desc.frozen:
                node._kd_describe(node._kd_desc.unlocked())
        elif isinstance(node, Values) and node._kd_desc.frozen and not _is_kept(node, levels):
            node._kd_describe(node._kd_desc.unlocked())


def _traced_check_not_held(node: Node, beside: Collection[int] = ()) -> None:
    if node._kd_desc.held:
        raise _is_held()


@traced_as(_traced_check_not_held)
def check_not_held(node: Node, beside: Collection[int] = ()) -> None:
    """Raise if an enclosing container is locked, so that a part of it cannot be unlocked.

    Args:
        node: the part.
        beside: the identities of containers that are unlocked with it.

    Raises:
        Locked: if there is one, and it still exists.
    """
    if _is_kept(node, beside):
        raise _is_held()


def _is_kept(node: Node, beside: Collection[int]) -> bool:
    """Return whether a locked container that still exists encloses a node; see `check_not_held`."""
    if not node._kd_desc.held:
        return False
    holders: Holders = getattr(node, "_kd_holders", ())
    if not holders and not beside:  # a kind that has no place for it, or compiled code locked it
        return True
    for each in holders:
        holder = each()
        if holder is None or id(holder) in beside or not holder._kd_desc.frozen:
            continue
        # A stack makes what it encloses anew.
        if isinstance(holder, Composite) or any(below is node for below in holder._kd_below()):
            return True
    return False


def _is_held() -> Locked:
    return Locked(
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


def remove_entry(container: AbstractContainer, path: tuple[str, ...]) -> None:
    """Remove the entry at a path; from a stack, also one that only some members have.

    Raises:
        KeyNotFound: if there is none.
        Locked: if the container is locked.
    """
    if container._kd_desc.frozen:
        container._kd_check_unlocked(f"remove {format_key(path)}")
    if isinstance(container, Composite) and not has_entry(container._kd_entries, path):
        having = [each for each in container._members if has_entry(each._kd_entries, path)]
        for member in {id(each): each for each in having}.values():
            remove_entry(member, path)
        if having:
            return
    check_has(container, path)
    level = level_at(container, path[:-1])
    level._kd_check_unlocked(f"remove {format_key(path)}")
    level._kd_del_entry(path[-1])


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
            "`td[key] = td.get(key).data.expand(*td.batch_size, *td[key].shape)`."
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


# The base class of containers that are made of members, as lazy stacks are.
#
# An operation that does not need the whole batch runs on each member (`_by_member`), so members
# keep their own keys, shapes, dtypes and storage. An operation that changes the structure changes
# all members or none (`_change_members`). All others read `_kd_entries`, which stacks the members.


class MemberList(list[object]):
    """The entry of each member of a stack, which may differ in shape."""


Side: TypeAlias = "Literal['left', 'right']"


class Reading:
    """How an entry is read whose shapes differ among the members of a stack; see `reading`."""

    __slots__ = ("form", "layout", "padding_side", "padding_value")

    def __init__(
        self,
        form: Literal["list", "padded", "nested"],
        padding_value: float,
        padding_side: Side,
        layout: torch.layout,
    ) -> None:
        self.form, self.layout = form, layout
        self.padding_value, self.padding_side = padding_value, padding_side


class Composite(AbstractContainer):
    """Members stacked along a batch dimension."""

    __slots__ = ()

    _kd_owns_leaves: ClassVar[bool] = False

    _dim: int
    """The batch dimension along which members are stacked."""

    _members: list[AbstractContainer]

    @abstractmethod
    def _of(self, members: Sequence[AbstractContainer], dim: int | None = None) -> Self:
        """Return a container of other members, stacked along another dimension if one is given."""

    @abstractmethod
    def _replace_members(self, members: Sequence[AbstractContainer]) -> None:
        """Take other members, which fit the descriptor that is set next."""

    @abstractmethod
    def _rows_of_operand(self, other: Entry) -> Sequence[Entry]:
        """Return the part of another container that belongs to each member."""

    @abstractmethod
    def _row_writes(self, index: object, value: object, path: tuple[str, ...]) -> list[Write]:
        """Return the checked writes that store a value in the rows at an index."""

    @abstractmethod
    def _read_as(self, path: tuple[str, ...], default: object, how: Reading) -> object:
        """Return an entry whose shapes may differ; `default` where a member lacks it."""

    def _by_member(self, fn: Callable[..., AbstractContainer], *others: object) -> Self:
        """Apply `fn` to each member and its rows of other containers; stack the results."""
        columns = [self._rows_of_operand(cast("Entry", other)) for other in others]
        return self._of([fn(*row) for row in zip(self._members, *columns, strict=True)])

    def _change_members(
        self, action: str, change: Callable[..., object], *columns: Sequence[object]
    ) -> None:
        """Change the structure of each member; if one fails, restore all.

        Args:
            action: the action, for the message of a locked container.
            change: called once for each member, with the member and its item of each column.
            *columns: further arguments of `change`, one item for each member.
        """
        self._kd_check_unlocked(action)
        rows = {id(row[0]): row for row in zip(self._members, *columns, strict=True)}
        with unchanged_on_error(self):
            for row in rows.values():
                change(*row)


def set_names(level: AbstractContainer, names: Names) -> None:
    """Set checked names in a container, and in all below it; a lock does not cover them."""
    desc = level._kd_desc
    redescribe(level, desc.with_batch(with_names(desc.batch, names)))
    if isinstance(level, Composite):
        names = names[: level._dim] + names[level._dim + 1 :]
    elif level._kd_nested:
        for key, entry in list(level._kd_entries.items()):
            if is_data(entry):
                own = entry._kd_desc
                named = own.with_batch(with_names(own.batch, names))
                level._kd_set_entry(key, entry._kd_with_descriptor(named))
    for node in level._kd_below():
        if isinstance(node, AbstractContainer):
            set_names(node, names)


def redescribe(level: AbstractContainer, desc: Descriptor) -> None:
    """Set the batch size and the device of a container, which stays locked if it is."""
    old = level._kd_desc
    level._kd_describe(desc.with_lock(old.lock, old.held) if old.frozen else desc)


def take_names(level: AbstractContainer, value: Node) -> None:
    """Give a container without names those of a container that was stored in it."""
    if isinstance(value, AbstractContainer):
        desc = level._kd_desc
        names = names_of(value._kd_desc.batch[: desc.ndim])
        if any(name is not None for name in names):
            set_names(level, names)


def reading(
    as_list: bool,
    as_padded_tensor: bool,
    as_nested_tensor: bool,
    padding_value: float = 0.0,
    padding_side: Side = "right",
    layout: torch.layout = torch.jagged,
) -> Reading:
    """Return how an entry is read, from the arguments of `get`, of which one is true."""
    if as_list + as_padded_tensor + as_nested_tensor > 1:
        raise InvalidArgument(
            "`as_list`, `as_padded_tensor` and `as_nested_tensor` cannot be combined. Pass one."
        )
    form: Literal["list", "padded", "nested"] = "list" if as_list else "padded"
    return Reading("nested" if as_nested_tensor else form, padding_value, padding_side, layout)


def read_as(
    container: AbstractContainer, path: tuple[str, ...], default: object, how: Reading
) -> object:
    """Return an entry, read as is said if it is in a stack, or `default` where there is none."""
    stack, below = stack_above(container, path)
    if stack is not None:
        return stack._read_as(below, default, how)
    found = find_entry(container._kd_entries, path)
    return default if found is None else found


def absent(container: AbstractContainer, path: tuple[str, ...], default: object) -> object:
    """Return the default of a read; if none is given, `None`, unless it goes on below a tensor.

    A field of a tensor class that is not set is `None`, whatever the default.

    Raises:
        KeyNotFound: if the default is `NO_DEFAULT`.
    """
    if container._kd_tensor_class is not None:
        above = path[:-1]
        level = find_entry(container._kd_entries, above) if above else container
        if isinstance(level, AbstractContainer) and path[-1] in level._kd_unset():
            return None
    if default is NO_DEFAULT:
        return container._kd_read(path)  # raises
    if default is not OR_NONE:
        return default
    refuse_leaf(container._kd_entries, path)
    return None


def holds_entries(container: AbstractContainer) -> bool:
    """Return whether there is an entry; of a stack, in any member: they need not be in all."""
    if isinstance(container, Composite):
        return any(map(holds_entries, container._members))
    return len(container._kd_entries) > 0  # torch 2.10 does not trace `bool` of a dict


def partial_entries(
    levels: Sequence[AbstractContainer], path: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """Yield the paths that are not in all of several containers, at any level and in any stack.

    No entry is read or stacked.
    """
    rows: list[AbstractContainer] = []
    for level in levels:
        rows += _members_below(level)
    found = [kinds_by_key(row._kd_entries) for row in rows]
    first, *others = found
    common: Iterable[str] = first.keys()
    if any(other.keys() != common for other in others):
        common = {key: None for key in first if all(key in other for other in others)}
        every = {key: None for each in found for key in each}
        yield from [(*path, key) for key in every if key not in common]
    for key in common:
        if isinstance(first[key], AbstractContainer):
            column = [each[key] for each in found]
            below = [node for node in column if isinstance(node, AbstractContainer)]
            yield from partial_entries(below, (*path, key))


def has_partial_entries(container: AbstractContainer) -> bool:
    """Return whether some members of a stack hold an entry that others do not."""
    return next(partial_entries([container]), None) is not None


def refuse_partial(container: AbstractContainer, purpose: str) -> None:
    """Refuse a stack with entries that only some members hold, where they would be lost.

    Raises:
        KeySetMismatch: if there is such an entry.
    """
    lost = [format_key(path).strip("`") for path in partial_entries([container])]
    if lost:
        those, it = ("them", "they are") if len(lost) > 1 else ("it", "it is")
        raise KeySetMismatch(
            f"`{purpose}` joins the entries that all members of a lazy stack hold, and {it} not in "
            f"all of them: {listed(lost)}. Leave {those} out with `exclude`, set {those} in the "
            "other members, or keep the rows apart: `save`, `to_buffers`, `tolist` and "
            "`to_json(lines=True)` do."
        )


def _members_below(level: AbstractContainer) -> list[AbstractContainer]:
    """Return the containers that a stack of stacks is made of; any other container, itself."""
    if not isinstance(level, Composite):
        return [level]
    return [row for member in level._members for row in _members_below(member)]


def stack_above(
    container: AbstractContainer, path: tuple[str, ...]
) -> tuple[Composite | None, tuple[str, ...]]:
    """Return the first stack on the way to an entry, and the path of the entry in it."""
    level: object = container
    for depth, part in enumerate(path):
        if isinstance(level, Composite):
            return level, path[depth:]
        if not isinstance(level, AbstractContainer):
            break
        level = level._kd_entries.get(part)
    return None, ()


def rows_or_stacked(stack: Composite, key: str) -> object:
    """Return an entry of a stack; one that cannot be stacked as the list of its rows."""
    try:
        return stack._kd_entries[key]
    except ShapeMismatch:
        return MemberList(
            rows_or_stacked(member, key)
            if isinstance(member, Composite)
            else member._kd_entries[key]
            for member in stack._members
        )


def are_alike(one: Composite, other: Composite) -> bool:
    """Return whether two stacks have as many members along the same dimension."""
    return one._dim == other._dim and len(one._members) == len(other._members)


def takes(fn: LeafFn, index: object, batch: Batch = ()) -> LeafFn:
    """Record on a leaf function its index of the batch, so that a stack can select members.

    An index that may hold `...` is recorded with the batch size that it indexes.
    """
    if type(fn) is not itemgetter and not is_dynamo_compiling():
        fn.__dict__["index"] = index, batch
    return fn


def index_of(fn: LeafFn) -> tuple[object, Batch] | None:
    """Return what `takes` recorded on a leaf function: an index and a batch size."""
    if type(fn) is itemgetter:
        return fn.__reduce__()[1][0], ()
    return getattr(fn, "index", None)


@contextmanager
def unchanged_on_error(root: AbstractContainer) -> Iterator[None]:
    """Restore the entries of a container, and of all below it, if the block raises."""
    saved = [(level, dict(level._kd_entries)) for level in _levels(root)]
    try:
        yield
    except BaseException:
        for level, entries in saved:
            _restore(level, entries)
        raise


def _levels(level: AbstractContainer) -> Iterator[AbstractContainer]:
    """Iterate over all containers that hold entries of their own."""
    if not isinstance(level, Composite):
        yield level
    for node in level._kd_below():
        if isinstance(node, AbstractContainer):
            yield from _levels(node)


def _restore(level: AbstractContainer, entries: dict[str, Entry]) -> None:
    """Restore the entries of a level, in their order."""
    old, wanted = list(level._kd_entries), list(entries)
    same = 0
    while same < min(len(old), len(wanted)) and old[same] == wanted[same]:
        same += 1
    for key in old[same:]:
        level._kd_del_entry(key)
    now = level._kd_entries  # read here: a kind may compute it, and entries are gone by now
    for key, entry in entries.items():
        if now.get(key) is not entry:
            level._kd_set_entry(key, entry)


def take_leaves(td: AbstractContainer, made: AbstractContainer) -> None:
    """Replace the leaves of a container by those of another one of the same structure."""
    with unchanged_on_error(td):
        _take_leaves(td, made)


def _take_leaves(td: AbstractContainer, made: AbstractContainer) -> None:
    if isinstance(td, Composite) and isinstance(made, Composite):
        for member, other in zip(td._members, made._members, strict=True):
            _take_leaves(member, other)
        return
    for key, value in made._kd_entries.items():
        mine = td._kd_entries[key]
        if tensor_of(value) is not None:
            td._kd_set_entry(key, value)
        elif isinstance(mine, AbstractContainer) and isinstance(value, AbstractContainer):
            _take_leaves(mine, value)


# Dispatch of `__torch_function__`: what is called when a torch function gets a container.
#
# There are three tables. `METHODS` maps a torch function to the *name* of a method, so that
# subclasses can override it; its second name is the method to call when the container is the
# second operand (`tensor - td` is `td.__rsub__(tensor)`). `FUNCTIONS` maps a torch function of
# several containers (`torch.stack`) to its implementation, `ELEMENTWISE` one that treats each
# leaf, or each element, alone. While dynamo traces, names are constants, and a table of few
# functions adds few guards: "ops" in the benchmarks. Knows tables; must not know a container.

TorchFunction: TypeAlias = Callable[..., object]

FUNCTIONS: Final[dict[TorchFunction, Callable[..., object]]] = {}
ELEMENTWISE: Final[dict[TorchFunction, Callable[..., object]]] = {}
METHODS: Final[dict[TorchFunction, tuple[str, str | None]]] = {}
_INSTEAD: Final[dict[TorchFunction, str]] = {
    torch.equal: "Write `(a == b).all()`, which compares the leaves of equal keys.",
    torch.allclose: "Write `torch.testing.assert_close(a, b)`, or `((a - b).abs() < atol).all()`.",
}
"""What to write for functions that give one answer for two containers."""


def call(
    cls: type,
    func: TorchFunction,
    types: Sequence[type],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
) -> object:
    """Call the implementation of a torch function for containers: their `__torch_function__`.

    Raises:
        UnsupportedFunction: if the function is in no table; the message names a similar one.
    """
    own = FUNCTIONS.get(func)
    if own is None:
        names = _method_of(func)
        if names is not None:
            return _call_method(func, names, args, {} if kwargs is None else dict(kwargs))
        own = ELEMENTWISE.get(func)
    if own is None:
        if is_dynamo_compiling() and (func is checkpoint or isinstance(func, HigherOrderOperator)):
            with without_torch_function():  # it calls a function of the user
                return func(*args, **kwargs) if kwargs else func(*args)
        raise UnsupportedFunction(_unsupported(func))
    return own(*args, **kwargs) if kwargs else own(*args)


def _call_method(
    func: TorchFunction,
    names: tuple[str, str | None],
    args: Sequence[object],
    kwargs: dict[str, object],
) -> object:
    if not args and "input" in kwargs:
        args = (kwargs.pop("input"),)
    if is_node(args[0]) and hasattr(args[0], names[0]):
        if isinstance(args[0], AbstractContainer) and args[0]._kd_tensor_class is not None:
            return getattr(args[0]._kd_engine, names[0])(*args, **kwargs)
        return getattr(args[0], names[0])(*args[1:], **kwargs)
    if names[1] is None or len(args) < 2 or not is_node(args[1]):
        raise UnsupportedFunction(
            f"the first argument of `{name_of(func)}` must be a container, got a "
            f"`{type(args[0]).__name__}`. Exchange the operands, or use `apply`."
        )
    return getattr(type(args[1]), names[1])(args[1], args[0], *args[2:], **kwargs)


@assume_constant_result
def _method_of(func: TorchFunction) -> tuple[str, str | None] | None:
    return METHODS.get(func)


def functions() -> list[TorchFunction]:
    """List the functions of all tables."""
    return [*FUNCTIONS, *ELEMENTWISE, *METHODS]


def name_of(func: TorchFunction) -> str:
    """Return the public name of a torch function."""
    name = getattr(func, "__name__", repr(func))
    for space, prefix in ((torch, "torch"), (Tensor, "torch.Tensor")):
        if getattr(space, name, None) is func:
            return f"{prefix}.{name}"
    public = torch.overrides.resolve_name(func)
    return name if public is None else public


def _alike(name: str, other: str) -> bool:
    """Return whether two names are similar; strict, because names of functions are short."""
    return difflib.SequenceMatcher(None, name, other).ratio() > 0.75 or other.strip("_") in name


@assume_constant_result
def _unsupported(func: TorchFunction) -> str:
    """Return the text of the error for a function that is in no table."""
    name = name_of(func)
    bare = {name_of(each).rpartition(".")[2]: name_of(each) for each in functions()}
    last = name.rpartition(".")[2]
    near = nearest_key(last, bare)
    text = f"`{name}` is not supported for containers."
    if near is not None and _alike(last, str(near)):
        text += f" The most similar supported function is `{bare[str(near)]}`."
    remedy = _INSTEAD.get(func, f"Use `td.apply({name})` to apply it to each leaf.")
    return f"{text} {remedy}"
