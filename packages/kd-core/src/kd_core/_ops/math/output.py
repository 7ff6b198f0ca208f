"""Results written into a container that the caller passes as `out`, all of them or none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kd_core._errors import InvalidArgument, ShapeMismatch, wrong_type
from kd_core._keys import format_key
from kd_core._leaves.loops import finder
from kd_core._leaves.writes import Write, check_write, collect_writes, write_all
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from typing import TypeVar

    W = TypeVar("W", bound=AbstractContainer)


def written_to(out: W | None, result: W) -> W:
    """Return a result, or write it into the leaves of `out` and return that.

    Everything is checked before the first leaf is written; `out` may be locked.

    Args:
        out: a container of the keys, batch size and shapes of the result; `None`: no output.
        result: the computed result.

    Raises:
        KeySetMismatch: if the keys of `out` differ.
        ShapeMismatch: if the batch size or the shape of an entry differs.
        InvalidArgument: if a dtype cannot be cast, gradients are recorded, or one value of `out`
            that is not a tensor differs.
    """
    if out is None:
        return result
    if not isinstance(out, AbstractContainer):
        raise wrong_type("`out`", "a container", out)
    if out._desc.batch != result._desc.batch:
        raise ShapeMismatch(
            f"`out` must have batch_size {result._desc.batch}, got {out._desc.batch}."
        )
    writes: list[Write] = []
    for target, source in zip(*collect_writes(out, result), strict=True):
        where = finder(out._entries, target)
        if not is_compiling():
            _check(where, target, source)
            check_write(target, source, where)
        writes.append((target, source, where))
    write_all(writes)
    return out


def reduced_to(out: W | None, result: W | Tensor) -> W | Tensor:
    """Return a reduction, or write it into `out`; one tensor for all leaves has no such place."""
    if out is None:
        return result
    if isinstance(result, Tensor):
        raise InvalidArgument(
            "`out` cannot be combined with `reduce=True`, whose result is one tensor."
        )
    return written_to(out, result)


def _check(where: object, target: Tensor, source: Tensor) -> None:
    """Refuse a leaf of `out` into which torch would not write this result."""
    if target.shape == source.shape and torch.can_cast(source.dtype, target.dtype):
        if not (torch.is_grad_enabled() and (target.requires_grad or source.requires_grad)):
            return
        raise InvalidArgument(
            f"entry {_name(where)} requires gradients, which `out` does not support. Leave out "
            "`out`, or use `torch.no_grad()`."
        )
    if target.shape != source.shape:
        raise ShapeMismatch(
            f"entry {_name(where)} of `out` must have shape {tuple(source.shape)}, got "
            f"{tuple(target.shape)}."
        )
    raise InvalidArgument(
        f"entry {_name(where)} of `out` must have a dtype to which {source.dtype} can be cast, got "
        f"{target.dtype}. Cast `out` first."
    )


def _name(where: object) -> str:
    return format_key(where()) if callable(where) else "`...`"
