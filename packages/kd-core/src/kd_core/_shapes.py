"""Arithmetic of batch shapes: normalise, infer, and the shape of an index.

Knows tuples of integers; must not know containers. Sizes may be symbolic (under `torch.export`),
so nothing here asks for their type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from kd_core._errors import InvalidArgument, InvalidValue, OutOfRange

if TYPE_CHECKING:
    from kd_core._types import Batch, BatchSize

Simple: TypeAlias = "int | slice | None"


def batch_of(batch_size: BatchSize) -> Batch:
    """A batch size as a tuple.

    Raises:
        InvalidArgument: if it is not an integer or a sequence of integers.
    """
    if isinstance(batch_size, tuple | list):
        return tuple(batch_size)
    if isinstance(batch_size, int):
        return (batch_size,)
    try:
        return tuple(batch_size)
    except TypeError:
        raise InvalidArgument(
            f"batch_size must be an integer or a sequence of integers, but "
            f"`{type(batch_size).__name__}` came."
        ) from None


def wrap_dim(dim: int, ndim: int) -> int:
    """A dimension counted from the front.

    Raises:
        OutOfRange: if there is no such dimension.
    """
    if not -ndim <= dim < ndim:
        allowed = f"between {-ndim} and {ndim - 1}" if ndim else "absent: there are no dimensions"
        raise OutOfRange(
            f"dimension {dim} is out of range for a container of {ndim} batch dimensions: it must "
            f"be {allowed}. Trailing dimensions of entries are reached with `apply`."
        )
    return dim + ndim if dim < 0 else dim


def index_int(batch: Batch, index: int) -> Batch:
    """The batch shape after `td[index]`."""
    if not batch:
        raise too_many_indices((index,), batch)
    if not -batch[0] <= index < batch[0]:
        raise OutOfRange(
            f"index {index} is out of range for batch_size {batch}: the first dimension has "
            f"{batch[0]} rows."
        )
    return batch[1:]


def index_slice(batch: Batch, index: slice) -> Batch:
    """The batch shape after `td[a:b:c]`."""
    if not batch:
        raise too_many_indices((index,), batch)
    return (slice_length(index, batch[0]), *batch[1:])


def slice_length(index: slice, size: int) -> int:
    """The number of rows that a slice takes of `size`."""
    step = 1 if index.step is None else index.step
    if step <= 0:
        raise InvalidValue(
            f"slices need a step of 1 or more, but {step} came. Use `flip` to reverse a dimension."
        )
    if index == slice(None):
        return size
    return len(range(*index.indices(size)))


def index_simple(batch: Batch, items: Sequence[Simple]) -> Batch:
    """The batch shape after an index of integers, slices and `None`s, without an ellipsis."""
    out: list[int] = []
    position = 0
    for item in items:
        if item is None:
            out.append(1)
            continue
        size = batch[position]
        position += 1
        if isinstance(item, slice):
            out.append(slice_length(item, size))
        elif not -size <= item < size:
            raise OutOfRange(
                f"index {item} is out of range for dimension {position - 1} of batch_size {batch}."
            )
    return (*out, *batch[position:])


def too_many_indices(items: Sequence[object], batch: Batch) -> OutOfRange:
    """More indices than batch dimensions."""
    shown = ", ".join(
        f"a {type(item).__name__}" if hasattr(item, "shape") else repr(item) for item in items
    )
    return OutOfRange(
        f"too many indices ({shown}) for batch_size {batch}: only batch dimensions are indexed. "
        "Index the entries themselves for their trailing dimensions, as in `td['key'][..., 0]`."
    )
