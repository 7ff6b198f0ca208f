"""Results of a pointwise operation as a container: they start with the batch size.

Knows the results for all leaves; must not know the operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor

from kd_core._errors import ShapeMismatch
from kd_core._leaves.foreach import PLAIN, is_ragged
from kd_core._ops.math.alignment import check_members_keep_batch, keeps_batch
from kd_core._protocol.primitives import AbstractContainer, name_in

if TYPE_CHECKING:
    from typing import TypeVar

    from kd_core._nodes.entry import Entry

    W = TypeVar("W", bound=AbstractContainer)


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


def leaves_batch(td: AbstractContainer, leaf: Tensor, result: Tensor) -> ShapeMismatch:
    return ShapeMismatch(
        f"the result for {name_in(td, leaf)} must have a shape that starts with batch_size "
        f"{td._desc.batch}, got {tuple(result.shape)}. Expand the first container, or exchange the "
        "operands."
    )
