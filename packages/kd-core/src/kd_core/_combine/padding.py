"""Padding: adding rows to containers along batch dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from kd_core._base import TensorDictBase
from kd_core._batch.shapes import wrap_dim
from kd_core._combine.joining import batches_differ, first_of
from kd_core._combine.stacking import stack
from kd_core._containers.non_tensor import NonTensorDataBase
from kd_core._errors import KeyCollision
from kd_core._keys import format_key
from kd_core._protocol.primitives import same_batch

if TYPE_CHECKING:
    from kd_core._types import NestedKey

C = TypeVar("C", bound=TensorDictBase)


def pad(tensordict: C, pad_size: Sequence[int], value: float = 0.0, *, inplace: bool = False) -> C:
    """Add rows before and after those along each batch dimension: `tensordict.pad`.

    Args:
        tensordict: the container to pad.
        pad_size: the numbers of rows to add before and after, for the first batch dimension, then
            for the second, and so on; negative numbers remove rows.
        value: the value of the new rows.
        inplace: change the container instead of making a new one.

    Raises:
        InvalidValue: if the numbers are not pairs, or there are too many.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, pad
        >>> pad(TensorDict({"a": torch.ones(2)}, [2]), [1, 2])["a"]
        tensor([0., 1., 1., 0., 0.])
    """
    return tensordict.pad(pad_size, value, inplace=inplace)


def pad_sequence(
    sequences: Sequence[C],
    pad_dim: int = 0,
    padding_value: float = 0.0,
    return_mask: bool | str = False,
) -> C:
    """Stack containers of different lengths, the shorter ones padded at their end.

    Containers without a batch, as data sets give them, are padded leaf by leaf: each leaf to its
    own longest. A leaf that lacks dimension `pad_dim` is stacked as it is.

    Args:
        sequences: containers of the same keys, whose batch sizes differ in `pad_dim` at most.
        pad_dim: the batch dimension that is padded; without a batch, the dimension of each leaf.
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
    for number, each in enumerate(sequences):
        if len(each._desc.batch) != first._desc.ndim:
            raise batches_differ(first._desc.batch, each._desc.batch, number, "pad_sequence", ())
    if not first._desc.ndim and pad_dim >= 0:
        return _pad_leaves(sequences, pad_dim, padding_value, return_mask)
    at = wrap_dim(pad_dim, first._desc.ndim)
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
    return _with_masks(result, _masks(result, lengths, at + 1), return_mask)


def _with_masks(result: C, masks: TensorDictBase, return_mask: bool | str) -> C:
    key = "masks" if return_mask is True else str(return_mask)
    if key in result._entries:
        raise KeyCollision(
            f"key {format_key(key)} exists already. Pass another key as `return_mask`."
        )
    return result.set(key, masks)


def _pad_leaves(sequences: Sequence[C], dim: int, value: float, return_mask: bool | str) -> C:
    """Stack containers without a batch, each leaf padded to its own longest in a dimension."""
    longest: dict[NestedKey, int] = {}
    for each in sequences:
        for key, leaf in each.items(True, True):
            longest[key] = max(longest.get(key, 0), *leaf.shape[dim : dim + 1], 0)

    def padded(key: NestedKey, leaf: Tensor, fill: float = value) -> Tensor:
        if leaf.ndim <= dim:
            return leaf
        rows = [0, longest[key] - leaf.shape[dim]]
        return torch.constant_pad_nd(leaf, [0, 0] * (leaf.ndim - dim - 1) + rows, fill)

    def mask(key: NestedKey, leaf: Tensor) -> Tensor:
        real = leaf.new_ones((), dtype=torch.bool).expand(leaf.shape[: dim + 1])
        return padded(key, real, False)

    result = stack(
        [each.named_apply(padded, nested_keys=True, batch_size=()) for each in sequences]
    )
    if return_mask is False:
        return result
    masks = stack([each.named_apply(mask, nested_keys=True, batch_size=()) for each in sequences])
    return _with_masks(result, _leaves_alone(masks), return_mask)


def _leaves_alone(masks: C) -> C:
    """Drop what is not a tensor from a container of masks."""
    data = [key for key, value in masks._entries.items() if isinstance(value, NonTensorDataBase)]
    return masks.exclude(*data)


def _masks(container: TensorDictBase, lengths: list[int], dim: int) -> TensorDictBase:
    """Return a container with one mask for each leaf: true for the rows that are not padding."""
    batch = container._desc.batch
    rows = torch.arange(batch[dim]) < torch.tensor(lengths)[:, None]
    shape = [1] * len(batch)
    shape[0], shape[dim] = batch[0], batch[dim]
    mask = rows.reshape(shape).expand(batch)
    masked = container._map_each(lambda leaf: mask.to(leaf.device), same_batch)
    return _leaves_alone(masked)
