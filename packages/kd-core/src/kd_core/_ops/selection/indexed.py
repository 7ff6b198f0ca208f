"""The rows of a container at an index of any kind."""

from __future__ import annotations

from typing import TypeVar

from torch.compiler import is_dynamo_compiling

from kd_core._ops.selection.index_plan import beyond, resolve
from kd_core._protocol.composite import takes
from kd_core._protocol.primitives import AbstractContainer

W = TypeVar("W", bound=AbstractContainer)


def rows_at(container: W, index: object) -> W:
    """Return the rows at an index of any kind."""
    desc = container._desc
    fn, after = resolve(index, desc.batch)
    ndim = desc.ndim
    if container._nested and not is_dynamo_compiling():
        takes(fn, index, desc.batch)
    try:
        return container._map_each(
            fn, lambda shape: after + shape[ndim:], (desc, desc.with_batch(after))
        )
    except IndexError as error:
        raise beyond(desc.batch, error) from None
