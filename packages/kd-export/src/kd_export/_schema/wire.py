"""Nested keys and the flat names that stand for them in a file.

A *wire name* joins the parts of a key with dots: ``("out", "image")`` is ``out.image``. It is
reversible and free of collisions, because dots (and percent signs) inside a part are escaped as
in a URL. An *argument name* is what the same key is called as a Python argument: it need not be
reversible, but it must be unique among its siblings.

Nothing here imports torch: the functions serve files that are read without it.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping

from kd_export._errors import Key, KeyMismatch

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
