"""Rows of entries: their values in order, their positions, and several entries in one pool.

Knows what holds rows; must not know the class of an entry with one value per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kd_core._containers.non_tensor import NonTensorData
from kd_core._containers.row_pool import count_rows, nested_values, own_pool

if TYPE_CHECKING:
    from kd_core._containers.non_tensor import NonTensorDataBase
    from kd_core._containers.row_pool import Rows
    from kd_core._types import LeafFn


def flat_values(node: Rows) -> list[object]:
    """Return the values of all rows in one list."""
    ndim = node._desc.ndim
    positions = node._positions
    if positions.ndim == ndim:
        return [node._pool[position] for position in positions.reshape(-1).tolist()]
    rows = positions.reshape(math.prod(node._desc.batch), *positions.shape[ndim:])
    return [nested_values(row, node._pool) for row in rows.tolist()]


def add_values(node: Rows, values: list[object]) -> int:
    """Add values to the pool of an entry; return the position of the first.

    Values are never taken out here: in compiled code copies share the pool.
    """
    start = len(node._pool)
    node._pool.extend(values)
    return start


def move_positions(node: Rows, fn: LeafFn) -> Tensor:
    """Apply a function that moves rows to the positions."""
    try:
        return fn(node._positions)
    except RuntimeError:  # its index is on another device, or it needs a contiguous leaf
        device = node._desc.device or torch.accelerator.current_accelerator() or "cpu"
        return fn(node._positions.contiguous().to(device)).cpu()


def pool_rows(nodes: Sequence[NonTensorDataBase]) -> tuple[list[object], list[Tensor]]:
    """Return the values of several entries in one pool, and their positions in it."""
    pool: list[object] = []
    columns = []
    for node in nodes:
        if isinstance(node, NonTensorData):
            columns.append(torch.full(node._desc.batch, len(pool), device="cpu"))
            pool.append(node._item())
        else:
            own, positions = _own_rows(cast("Rows", node))
            columns.append(positions + len(pool))
            pool += own
    return pool, columns


def _own_rows(node: Rows) -> tuple[list[object], Tensor]:
    """Return a copy of the pool of an entry with one value for each row, and their positions."""
    if node._positions.ndim == node._desc.ndim:
        return own_pool(node._pool, node._positions)
    values = flat_values(node)  # lists, perhaps of different lengths
    return values, count_rows(len(values)).reshape(node._desc.batch)


def join_rows(
    nodes: Sequence[NonTensorDataBase], call: Callable[..., Tensor], dim: int
) -> tuple[list[object], Tensor]:
    """Return the values of several entries in one pool, and their joined positions."""
    pool, columns = pool_rows(nodes)
    return pool, call(columns, dim)
