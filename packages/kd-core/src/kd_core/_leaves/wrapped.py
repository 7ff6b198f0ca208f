"""Writes into leaves of classes that decide when they are written what they refuse.

A leaf made of other tensors, as a `DTensor` is, refuses plain tensors beside it, or an index across
its parts: one write of each kind is tried on a copy. A class of the user's may raise in the middle
of a copy: the old values are kept, and written back. Other leaves may have been written by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kd_core._leaves.foreach import StandIn, are_unwrapped, prepare, wraps_tensors
from kd_core._torch_private import make_subclass, no_torch_function, without_torch_function


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


@contextmanager
def kept(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Iterator[None]:
    """Write the old values of the targets back if a copy into one of them raises.

    Nothing is kept unless a class of the user's takes part: torch itself was asked before.
    """
    old: list[tuple[Tensor, Tensor]] = []
    if any(map(_decides, (*targets, *sources))):
        old = [pair for pair in map(_old_values, targets) if pair is not None]
    prepare(zip(targets, sources, strict=True))
    try:
        yield
    except BaseException:
        with without_torch_function(), torch.no_grad():
            for plain, values in old:
                plain.copy_(values)
        raise


def _decides(leaf: Tensor) -> bool:
    """Return whether code of the class of a leaf runs when it is copied; wrappers are tried."""
    kind = type(leaf)
    if issubclass(kind, StandIn):
        return False  # it never raises, prepared
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    usual = (getattr(Tensor.__torch_function__, "__func__"), no_torch_function)  # noqa: B009  # stubs call it a function
    if function in usual and kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
        return kind.copy_ is not Tensor.copy_
    return not wraps_tensors(leaf)


def _old_values(target: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return a plain tensor in the memory of a leaf, and a copy; `None` where it has none."""
    try:
        with without_torch_function(), torch.no_grad():
            if not target.untyped_storage().data_ptr():
                return None
            plain = make_subclass(Tensor, target)
            return plain, plain.clone()
    except (RuntimeError, NotImplementedError, TypeError):
        return None


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
