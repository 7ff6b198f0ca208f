"""The one way to write a value of JSON as bytes, and reading such bytes without surprises.

Keys are sorted, nothing stands between tokens, and all characters are ASCII, so that equal values
are equal bytes. Keys that are given twice, numbers that are not finite, and nesting so deep that a
parser would fail are refused.
"""

from __future__ import annotations

import json
import math
from typing import Final, Never

from kd_core._errors import FormatError

RESTORE: Final = "Restore the file from a copy."


def canonical(value: object) -> bytes:
    """Return the bytes of a value of JSON."""
    return _ENCODER.encode(value).encode("ascii")


def parsed(data: bytes, what: str, encoding: str = "ascii") -> object:
    """Return the value that bytes of JSON stand for.

    Args:
        data: the bytes.
        what: what they are, for messages.
        encoding: `"utf-8"` for files of other origins.

    Raises:
        FormatError: if they are not JSON, or a key is given twice, or a number is not finite.
    """
    try:
        return _DECODER.decode(data.decode(encoding))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what} must be JSON: {error}. {RESTORE}") from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("an object has a key twice")
    return made


def _not_finite(name: str) -> Never:
    raise ValueError(f"`{name}` is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"`{text}` is not a finite number")
    return value


_ENCODER: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_finite, parse_constant=_not_finite
)
