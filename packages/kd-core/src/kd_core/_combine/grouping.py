"""Grouping the rows of a container by the values of an entry."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor

from kd_core._base import TensorDictBase
from kd_core._errors import InvalidArgument, ShapeMismatch, wrong_type
from kd_core._keys import format_key, path_of
from kd_core._nodes.entry import is_unbatched

if TYPE_CHECKING:
    from kd_core._containers.non_tensor import NonTensorDataBase
    from kd_core._types import NestedKey

C = TypeVar("C", bound=TensorDictBase)


def group_by(tensordict: C, key: NestedKey) -> tuple[Tensor, tuple[C, ...]]:
    """Group the rows along the first batch dimension by the values of one entry.

    Args:
        tensordict: the container; rows of a group keep their order.
        key: an entry with one value, or one vector of values, for each row; values that are not
            tensors must be hashable and comparable, as strings are.

    Returns:
        The values that occur, sorted: a tensor, or a list of other values; and a container of the
        rows of each.

    Raises:
        KeyNotFound: if there is no such entry.
        ShapeMismatch: if the container has no batch dimension.
        InvalidArgument: if values cannot be sorted.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, group_by
        >>> td = TensorDict({"who": torch.tensor([1, 0, 1]), "x": torch.arange(3)}, [3])
        >>> who, groups = group_by(td, "who")
        >>> who, [group["x"].tolist() for group in groups]
        (tensor([0, 1]), [[1], [0, 2]])
    """
    values = tensordict._kd_read(path_of(key))
    if isinstance(values, TensorDictBase) or is_unbatched(values):
        raise wrong_type(f"entry {format_key(key)}", "a tensor or non-tensor data", values)
    if not tensordict._kd_desc.ndim:
        raise ShapeMismatch(
            "`group_by` expected a batch dimension, got batch_size (). Set the batch size first."
        )
    found: Tensor | list[object]
    if isinstance(values, Tensor):
        found, group = torch.unique(values, dim=0, return_inverse=True)
    else:
        found, group = _unique(cast("NonTensorDataBase", values).tolist(), key)
    order = group.argsort(stable=True)
    counts = torch.bincount(group, minlength=len(found)).tolist()
    return cast("Tensor", found), tensordict.index_select(0, order).split(counts)


def _unique(rows: object, key: NestedKey) -> tuple[list[object], Tensor]:
    """Return the values of rows without repetitions, sorted, and the number of that of each row."""
    each = [_hashable(row) for row in cast("list[object]", rows)]
    try:
        found: list[object] = sorted(set(each))  # type: ignore[type-var]  # or it raises
        numbers = {value: number for number, value in enumerate(found)}
    except TypeError as error:
        raise InvalidArgument(
            f"the values of entry {format_key(key)} must be hashable and comparable to group by "
            f"them: {error}. Store a number for each of them, and group by it."
        ) from None
    return found, torch.tensor([numbers[value] for value in each], dtype=torch.int64, device="cpu")


def _hashable(value: object) -> object:
    """Return a list, of the values of several rows or stored as one value, as a tuple."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
