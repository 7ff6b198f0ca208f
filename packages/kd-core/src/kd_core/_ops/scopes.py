"""Containers as contexts: `with td.unlock_()`, `with td.reshape(...) as view` and their undoing.

Knows which call a scope undoes; must not know what the call computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from inspect import isfunction
from types import TracebackType
from typing import TYPE_CHECKING, Final, Generic, TypeAlias, TypeVar
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from kd_core._descriptor import LOCKED_BY_USER
from kd_core._errors import InvalidArgument
from kd_core._keys import KeyPath
from kd_core._leaves.foreach import shares_storage
from kd_core._leaves.loops import find_entry, version_of
from kd_core._nodes import RowData, is_any_data
from kd_core._protocol import (
    AbstractContainer,
    Composite,
    engine,
    level_at,
    lock,
    locked_as,
    map_by,
    relock,
    unchanged_on_error,
    unlock,
    unlock_all,
)
from kd_core._shapes import numel, unchanged
from kd_core._torch_private import run_alone_eagerly, traced_as

if TYPE_CHECKING:
    from typing import Protocol, Self

    from kd_core._nodes import Entry
    from kd_core._shapes import Plan
    from kd_core._types import Batch

    class Undo(Protocol):
        """How entries of a result become entries of the source again."""

        def path(self, path: KeyPath) -> KeyPath:
            """Return where an entry of the result belongs in the source."""

        def entry(self, entry: Entry) -> Entry:
            """Return an entry of the result as it is stored in the source."""

    G = TypeVar("G")
    K = TypeVar("K")
    W = TypeVar("W", bound=AbstractContainer)


# Which operations can be undone, and how their entries become entries of the source again.
#
# An operation that can be undone records its source on the result, and what undoes it. The source
# is referred to weakly, so a result keeps nothing alive. The methods below read the record.

Origin: TypeAlias = (
    "tuple[ReferenceType[AbstractContainer] | None, Callable[[AbstractContainer, G], Undo], G]"
)
"""The source, `None` for the container itself; what makes the undo; and what it is given."""


def record(
    result: W, source: AbstractContainer, undo: Callable[[AbstractContainer, G], Undo], given: G
) -> W:
    """Record on a result how it is undone; return it. Compiled code records nothing.

    Args:
        result: the result.
        source: the container that it was made from.
        undo: called on entry to a scope, with the source and `given`.
        given: what the operation was called with.
    """
    if not is_dynamo_compiling():
        try:  # noqa: SIM105  # a context manager is slower: "keys" in the benchmarks
            result._kd_scope = ref(source), undo, given
        except (AttributeError, TypeError):  # a kind that has no place for it
            pass
    return result


def note(result: AbstractContainer, origin: Origin[G]) -> None:
    """Store an origin on a container, where its kind has a place for it."""
    try:  # noqa: SIM105  # a context manager is slower: "lock" in the benchmarks
        result._kd_scope = origin  # type: ignore[misc]  # the slot is that of the kind
    except AttributeError:
        pass


def _traced_moved(how: Plan, container: W) -> W:
    if how[0] is unchanged:
        return container
    return locked_as(container, map_by(how, container))


@traced_as(_traced_moved)
def moved(how: Plan, container: W) -> W:
    """Apply a plan that moves rows and record how it is undone; compiled code records nothing.

    A plan that changes nothing gives the container itself, and what moves rows of a locked one a
    locked one.
    """
    leaf, batch, inner = how  # as `map_by`, inlined: "shape" in the benchmarks
    if leaf is unchanged:
        note(container, UNCHANGED)
        return container
    desc = container._kd_desc
    result = container._kd_map_each(leaf, inner, (desc, desc.with_batch(batch)))
    if desc.frozen or not container._kd_owns_leaves:
        locked_as(container, result)
    try:  # noqa: SIM105  # as `record`, inlined too
        result._kd_scope = ref(container), Moved, how
    except (AttributeError, TypeError):  # a kind that has no place for it
        pass
    return result


def made_by(how: Plan, container: AbstractContainer, result: W) -> W:
    """Record how a result is undone that a plan did not make, but could have made; see `moved`."""
    result._kd_describe(result._kd_desc.with_batch(how[2](container._kd_desc.batch)))
    if container._kd_desc.frozen:
        lock(result)
    with suppress(AttributeError, TypeError):  # a kind that has no place for it
        result._kd_scope = ref(container), Moved, how
    return result


run_alone_eagerly(record, moved, made_by)  # as `recording` says


def recording(kind: type[K]) -> type[K]:
    """Let dynamo trace methods that record how they are undone, and compile none of them alone.

    After a graph break in a function with a `with` statement, its calls are compiled one by one.
    What they make records nothing, and could not be entered.
    """
    run_alone_eagerly(*[method for method in vars(kind).values() if isfunction(method)])
    return kind


class Moved:
    """Undoes an operation that moves the rows of a batch."""

    __slots__ = ("batch", "how")

    def __init__(self, source: AbstractContainer, how: Plan) -> None:
        self.batch: Batch = source._kd_desc.batch
        self.how = how
        if numel(self.batch) != numel(self.how[1]):
            raise InvalidArgument(
                f"a change of batch_size {self.batch} to {self.how[1]} cannot be undone: the "
                "number of rows differs. Assign the result to a name instead of using `with`."
            )

    def path(self, path: KeyPath) -> KeyPath:
        return path

    def entry(self, entry: Entry) -> Entry:
        back = self._back()
        if isinstance(entry, Tensor):
            return back(entry)
        old, ndim = self.batch, len(self.how[1])
        return entry._kd_map_each(back, lambda batch: old + batch[ndim:])

    def _back(self) -> Callable[[Tensor], Tensor]:
        old, new = self.batch, self.how[1]
        rows = torch.arange(numel(old), device="cpu")
        order = self.how[0](rows.reshape(old)).reshape(-1)
        keeps_order = torch.equal(order, rows)
        places = order.argsort()

        def move_back(leaf: Tensor) -> Tensor:
            rest = leaf.shape[len(new) :]
            if not keeps_order:
                leaf = leaf.reshape((len(places), *rest))[places.to(leaf.device)]
            return leaf.reshape((*old, *rest))

        return move_back


class Flattened:
    """Undoes `flatten_keys`: entries return to where they were, new names are split."""

    __slots__ = ("is_leaf", "paths", "separator")

    def __init__(
        self, source: AbstractContainer, given: tuple[str, Callable[[type], bool] | None]
    ) -> None:
        self.separator, self.is_leaf = given
        self.paths: dict[str, KeyPath] = {}
        self._note(source, ())

    def _note(self, level: AbstractContainer, path: KeyPath) -> None:
        """Record the path of each flat name."""
        if isinstance(level, Composite):
            for member in level._members:
                self._note(member, path)
            return
        for key, value in level._kd_entries.items():
            enters = self.is_leaf is None or not self.is_leaf(type(value))
            if isinstance(value, AbstractContainer) and enters:
                self._note(value, (*path, key))
            else:
                self.paths[self.separator.join((*path, key))] = (*path, key)

    def path(self, path: KeyPath) -> KeyPath:
        name, *below = path
        known = self.paths.get(name)
        if known is None:
            known = tuple(name.split(self.separator)) if self.separator else (name,)
        return (*known, *below)

    def entry(self, entry: Entry) -> Entry:
        return entry


class Unflattened:
    """Undoes `unflatten_keys`: the parts of a path are joined again."""

    __slots__ = ("separator",)

    def __init__(self, source: AbstractContainer, separator: str) -> None:
        self.separator = separator

    def path(self, path: KeyPath) -> KeyPath:
        return (self.separator.join(path),)

    def entry(self, entry: Entry) -> Entry:
        return entry


class Kept:
    """Undoes an operation that gave the container itself: its entries are where they belong."""

    __slots__ = ()

    def __init__(self, source: AbstractContainer, given: None) -> None:
        pass

    def path(self, path: KeyPath) -> KeyPath:
        return path

    def entry(self, entry: Entry) -> Entry:
        return entry

    def restore(self, td: AbstractContainer) -> None:
        pass


UNCHANGED: Final[Origin[None]] = None, Kept, None
"""The origin of a container that an operation gave back as it is."""


class Relocked:
    """Undoes `lock_` and `unlock_`.

    Args:
        source: the container.
        reason: what locked it before, or `None`.
    """

    __slots__ = ("reason",)

    def __init__(self, source: AbstractContainer, reason: str | None) -> None:
        self.reason = reason

    def path(self, path: KeyPath) -> KeyPath:
        return path

    def entry(self, entry: Entry) -> Entry:
        return entry

    def restore(self, td: AbstractContainer) -> None:
        unlock(td) if self.reason is None else relock(td, self.reason)


WAS_UNLOCKED: Final[Origin[str | None]] = None, Relocked, None
"""The origin of a container that was not locked before its lock was changed."""


WAS_LOCKED: Final[Origin[str | None]] = None, Relocked, LOCKED_BY_USER
"""The origin of a container that `lock_` had locked before its lock was changed."""


def note_lock(td: AbstractContainer, reason: str | None) -> None:
    """Note what locked a container, if anything, before its lock was changed."""
    note(td, WAS_UNLOCKED if reason is None else (None, Relocked, reason))


# Locks, and containers as context managers: the operation that made one is undone on exit.
#
# `with` takes a snapshot of the result. On exit, what changed is carried back to the source: new
# and changed entries with the operation undone, removed entries as removals.


class Contexts(AbstractContainer):
    """Locks against changes of the structure, and `with` on results, which is undone on exit.

    The results are those of `view`, `reshape`, `flatten`, `unflatten`, `squeeze`, `unsqueeze`,
    `permute`, `transpose`, `movedim`, `flip`, `roll` and their like, `flatten_keys`,
    `unflatten_keys`, `lock_` and `unlock_`. On exit, entries that were added, replaced or removed
    are so in the source as well; values written in place are there already. If the block raises, or
    an entry does not fit, the keys of the source stay as they were.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": {"b": torch.zeros(2, 3)}}, [2, 3])
        >>> with td.flatten_keys() as flat:
        ...     flat["a.c"] = flat["a.b"] + 1
        >>> td["a", "c"].shape
        torch.Size([2, 3])
        >>> with td.view(6) as rows:
        ...     rows["row"] = torch.arange(6)
        >>> td["row"].tolist()
        [[0, 1, 2], [3, 4, 5]]
        >>> with td.lock_().unlock_():
        ...     td["d"] = 1 + td["row"]
        >>> td.is_locked
        True
    """

    __slots__ = ()

    def __enter__(self) -> Self:
        enter(self)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        leave(self, exc_type is not None)

    @property
    def is_locked(self) -> bool:
        """Whether the structure may not change; assigning to it locks or unlocks."""
        return self._kd_desc.frozen

    @is_locked.setter
    def is_locked(self, locked: bool) -> None:
        lock(self) if locked else self.unlock_()

    def lock_(self) -> Self:
        """Forbid changes of structure, in nested containers too; return self.

        Example:
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": 0.0}).lock_()
            >>> td["b"] = 1.0
            Traceback (most recent call last):
            ...
            kd_core.Locked: cannot set `b`: the container is locked by `lock_()`. ...
        """
        reason = self._kd_desc.lock
        note_lock(self, reason)
        return lock(self)

    def unlock_(self) -> Self:
        """Allow changes of structure again, in nested containers too; return self.

        `with td.unlock_():` locks a container that was locked again at the end of the block.

        Raises:
            Locked: if a locked container encloses it, or encloses one that it holds, too. One that
                does not exist any more does not count.
        """
        desc = self._kd_desc
        reason = LOCKED_BY_USER if desc.held and desc.lock is None else desc.lock
        unlock_all(self)
        note_lock(self, reason)
        return self

    def locked(self) -> LockScope[Self]:
        """Return a context in which the container is locked; before and after it is as it was."""
        return LockScope(self, True)

    def unlocked(self) -> LockScope[Self]:
        """Return a context in which the container is unlocked; before and after it is as it was.

        Example:
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": 0.0}).lock_()
            >>> with td.unlocked():
            ...     td["b"] = 1.0
            >>> td.is_locked
            True
        """
        return LockScope(self, False)


class _Scope:
    """A `with` statement that was entered and not left yet."""

    __slots__ = ("before", "origin", "source", "undo", "view")

    def __init__(
        self,
        view: AbstractContainer,
        source: AbstractContainer,
        undo: Undo,
        before: Snapshot | Parts,
        origin: Origin[object],
    ) -> None:
        self.view = view
        self.source = source
        self.undo = undo
        self.before = before
        self.origin = origin


_entered: dict[int, list[_Scope]] = {}
"""The scopes that are open, by the identity of their container, the innermost last."""


def enter(view: AbstractContainer) -> None:
    """Enter the scope of a result: find its source, and note its entries.

    Raises:
        InvalidArgument: if the container is not the result of an operation that can be undone.
    """
    origin: Origin[object] | None = getattr(view, "_kd_scope", None)
    if origin is None:
        raise _nothing_to_undo()
    where, make, given = origin
    source = view if where is None else where()
    if source is None:
        raise InvalidArgument(
            "the container that this one was made from does not exist any more, so nothing can be "
            "carried back to it. Give it a name before the `with` statement."
        )
    undo = make(source, given)
    before: Snapshot | Parts = {}
    if isinstance(undo, Moved) and where is not None:
        before = _parts(view)
    elif where is not None:
        before = _snapshot(view)
    if not _has_members_for(source, before):
        raise _nothing_to_undo()
    scope = _Scope(view, source, undo, before, origin)
    _entered.setdefault(id(view), []).append(scope)


def leave(view: AbstractContainer, failed: bool) -> None:
    """Exit the innermost scope of a result: undo the operation."""
    scopes = _entered[id(view)]
    scope = scopes.pop()
    if not scopes:
        del _entered[id(view)]
    note(view, scope.origin)
    if isinstance(scope.undo, (Relocked, Kept)):
        scope.undo.restore(view)
    elif not failed:
        carry: Callable[..., None] = _carry_back
        if isinstance(scope.undo, Moved):
            carry = _carry_rows_back
        with unchanged_on_error(scope.source):
            carry(scope.source, view, scope.before, scope.undo)


class _Seen:
    """An entry as it was on entry to a scope."""

    __slots__ = ("entry", "value", "version")

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.value = _one_value(entry)
        self.version = version_of(entry)

    def is_like(self, old: _Seen) -> bool:
        """Return whether the entry is the one that it was, with its value if that is one."""
        return self.entry is old.entry and self.value is old.value


def _one_value(entry: Entry) -> object:
    """Return the value of data that has one for all rows: a write to it reaches no other entry."""
    if not is_any_data(entry) or isinstance(entry, RowData):
        return None
    return entry._kd_item()


Snapshot: TypeAlias = "dict[KeyPath, _Seen] | list[Snapshot]"
Parts: TypeAlias = "dict[KeyPath, list[_Seen]]"


def _snapshot(view: AbstractContainer) -> Snapshot:
    """Record the entries of a container, those of each member of a stack on its own."""
    if isinstance(view, Composite):
        return [_snapshot(member) for member in view._members]
    return {path: _Seen(entry) for path, entry in _leaves(view, ())}


def _parts(view: AbstractContainer) -> Parts:
    """Record the entries of a container; of a stack, at any level, those of each member."""
    found: Parts = {}

    def record(level: AbstractContainer, path: KeyPath) -> None:
        if isinstance(level, Composite):
            for member in level._members:
                record(member, path)
            return
        for key, value in level._kd_entries.items():
            if isinstance(value, AbstractContainer):
                record(value, (*path, key))
            else:
                found.setdefault((*path, key), []).append(_Seen(value))

    record(view, ())
    return found


def _leaves(level: AbstractContainer, path: KeyPath) -> Iterator[tuple[KeyPath, Entry]]:
    """Yield the tensors and the data of all levels; a nested stack is read."""
    for key, value in level._kd_entries.items():
        if isinstance(value, AbstractContainer):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _carry_back(
    source: AbstractContainer, view: AbstractContainer, before: Snapshot, undo: Undo
) -> None:
    if isinstance(before, list):
        assert isinstance(source, Composite)
        assert isinstance(view, Composite)
        members = zip(source._members, view._members, before, strict=True)
        for mine, member, seen in members:
            _carry_back(mine, member, seen, undo)
        return
    now = dict(_leaves(view, ()))
    for path in before.keys() - now.keys():
        target = undo.path(path)
        if find_entry(source._kd_entries, target) is not None:
            level = level_at(source, target[:-1])
            level._kd_check_unlocked("carry removed entries back")
            level._kd_del_entry(target[-1])
    for path, entry in now.items():
        target = undo.path(path)
        if not _is_unchanged(source, target, entry, before.get(path)):
            source._kd_store(target, undo.entry(entry))


def _carry_rows_back(
    source: AbstractContainer, view: AbstractContainer, seen: Parts, undo: Undo
) -> None:
    """Store what changed in a result that moved the rows of a batch."""
    now = _parts(view)
    for path in seen.keys() - now.keys():
        if find_entry(source._kd_entries, path) is not None:
            level = level_at(source, path[:-1])
            level._kd_check_unlocked("carry removed entries back")
            level._kd_del_entry(path[-1])
    for path, parts in now.items():
        known = seen.get(path, [])
        if len(known) == len(parts) > 1:  # members are seen through views
            if all(now.is_like(old) for now, old in zip(parts, known, strict=True)):
                continue
        elif len(known) == len(parts) and _is_unchanged(source, path, parts[0].entry, known[0]):
            continue
        entry = find_entry(view._kd_entries, path)
        if entry is not None:
            source._kd_store(path, undo.entry(entry))


def _is_unchanged(
    source: AbstractContainer, target: KeyPath, entry: Entry, seen: _Seen | None
) -> bool:
    """Return whether the source has the values of an entry without being written."""
    if seen is None or seen.entry is not entry:
        return False
    if not isinstance(entry, Tensor):
        return _one_value(entry) is seen.value
    mine = find_entry(source._kd_entries, target)
    if isinstance(mine, Tensor) and (mine is entry or shares_storage(mine, entry)):
        return True
    return seen.version >= 0 and seen.version == entry._version


def _has_members_for(source: AbstractContainer, before: Snapshot | Parts) -> bool:
    """Return whether a snapshot by members can be carried back to a source."""
    if not isinstance(before, list):
        return True
    return isinstance(source, Composite) and len(source._members) == len(before)


def _nothing_to_undo() -> InvalidArgument:
    """Build the error for `with` on a container that no operation made."""
    return InvalidArgument(
        "`with` expected the result of an operation that can be undone, as `with "
        "td.flatten_keys() as flat:`, `with td.view(-1) as rows:` or `with td.unlock_():`."
    )


L = TypeVar("L", bound="Contexts")


class LockScope(Generic[L]):
    """Sets the lock of a container on entry and restores it on exit."""

    __slots__ = ("_container", "_lock", "_reason")

    def __init__(self, container: L, lock: bool) -> None:
        self._container, self._lock = container, lock
        self._reason = container._kd_desc.lock

    def __enter__(self) -> L:
        self._reason = self._container._kd_desc.lock
        td = self._container
        return engine(td).lock_(td) if self._lock else engine(td).unlock_(td)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        relock(self._container, self._reason)
