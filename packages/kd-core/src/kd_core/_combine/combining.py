"""Making one container of several: stack, cat, pad and merge.

Decisions that hold here:

- Everything is strict: all containers have the same keys, in any order, and batch sizes that fit.
  An error names the entry and the number of the container that differs.
- Data that is no tensor is one value for the whole batch, so all containers must agree on it.
- The first container gives the kind of the result.

How several containers are walked at once stands in `_join`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from kd_core._base import TensorDictBase
from kd_core._batch.caching import plan, remembered
from kd_core._batch.shapes import as_ints, wrap_dim
from kd_core._combine.joining import (
    Join,
    batches_differ,
    combined,
    concatenated_shape,
    dims_of,
    first_of,
    stacked_shape,
)
from kd_core._containers.non_tensor import NonTensorData
from kd_core._errors import InvalidValue, KeyCollision
from kd_core._keys import format_key
from kd_core._protocol.primitives import map_by, whole

if TYPE_CHECKING:
    from kd_core._types import Batch

C = TypeVar("C", bound=TensorDictBase)

# By names of their own: dynamo guards that the `torch` of each module it looks into is the same.
_stack_tensors, _cat_tensors = torch.stack, torch.cat


def stack(tensors: Sequence[C], dim: int = 0, *, out: C | None = None) -> C:
    """Stack containers along a new batch dimension; `torch.stack` comes here too.

    Args:
        tensors: containers of the same keys and batch size.
        dim: where the new dimension goes; negative ones count from behind the last one.
        out: a container whose leaves the result is written to.

    Raises:
        KeySetMismatch: if a container has other keys than the first.
        ShapeMismatch: if a batch size or the shape of an entry differs.
        InvalidValue: if they hold different values of data that is no tensor.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, stack
        >>> stack([TensorDict({"a": torch.zeros(3)}, [3]) for _ in range(2)]).batch_size
        torch.Size([2, 3])
    """
    return combined(tensors, _stacking(dims_of(tensors, "stack"), dim), out)


def cat(tensors: Sequence[C], dim: int = 0, *, out: C | None = None) -> C:
    """Concatenate containers along a batch dimension; `torch.cat` comes here too.

    Args:
        tensors: containers of the same keys, whose batch sizes differ in `dim` at most.
        dim: along which batch dimension.
        out: a container whose leaves the result is written to.

    Raises:
        KeySetMismatch: if a container has other keys than the first.
        ShapeMismatch: if a batch size or the shape of an entry differs elsewhere.
        InvalidValue: if they hold different values of data that is no tensor.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, cat
        >>> cat([TensorDict({"a": torch.zeros(n)}, [n]) for n in (2, 3)]).batch_size
        torch.Size([5])
    """
    return combined(tensors, _concatenating(dims_of(tensors, "cat"), dim), out)


def pad(container: C, pad_size: Sequence[int], value: float = 0.0) -> C:
    """Add rows before and after those along each batch dimension.

    Args:
        container: what to pad.
        pad_size: how many rows to add before and after, for the first batch dimension, then for
            the second, and so on; negative numbers take rows away.
        value: what the new rows hold.

    Raises:
        InvalidValue: if the numbers do not come in pairs, or there are too many.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, pad
        >>> pad(TensorDict({"a": torch.ones(2)}, [2]), [1, 2])["a"]
        tensor([0., 1., 1., 0., 0.])
    """
    batch = container._desc.batch
    new, backwards = _padded_sizes(batch, as_ints(pad_size))

    def pad_leaf(leaf: Tensor) -> Tensor:
        return torch.constant_pad_nd(leaf, [0, 0] * (leaf.ndim - len(batch)) + backwards, value)

    return map_by(plan(batch, pad_leaf, new), container)


def pad_sequence(
    sequences: Sequence[C],
    pad_dim: int = 0,
    padding_value: float = 0.0,
    return_mask: bool | str = False,
) -> C:
    """Stack containers of different lengths, the shorter ones padded at their end.

    Args:
        sequences: containers of the same keys, whose batch sizes differ in `pad_dim` at most.
        pad_dim: the batch dimension that is padded.
        padding_value: what the new rows hold.
        return_mask: also say which rows are real: a container of masks, one for each entry, at the
            key `"masks"`, or at the key given.

    Raises:
        ShapeMismatch: if batch sizes differ elsewhere.
        KeyCollision: if there is an entry at the key of the masks.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, pad_sequence
        >>> parts = [TensorDict({"a": torch.ones(n)}, [n]) for n in (1, 2)]
        >>> pad_sequence(parts, return_mask=True)["masks", "a"]
        tensor([[ True, False],
                [ True,  True]])
    """
    first = first_of(sequences, "pad_sequence")
    at = wrap_dim(pad_dim, first._desc.ndim)
    for number, each in enumerate(sequences):
        if len(each._desc.batch) != first._desc.ndim:
            raise batches_differ(first._desc.batch, each._desc.batch, number, "pad_sequence", ())
    lengths = [each._desc.batch[at] for each in sequences]
    longest = max(lengths)
    before = (0, 0) * at
    padded = [
        each if length == longest else pad(each, (*before, 0, longest - length), padding_value)
        for each, length in zip(sequences, lengths, strict=True)
    ]
    result = stack(padded)
    if return_mask is False:
        return result
    key = "masks" if return_mask is True else return_mask
    if key in result._entries:
        raise KeyCollision(
            f"there is an entry {format_key(key)} already. Pass another key as `return_mask`."
        )
    return result.set(key, _masks(result, lengths, at + 1))


def merge_tensordicts(first: C, *others: TensorDictBase) -> C:
    """Make a container of the entries of several, nested ones merged; the tensors are shared.

    Args:
        first: gives the kind and the batch size.
        *others: containers of the same batch size; where keys meet, the later entry stays.

    Raises:
        ShapeMismatch: if a batch size differs.

    Example:
        >>> from kd_core import TensorDict, merge_tensordicts
        >>> merged = merge_tensordicts(TensorDict(a=1, b={"c": 2}), TensorDict(b={"d": 3}))
        >>> list(merged.keys(True, True))
        ['a', ('b', 'c'), ('b', 'd')]
    """
    batch = first_of([first, *others], "merge_tensordicts")._desc.batch
    for number, other in enumerate(others, start=1):
        if other._desc.batch != batch:
            raise batches_differ(batch, other._desc.batch, number, "merge_tensordicts", ())
    merged = first.clone(recurse=False)
    for other in others:
        merged.update(other)
    return merged


@remembered
def _stacking(ndim: int, dim: int) -> Join:
    return Join("stack", wrap_dim(dim, ndim + 1), _stack_tensors, stacked_shape)


@remembered
def _concatenating(ndim: int, dim: int) -> Join:
    return Join("cat", wrap_dim(dim, ndim), _cat_tensors, concatenated_shape)


@remembered
def _padded_sizes(batch: Batch, pad_size: Batch) -> tuple[Batch, list[int]]:
    """The batch size after padding, and the rows to add as torch takes them: last dimension first.

    Without the value that is padded with, because -0.0 equals 0.0.
    """
    ndim = len(batch)
    if len(pad_size) % 2 or len(pad_size) > 2 * ndim:
        raise InvalidValue(
            f"`pad_size` holds a pair (rows before, rows after) for each of the {ndim} batch "
            f"dimensions at most, but {pad_size} came."
        )
    pairs = [pad_size[i : i + 2] for i in range(0, len(pad_size), 2)]
    pairs += [(0, 0)] * (ndim - len(pairs))
    new = tuple(size + sum(pair) for size, pair in zip(batch, pairs, strict=True))
    if any(size < 0 for size in new):
        raise InvalidValue(
            f"`pad_size` {pad_size} takes more rows away than batch_size {batch} has."
        )
    return new, [rows for pair in reversed(pairs) for rows in pair]


def _masks(container: TensorDictBase, lengths: list[int], dim: int) -> TensorDictBase:
    """A container that holds, for each leaf, which rows of it are real."""
    batch = container._desc.batch
    rows = torch.arange(batch[dim]) < torch.tensor(lengths)[:, None]
    shape = [1] * len(batch)
    shape[0], shape[dim] = batch[0], batch[dim]
    mask = rows.reshape(shape).expand(batch)
    masked = container._map_each(lambda leaf: mask.to(leaf.device), whole)
    data = [key for key, value in masked._entries.items() if isinstance(value, NonTensorData)]
    return masked.exclude(*data)
