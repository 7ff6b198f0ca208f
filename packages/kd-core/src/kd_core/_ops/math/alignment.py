"""Alignment of operands and results with leaves: the rows and dimensions of each leaf.

Knows containers of members; must not know the operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from torch import Tensor

from kd_core._errors import ShapeMismatch, shape_text
from kd_core._keys import format_key
from kd_core._leaves.foreach import PLAIN, is_ragged
from kd_core._leaves.loops import all_plain, name_of_leaf
from kd_core._nodes.entry import is_unbatched
from kd_core._protocol.composite import Composite
from kd_core._protocol.primitives import AbstractContainer, name_in

if TYPE_CHECKING:
    from typing import TypeVar

    from kd_core._nodes.entry import Entry
    from kd_core._types import Batch

    W = TypeVar("W", bound=AbstractContainer)


def keeps_batch(td: AbstractContainer) -> bool:
    """Return whether the shapes of collected leaves start with the batch size."""
    if not td._nested:  # only tensors: "math" in the benchmarks
        return True
    if not td._owns_leaves:
        return False
    return all_plain(td._entries) or all(
        keeps_batch(node) for node in td._below() if isinstance(node, AbstractContainer)
    )


def beside_members(td: AbstractContainer, operand: Tensor) -> list[Tensor]:
    """Return the part of a tensor over the batch that belongs to each leaf of `_collect`."""
    batch: Batch = td._desc.batch
    beside: list[Tensor] = []
    rows = operand.reshape((*operand.shape, *(1,) * (len(batch) - operand.ndim)))
    _stand_beside(td, rows.expand(batch), len(batch), beside)
    return beside


def _stand_beside(td: AbstractContainer, operand: Tensor, ndim: int, beside: list[Tensor]) -> None:
    """Append a tensor over the first `ndim` dimensions for each leaf of `_collect`."""
    if isinstance(td, Composite):
        over = td._dim < ndim
        rows = operand.unbind(td._dim) if over else [operand] * len(td._members)
        for member, row in zip(td._members, rows, strict=True):
            _stand_beside(member, row, ndim - over, beside)
        return
    for value in td._entries.values():
        if isinstance(value, AbstractContainer):
            _stand_beside(value, operand, ndim, beside)
        elif isinstance(value, Tensor):
            beside.append(operand.reshape((*operand.shape, *(1,) * (value.ndim - ndim))))


def lift_scalars(
    td: AbstractContainer,
    leaves: list[Tensor],
    operands: Sequence[object],
    columns: Sequence[list[Tensor]] | Sequence[list[object]],
) -> list[int]:
    """Replace the scalars of members by views with the dimension that they have in the stack.

    Torch promotes a 0-d operand beside a stacked leaf by its kind alone. Beside the 0-d leaf of a
    member it would promote by dtype, because both have the same rank. Where an operand is 0-d
    beside the stacked leaf, the leaf of the member is replaced by a view of one more dimension, and
    so is each operand that has rows.

    Args:
        td: the container.
        leaves: its leaves, in the order of `_collect`; changed.
        operands: the operands as given.
        columns: for each operand, its value at each leaf; changed.

    Returns:
        The positions of the leaves that were replaced.
    """
    scalars = [position for position, leaf in enumerate(leaves) if not leaf.ndim]
    if not scalars:
        return []
    alone = [_alone(td, operand, inside=False) for operand in operands]
    in_stack = isinstance(td, Composite)
    lifted = [
        position
        for position in scalars
        if any(each[position] for each in alone) or (in_stack and _are_mixed(columns, position))
    ]
    for position in lifted:
        leaves[position] = leaves[position].unsqueeze(0)
        for flags, column in zip(alone, cast("Sequence[list[object]]", columns), strict=True):
            value = column[position]
            if isinstance(value, Tensor) and not flags[position]:
                column[position] = value.unsqueeze(0)
    return lifted


def _are_mixed(columns: Sequence[Sequence[object]], position: int) -> bool:
    """Return whether a leaf has a number and a tensor beside it; torch takes both for numbers."""
    values = [column[position] for column in columns if column[position] is not None]
    return len({isinstance(value, Tensor) for value in values}) > 1


def lower_scalars(results: list[Tensor], lifted: list[int]) -> list[Tensor]:
    """Remove the dimension that `lift_scalars` added from the results."""
    for position in lifted:
        results[position] = results[position].squeeze(0)
    return results


def _alone(td: AbstractContainer, operand: object, inside: bool) -> list[bool]:
    """Return for each leaf of `_collect` whether it is a member's, and its operand is 0-d."""
    if isinstance(operand, AbstractContainer) and operand._desc.batch:
        operand = None  # all its leaves have rows
    if not isinstance(operand, (AbstractContainer, Tensor)) or not (inside or _has_members(td)):
        leaves: list[Tensor] = []
        td._collect(leaves)
        return [False] * len(leaves)
    if isinstance(td, Composite):
        return [flag for member in td._members for flag in _alone(member, operand, inside=True)]
    flags: list[bool] = []
    for key, value in td._entries.items():
        other = operand if isinstance(operand, Tensor) else operand._entries.get(key)
        if isinstance(value, AbstractContainer):
            flags += _alone(value, other, inside)
        elif is_unbatched(value):
            flags.append(False)
        elif isinstance(value, Tensor):
            flags.append(inside and isinstance(other, Tensor) and not other.ndim)
    return flags


def _has_members(td: AbstractContainer) -> bool:
    return isinstance(td, Composite) or any(
        _has_members(node) for node in td._below() if isinstance(node, AbstractContainer)
    )


def check_members_keep_batch(td: AbstractContainer, path: tuple[str, ...] = ()) -> None:
    """Refuse results of members whose leaves do not start with the batch size.

    Raises:
        ShapeMismatch: naming the entry.
    """
    if isinstance(td, Composite):
        for member in td._members:
            check_members_keep_batch(member, path)
        return
    batch = td._desc.size  # of plain integers, as in `binary`
    for key, value in td._entries.items():
        if isinstance(value, AbstractContainer):
            check_members_keep_batch(value, (*path, key))
        elif isinstance(value, Tensor) and value.shape[: len(batch)] != batch:
            raise ShapeMismatch(
                f"the result for entry {format_key((*path, key))} of a member must have a shape "
                f"that starts with batch_size {shape_text(batch)}, got {shape_text(value.shape)}. "
                "Expand the first container, or exchange the operands."
            )


def of_pairs(td: W, other: object, results: list[Tensor]) -> W:
    """Return the results for pairs of leaves as a container; they are ragged where `other` is."""
    mixed = isinstance(other, AbstractContainer) and other._nested and keeps_batch(td)
    if mixed and not PLAIN.issuperset(map(type, results)) and any(map(is_ragged, results)):
        found = iter(results)
        return td._zip_each(cast("Entry", other), lambda leaf, beside: next(found))
    return td._rebuild(iter(results))


def of_members(td: W, results: list[Tensor]) -> W:
    new = td._rebuild(iter(results))
    check_members_keep_batch(new)
    return new


def has_rows(td: AbstractContainer, leaf: Tensor) -> bool:
    """Return whether a leaf has the batch dimensions."""
    path = name_of_leaf(td._entries, leaf) if td._nested else None
    return path is None or not is_unbatched(td._read(path))


def leaves_batch(td: AbstractContainer, leaf: Tensor, result: Tensor) -> ShapeMismatch:
    return ShapeMismatch(
        f"the result for {name_in(td, leaf)} must have a shape that starts with batch_size "
        f"{td._desc.batch}, got {tuple(result.shape)}. Expand the first container, or exchange the "
        "operands."
    )
