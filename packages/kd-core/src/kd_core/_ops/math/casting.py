"""Casting leaves to a dtype: all of them, or those that a filter chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch import Tensor

from kd_core._nodes import registry
from kd_core._nodes.entry import tensor_of
from kd_core._protocol.composite import Composite
from kd_core._protocol.primitives import AbstractContainer, leaves_of

if TYPE_CHECKING:
    from typing import TypeVar

    from kd_core._nodes.entry import Entry

    W = TypeVar("W", bound=AbstractContainer)


CastFilter: TypeAlias = Callable[[tuple[str, ...], Tensor], bool]
"""A function of the path and the tensor of a leaf that says whether the leaf is cast."""


def cast_leaves(td: W, dtype: torch.dtype, cast_filter: CastFilter | None = None) -> W:
    """Cast every leaf; the container itself is returned where all have the dtype.

    Args:
        td: the container.
        dtype: the dtype.
        cast_filter: called with the path and the tensor of each leaf; says whether it is cast.
    """
    if cast_filter is not None:
        return _cast_some(td, dtype, cast_filter, ())
    leaves = leaves_of(td)
    for leaf in leaves:
        if leaf.dtype is not dtype:
            return td._rebuild(iter([leaf.to(dtype=dtype) for leaf in leaves]))
    return td


def _cast_some(td: W, dtype: torch.dtype, cast_filter: CastFilter, path: tuple[str, ...]) -> W:
    """Cast the leaves that a filter chooses."""
    if isinstance(td, Composite):
        return td._by_member(lambda member: _cast_some(member, dtype, cast_filter, path))
    entries: dict[str, Entry] = {}
    for key, value in td._entries.items():
        if isinstance(value, AbstractContainer):
            entries[key] = cast("Entry", _cast_some(value, dtype, cast_filter, (*path, key)))
            continue
        leaf = tensor_of(value)
        entries[key] = value
        if leaf is not None and cast_filter((*path, key), leaf):
            made = leaf.to(dtype=dtype)
            entries[key] = made if leaf is value else registry.wrap_tensor(made, td._desc)
    return td._like(entries, td._desc.unlocked())
