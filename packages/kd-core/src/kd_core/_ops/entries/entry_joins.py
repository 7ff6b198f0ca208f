"""Joining the entries of one container: to one entry, or to one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kd_core._errors import InvalidValue, KdError, wrong_type
from kd_core._keys import format_key, path_of
from kd_core._protocol.composite import unchanged_on_error
from kd_core._protocol.primitives import AbstractContainer, level_at

if TYPE_CHECKING:
    from typing import Self, TypeVar

    from kd_core._types import NestedKey

    Join = Callable[..., Tensor]

    W = TypeVar("W", bound=AbstractContainer)


class EntryJoins(AbstractContainer):
    """The methods that stack or concatenate entries of one container.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"x": torch.zeros(3), "y": torch.ones(3)}, [3])
        >>> td.stack_from_tensordict(-1).shape
        torch.Size([3, 2])
        >>> td.stack_tensors("x", "y", out_key="xy", dim=-1)["xy"].shape, list(td.keys())
        (torch.Size([3, 2]), ['xy'])
    """

    __slots__ = ()

    def stack_tensors(
        self, *keys: NestedKey, out_key: NestedKey, dim: int = 0, keep_entries: bool = False
    ) -> Self:
        """Stack some leaves to one entry, which takes their place; return self.

        Args:
            *keys: the leaves, in their order.
            out_key: the key of the new entry.
            dim: the new dimension of the leaves; the result must start with the batch size, so it
                is behind the batch, or counted from the end.
            keep_entries: keep the leaves as well.

        Raises:
            ShapeMismatch: if the result does not fit the batch size; then nothing is changed.
        """
        return _joined(self, torch.stack, keys, out_key, dim, keep_entries)

    def cat_tensors(
        self, *keys: NestedKey, out_key: NestedKey, dim: int = 0, keep_entries: bool = False
    ) -> Self:
        """Concatenate some leaves to one entry, which takes their place; see `stack_tensors`."""
        return _joined(self, torch.cat, keys, out_key, dim, keep_entries)

    def stack_from_tensordict(
        self,
        dim: int = 0,
        *,
        sorted: bool | Sequence[NestedKey] = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Stack all leaves to one tensor.

        Args:
            dim: the new dimension.
            sorted: order the leaves by their keys, or as these keys; else as they were added.
            out: a tensor into which the result is written.
        """
        return torch.stack(_leaves(self, sorted), dim, out=out)

    def cat_from_tensordict(
        self,
        dim: int = 0,
        *,
        sorted: bool | Sequence[NestedKey] = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Concatenate all leaves to one tensor; see `stack_from_tensordict`."""
        return torch.cat(_leaves(self, sorted), dim, out=out)


def _joined(
    td: W, join: Join, keys: Sequence[NestedKey], out_key: NestedKey, dim: int, keep: bool
) -> W:
    paths = [path_of(key) for key in keys]
    if not paths:
        raise InvalidValue("expected the keys of one or more leaves, got none.")
    column = [_leaf_at(td, path) for path in paths]
    try:
        joined = join(column, dim)
    except (RuntimeError, IndexError) as error:
        if isinstance(error, KdError):
            raise
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in column)
        raise InvalidValue(f"cannot join leaves of shapes {shapes}: {error}") from error
    td._check_unlocked(f"set {format_key(out_key)}")
    with unchanged_on_error(td):
        for path in () if keep else dict.fromkeys(paths):
            level = level_at(td, path[:-1])
            level._check_unlocked(f"remove {format_key(path)}")
            level._del_entry(path[-1])
        td._store(path_of(out_key), joined)
    return td


def _leaf_at(td: AbstractContainer, path: tuple[str, ...]) -> Tensor:
    leaf = td._read(path)
    if not isinstance(leaf, Tensor):
        raise wrong_type(f"entry {format_key(path)}", "a tensor", leaf)
    return leaf


def _leaves(td: AbstractContainer, order: bool | Sequence[NestedKey]) -> list[Tensor]:
    """Return the leaves in an order: as they were added, by key, or of the given keys."""
    if not isinstance(order, bool):
        return [_leaf_at(td, path_of(key)) for key in order]
    paths = _paths(td, ())
    if not paths:
        raise InvalidValue("expected at least one tensor, got a container without tensors.")
    return [_leaf_at(td, path) for path in (sorted(paths) if order else paths)]


def _paths(level: AbstractContainer, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for key, value in level._entries.items():
        if isinstance(value, AbstractContainer):
            found += _paths(value, (*path, key))
        elif isinstance(value, Tensor):
            found.append((*path, key))
    return found
