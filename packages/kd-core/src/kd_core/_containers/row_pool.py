"""Pools of values, and the positions of rows in them: of one entry, and of several in one pool.

Knows what holds rows; must not know the class of an entry with one value per row.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from kd_core._containers.non_tensor import NonTensorData
from kd_core._errors import InvalidValue

if TYPE_CHECKING:
    from typing import Protocol

    from kd_core._batch.descriptor import Descriptor
    from kd_core._containers.non_tensor import NonTensorDataBase
    from kd_core._types import LeafFn

    class Rows(Protocol):
        """What holds a pool and the positions of its rows, perhaps with further dimensions."""

        _desc: Descriptor
        _pool: list[object]
        _positions: Tensor


_is_grad_wrapper: Callable[[Tensor], bool] = torch._C._functorch.is_gradtrackingtensor
_inner: Callable[[Tensor], Tensor] = torch._C._functorch.get_unwrapped


_SPARE: Final = 64
"""How many unused values a pool may hold beyond three times its rows before it is compacted."""


def count_rows(rows: int) -> Tensor:
    """Return the positions of rows with one value each, in order."""
    return torch.arange(rows, device="cpu")


def nested_values(positions: object, pool: list[object]) -> object:
    """Return the values at positions, which are given as nested lists or as one number.

    Raises:
        InvalidValue: in compiled code, which knows no number that a tensor holds.
    """
    if is_dynamo_compiling() and positions != []:
        raise InvalidValue(
            "values of rows that are not tensors cannot be read in compiled code, got a read of "
            "single values. Read them, or write them to members of a stack, outside of it."
        )
    if not isinstance(positions, list):
        return pool[cast(int, positions)]
    if positions and not isinstance(positions[0], list):
        return [pool[position] for position in positions]
    return [nested_values(inner, pool) for inner in positions]


def without_wrappers(positions: Tensor) -> Tensor:
    """Return positions without the wrapper of `torch.func.grad`, which is void when that ends."""
    if not is_compiling():
        while _is_grad_wrapper(positions):
            positions = _inner(positions)
    return positions


def share_storage(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of positions have the same storage."""
    return one is other or (
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and one.numel() > 0
    )


def own_pool(pool: list[object], positions: Tensor) -> tuple[list[object], Tensor]:
    """Return a copy of a pool for copied positions, without values that no row has if many."""
    if is_compiling() or 2 * positions.numel() >= len(pool):
        return pool.copy(), positions
    rows = positions.reshape(-1).tolist()
    return [pool[row] for row in rows], count_rows(len(rows)).reshape(positions.shape)


def compact(node: Rows, more: int) -> None:
    """Drop the values that no position refers to, if there are many.

    To see whether others need them takes a search of all objects, so this is asked again only when
    the pool has doubled: copies made in compiled code may keep it for good.

    Args:
        node: what holds the pool.
        more: how many values will be added.
    """
    if is_compiling():
        return
    pool, storage = node._pool, node._positions.untyped_storage()
    rows = storage.nbytes() // 8
    limit = 3 * rows + _SPARE
    if len(pool) <= limit:
        return
    alone: list[object] = []
    holders = sys.getrefcount(pool) - sys.getrefcount(alone)  # Python 3.14 counts no argument
    if holders > 1:
        doublings = (len(pool) // limit).bit_length()
        if doublings == ((len(pool) + more) // limit).bit_length():
            return
        if _is_kept_by_copies(node, holders):
            return
    everywhere = torch.empty(0, dtype=torch.int64).set_(storage, 0, (rows,), (1,))
    used, positions = torch.unique(everywhere, return_inverse=True)
    pool[:] = [pool[position] for position in used.tolist()]
    everywhere.copy_(positions)


def _is_kept_by_copies(node: Rows, holders: int) -> bool:
    """Return whether copies may share the pool, as those made in compiled code do."""
    kin = [each for each in gc.get_referrers(node._pool) if isinstance(each, type(node))]
    alike = sum(share_storage(each._positions, node._positions) for each in kin)
    return alike != holders


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
