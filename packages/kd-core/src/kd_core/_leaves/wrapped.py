"""Writes into leaves that are made of other tensors, as a `DTensor` is: tried on copies.

Such a leaf decides when it is written what it refuses: plain tensors beside it, an index across its
parts. Other leaves may have been written by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kd_core._leaves.foreach import are_unwrapped, wraps_tensors


class Refused:
    """A write that was refused.

    Attributes:
        position: which of the writes it is.
        reason: what the leaf said.
    """

    __slots__ = ("position", "reason")

    def __init__(self, position: int, reason: str) -> None:
        self.position = position
        self.reason = reason


def first_refused(
    write: Callable[..., object], targets: Sequence[Tensor], *columns: Sequence[object]
) -> Refused | None:
    """Return the first write that a leaf or operand made of other tensors refuses.

    One write of each kind is tried on a copy. A single kind is not: if the first write of all is
    refused, nothing has been written.

    Args:
        write: the function, called with a leaf and the value of each operand there.
        targets: the tensors that are written.
        *columns: for each operand, its value at each leaf.
    """
    kinds: dict[object, int] = {}
    for position, values in enumerate(zip(targets, *columns, strict=True)):
        kinds.setdefault(_kind_of(values), position)
    if len(kinds) < 2:
        return None
    kinds.pop(None, None)
    for position in kinds.values():
        try:
            with torch.no_grad():
                copy = targets[position].detach().clone()
                write(copy, *[column[position] for column in columns])
        except RuntimeError as error:
            return Refused(position, str(error).partition("\n")[0].rstrip("."))
    return None


def _kind_of(values: tuple[object, ...]) -> object:
    """Return what decides whether a write is refused; `None`: all values are plain."""
    if are_unwrapped(*values):
        return None
    return tuple(
        (value.dtype, value.shape, _parts_of(value))
        for value in values
        if isinstance(value, Tensor)
    )


def _parts_of(value: Tensor) -> object:
    """Return how a `DTensor` is spread; of others made of tensors, which one it is."""
    if not wraps_tensors(value):
        return None
    placements = getattr(value, "placements", None)
    return id(value) if placements is None else (getattr(value, "device_mesh", None), placements)
