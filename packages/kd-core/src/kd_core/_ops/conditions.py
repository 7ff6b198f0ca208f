"""Rows of a container chosen by a condition: what `where` does, and `scatter` where it must.

A condition lines up with the first batch dimensions. Entries of lazy stacks are chosen member by
member, and rows of nested tensors one by one.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kd_core import _registry as registry
from kd_core._errors import InvalidValue, OutOfRange, ShapeMismatch, shape_text
from kd_core._leaves.foreach import is_ragged
from kd_core._leaves.loops import Selection, chosen_rows, is_shapeless, without_shape
from kd_core._ops.binary import blended, keeps_batch
from kd_core._ops.indexing import behind, check_mask, rows_at
from kd_core._protocol import AbstractContainer, Composite, name_in, refuse_unbatched
from kd_core._shapes import SAME_SHAPE, broadcasts_to, check_lines_up

if TYPE_CHECKING:
    from typing import TypeVar

    from kd_core._types import Batch, LeafFn

    W = TypeVar("W", bound=AbstractContainer)


def selected(
    td: W, condition: Tensor, other: AbstractContainer | Tensor | float, pad: float | None
) -> W:
    """Return the rows of a container where a condition is true, and those of `other` elsewhere."""
    batch = td._kd_desc.batch
    chosen = spread(check_mask(condition), batch, "a condition", features=True)
    if isinstance(other, AbstractContainer):
        if other._kd_desc.batch != batch:
            raise ShapeMismatch(
                f"batch sizes must be equal, got {batch} and {other._kd_desc.batch} in `other` of "
                "`where`."
            )
        selection = _selection(td, other, condition, batch)
        if pad is not None:
            from kd_core._ops.blending import binary_with_default

            return binary_with_default(td, other, selection, pad)
        return td._kd_zip_each(other, selection)
    new = spread(other, batch, "a tensor") if isinstance(other, Tensor) and other.ndim else None
    refuse_unbatched(td, "written at some rows")
    if not keeps_batch(td):
        if condition.ndim > len(batch):  # over features, which each member has behind its own rows
            return td._kd_zip_each(td, _replacement(condition, other, batch))
        condition = from_the_first(condition, batch)
        if new is not None:
            other = from_the_first(cast("Tensor", other), batch)
        return blended(td, _chosen, condition, other)

    def pick(leaf: Tensor) -> Tensor:
        if is_ragged(leaf):
            return _ragged_rows(td, leaf, condition, other)
        return torch.where(chosen(leaf), leaf, other if new is None else new(leaf))

    return td._kd_map_each(pick, SAME_SHAPE)


def _selection(
    td: AbstractContainer,
    other: AbstractContainer,
    condition: Tensor,
    batch: Batch,
) -> Selection:
    """Return the function that chooses among the rows of two containers of a batch size."""
    chosen = spread(condition, batch, "a condition", features=True)

    def pick(leaf: Tensor, new: Tensor) -> Tensor:
        if leaf.__class__ is not Tensor and is_ragged(leaf):
            return _ragged_rows(td, leaf, condition, new)
        if new.__class__ is not Tensor and is_ragged(new):
            return _ragged_rows(other, new, ~condition, leaf)
        return torch.where(chosen(new if leaf.ndim < new.ndim else leaf), leaf, new)

    def of_member(dim: int, row: int) -> Selection:
        part = _part_of_member(condition, dim, row)
        return _selection(td, other, part, batch[:dim] + batch[dim + 1 :])

    return Selection(pick, of_member)


def _replacement(condition: Tensor, other: Tensor | float, batch: Batch) -> Selection:
    """Return the function that replaces rows by a tensor or a number; it is given a leaf twice."""
    chosen = spread(condition, batch, "a condition", features=True)
    new = spread(other, batch, "a tensor") if isinstance(other, Tensor) and other.ndim else None

    def pick(leaf: Tensor, same: Tensor) -> Tensor:
        return torch.where(chosen(leaf), leaf, other if new is None else new(leaf))

    def of_member(dim: int, row: int) -> Selection:
        part = _part_of_member(condition, dim, row)
        value = _part_of_member(other, dim, row) if isinstance(other, Tensor) else other
        return _replacement(part, value, batch[:dim] + batch[dim + 1 :])

    return Selection(pick, of_member)


def _part_of_member(tensor: Tensor, dim: int, row: int) -> Tensor:
    """Return the part of a tensor over the rows of a stack that one member has."""
    if dim >= tensor.ndim:
        return tensor
    return tensor.select(dim, row if tensor.shape[dim] != 1 else 0)


def _chosen(leaf: Tensor, condition: Tensor, other: Tensor | float) -> Tensor:
    if is_ragged(leaf):
        return chosen_rows(leaf, condition.reshape(condition.shape[:1]), other)
    return torch.where(condition, leaf, other)


def _ragged_rows(
    td: AbstractContainer, leaf: Tensor, condition: Tensor, other: Tensor | float
) -> Tensor:
    """Return the rows of a nested tensor where a condition is true, and others elsewhere."""
    if isinstance(other, Tensor) and other.ndim > 1 and not is_ragged(other):
        raise InvalidValue(
            f"{name_in(td, leaf)} must be ragged in both containers or in none, got shapes "
            f"{shape_text(leaf.shape)} and {shape_text(other.shape)}. Call `to_padded_tensor` "
            "first."
        )
    return chosen_rows(leaf, condition, other)


def scattered_rows(td: W, index: Tensor, src: AbstractContainer | float) -> W:
    """Return a copy with rows of a source at row numbers: `scatter` along the only dimension.

    Unlike `torch.scatter`, it never stacks the entries of lazy stacks, whose shapes may differ.

    Raises:
        OutOfRange: if a row number is.
    """
    if not index.numel():
        return td._kd_map_each(Tensor.clone)
    batch = td._kd_desc.batch
    low, high = index.min().item(), index.max().item()
    if low < 0 or high >= batch[0]:
        raise OutOfRange(
            f"row numbers of `scatter` must be from 0 to {batch[0] - 1}, got "
            f"{low if low < 0 else high}."
        )
    rows, count = torch.arange(batch[0], device=index.device), len(index)
    if not isinstance(src, AbstractContainer):
        rows[index.long()] = -1
        return selected(td, rows >= 0, src, None)
    rows[index.long()] = torch.arange(batch[0], batch[0] + count, device=index.device)
    both: AbstractContainer = registry.cat((td, rows_at(src, slice(count))), 0)
    return cast("W", rows_at(both, rows))


def _over_features(tensor: Tensor, what: str, leaf: Tensor) -> Tensor:
    """Return a tensor that stands for the first dimensions of a leaf, beyond the batch too."""
    shape = tuple(tensor.shape)
    if len(shape) > leaf.ndim or not broadcasts_to(shape, leaf.shape[: len(shape)]):
        raise ShapeMismatch(
            f"{what} of shape {shape} must fit the first dimensions of each entry, got an entry of "
            f"shape {shape_text(leaf.shape)}. Pass one over the batch dimensions alone."
        )
    return behind(tensor, leaf)


def holds_stack(node: object) -> bool:
    """Return whether a container is a lazy stack, or one is below it."""
    if isinstance(node, Composite):
        return True
    return isinstance(node, AbstractContainer) and any(map(holds_stack, node._kd_below()))


def from_the_first(tensor: Tensor, batch: Batch) -> Tensor:
    """Return a tensor that fits the first batch dimensions with a dimension for each of them.

    Unlike an operand, a mask that fits the last dimensions too means the first, as an index does.
    """
    if is_shapeless(tensor):
        return tensor
    shape, missing = tuple(tensor.shape), len(batch) - tensor.ndim
    if shape and missing > 0 and broadcasts_to(shape, batch[: len(shape)]):
        return tensor.reshape(shape + (1,) * missing)
    return tensor


def spread(tensor: Tensor, batch: Batch, what: str, features: bool = False) -> LeafFn:
    """Return `behind` for many leaves; it is called once for each number of dimensions.

    Args:
        tensor: the tensor.
        batch: the batch size.
        what: what an error calls the tensor.
        features: it may have more dimensions than the batch, which are those of all leaves.

    Raises:
        ShapeMismatch: if the shape of the tensor does not fit the batch, or a leaf.
    """
    if is_shapeless(tensor):
        raise without_shape(what)
    if features and tensor.ndim > len(batch):
        return partial(_over_features, tensor, what)
    check_lines_up(tensor.shape, batch, what)
    made: dict[int, Tensor] = {}
    on_cpu = tensor.is_cpu

    def to_leaf(leaf: Tensor) -> Tensor:
        if not on_cpu or not leaf.is_cpu:
            return behind(tensor, leaf)
        ndim = leaf.ndim
        if ndim not in made:
            made[ndim] = behind(tensor, leaf)
        return made[ndim]

    return to_leaf
