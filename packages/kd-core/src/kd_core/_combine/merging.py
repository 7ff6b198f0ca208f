"""Merging the entries of several containers into one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kd_core._base import TensorDictBase
from kd_core._combine.joining import batches_differ, first_of

C = TypeVar("C", bound=TensorDictBase)


def merge_tensordicts(
    first: C,
    *others: TensorDictBase,
    callback_exist: Callable[[object, object], object] | None = None,
) -> C:
    """Merge the entries of several containers, nested ones too; the tensors are shared.

    Args:
        first: gives the kind and the batch size.
        *others: containers of the same batch size; of a key that several have, the first
            container's entry stays.
        callback_exist: called with the two entries of a key that both have, those that are not
            containers; what it returns is stored instead.

    Raises:
        ShapeMismatch: if a batch size differs.

    Example:
        >>> from kd_core import TensorDict, merge_tensordicts
        >>> merged = merge_tensordicts(TensorDict(a=1, b={"c": 2}), TensorDict(b={"d": 3}))
        >>> list(merged.keys(True, True))
        ['a', ('b', 'c'), ('b', 'd')]
    """
    batch = first_of([first, *others], "merge_tensordicts")._kd_desc.batch
    for number, other in enumerate(others, start=1):
        if other._kd_desc.batch != batch:
            raise batches_differ(batch, other._kd_desc.batch, number, "merge_tensordicts", ())
    merged = first._kd_engine.clone(first, recurse=False)
    for other in others:
        _add_missing(merged, other._kd_engine.clone(other, recurse=False), callback_exist)
    return merged


def _add_missing(
    target: TensorDictBase,
    source: TensorDictBase,
    callback: Callable[[object, object], object] | None,
) -> None:
    """Store the entries of a container that another one lacks, level by level."""
    for key, value in source._kd_engine.items(source):
        mine: object = TensorDictBase.get(target, key)
        entry: object = value
        if mine is None:
            target._kd_engine.set(target, key, entry)
        elif isinstance(mine, TensorDictBase) and isinstance(entry, TensorDictBase):
            _add_missing(mine, entry, callback)
        elif callback is not None:
            target._kd_engine.set(target, key, callback(mine, entry))
