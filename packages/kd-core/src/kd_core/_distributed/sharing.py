"""Rows for each rank: padded to a number that can be divided, or balanced by weight."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch import Tensor

from kd_core._errors import InvalidArgument, InvalidValue, ShapeMismatch
from kd_core._keys import format_key, path_of
from kd_core._protocol.primitives import AbstractContainer, Composite

if TYPE_CHECKING:
    from kd_core._types import Index, NestedKey

Weights: TypeAlias = "NestedKey | Tensor | Sequence[float]"


def _taken(td: AbstractContainer, index: Index | str) -> AbstractContainer:
    return td._kd_engine.__getitem__(td, index)


def _rows_of(td: AbstractContainer, what: str) -> int:
    if not td._kd_desc.ndim:
        raise InvalidValue(f"`{what}` needs a batch dimension, got batch_size ().")
    return td._kd_desc.batch[0]


def pad_to_divisor(td: AbstractContainer, divisor: int) -> tuple[AbstractContainer, int]:
    """Return a container whose number of rows can be divided, and how many rows were added."""
    if type(divisor) is not int or divisor < 1:
        raise InvalidValue(f"`divisor` must be a positive integer, got {divisor!r}.")
    count = _rows_of(td, "pad_to_divisor")
    missing = -count % divisor  # none without rows: 0 can be divided
    if not missing:
        return td, 0
    return _taken(td, torch.arange(count + missing).remainder(count)), missing


def unpad(td: AbstractContainer, count: int) -> AbstractContainer:
    """Return a container without its last rows."""
    rows = _rows_of(td, "unpad")
    if type(count) is not int or not 0 <= count <= rows:
        raise InvalidValue(f"`count` must be a number of rows from 0 to {rows}, got {count!r}.")
    return _taken(td, slice(rows - count)) if count else td


def balanced_chunks(
    td: AbstractContainer, chunks: int, weights: Weights
) -> tuple[list[AbstractContainer], Tensor]:
    """Return containers whose weights are about equal, and which row each of their rows was."""
    rows = _rows_of(td, "balanced_chunks")
    if type(chunks) is not int or not 1 <= chunks <= rows:
        raise InvalidValue(
            f"`chunks` must be an integer from 1 to the number of rows, {rows}, got {chunks!r}. "
            "Call `pad_to_divisor` first to have a row for each rank."
        )
    groups = _groups(_weights_of(td, weights, rows), chunks)
    parts = [_taken(td, torch.tensor(group)) for group in groups]
    return parts, torch.tensor([row for group in groups for row in group])


def restore_order(td: AbstractContainer, order: object) -> AbstractContainer:
    """Return the rows in the order that they had before `balanced_chunks`."""
    rows = _rows_of(td, "restore_order")
    if not isinstance(order, Tensor) or sorted(order.tolist()) != list(range(rows)):
        raise InvalidArgument(
            f"`order` must hold each number from 0 to {rows - 1} once, as `balanced_chunks` "
            "returned it. Put the rows of all chunks together first."
        )
    return _taken(td, order.argsort())


def _groups(weights: Sequence[float], count: int) -> list[list[int]]:
    """Return the rows of each group: the heaviest row goes to the lightest group, and so on."""
    groups: list[list[int]] = [[] for _ in range(count)]
    heap = [(0.0, 0, position) for position in range(count)]
    for row in sorted(range(len(weights)), key=lambda row: -weights[row]):
        total, size, position = heapq.heappop(heap)
        groups[position].append(row)
        heapq.heappush(heap, (total + weights[row], size + 1, position))
    return [sorted(group) for group in groups]


def _weights_of(td: AbstractContainer, weights: Weights, rows: int) -> list[float]:
    found = _listed(td, weights)
    numbers = [each for each in found if isinstance(each, (int, float))]
    if not len(numbers) == len(found) == rows:
        raise ShapeMismatch(
            f"`weights` must be one number for each of the {rows} rows, got {len(found)} values."
        )
    if not all(math.isfinite(each) and each >= 0 for each in numbers):
        raise InvalidValue("`weights` must be finite and non-negative.")
    return numbers


def _listed(td: AbstractContainer, weights: Weights) -> list[object]:
    if isinstance(weights, Tensor):
        return list(weights.tolist()) if weights.ndim else [weights]
    if isinstance(weights, str) or (weights and isinstance(weights[0], str)):
        return _lengths(td, path_of(cast("NestedKey", weights)))
    return list(weights)


def _lengths(td: AbstractContainer, path: tuple[str, ...]) -> list[object]:
    """Return the length of each row of a ragged entry, or the values of a dense one."""
    level = td
    for key in path[:-1]:
        level = _taken(level, key)
    if isinstance(level, Composite) and level._dim == 0:
        leaves: list[object] = [_taken(member, path[-1]) for member in level._members]
    else:
        entry: object = _taken(level, path[-1])
        if isinstance(entry, Tensor) and not entry.is_nested:
            return _listed(td, entry)
        leaves = list(entry.unbind()) if isinstance(entry, Tensor) else []
    lengths: list[object] = [
        leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim
    ]
    if not leaves or len(lengths) < len(leaves):
        raise InvalidArgument(
            f"entry {format_key(path)} must be ragged, or one number for each row. Pass the "
            "weights of the rows as numbers."
        )
    return lengths
