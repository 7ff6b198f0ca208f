"""Rows of a container that are in another one, and rows without their duplicates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar, cast, overload

import torch
from torch import Tensor

from kd_core._base import TensorDictBase
from kd_core._batch.shapes import wrap_dim
from kd_core._errors import ShapeMismatch, shape_text, wrong_type
from kd_core._keys import format_key, path_of

if TYPE_CHECKING:
    from kd_core._types import NestedKey

T = TypeVar("T", bound=TensorDictBase)


def isin(input: TensorDictBase, reference: TensorDictBase, key: NestedKey, dim: int = 0) -> Tensor:
    """Return which rows of a container have an entry that is a row of a reference.

    Args:
        input: the container whose rows are looked up.
        reference: the container in which they are looked up.
        key: the entry that is compared; all of its other dimensions belong to a row.
        dim: the batch dimension of the rows.

    Returns:
        One boolean for each row.

    Raises:
        ShapeMismatch: if rows of the two have different shapes.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, isin
        >>> td = TensorDict({"id": torch.tensor([[1, 2], [3, 4]])}, [2])
        >>> isin(td, td[1:], "id")
        tensor([False,  True])
    """
    rows, others = _rows(input, key, dim), _rows(reference, key, dim)
    if rows.shape[1:] != others.shape[1:]:
        raise ShapeMismatch(
            f"rows of entry {format_key(path_of(key))} must have the same shape in both containers,"
            f" got {shape_text(rows.shape[1:])} and {shape_text(others.shape[1:])}."
        )
    if rows[0:0].numel() == 0 and 0 in rows.shape[1:]:
        return torch.full((len(rows),), len(others) > 0, device=rows.device)
    together = torch.cat([rows, others])
    _, group = torch.unique(together, dim=0, return_inverse=True)
    return torch.isin(group[: len(rows)], group[len(rows) :])


@overload
def remove_duplicates(
    input: T, key: NestedKey, dim: int = 0, *, return_indices: Literal[False] = False
) -> T: ...
@overload
def remove_duplicates(
    input: T, key: NestedKey, dim: int = 0, *, return_indices: Literal[True]
) -> tuple[T, Tensor]: ...
def remove_duplicates(
    input: T, key: NestedKey, dim: int = 0, *, return_indices: bool = False
) -> T | tuple[T, Tensor]:
    """Return the first row of each group of rows that have an equal entry, in their order.

    Args:
        input: the container.
        key: the entry that is compared; all of its other dimensions belong to a row.
        dim: the batch dimension of the rows.
        return_indices: also return for each row of `input` the position of its equal in the result.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, remove_duplicates
        >>> td = TensorDict({"id": torch.tensor([3, 1, 3]), "x": torch.arange(3)}, [3])
        >>> unique, indices = remove_duplicates(td, "id", return_indices=True)
        >>> unique["x"], indices
        (tensor([0, 1]), tensor([0, 1, 0]))
    """
    dim = wrap_dim(dim, input._kd_desc.ndim)
    rows = _rows(input, key, dim)
    if rows.numel():
        _, group = torch.unique(rows, dim=0, return_inverse=True)
    else:
        group = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    first = torch.full((len(rows),), len(rows), device=rows.device)
    first.scatter_reduce_(0, group, torch.arange(len(rows), device=rows.device), "amin")
    kept = first[first < len(rows)].sort().values
    position = torch.searchsorted(kept, first[group])
    unique = cast("T", torch.index_select(cast("Tensor", input), dim, kept))
    return (unique, position) if return_indices else unique


def _rows(td: TensorDictBase, key: NestedKey, dim: int) -> Tensor:
    """Return an entry with the dimension of the rows in front."""
    leaf: object = td._kd_read(path_of(key))
    if not isinstance(leaf, Tensor):
        raise wrong_type(f"entry {format_key(path_of(key))}", "a tensor", leaf)
    return leaf.movedim(wrap_dim(dim, td._kd_desc.ndim), 0)
