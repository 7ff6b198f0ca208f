"""Aliases that everything in this package agrees on: keys, sizes, indices, functions of leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from types import EllipsisType
from typing import TYPE_CHECKING, Final, SupportsIndex, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

if TYPE_CHECKING:
    NestedKey: TypeAlias = str | tuple["NestedKey", ...]
else:
    NestedKey = str | tuple  # programs ask `isinstance(key, NestedKey)`
"""A key of a container: a string, or a (nested) tuple of strings that names a path."""

DeviceLike: TypeAlias = "torch.device | str | int"
"""What `torch.device` accepts."""

DtypeLike: TypeAlias = "torch.dtype | type[complex]"
"""What torch accepts as a dtype: also `int`, `float`, `bool` and `complex`."""

BatchSize: TypeAlias = "Sequence[int] | int"
"""Leading dimensions shared by all entries of a container."""

Dims: TypeAlias = "int | str | Sequence[int | str]"
"""One batch dimension or several, by number or by name."""

ArrayIndex: TypeAlias = "NDArray[numpy.int64] | NDArray[numpy.int32] | NDArray[numpy.bool_]"
Rows: TypeAlias = "Sequence[int] | Sequence[bool] | Tensor | ArrayIndex"
IndexItem: TypeAlias = "SupportsIndex | slice | EllipsisType | Rows | None"
Index: TypeAlias = "IndexItem | tuple[IndexItem, ...]"
"""What indexes the batch dimensions: as on a tensor of shape `batch_size`."""

Batch: TypeAlias = tuple[int, ...]
Sizes: TypeAlias = "tuple[int | Sequence[int], ...]"
"""Sizes or dimensions, as separate arguments or as one sequence."""

LeafFn: TypeAlias = Callable[[Tensor], Tensor]
PartsFn: TypeAlias = "Callable[[Tensor], Sequence[Tensor]]"
BatchFn: TypeAlias = Callable[[Batch], Batch]


class NoDefault(Enum):
    """The type of `NO_DEFAULT`: an enumeration, the one kind of marker that dynamo can rebuild."""

    NO_DEFAULT = "NO_DEFAULT"

    def __repr__(self) -> str:
        return "NO_DEFAULT"

    def __reduce_ex__(self, protocol: object) -> str:  # type: ignore[override]  # a name, see pickle
        return "NO_DEFAULT"


NoDefault.__module__ = "kd_core"


NO_DEFAULT: Final = NoDefault.NO_DEFAULT
"""Marks a default that was not given, where `None` is a value like another."""


class OrNone(Enum):
    """The type of `OR_NONE`."""

    OR_NONE = "OR_NONE"

    def __repr__(self) -> str:
        return "None"


OR_NONE: Final = OrNone.OR_NONE
"""The default of `get`, which returns `None` then; `NO_DEFAULT` asks it to raise."""
