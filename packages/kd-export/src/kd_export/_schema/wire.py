"""Keys and values as a file holds them: flat names for nested keys, and checked values of JSON.

A *wire name* joins the parts of a key with dots: ``("out", "image")`` is ``out.image``. It is
reversible and free of collisions, because dots (and percent signs) inside a part are escaped as
in a URL. An *argument name* is what the same key is called as a Python argument: it need not be
reversible, but it must be unique among its siblings.

JSON may hold anything: a function ``as_...`` returns what a value must be, or raises `TypeError` or
`ValueError` with a message that stays short whatever the value is. What a user passes to be stored
must be such that JSON holds it exactly.

Nothing here imports torch: the functions serve files that are read without it.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Iterable, Mapping

from kd_export._errors import ExportError, Key, KeyMismatch, brief

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Number = bool | int | float

_DTYPES = """
bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32
complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
"""
_LARGEST_SIZE = 1 << 62
_LARGEST_NUMBER = 1 << 64


def as_number(item: Json) -> Number:
    if isinstance(item, str):
        return float(item)
    if isinstance(item, float) or (isinstance(item, int) and abs(item) < _LARGEST_NUMBER):
        return item
    raise TypeError(f"expected a number, got {brief(item)}")


def as_finite(item: Json) -> Number:
    number = as_number(item)
    if math.isfinite(number):
        return number
    raise ValueError(f"expected a finite number, got {number}")


def as_size(item: Json) -> int:
    size = as_int(item)
    if 0 <= size <= _LARGEST_SIZE:
        return size
    raise ValueError(f"expected a size, got {size}")


def as_int(item: Json) -> int:
    if type(item) is int:
        return item
    raise TypeError(f"expected an integer, got {brief(item)}")


def as_str(item: Json) -> str:
    if isinstance(item, str):
        return item
    raise TypeError(f"expected a string, got {brief(item)}")


def as_dtype(item: Json) -> str:
    name = as_str(item)
    if name in _DTYPES.split():
        return name
    raise ValueError(f"expected a dtype, got {brief(name)}")


def as_list(item: Json) -> list[Json]:
    if isinstance(item, list):
        return item
    raise TypeError(f"expected a list, got {brief(item)}")


def as_dict(item: Json) -> dict[str, Json]:
    if isinstance(item, dict):
        return item
    raise TypeError(f"expected an object, got {brief(item)}")


def check_mapping(
    name: str, value: object, form: str, kind: type[ExportError] = ExportError
) -> None:
    """Check that an argument is a mapping, if it is given.

    Args:
        name: The argument.
        value: What was passed for it.
        form: An example of what may be.
        kind: What to raise.

    Raises:
        ExportError: It is not.
    """
    if value is not None and not isinstance(value, Mapping):
        raise kind(
            f"expected a dict for `{name}`, got {value!r}.",
            expected="a dict",
            got=value,
            hint=f"Pass one, such as `{name}={form}`.",
        )


def check_metadata(value: Mapping[str, object] | None) -> dict[str, Json]:
    """Check that metadata is a mapping of exact JSON.

    Raises:
        ExportError: It is not.
    """
    check_mapping("metadata", value, "{'note': ...}")
    stored = check_json(dict(value or {}))
    assert isinstance(stored, dict)
    return stored


def check_json(value: object, where: str = "metadata") -> Json:
    """Check that a value is exact JSON: no NaN, no tuples, no objects, string keys only."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list):
        return [check_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: check_json(item, f"{where}[{name!r}]") for name, item in value.items()}
    raise ExportError(
        f"`{where}` is {value!r}, which JSON cannot hold exactly.",
        got=value,
        hint="Use None, bool, int, finite float, str, lists of these, or dicts with string keys.",
    )


_EMPTY = "%"


def wire_name(key: Key) -> str:
    """Return the flat name of a nested key.

    >>> wire_name(("out", "image"))
    'out.image'
    >>> wire_name(("v1.2", "100%"))
    'v1%2E2.100%25'
    """
    return ".".join(
        part.replace("%", "%25").replace(".", "%2E") if part else _EMPTY for part in key
    )


def wire_key(name: str) -> Key:
    """Return the nested key that a flat name stands for.

    >>> wire_key("out.image")
    ('out', 'image')
    >>> wire_key("v1%2E2.100%25")
    ('v1.2', '100%')
    """
    return tuple(
        "" if part == _EMPTY else part.replace("%2E", ".").replace("%25", "%")
        for part in name.split(".")
    )


def as_key(key: object) -> Key:
    """Convert a key, a string or (nested) tuples of strings, to one flat tuple.

    >>> as_key("a"), as_key(("a", ("b", "c")))
    (('a',), ('a', 'b', 'c'))
    """
    if isinstance(key, str):
        return (key,)
    if isinstance(key, tuple) and key:
        return tuple(part for item in key for part in as_key(item))
    raise KeyMismatch(
        f"a key must be a string or a tuple of strings, got {key!r}.", expected="key", got=key
    )


def argument_names(keys: Iterable[Key]) -> dict[Key, str]:
    """Name keys as Python arguments, each differently.

    >>> argument_names([("some", "key"), ("class",), ("some_key",)])
    {('some', 'key'): 'some_key', ('class',): 'class_', ('some_key',): 'some_key_1'}
    """
    names: dict[Key, str] = {}
    for key in keys:
        name = re.sub(r"\W", "_", "_".join(key), flags=re.ASCII)
        if not name or name[0].isdigit():
            name = f"_{name}"
        if keyword.iskeyword(name) or name == "self":
            name = f"{name}_"
        names[key] = unused_name(name, names.values())
    return names


def unused_name(name: str, taken: Iterable[str]) -> str:
    """Append a number to a name that is taken.

    >>> unused_name("x", ["x", "x_1"])
    'x_2'
    """
    used = set(taken)
    candidate, count = name, 0
    while candidate in used:
        count += 1
        candidate = f"{name}_{count}"
    return candidate


def nest(entries: Mapping[Key, object]) -> dict[str, object]:
    """Build nested dictionaries from entries by key.

    >>> nest({("a", "b"): 1, ("c",): 2})
    {'a': {'b': 1}, 'c': 2}
    """
    tree: dict[str, object] = {}
    for key, value in entries.items():
        node = tree
        for part in key[:-1]:
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                raise KeyMismatch(
                    f"`{wire_name(key)}` lies below an entry that is itself a value.", key=key
                )
            node = child
        node[key[-1]] = value
    return tree


def unnest(tree: Mapping[str, object], prefix: Key = ()) -> dict[Key, object]:
    """List the entries of nested dictionaries by key, the reverse of `nest`.

    >>> unnest({"a": {"b": 1}, "c": 2})
    {('a', 'b'): 1, ('c',): 2}
    """
    entries: dict[Key, object] = {}
    for part, value in tree.items():
        if isinstance(value, Mapping):
            entries.update(unnest(value, (*prefix, part)))
        else:
            entries[(*prefix, part)] = value
    return entries
