"""Grouping the rows of a container by the values of an entry."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from kd_core._base import TensorDictBase
from kd_core._errors import ShapeMismatch, wrong_type
from kd_core._keys import format_key, path_of

if TYPE_CHECKING:
    from kd_core._types import NestedKey

C = TypeVar("C", bound=TensorDictBase)


def group_by(tensordict: C, key: NestedKey) -> tuple[Tensor, tuple[C, ...]]:
    """Group the rows along the first batch dimension by the values of one entry.

    Args:
        tensordict: the container; rows of a group keep their order.
        key: an entry with one value, or one vector of values, for each row.

    Returns:
        The values that occur, sorted, and a container of the rows of each.

    Raises:
        KeyNotFound: if there is no such entry.
        ShapeMismatch: if the container has no batch dimension.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, group_by
        >>> td = TensorDict({"who": torch.tensor([1, 0, 1]), "x": torch.arange(3)}, [3])
        >>> who, groups = group_by(td, "who")
        >>> who, [group["x"].tolist() for group in groups]
        (tensor([0, 1]), [[1], [0, 2]])
    """
    values = tensordict._read(path_of(key))
    if not isinstance(values, Tensor):
        raise wrong_type(f"entry {format_key(key)}", "a tensor", values)
    if not tensordict._desc.ndim:
        raise ShapeMismatch(
            "`group_by` expected a batch dimension, got batch_size (). Set the batch size first."
        )
    found, group = torch.unique(values, dim=0, return_inverse=True)
    order = group.argsort(stable=True)
    counts = torch.bincount(group, minlength=found.shape[0]).tolist()
    return found, tensordict.index_select(0, order).split(counts)
