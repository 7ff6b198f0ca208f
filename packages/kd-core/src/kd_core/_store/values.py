"""Which data that is not a tensor is kept, and how it is written as JSON.

`None`, `bool`, `int`, `str`, finite floats and lists stand for themselves. Everything else is an
object with one key:

| object | value |
| --- | --- |
| `{"f": "nan"}` | a float that is not finite: `nan`, `inf` or `-inf` |
| `{"d": [[key, value], ...]}` | a dict with string keys, in its order |
| `{"t": [...]}` | a tuple |
| `{"b": "..."}` | bytes, in base 64 |
| `{"r": [name, value]}` | a value of a registered type, enumerations among them |

A value comes back with its own type. Other values are refused when they are saved.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Final, cast

from kd_core._errors import FormatError, InvalidArgument, InvalidValue, with_article
from kd_core._keys import format_key
from kd_core._protocol.validation import MAX_DEPTH
from kd_core._store.canonical import RESTORE
from kd_core._store.registered import TYPES, type_named

_PLAIN: Final = frozenset({type(None), bool, str})
_FLOATS: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MOST_DIGITS: Final = 4000
"""Python refuses to write and read integers of more than 4300."""


def written(value: object, path: tuple[str, ...], depth: int = 0) -> object:
    """Return what stands for a value in JSON.

    Args:
        value: the value.
        path: the entry that holds it, for messages.
        depth: how many lists and dicts enclose it.

    Raises:
        InvalidArgument: if its type is not kept.
        InvalidValue: if it is nested too deeply, or an integer has too many digits.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, int) and kind is int:
        if abs(value) >= 10**_MOST_DIGITS:
            raise InvalidValue(
                f"entry {format_key(path)} must hold integers of at most {_MOST_DIGITS} digits. "
                "Save it as a string or as bytes."
            )
        return value
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {"f": repr(value)}
    if depth >= MAX_DEPTH:
        raise InvalidValue(
            f"entry {format_key(path)} must be nested at most {MAX_DEPTH} levels deep. Check it "
            "for a cycle."
        )
    if isinstance(value, (list, tuple)) and kind in (list, tuple):
        items = [written(item, path, depth + 1) for item in value]
        return items if kind is list else {"t": items}
    if isinstance(value, dict) and kind is dict:
        if not all(type(key) is str for key in value):
            raise InvalidArgument(
                f"entry {format_key(path)} must be a dict with string keys to be saved. Convert "
                "the keys to strings, or save a list of pairs."
            )
        return {"d": [[key, written(item, path, depth + 1)] for key, item in value.items()]}
    if isinstance(value, bytes) and kind is bytes:
        return {"b": base64.b64encode(value).decode("ascii")}
    stored = TYPES.get(kind)
    if stored is None:
        raise InvalidArgument(
            f"entry {format_key(path)} holds {with_article(kind.__qualname__)}, which cannot be "
            "saved: non-tensor data must be strings, numbers, booleans, `None`, bytes, lists, "
            "tuples or dicts with string keys. Register the type with "
            "`kd_core.store.register_type`, or `exclude` the entry."
        )
    return {"r": [stored.name, written(stored.encode(value), path, depth + 1)]}


def read(value: object, depth: int = 0) -> object:
    """Return the value that stands behind what `written` returned.

    Raises:
        FormatError: if it is none of the forms.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth > MAX_DEPTH:
        raise FormatError(f"non-tensor data is nested more than {MAX_DEPTH} levels deep. {RESTORE}")
    if isinstance(value, list):
        return [read(item, depth + 1) for item in value]
    if isinstance(value, dict) and len(value) == 1:
        [(tag, inner)] = value.items()
        reader = _READERS.get(tag)
        if reader is not None:
            return reader(inner, depth + 1)
    raise _unknown(value)


def _float(inner: object, depth: int) -> object:
    if not isinstance(inner, str) or inner not in _FLOATS:
        raise _unknown(inner)
    return _FLOATS[inner]


def _dict(inner: object, depth: int) -> object:
    made: dict[str, object] = {}
    for pair in _list(inner):
        match pair:
            case [str(key), item] if key not in made:
                made[key] = read(item, depth)
            case _:
                raise _unknown(pair)
    return made


def _tuple(inner: object, depth: int) -> object:
    return tuple([read(item, depth) for item in _list(inner)])


def _bytes(inner: object, depth: int) -> object:
    try:
        return base64.b64decode(cast(str, inner), validate=True)
    except (ValueError, TypeError):
        raise _unknown(inner) from None


def _registered(inner: object, depth: int) -> object:
    match inner:
        case [name, item]:
            stored = type_named(name)
            value = read(item, depth)
            try:
                return stored.decode(value)
            except Exception as error:
                raise FormatError(
                    f"{value!r} is not a valid value of the registered type {name!r}: {error}."
                ) from error
    raise _unknown(inner)


def _list(inner: object) -> list[object]:
    if not isinstance(inner, list):
        raise _unknown(inner)
    return inner


_READERS: Final[dict[str, Callable[[object, int], object]]] = {
    "f": _float,
    "d": _dict,
    "t": _tuple,
    "b": _bytes,
    "r": _registered,
}


def _unknown(found: object) -> FormatError:
    return FormatError(f"expected non-tensor data, got {str(found)[:80]!r}. {RESTORE}")
