"""Giving a container another batch: other entries with another size, or names of its dimensions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kd_core._batch.descriptor import (
    LOCKED_BY_ARENA,
    LOCKED_BY_SHARING,
    LOCKED_WITH_ROWS,
    describe,
)
from kd_core._batch.names import checked_names, with_names
from kd_core._errors import InvalidArgument, KeySetMismatch, listed, wrong_type
from kd_core._keys import format_key
from kd_core._leaves.nested import stored_in
from kd_core._nodes.entry import is_data
from kd_core._protocol.composite import Composite, unchanged_on_error
from kd_core._protocol.primitives import AbstractContainer, engine, leaves_of, lock, relock
from kd_core._protocol.validation import as_entry

if TYPE_CHECKING:
    from typing import TypeVar

    from kd_core._batch.descriptor import Descriptor
    from kd_core._batch.names import Names
    from kd_core._nodes.entry import Entry
    from kd_core._types import Batch, NestedKey

    W = TypeVar("W", bound=AbstractContainer)


class StaysLazy(InvalidArgument, NotImplementedError):
    """A change in place that a lazy stack cannot make."""


def take_batch_size(
    td: AbstractContainer,
    source: object,
    clone: bool,
    keys_to_update: Iterable[NestedKey] | None = None,
) -> bool:
    """Replace the entries and the batch size by those of a source; `False` if it has the same.

    Raises:
        KeySetMismatch: if the source lacks a key, whose entry would keep the old batch size.
        Locked: if the container is locked.
    """
    if not isinstance(source, AbstractContainer):
        remedy = "Only a container has a batch size."
        raise wrong_type("the source of `update_batch_size=True`", "a container", source, remedy)
    if source._kd_desc.batch == td._kd_desc.batch:
        return False
    if keys_to_update is not None:
        raise InvalidArgument(
            "`update_batch_size=True` replaces all entries and cannot be combined with "
            "`keys_to_update`. Pass one of them."
        )
    td._kd_check_unlocked("change the batch size")
    _check_keys(td, source, ())
    copy = source._kd_map_each(Tensor.clone) if clone else source._kd_shallow()
    after = td._kd_desc.with_batch(source._kd_desc.batch)
    _take(td, {key: as_entry(key, value, after) for key, value in copy._kd_entries.items()}, after)
    return True


def become(td: W, result: AbstractContainer, action: str) -> W:
    """Replace the entries and the batch size by those of a result of the same keys; return it.

    Raises:
        Locked: if the container is locked.
        InvalidArgument: if it is a lazy stack, whose members stay.
    """
    td._kd_check_unlocked(action)
    if isinstance(td, Composite):
        _take_members(td, result, action)
        return td
    _check_keys(td, result, ())
    _take(td, dict(result._kd_entries), result._kd_desc)
    return td


def _take_members(td: Composite, result: AbstractContainer, action: str) -> None:
    """Replace the members of a stack by the rows of a result along the stacked dimension."""
    dim, batch = td._dim, result._kd_desc.batch
    if dim >= len(batch) or not batch[dim]:
        raise StaysLazy(
            f"cannot {action}: a lazy stack must keep its stacked dimension and a member, got "
            f"batch_size {batch}. Leave out `inplace=True`."
        )
    same = isinstance(result, Composite) and result._dim == dim
    members = result._members if same else engine(result).unbind(result, dim)  # type: ignore[attr-defined]  # of a concern
    members = [
        member if same or batch == td._kd_desc.batch else member._kd_map_each(torch.clone)
        for member in members
    ]
    td._replace_members(members)
    td._kd_describe(td._kd_desc.with_batch(batch))


def _take(td: AbstractContainer, entries: dict[str, Entry], after: Descriptor) -> None:
    """Store checked entries under another descriptor: all of them, or nothing is changed."""
    before = td._kd_desc
    with unchanged_on_error(td):
        try:
            td._kd_describe(after)
            for key, entry in entries.items():
                td._kd_set_entry(key, entry)
        except BaseException:
            td._kd_describe(before)
            raise


def _check_keys(td: AbstractContainer, source: AbstractContainer, path: tuple[str, ...]) -> None:
    """Refuse a source that lacks a key of the container."""
    theirs = source._kd_entries
    missing = [key for key in td._kd_entries if key not in theirs]
    if missing:
        where = f" below {format_key(path)}" if path else ""
        raise KeySetMismatch(
            f"the source lacks {listed(missing)}{where}, which would keep batch_size "
            f"{td._kd_desc.batch} beside {source._kd_desc.batch}. Remove these entries first."
        )
    for key, value in td._kd_entries.items():
        other = theirs[key]
        if isinstance(value, AbstractContainer) and isinstance(other, AbstractContainer):
            value._kd_check_unlocked(f"replace {format_key((*path, key))}")
            _check_keys(value, other, (*path, key))


def check_names(names: Sequence[str | None] | None, batch: Batch) -> Names:
    """Return one name or `None` for each batch dimension; `None` stands for no names.

    Raises:
        InvalidArgument: if one is neither a string nor `None`.
        InvalidValue: if there is not one for each dimension, or one is given twice.
    """
    return checked_names([None] * len(batch) if names is None else names, batch)


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


def named(td: W, names: Sequence[str | None] | None) -> W:
    """Return a container under other names, locked if it is; tensors are shared."""
    checked = check_names(names, td._kd_desc.batch)
    new = td._kd_shallow()
    set_names(new, checked)
    return relock(new, td._kd_desc.lock)


def redescribe(level: AbstractContainer, desc: Descriptor) -> None:
    """Set the batch size and the device of a container, which stays locked if it is."""
    old = level._kd_desc
    level._kd_describe(desc.with_lock(old.lock, old.held) if old.frozen else desc)


def put_on(level: AbstractContainer, device: torch.device | None) -> None:
    """Set the device of a container and of all below; no leaf is moved."""
    below = level._kd_below()
    if below and level._kd_owns_leaves:
        for key, value in list(level._kd_entries.items()):
            if not isinstance(value, Tensor | AbstractContainer):
                level._kd_set_entry(
                    key, value._kd_with_descriptor(describe(value._kd_desc.batch, device))
                )
        below = level._kd_below()
    for node in below:
        if isinstance(node, AbstractContainer):
            put_on(node, device)
    if level._kd_desc.device != device:
        redescribe(level, describe(level._kd_desc.batch, device))


def locked_as_rows(container: AbstractContainer, rows: W) -> W:
    """Lock views of the rows of a locked container, if its memory is that of other processes.

    Views of rows of another container are not locked: they are new containers.
    """
    desc = container._kd_desc
    if desc.lock in LOCKED_WITH_ROWS:
        return lock(rows, desc.locked_by)
    if desc.lock is not None:
        return rows
    from kd_core._store.places import place_of

    for leaf in leaves_of(container):  # an enclosing container is locked, which it does not know
        for part in stored_in(leaf):
            if place_of(part) is not None:
                return lock(rows, LOCKED_BY_ARENA)
            return lock(rows, LOCKED_BY_SHARING) if part.is_shared() else rows  # type: ignore[no-untyped-call]  # by torch
    return rows
