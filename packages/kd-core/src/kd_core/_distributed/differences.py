"""The error that says how the outlines of ranks differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kd_core._errors import InvalidValue, KdError, KeySetMismatch, ShapeMismatch
from kd_core._keys import format_key

if TYPE_CHECKING:
    from kd_core._distributed.outlines import Row
    from kd_core._keys import KeyPath


def difference(call: str, told: Sequence[tuple[int, Sequence[Row]]]) -> KdError:
    """Return the error that names the first entry in which outlines differ.

    Args:
        call: the call that needs equal outlines.
        told: ranks and the rows of their outlines, which are not all equal.
    """
    (first, rows), *others = told
    expected = {row.path: row for row in rows}
    for rank, other in others:
        found = {row.path: row for row in other}
        for path in [*expected, *found]:
            mine, theirs = expected.get(path), found.get(path)
            if mine != theirs:
                return _different(call, path, (first, mine), (rank, theirs))
    raise AssertionError("the outlines are equal")


def _different(
    call: str, path: KeyPath, mine: tuple[int, Row | None], theirs: tuple[int, Row | None]
) -> KdError:
    (first, row), (rank, other) = mine, theirs
    key = f"entry {format_key(path)}"
    if row is None or other is None:
        has, lacks = (rank, first) if row is None else (first, rank)
        return KeySetMismatch(
            f"`{call}` needs the same keys on all ranks: {key} exists on rank {has}, but not on "
            f"rank {lacks}. Add it, or `select` the shared keys."
        )
    if row.dtype != other.dtype:
        return InvalidValue(
            f"`{call}` needs the same dtypes on all ranks: {key} is {row.dtype} on rank {first}, "
            f"but {other.dtype} on rank {rank}. Convert one of them."
        )
    return ShapeMismatch(
        f"`{call}` needs the same shapes on all ranks: {key} has the shape {row.shape} on rank "
        f"{first}, but {other.shape} on rank {rank}. Pad or index one of them."
    )
