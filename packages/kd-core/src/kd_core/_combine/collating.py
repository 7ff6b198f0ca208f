"""Stacking samples of which some entries differ in length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence as pad_tensors

from kd_core._base import TensorDictBase
from kd_core._combine.joining import first_of
from kd_core._combine.stacking import stack
from kd_core._errors import InvalidArgument, KeyCollision, wrong_type
from kd_core._keys import format_key, path_of, several

if TYPE_CHECKING:
    from kd_core._types import NestedKey

C = TypeVar("C", bound=TensorDictBase)


def collate(
    batch: Sequence[C],
    *,
    pad_keys: Mapping[NestedKey, float] | Iterable[NestedKey] = (),
    nested_keys: Iterable[NestedKey] = (),
    mask_key: NestedKey | None = None,
) -> C:
    """Stack samples, for `DataLoader(collate_fn=...)`; some entries may differ in length.

    Args:
        batch: containers of the same keys, without a batch dimension.
        pad_keys: the entries that are padded along their first dimension, with the value that
            stands for what is missing; without values, 0.
        nested_keys: the entries that become nested tensors of the jagged layout.
        mask_key: where to store which values are real: a container of a mask for each padded entry.

    Raises:
        KeyNotFound: if a sample lacks a key.
        InvalidArgument: if a key is padded and nested.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, collate
        >>> samples = [TensorDict({"x": torch.ones(n), "y": 1.0 * n}) for n in (1, 2)]
        >>> got = collate(samples, pad_keys={"x": -1.0}, mask_key="mask")
        >>> got["x"].tolist(), got["y"].tolist(), got["mask", "x"].tolist()
        ([[1.0, -1.0], [1.0, 1.0]], [1.0, 2.0], [[True, False], [True, True]])
    """
    first_of(batch, "collate")
    several(pad_keys, "`pad_keys`")
    values = pad_keys if isinstance(pad_keys, Mapping) else dict.fromkeys(pad_keys, 0.0)
    padded = {path_of(key): value for key, value in values.items()}
    nested = [path_of(key) for key in several(nested_keys, "`nested_keys`")]
    both = [key for key in nested if key in padded]
    if both:
        raise InvalidArgument(
            f"entry {format_key(both[0])} is in `pad_keys` and in `nested_keys`. Choose one."
        )
    columns = {key: _column(batch, key) for key in (*padded, *nested)}
    result = stack([each._kd_engine.exclude(each, *columns) for each in batch])
    masks: dict[tuple[str, ...], Tensor] = {}
    for key, value in padded.items():
        column = columns[key]
        result._kd_engine.set(
            result, key, pad_tensors(column, batch_first=True, padding_value=value)
        )
        masks[key] = pad_tensors([leaf.new_ones(len(leaf)).bool() for leaf in column], True)
    for key in nested:
        result._kd_engine.set(
            result, key, torch.nested.as_nested_tensor(columns[key], layout=torch.jagged)
        )
    if mask_key is not None and masks:
        if mask_key in result:
            raise KeyCollision(f"key {format_key(mask_key)} exists already. Choose another one.")
        result._kd_engine.set(result, mask_key, masks)
    return result


def _column(batch: Sequence[TensorDictBase], key: tuple[str, ...]) -> list[Tensor]:
    """Return the leaf at a key of each sample."""
    column: list[Tensor] = []
    for number, each in enumerate(batch):
        leaf = each._kd_read(key)
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            what = f"entry {format_key(key)} of sample {number}"
            raise wrong_type(what, "a tensor with a dimension to pad", leaf)
        column.append(leaf)
    return column
