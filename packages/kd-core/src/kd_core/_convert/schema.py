"""The schema of a container: what its entries are, without their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from kd_core._batch.descriptor import describe
from kd_core._errors import wrong_type
from kd_core._keys import format_key, path_of
from kd_core._leaves.loops import kinds_of
from kd_core._naming import public_in
from kd_core._nodes import registry
from kd_core._nodes.entry import is_unbatched
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from kd_core._types import NestedKey


@public_in("kd_core.convert")
class LeafSchema(NamedTuple):
    """What one entry of a container is.

    Attributes:
        kind: `"tensor"`, `"jagged"` (a nested tensor), `"ragged"` (members of different shapes),
            `"unbatched"` (an `UnbatchedTensor`) or `"data"` (not a tensor).
        shape: the dimensions after the batch size, or all of an unbatched tensor; empty for data
            and for what has no one shape.
        dtype: the dtype; `None` for data.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> TensorDict({"a": torch.zeros(3, 4)}, [3]).schema()["a"].shape
        torch.Size([4])
    """

    kind: str
    shape: torch.Size
    dtype: torch.dtype | None


def schema_of(td: AbstractContainer) -> dict[NestedKey, LeafSchema]:
    """Return the schema of all leaves; keys of nested ones are tuples."""
    found: dict[NestedKey, LeafSchema] = {}
    _describe(td, td._kd_desc.ndim, (), found)
    return found


def _describe(
    td: AbstractContainer,
    ndim: int,
    path: tuple[str, ...],
    found: dict[NestedKey, LeafSchema],
) -> None:
    for key, kind in kinds_of(td._kd_entries):
        where = (*path, key)
        if isinstance(kind, AbstractContainer):
            _describe(cast("AbstractContainer", td._kd_entries[key]), ndim, where, found)
        elif is_unbatched(kind):
            tensor = kind._tensor
            found[where if path else key] = LeafSchema("unbatched", tensor.shape, tensor.dtype)
        elif isinstance(kind, Tensor):
            found[where if path else key] = _leaf_schema(td, key, kind, ndim)
        else:
            found[where if path else key] = LeafSchema("data", torch.Size(()), None)


def _leaf_schema(td: AbstractContainer, key: str, kind: Tensor, ndim: int) -> LeafSchema:
    try:
        leaf = cast("Tensor", td._kd_entries[key])
    except RuntimeError:  # its members have different shapes
        return LeafSchema("ragged", torch.Size(()), kind.dtype)
    if leaf.is_nested:
        return LeafSchema("jagged", torch.Size(()), leaf.dtype)
    return LeafSchema("tensor", torch.Size(leaf.shape[ndim:]), leaf.dtype)


def entries_of_schema(
    schema: Mapping[NestedKey, object],
    batch: tuple[int, ...],
    device: object,
    path: tuple[str, ...] = (),
) -> dict[tuple[str, ...], object]:
    """Return zeros for each leaf of a schema.

    Args:
        schema: for each key a `LeafSchema`, a pair of shape and dtype in any order, or a mapping.
        batch: the batch size.
        device: where the tensors are made.
        path: the key of the mapping, for messages.
    """
    made: dict[tuple[str, ...], object] = {}
    zeros = cast("Callable[..., Tensor]", torch.zeros)
    for key, row in schema.items():
        where = (*path, *path_of(key))
        if isinstance(row, Mapping):
            made.update(entries_of_schema(row, batch, device, where))
            continue
        shape, dtype, kind = _shape_and_dtype(where, row)
        if kind == "data":
            made[where] = None
            continue
        if kind == "unbatched":
            made[where] = registry.wrap_tensor(
                zeros(shape, dtype=dtype, device=device), describe(())
            )
            continue
        made[where] = zeros((*batch, *shape), dtype=dtype, device=device)
    return made


def _shape_and_dtype(
    key: tuple[str, ...], row: object
) -> tuple[tuple[int, ...], torch.dtype | None, str]:
    if isinstance(row, LeafSchema):
        if row.kind in ("ragged", "jagged"):
            remedy = "Replace it by a shape and a dtype."
            raise wrong_type(f"the schema of {format_key(key)}", "one shape", row.kind, remedy)
        return tuple(row.shape), row.dtype, row.kind
    if isinstance(row, torch.dtype):
        return (), row, "tensor"
    pair = tuple(row) if isinstance(row, (tuple, list)) else ()
    dtypes = [part for part in pair if isinstance(part, torch.dtype)]
    shapes = [part for part in pair if isinstance(part, (tuple, list))]
    if len(pair) != 2 or len(dtypes) != 1 or len(shapes) != 1:
        raise wrong_type(
            f"the schema of {format_key(key)}",
            "a `LeafSchema`, a shape and a dtype, or a mapping",
            row,
            "Write for example `((84, 84), torch.float32)`.",
        )
    return tuple(shapes[0]), dtypes[0], "tensor"
