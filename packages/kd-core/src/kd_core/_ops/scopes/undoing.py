"""Which operations can be undone, and how their entries become entries of the source again.

An operation that can be undone records its source on the result, and what undoes it. The source is
referred to weakly, so a result keeps nothing alive. `contexts` reads the record.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeAlias
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from kd_core._batch.descriptor import LOCKED_BY_USER
from kd_core._batch.plans import unchanged
from kd_core._batch.shapes import numel
from kd_core._errors import InvalidArgument
from kd_core._keys import KeyPath
from kd_core._protocol.composite import Composite
from kd_core._protocol.primitives import (
    AbstractContainer,
    lock,
    locked_as,
    map_by,
    relock,
    unlock,
)
from kd_core._torch_private import traced_as

if TYPE_CHECKING:
    from typing import Protocol, TypeVar

    from kd_core._batch.plans import Plan
    from kd_core._nodes.entry import Entry
    from kd_core._types import Batch

    class Undo(Protocol):
        """How entries of a result become entries of the source again."""

        def path(self, path: KeyPath) -> KeyPath:
            """Return where an entry of the result belongs in the source."""

        def entry(self, entry: Entry) -> Entry:
            """Return an entry of the result as it is stored in the source."""

    G = TypeVar("G")
    W = TypeVar("W", bound=AbstractContainer)


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
    if desc.frozen:
        lock(result)
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


def was_locked(reason: str) -> Origin[str | None]:
    """Return the origin of a container that was locked before its lock was changed."""
    return None, Relocked, reason
