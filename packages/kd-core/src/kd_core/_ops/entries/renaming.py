"""New names for the keys of a container, level by level, and entries that move between levels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, cast

from torch import Tensor

from kd_core._errors import KeyCollision, batch_does_not_fit, wrong_type
from kd_core._keys import format_key, plain_str
from kd_core._protocol.composite import Composite
from kd_core._protocol.primitives import AbstractContainer, lowest_level

if TYPE_CHECKING:
    from typing import TypeVar

    from kd_core._nodes.entry import Data, Entry

    W = TypeVar("W", bound=AbstractContainer)

KeyFn: TypeAlias = Callable[[str], str]
"""A function from a key of one level to its new name."""


def renamed(td: W, name: KeyFn, path: tuple[str, ...] = ()) -> W:
    """Return a container whose keys have new names at every level; tensors are shared.

    Raises:
        KeyCollision: if two keys of a level get the same name.
        InvalidArgument: if a name is not a string.
    """
    if isinstance(td, Composite):
        return td._by_member(lambda member: renamed(member, name, path))
    entries: dict[str, Entry] = {}
    for key, value in td._entries.items():
        new: object = name(key)
        if not isinstance(new, str):
            raise wrong_type(f"the new name of {format_key((*path, key))}", "a string", new)
        new = plain_str(new)
        if new in entries:
            raise KeyCollision(
                f"two keys would be renamed to {format_key((*path, new))}. Return a name of its "
                "own for each key."
            )
        if isinstance(value, AbstractContainer):
            value = cast("Entry", renamed(value, name, (*path, key)))
        entries[new] = value
    return td._like(entries, td._desc.unlocked())


def store_moved(td: AbstractContainer, path: tuple[str, ...], entry: Entry) -> None:
    """Store an entry that was removed elsewhere in a container.

    Raises:
        ShapeMismatch: if it does not fit the batch size of its new level; the value of one row does
            not become one of a batch.
    """
    level, _ = lowest_level(td, path)
    if level._desc.ndim and not isinstance(entry, (Tensor, AbstractContainer)):
        batch = entry._desc.batch
        if not batch and not cast("Data", entry)._of_batch:
            raise batch_does_not_fit(format_key(path), level._desc.batch, batch)
    td._store(path, entry)
