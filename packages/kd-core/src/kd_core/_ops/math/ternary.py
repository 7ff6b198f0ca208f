"""Functions of a leaf and two operands, run on all leaves of a container.

`_ops.math.operands` has the rules for each operand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, cast

from torch import Tensor

from kd_core._errors import ShapeMismatch
from kd_core._leaves.foreach import (
    Kernel,
    as_it_was,
    run_up_to_overlap,
    use_foreach,
    write_apart,
)
from kd_core._leaves.in_place import check_in_place
from kd_core._ops.math.operands import (
    as_operand,
    check_batches,
    has_rows,
    is_of_rows,
    is_plain,
    keeps_batch,
    leaves_batch,
    lift_scalars,
    lower_scalars,
    of_members,
    of_pairs,
    padded,
    widened,
)
from kd_core._protocol.primitives import AbstractContainer, leaves_of, locked_as

if TYPE_CHECKING:
    from typing import TypeVar

    from kd_core._nodes.entry import Entry

    W = TypeVar("W", bound=AbstractContainer)

_LeafOp: TypeAlias = Callable[..., Tensor]


def blend(td: W, fn: _LeafOp, first: object, second: object, kernel: Kernel | None = None) -> W:
    """Apply a function of three to every leaf and two operands; see `binary` for the lock.

    Args:
        td: the container.
        fn: the function of one leaf and the operands for it.
        first: the first operand; `None` is passed on.
        second: the second operand.
        kernel: the foreach function for two lists and a number.
    """
    result = blended(td, fn, first, second, kernel)
    if isinstance(first, AbstractContainer) or isinstance(second, AbstractContainer):
        return locked_as(td, result)
    return result if is_of_rows(first) or is_of_rows(second) else locked_as(td, result)


def blended(td: W, fn: _LeafOp, first: object, second: object, kernel: Kernel | None = None) -> W:
    """Apply a function of three to every leaf and two operands; the result is not locked."""
    if is_plain(first) and is_plain(second):
        return td._kd_map_each(lambda leaf: fn(leaf, first, second))
    try:
        leaves, columns = _columns(td, first, second)
    except ShapeMismatch:
        wide = widened(td, first, second)
        if wide is None:
            raise
        return blended(wide, fn, first, second, kernel)
    if not keeps_batch(td):
        lifted = lift_scalars(td, leaves, [first, second], columns)
        results = lower_scalars(_run_columns(leaves, columns, fn, kernel), lifted)
        return of_members(td, results)
    results = _run_columns(leaves, columns, fn, kernel)
    ndim, batch = td._kd_desc.ndim, td._kd_desc.size  # of plain integers, as in `binary`
    for leaf, result in zip(leaves, results, strict=True):
        if result.shape[:ndim] != batch and has_rows(td, leaf):
            raise leaves_batch(td, leaf, result)
    return of_pairs(td, first, results)


def blend_(td: W, fn: _LeafOp, first: object, second: object, kernel: Kernel | None = None) -> W:
    """Apply a function of three that writes into the storage of each leaf; see `blend`."""
    operands = [
        as_it_was(each, leaves_of(td)) if isinstance(each, Tensor) else each
        for each in (first, second)
    ]
    leaves, columns = _columns(td, *operands)
    if not keeps_batch(td):
        lift_scalars(td, leaves, operands, columns)
    check_in_place(td._kd_entries, leaves, fn, *columns)
    left, right = columns
    ends = _ends(leaves, columns) if kernel is not None else None
    start = 0
    if kernel is not None and ends is not None:
        start = run_up_to_overlap(kernel, leaves, ends, right[0])
    for position in range(start, len(leaves)):
        leaf, one, two = leaves[position], left[position], right[position]
        try:
            fn(leaf, one, two)
        except RuntimeError:
            write_apart(fn, leaf, one, two)
    return td


def _columns(td: AbstractContainer, *operands: object) -> tuple[list[Tensor], list[list[object]]]:
    """Return the leaves, and for each operand its values, one for each leaf."""
    leaves: list[Tensor] = []
    td._kd_collect(leaves)
    columns: list[list[object]] = []
    for operand in operands:
        column: list[Tensor] = []
        if isinstance(operand, AbstractContainer):
            td._kd_collect_pair(cast("Entry", operand), [], column, ())
            check_batches(td._kd_desc.batch, operand._kd_desc.batch)
        elif operand is not None:
            value = as_operand(operand)
            if isinstance(value, Tensor) and value.ndim:
                column = padded(td, value, leaves)
            else:
                columns.append([value] * len(leaves))
                continue
        columns.append(list(column) if column else [None] * len(leaves))
    return leaves, columns


def _run_columns(
    leaves: list[Tensor], columns: list[list[object]], fn: _LeafOp, kernel: Kernel | None
) -> list[Tensor]:
    ends = _ends(leaves, columns) if kernel is not None else None
    if kernel is not None and ends is not None:
        return list(kernel(leaves, ends, columns[1][0]))  # type: ignore[call-overload, no-any-return]  # gives the leaves
    return list(map(fn, leaves, *columns))


def _ends(leaves: list[Tensor], columns: list[list[object]]) -> list[Tensor] | None:
    """Return the first operands where a kernel takes them beside a number, else `None`."""
    first, second = columns
    if leaves and isinstance(second[0], (float, int)):
        ends = [each for each in first if isinstance(each, Tensor)]
        if len(ends) == len(leaves) and use_foreach(leaves) and use_foreach(ends):
            return ends
    return None
