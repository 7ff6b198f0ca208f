"""Setting the names of batch dimensions, in a container and in all below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kd_core._batch.names import checked_names, with_names
from kd_core._protocol.composite import Composite
from kd_core._protocol.primitives import AbstractContainer, relock

if TYPE_CHECKING:
    from typing import TypeVar

    from kd_core._batch.names import Names
    from kd_core._types import Batch

    W = TypeVar("W", bound=AbstractContainer)


def check_names(names: Sequence[str | None] | None, batch: Batch) -> Names:
    """Return one name or `None` for each batch dimension; `None` stands for no names.

    Raises:
        InvalidArgument: if one is neither a string nor `None`.
        InvalidValue: if there is not one for each dimension, or one is given twice.
    """
    return checked_names([None] * len(batch) if names is None else names, batch)


def set_names(level: AbstractContainer, names: Names) -> None:
    """Set checked names in a container that is not locked, and in all below it."""
    desc = level._desc
    level._describe(desc.with_batch(with_names(desc.batch, names)))
    if isinstance(level, Composite):
        names = names[: level._dim] + names[level._dim + 1 :]
    for node in level._below():
        if isinstance(node, AbstractContainer):
            set_names(node, names)


def named(td: W, names: Sequence[str | None] | None) -> W:
    """Return a container under other names, locked if it is; tensors are shared."""
    checked = check_names(names, td._desc.batch)
    new = td._shallow()
    set_names(new, checked)
    return relock(new, td._desc.lock)
