"""Test inputs that a seed gives, the same on every machine and with every array library.

A file carries the seeds of its tests and a few of the numbers that must come out, not whole
tensors, so it stays small. Numbers are drawn with `random.Random`, whose stream is guaranteed
not to change, and need neither torch nor numpy.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kd_export._errors import ExportError, ShapeMismatch
from kd_export._schema.schema import Entry, Number, Schema

STORED = 32
"""How many numbers of each output a stored test holds."""
MOST_NUMBERS = 1 << 25
"""How many numbers a test draws at most: a file may claim any shape."""

_INT64 = 1 << 63

_TOLERANCES = {
    "float64": (1e-7, 1e-9),
    "complex128": (1e-7, 1e-9),
    "float32": (1e-4, 1e-5),
    "complex64": (1e-4, 1e-5),
    "float16": (1e-2, 1e-3),
    "bfloat16": (2e-2, 1e-2),
}


@dataclass(frozen=True, slots=True)
class Drawn:
    """The numbers of one input, in row-major order, and the shape they fill."""

    numbers: Sequence[Number]
    shape: tuple[int, ...]
    dtype: str


def draw(schema: Schema, sizes: Mapping[str, int], seed: int) -> list[Drawn]:
    """Draw one set of inputs.

    Floats are uniform between the bounds of the example. Integers stay between them too, and
    below the size of every dynamic axis, so that indices into another input stay valid.
    """
    source = random.Random(seed)
    limit = min(sizes.values(), default=None)
    return [_draw(entry, sizes, source, limit) for entry in schema.inputs]


def _draw(
    entry: Entry, sizes: Mapping[str, int], source: random.Random, limit: int | None
) -> Drawn:
    shape = concrete(entry.shape, sizes)
    count = math.prod(shape)
    if count > MOST_NUMBERS:
        raise ExportError(
            f"a test of `{entry.wire}` with shape {shape} needs {count:,} numbers, more than "
            f"{MOST_NUMBERS:,}.",
            key=entry.key,
            expected=MOST_NUMBERS,
            got=count,
            hint="Pass smaller `batch_sizes`, or an example of smaller shape.",
        )
    low = 0 if entry.low is None else entry.low
    high = 1 if entry.high is None else entry.high
    numbers: Sequence[Number]
    if entry.dtype == "bool":
        numbers = array("b", (source.random() < 0.5 for _ in range(count)))
    elif "float" in entry.dtype:
        width = high - low
        numbers = array("d", (low + width * source.random() for _ in range(count)))
    else:
        start, width = int(low), high - low + 1
        bound = max(limit, 1) if limit is not None and low >= 0 else None
        whole = (start + int(width * source.random()) for _ in range(count))
        bounded = whole if bound is None else (number % bound for number in whole)
        small = low >= -_INT64 and high < _INT64
        numbers = array("q", bounded) if small else list(bounded)
    return Drawn(numbers, shape, entry.dtype)


def concrete(shape: Sequence[int | str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Replace axis names by sizes.

    >>> concrete(("batch", 3), {"batch": 2})
    (2, 3)
    """
    missing = [size for size in shape if isinstance(size, str) and size not in sizes]
    if missing:
        raise ShapeMismatch(f"no size was given for the axis `{missing[0]}`.", got=missing[0])
    return tuple(sizes[size] if isinstance(size, str) else size for size in shape)


def positions(count: int) -> list[int]:
    """Choose evenly spaced positions among the elements of an output.

    >>> positions(3), positions(96)[:3]
    ([0, 1, 2], [0, 3, 6])
    """
    stored = stored_count(count)
    return [index * count // stored for index in range(stored)]


def stored_count(count: int) -> int:
    """Return how many numbers are stored of an output of ``count`` elements."""
    return min(count, STORED)


def tolerance(dtype: str, rtol: float | None, atol: float | None) -> tuple[float, float]:
    """Return the relative and absolute tolerance of a dtype; integers must be equal."""
    default_rtol, default_atol = _TOLERANCES.get(dtype, (0.0, 0.0))
    return (default_rtol if rtol is None else rtol, default_atol if atol is None else atol)
