"""Pools of values and the positions of rows in them.

Knows lists and tensors of positions; must not know entries.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from kd_core._errors import InvalidValue

if TYPE_CHECKING:
    from typing import Protocol

    from kd_core._batch.descriptor import Descriptor

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


def compact(node: Rows) -> None:
    """Drop the values that no position refers to, if there are many."""
    if is_compiling():
        return
    rows = node._positions.untyped_storage().nbytes() // 8
    if len(node._pool) <= 3 * rows + _SPARE or _is_kept_by_copies(node):
        return
    pool, storage = node._pool, node._positions.untyped_storage()
    everywhere = torch.empty(0, dtype=torch.int64).set_(storage, 0, (rows,), (1,))
    used, positions = torch.unique(everywhere, return_inverse=True)
    pool[:] = [pool[position] for position in used.tolist()]
    everywhere.copy_(positions)


def _is_kept_by_copies(node: Rows) -> bool:
    """Return whether copies may share the pool, as those made in compiled code do."""
    pool = node._pool
    holders = sys.getrefcount(pool) - 2  # without the variable and the argument
    if holders == 1:
        return False
    kin = [each for each in gc.get_referrers(pool) if isinstance(each, type(node))]
    alike = sum(share_storage(each._positions, node._positions) for each in kin)
    return alike != holders
