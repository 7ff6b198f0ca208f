"""The inputs of stored tests, the same on every machine and with every array library.

A file carries the seeds of its tests, the numbers of those inputs that cannot be drawn, and a few
of the numbers that must come out, so it stays small. Numbers are drawn with `random.Random`, whose
stream is guaranteed not to change, and need neither torch nor numpy.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kd_export._errors import ExportError, ShapeMismatch
from kd_export._schema.schema import Entry, Schema, Vector, known_size
from kd_export._schema.wire import Number

STORED = 32
"""How many numbers of each output a stored test holds."""
MOST_NUMBERS = 1 << 25
"""How many numbers a test draws at most: a file may claim any shape."""

MOST_STORED = 1 << 16
"""How many numbers of an input a stored test holds at most; a larger input is drawn."""

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


def draw(schema: Schema, vector: Vector) -> list[Drawn]:
    """Build the inputs of a stored test: numbers that it holds, or that its seed gives.

    Drawn numbers are uniform between the bounds of the example.
    """
    source = random.Random(vector.seed)
    return [_draw(entry, vector, source) for entry in schema.inputs]


def _draw(entry: Entry, vector: Vector, source: random.Random) -> Drawn:
    shape = concrete(entry.shape, vector.sizes)
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
    if entry.wire in vector.inputs:
        return Drawn(vector.inputs[entry.wire], shape, entry.dtype)
    low = 0 if entry.low is None else entry.low
    high = 1 if entry.high is None else entry.high
    numbers: Sequence[Number]
    if entry.dtype == "bool":
        numbers = array("b", (source.random() < 0.5 for _ in range(count)))
    elif "float" in entry.dtype or "complex" in entry.dtype:
        width = high - low
        numbers = array("d", (low + width * source.random() for _ in range(count)))
    else:
        start, width = int(low), high - low + 1
        whole = (start + int(width * source.random()) for _ in range(count))
        small = low >= -_INT64 and high < _INT64
        numbers = array("q", whole) if small else list(whole)
    return Drawn(numbers, shape, entry.dtype)


def concrete(shape: Sequence[int | str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Replace axis names by sizes.

    >>> concrete(("batch", 3, "batch + 1"), {"batch": 2})
    (2, 3, 3)
    """
    found = []
    for size in shape:
        known = known_size(size, sizes)
        if known is None:
            raise ShapeMismatch(f"no size was given for the axis `{size}`.", got=size)
        found.append(known)
    return tuple(found)


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


def tolerance(dtype: str) -> tuple[float, float]:
    """Return the relative and absolute tolerance of a dtype; integers must be equal."""
    return _TOLERANCES.get(dtype, (0.0, 0.0))


def distance(got: Number, expected: Number) -> float:
    """Return how far two numbers are apart; two that are not numbers are equal.

    >>> distance(1, 1.5), distance(math.nan, math.nan), distance(math.nan, 1)
    (0.5, 0.0, inf)
    """
    if got == expected or (math.isnan(got) and math.isnan(expected)):
        return 0.0
    apart = abs(float(got) - float(expected))
    return math.inf if math.isnan(apart) else apart


def magnitude(number: Number) -> float:
    """Return the size that a relative tolerance is relative to.

    >>> magnitude(-2), magnitude(math.inf)
    (2.0, 0.0)
    """
    return abs(float(number)) if math.isfinite(number) else 0.0
