"""Replacing all leaves of a container, of all levels or of none."""

from __future__ import annotations

from kd_core._nodes.entry import tensor_of
from kd_core._protocol.composite import Composite, unchanged_on_error
from kd_core._protocol.primitives import AbstractContainer


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
